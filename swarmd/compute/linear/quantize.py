"""Blocks in nf4 by bitsandbytes, through transformers' own quantiser; what few bits cost in accuracy is measured.

nf4 is QLoRA's normal float (Dettmers et al. 2023). int8 and int4 are ``linear``'s. Errors: docs/models.md.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import torch

from swarmd.errors import ConfigError


def library_config(kind: str) -> Any:
    """Make the library's own description of a kind; None for unquantised. Raises ConfigError without bitsandbytes."""
    if kind == "none":
        return None
    if kind != "nf4":
        raise ConfigError(f"quantize = {kind} is not the library's")
    if find_spec("bitsandbytes") is None or find_spec("accelerate") is None:
        raise ConfigError(
            f"quantize = {kind} needs bitsandbytes and accelerate: pip install -e '.[quantize]' in swarmd's repository"
        )
    from transformers import BitsAndBytesConfig

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)


def relative_error(computed: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the norm of the error over the norm of the expected tensor."""
    error = computed.float() - expected.float()
    size = expected.float().norm().clamp(min=1e-9)
    return float(error.norm() / size)
