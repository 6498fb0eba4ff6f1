"""A client's own parameters under training, for the blocks of one hop: LoRA matrices, and prefixes of keys and values.

They come as safetensors and live in memory only, as leaves that gradients are taken by. ``{module}.lora_A`` [r, in]
and ``{module}.lora_B`` [out, r] update a matrix (Hu et al. 2021; the client puts PEFT's scale into B);
``{block}.keys`` and ``{block}.values`` [1, heads, n, head size] precede a block's tokens (prefix tuning, Li and Liang
2021; P-tuning v2, Liu et al. 2021).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import safetensors.torch
import torch
from safetensors import SafetensorError

from swarmd.compute.adapters import DTYPES, Lora
from swarmd.compute.kvcache import SpanCache
from swarmd.compute.span import LoadedSpan
from swarmd.errors import ConfigError
from swarmd.values import Span

MAX_PREFIX_TOKENS = 4_096
_PREFIX = re.compile(r"(\d+)\.(keys|values)")


@dataclass(frozen=True, slots=True)
class Tuned:
    """Parameters of the blocks of one hop; ``leaves`` by block and name, as they came."""

    lora: Lora
    leaves: Mapping[int, dict[str, torch.Tensor]]
    n_prefix: int = 0
    n_bytes: int = 0

    def of_block(self, block: int) -> dict[str, torch.Tensor]:
        return self.leaves.get(block, {})

    def fill(self, cache: SpanCache, blocks: range, n_rows: int) -> None:
        """Put the prefix in front of an empty cache of ``blocks``."""
        if not self.n_prefix:
            return
        for block in blocks:
            keys, values = (
                self.leaves[block][f"{block}.{name}"].expand(n_rows, -1, -1, -1) for name in ("keys", "values")
            )
            cache.cache.layers[block].update(keys, values)
        cache.see(self.n_prefix)


NOTHING = Tuned(Lora(), {})


@dataclass(slots=True)
class _Reading:
    leaves: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    matrices: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    prefixes: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)


def read_tuned_untrusted(span: LoadedSpan, hop: Span, raw: bytes) -> Tuned:
    """Check a client's parameters for ``hop`` and make leaves of them. Raises ConfigError."""
    try:
        tensors = safetensors.torch.load(raw)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"the parameters do not parse: {error}") from None
    reading = _Reading()
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES or not torch.isfinite(tensor).all():
            raise ConfigError(f"{name[:100]} is {tensor.dtype}, or holds values that are not finite")
        leaf = tensor.to(span.device).requires_grad_()
        block = _sort(span, reading, name, leaf)
        if block is None or not hop.start <= block < hop.end:
            raise ConfigError(f"{name[:100]} is no parameter of blocks {hop} of this model")
        reading.leaves.setdefault(block, {})[name] = leaf
    lora = Lora({module: (*_matrices(span, module, pair), 1.0) for module, pair in reading.matrices.items()})
    n_prefix = _check_prefixes(span, hop, reading.prefixes) if reading.prefixes else 0
    span.adapters.hook(lora)
    return Tuned(lora, reading.leaves, n_prefix, len(raw))


def _sort(span: LoadedSpan, reading: _Reading, name: str, leaf: torch.Tensor) -> int | None:
    """Note what a tensor is for; returns its block."""
    if (match := _PREFIX.fullmatch(name)) is not None:
        reading.prefixes.setdefault(int(match[1]), {})[match[2]] = leaf
        return int(match[1])
    module, _, matrix = name.rpartition(".")
    if matrix not in ("lora_A", "lora_B"):
        return None
    reading.matrices.setdefault(module, {})[matrix] = leaf
    return span.adapters.block_of(module)


def _matrices(span: LoadedSpan, module: str, pair: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    if "lora_A" not in pair:
        raise ConfigError(f"{module}.lora_A is missing")
    return span.adapters.checked(module, pair["lora_A"], pair.get("lora_B"))


def _check_prefixes(span: LoadedSpan, hop: Span, prefixes: dict[int, dict[str, torch.Tensor]]) -> int:
    """The number of tokens of a prefix that fits every block of the hop. Raises ConfigError."""
    if set(prefixes) != set(hop.blocks()) or any(set(p) != {"keys", "values"} for p in prefixes.values()):
        raise ConfigError(f"a prefix needs keys and values for each of the blocks {hop}")
    counts = {tensor.shape[2] if tensor.ndim == 4 else 0 for p in prefixes.values() for tensor in p.values()}
    n = counts.pop()
    if counts or not 1 <= n <= MAX_PREFIX_TOKENS:
        raise ConfigError(f"a prefix has the same number of tokens, at most {MAX_PREFIX_TOKENS}, in all blocks")
    for block, layer in zip(hop.blocks(), span.example_cache(hop).owned, strict=True):
        for name in ("keys", "values"):
            like = getattr(layer, name, None)
            if not torch.is_tensor(like) or like.ndim != 4:
                raise ConfigError("this family's layers keep more than plain keys and values: no prefixes")
            expected = (1, like.shape[1], n, like.shape[3])
            if tuple(prefixes[block][name].shape) != expected:
                raise ConfigError(f"{block}.{name} is {tuple(prefixes[block][name].shape)}, expected {expected}")
    return n
