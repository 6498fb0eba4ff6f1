"""A span whose blocks are those that most models have, computed for a few new tokens by a fused kernel (``compiled``).

Blocks are recognised by their parts: norms before attention and before a gated MLP, heads that share keys, rotary
positions. A family may put the same parts together otherwise. So the caller compares results before it relies on this.
A step takes about the time of reading the weights; torch's own operators take 1
to 15 microseconds each before they compute anything, and there are 43 in a block (docs/decisions/0007-kernels.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from swarmd.compute.cache.pieces import SessionTokens, join_rows, split_row
from swarmd.compute.cache.positions import Numbers, count_written, make_room
from swarmd.compute.cache.span_cache import SpanCache
from swarmd.compute.compiled import layout
from swarmd.compute.compiled.build import NotFused, compiling
from swarmd.compute.hardware.device import free_memory_bytes
from swarmd.compute.hardware.thread_pool import MOST_THREADS, ThreadPool
from swarmd.compute.linear.formats import STORED, exact_dtype, is_exact_in_float16
from swarmd.compute.linear.layers import (
    ROOM,
    FrozenLinear,
    rows_together,
    share_weight,
    stored_dtype,
    stored_weight,
)

ALIGNED = 64  # bytes: where a weight may begin
TIMED = (1, 2, 4, 8, 16, 32)  # tokens: more sessions than these seldom decode at once
LONGEST = 16  # tokens of one session: between the blocks of a prompt's pass steps of others get in

# What a block consists of, as nearly all families name it, and where its weights stand in the table of addresses.
MATRICES = {
    "self_attn.q_proj": layout.QUERY,
    "self_attn.k_proj": layout.KEY,
    "self_attn.v_proj": layout.VALUE,
    "self_attn.o_proj": layout.OUT,
    "mlp.gate_proj": layout.GATE,
    "mlp.up_proj": layout.UP,
    "mlp.down_proj": layout.DOWN,
}
NORMS = {"input_layernorm": layout.NORM, "post_attention_layernorm": layout.MLP_NORM}
HEAD_NORMS = {"self_attn.q_norm": layout.QUERY_NORM, "self_attn.k_norm": layout.KEY_NORM}
CURVES: Mapping[int, Callable[[torch.Tensor], torch.Tensor]] = {
    layout.SILU: functional.silu,
    layout.GELU_TANH: partial(functional.gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True)
class FusedPass:
    """See the module. ``tensors`` keeps alive what the table has addresses of; the threads of ``pool`` share work."""

    run_blocks: Callable[..., None]
    shape: Numbers
    floats: Numbers
    table: Numbers
    frequencies: Numbers
    dtype: torch.dtype
    tensors: Sequence[Any]
    on_pass: Callable[[], None]
    pool: ThreadPool

    @property
    def longest(self) -> int:
        """New tokens of one session that it is worth taking for."""
        return LONGEST

    @property
    def is_reentrant(self) -> bool:
        """It shares nothing with other passes, so that it may run in their midst."""
        return True

    def supports(self, caches: Sequence[SpanCache]) -> bool:
        """Do all sessions keep plain keys and values as this reads them, and have some?"""
        dtype = torch.int8 if self.shape[layout.KEPT] == layout.INT8 else self.dtype
        layers = [layer for cache in caches for layer in cache.owned]
        return all(cache.is_plain for cache in caches) and all(
            layer.has_shape and layer.dtype == dtype for layer in layers
        )

    def run(self, pieces: Sequence[SessionTokens]) -> list[torch.Tensor]:
        """Compute the new tokens of all pieces, each [b, t, d], and keep their keys and values."""
        hidden, positions = join_rows(pieces)
        x = hidden[0].float()
        kv_places, counts = make_room(pieces)
        room = torch.empty(len(x) * layout.n_shared(self.shape)).numpy()
        barrier = np.zeros(1, np.int64)
        of_pass = positions[0].numpy(), kv_places, counts

        def run_share(thread: int, n_threads: int) -> None:
            share = room, barrier, thread, n_threads
            self.run_blocks(self.shape, self.floats, self.table, self.frequencies, x.numpy(), of_pass, share)

        self.pool.run(len(x), run_share)
        count_written(pieces)
        self.on_pass()
        return split_row(x.to(self.dtype), pieces)


@dataclass(frozen=True, slots=True)
class FusedShape:
    """What the blocks of a fused kernel have in common; ``shape`` lacks the format of weights."""

    shape: Numbers
    floats: Numbers
    frequencies: Numbers
    head: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """The weights of one block as compiled code reads them: a row of addresses, and the tensors that they are of."""

    row: Numbers
    tensors: Sequence[Any]


def describe(
    decoder: Any,
    blocks: Sequence[nn.Module],
    dtype: torch.dtype,
    keeps_8_bits: bool = False,
) -> FusedShape:
    """Find out whether a fused kernel can compute these blocks, with caches in 8 bits or in ``dtype``; moves no weight.

    Raises NotFused.
    """
    try:
        first: Any = blocks[0]
        attention = first.self_attn
        rotary = decoder.rotary_emb
        matrices = [_matrices_of(block) for block in blocks]
        head = int(attention.head_dim)
        scale = float(attention.scaling)
        frequencies = rotary.inv_freq.float().numpy()
        factor = float(rotary.attention_scaling)
        epsilon = {_epsilon(block.get_submodule(name)) for block in blocks for name in NORMS}
        curve = _curve(first.mlp.act_fn)
    except AttributeError as error:
        raise NotFused(f"its blocks are of another kind: {error}") from None
    heads = matrices[0]["self_attn.q_proj"].out_features // head
    kept_heads = matrices[0]["self_attn.k_proj"].out_features // head
    inner = matrices[0]["mlp.gate_proj"].out_features
    if getattr(getattr(decoder, "config", None), "clip_qkv", None) is not None:
        raise NotFused("it clips queries, keys and values")
    if len(epsilon) > 1 or 2 * len(frequencies) > head or dtype not in STORED:
        raise NotFused("its blocks are of another kind")
    cache_format = layout.INT8 if keeps_8_bits else STORED[dtype]
    shape = np.array([heads, kept_heads, head, inner, layout.FLOAT32, cache_format, curve], np.int64)
    floats = np.array([epsilon.pop(), scale, factor], np.float32)
    return FusedShape(shape, floats, frequencies, head, dtype)


def assemble(
    shape: FusedShape,
    stored_in: torch.dtype,
    blocks: Sequence[BlockLayout],
    cache_folder: Path,
    on_pass: Callable[[], None] = lambda: None,
) -> FusedPass:
    """Make the fused kernel of these blocks, in their order. Raises NotFused where nothing can be compiled."""
    numbers = shape.shape.copy()
    numbers[layout.STORED] = STORED[stored_in]
    table = np.stack([block.row for block in blocks])
    pool = ThreadPool(min(torch.get_num_threads(), MOST_THREADS))
    return FusedPass(
        run_blocks=compiled_blocks(cache_folder),
        shape=numbers,
        floats=shape.floats,
        table=table,
        frequencies=shape.frequencies,
        dtype=shape.dtype,
        tensors=[block.tensors for block in blocks],
        on_pass=on_pass,
        pool=pool,
    )


def fuse(
    decoder: Any,
    blocks: Sequence[nn.Module],
    dtype: torch.dtype,
    cache_folder: Path,
    on_pass: Callable[[], None] = lambda: None,
    keeps_8_bits: bool = False,
) -> FusedPass:
    """Describe, lay out and assemble at once. Raises NotFused."""
    shape = describe(decoder, blocks, dtype, keeps_8_bits)
    stored_in = common_format([format_of(block) for block in blocks])
    laid_out = [lay_out(block, shape, stored_in) for block in blocks]
    return assemble(shape, stored_in, laid_out, cache_folder, on_pass)


def compiled_blocks(cache_folder: Path) -> Callable[..., None]:
    """Compile the function that computes blocks. Raises NotFused."""
    with compiling(cache_folder):
        from swarmd.compute.compiled.blocks import run_blocks

        run_blocks(*_no_blocks())
    return run_blocks


def _no_blocks() -> tuple[Any, ...]:
    """Make arguments with which the compiled function computes no block, but is compiled."""
    shape = np.ones(7, np.int64)
    table = np.zeros((0, layout.N_ADDRESSES), np.int64)
    floats = np.ones(3, np.float32)
    x = np.ones((1, 1), np.float32)
    positions = np.zeros(1, np.int64)
    kv_places = np.zeros((0, 1, 6), np.int64)
    counts = np.zeros((1, 2), np.int64)
    room = np.empty(6, np.float32)
    barrier = np.zeros(1, np.int64)
    return shape, floats, table, floats, x, (positions, kv_places, counts), (room, barrier, 0, 1)


def _matrices_of(block: nn.Module) -> dict[str, Any]:
    """Return a block's matrices by name, if nothing else has weights but these and norms. Raises NotFused."""
    modules = {
        name: module
        for name, module in block.named_modules()
        if isinstance(module, FrozenLinear) or [*module.parameters(recurse=False)]
    }
    matrices = {name: module for name, module in modules.items() if name in MATRICES}
    unknown = modules.keys() - MATRICES.keys() - NORMS.keys() - HEAD_NORMS.keys()
    missing = (MATRICES.keys() | NORMS.keys()) - modules.keys()
    if unknown or missing:
        raise NotFused(f"its blocks are of another kind: {', '.join(sorted(unknown | missing))}")
    for name, layer in matrices.items():
        if layer.out_features % rows_together(layer):
            raise NotFused(f"{name} is a {type(layer).__name__} of {getattr(layer, 'out_features', '?')}")
        if any(parameter.device.type != "cpu" for parameter in layer.parameters()):
            raise NotFused("it is not on a CPU")
    return matrices


def _epsilon(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


@torch.no_grad()
def _norm_weight(norm: Any) -> torch.Tensor:
    """Find out what a norm multiplies with: some families' is one more than their parameter.

    Ones have a mean square of 1, so the norm gives weight / sqrt(1 + epsilon).
    """
    ones = torch.ones_like(norm.weight).unsqueeze(0)
    normed: torch.Tensor = norm(ones)[0].float()
    return (normed * math.sqrt(1 + _epsilon(norm))).contiguous()


@torch.no_grad()
def _curve(function: Callable[[torch.Tensor], torch.Tensor]) -> int:
    """Find out the number of an activation, by its values. Raises NotFused."""
    x = torch.linspace(-6, 6, 64)
    for curve, known in CURVES.items():
        if torch.allclose(function(x), known(x), atol=1e-6):
            return curve
    raise NotFused("its activation is another one")


def format_of(block: nn.Module) -> torch.dtype:
    """Choose what all weights of a block can be kept in: as few bits as lose nothing. Raises NotFused."""
    layers = list(_matrices_of(block).values())
    common = common_format([stored_dtype(layer) for layer in layers])
    if common != torch.float32:
        return common
    weights = [stored_weight(layer) for layer in layers]
    if all(exact_dtype(weight) == torch.bfloat16 for weight in weights):
        return torch.bfloat16
    return torch.float16 if all(map(is_exact_in_float16, weights)) else common


def common_format(formats: Sequence[torch.dtype]) -> torch.dtype:
    """Choose what several weights can all be kept in, by what each can be kept in. Raises NotFused."""
    if len(set(formats)) == 1 and formats[0] in STORED:
        return formats[0]
    if not set(formats) <= {torch.float32, torch.bfloat16, torch.float16}:
        raise NotFused(f"its weights are in {', '.join(sorted(map(str, set(formats))))}")
    return torch.float32


def lay_out(block: nn.Module, shape: FusedShape, stored_in: torch.dtype) -> BlockLayout:
    """Move a block's weights to memory of their own, in large pages where there are any. Raises NotFused.

    Layers that can read them there share that memory, so that no weight is kept twice.
    """
    # One block's weights, one after the other, each from a multiple of ALIGNED bytes on:
    #
    #     arena    | q_proj | k_proj | v_proj | o_proj | gate_proj | up_proj | down_proj |
    #     tensors    arena, and beside it scales, biases and norms, which are small
    #     row        their addresses (``layout``)
    matrices = _matrices_of(block)
    sizes = [layer.in_features * layer.out_features for layer in matrices.values()]
    n_bytes = sum(_padded(size * _bytes_of(stored_in)) for size in sizes)
    if free_memory_bytes("cpu") < ROOM * n_bytes:
        raise NotFused("not enough memory to move its weights")
    arena = torch.from_numpy(np.empty(n_bytes, np.uint8))  # numpy asks for large pages, torch does not
    row = np.zeros(layout.N_ADDRESSES, np.int64)
    tensors = [arena]
    offset = 0

    def address_of(tensor: torch.Tensor) -> int:
        tensors.append(tensor)
        return tensor.data_ptr()

    for name, layer in matrices.items():
        column = MATRICES[name]
        weight = stored_weight(layer)
        end = offset + weight.numel() * stored_in.itemsize
        place = arena[offset:end].view(stored_in).view(weight.shape)
        offset += _padded(place.nbytes)
        place.copy_(weight)
        if place.dtype == weight.dtype:
            share_weight(layer, place)
        row[column] = place.data_ptr()
        if stored_in in (torch.int8, torch.uint8):
            row[layout.SCALES + column] = address_of(layer.stored_scales)
        if layer.bias is not None:
            row[layout.BIAS + column] = address_of(layer.bias.detach().float())
    width = matrices["self_attn.q_proj"].in_features
    modules = dict[str, Any](block.named_modules())
    for name, column in (NORMS | HEAD_NORMS).items():
        norm = modules.get(name)
        if norm is None:
            continue
        n_weights = shape.head if name in HEAD_NORMS else width
        if norm.weight.numel() != n_weights:
            raise NotFused(f"{name} has {norm.weight.numel()} weights")
        row[column] = address_of(_norm_weight(norm))
    return BlockLayout(row, tensors)


def _bytes_of(stored_in: torch.dtype) -> float:
    return 0.5 if stored_in == torch.uint8 else stored_in.itemsize


def _padded(n_bytes: float) -> int:
    """Round up, so that the next weight begins where one may."""
    return -(-int(n_bytes) // ALIGNED) * ALIGNED
