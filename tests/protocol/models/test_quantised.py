"""Whatever a configuration and a list of tensors say of a quantisation, they are read or refused."""

from __future__ import annotations

import random
from contextlib import suppress
from typing import Any

import pytest

from swarmd.errors import IntegrityError
from swarmd.protocol.models import quantised, scheme
from swarmd.protocol.models.quantised import Stored
from swarmd.protocol.models.scheme import Scheme

ENDS = (
    *("weight", "weight_scale", "weight_scale_inv", "weight_packed", "weight_zero_point", "weight_shape"),
    *("weight_global_scale", "weight_g_idx", "qweight", "qzeros", "scales", "g_idx", "bias", "input_scale"),
    *("gate_up_proj_blocks", "gate_up_proj_scales"),
    *("weight.absmax", "weight.quant_map", "weight.quant_state.bitsandbytes__nf4", "SCB", "weight_format"),
    *("_weight_qdata", "_weight_scale", "_weight_zero_point"),
)
KINDS = ("F32", "F16", "BF16", "F8_E4M3", "F8_E8M0", "U8", "I8", "I32", "I64")
EXTENTS = (0, 1, 2, 8, 16, 64, 128)
SCHEMES = (
    *(Scheme(scheme.FP8, 8, block) for block in ((128, 128), (0, 0))),
    *(Scheme(scheme.GPTQ, bits, zeros_lag=bits == 3) for bits in (3, 4)),
    *(Scheme(scheme.COMPRESSED, block=(16, 16), packings=each) for each in ((), ((4, 0),), ((4, 16), (8, 0)))),
    Scheme(scheme.BITSANDBYTES),
    Scheme(scheme.TORCHAO),
    Scheme(scheme.MXFP4, 4),
    Scheme(scheme.AWQ, 4),
)
WORDS: tuple[Any, ...] = (
    *(None, 0, 1, 3, 4, True, "x", [], {}, *scheme.METHODS, [128, 128], [0, 1]),
    *({"a": {"weights": {"num_bits": bits}}} for bits in (4, [1])),
    *({"a": each} for each in (None, {"weights": None}, {"weights": {"num_bits": 4, "block_structure": "x"}})),
)
KEYS = ("quant_method", "bits", "w_bit", "weight_block_size", "config_groups", "checkpoint_format", "format", "version")


@pytest.mark.parametrize("kind", SCHEMES)
def test_any_tensors_are_read_or_refused(kind: Scheme) -> None:
    rng = random.Random(str(kind))
    n_read = 0
    for _ in range(2_000):
        stored = []
        for end in rng.sample(ENDS, rng.randrange(1, 6)):
            shape = tuple(rng.choice(EXTENTS) for _ in range(rng.randrange(5)))
            stored.append(Stored(f"model.layers.0.{end}", rng.choice(KINDS), shape))
        with suppress(IntegrityError):
            plain = quantised.plain_tensors(kind, stored)
            n_read += 1
            names = {part for tensor in plain for part in (tensor.parts.values() or (tensor.name,))}
            assert names <= {tensor.name for tensor in stored}
    assert n_read


def test_any_settings_are_read_or_refused() -> None:
    rng = random.Random(4)
    for _ in range(5_000):
        settings = {key: rng.choice(WORDS) for key in rng.sample(KEYS, rng.randrange(1, 6))}
        field = rng.choice((*scheme.FIELDS, "sparsity_config"))
        with suppress(IntegrityError):
            scheme.read_scheme({field: rng.choice((settings, *WORDS))})
