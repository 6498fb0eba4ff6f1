"""What a layer of a session's cache keeps, as named tensors, and the way back.

The library has few kinds of layers, and a family's own cache is a list of them: keys and values of every token or of a
window's, an indexer's keys beside them, and states that do not grow (the last inputs of a convolution, the sum of a
recurrence). A kind that is not known here is not guessed at: its sessions are replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import (
    DummyLayer,
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from swarmd.compute.cache.kvcache import SlabLayer, stored
from swarmd.compute.cache.session_cache import Tensors
from swarmd.errors import Code, Refused, RemoteProtocolError

KNOWN_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    DynamicIndexedLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    DummyLayer,
)


def is_known(layers: Sequence[Any]) -> bool:
    """Can all that these layers keep be written down?"""
    return all(isinstance(layer, SlabLayer) or type(layer) in KNOWN_LAYERS for layer in layers)


def layer_state(layer: Any) -> Tensors:
    """Return all that a known layer keeps, on the CPU; nothing of a layer that has seen no token."""
    state: Tensors = {}
    if isinstance(layer, DynamicLayer):
        keys, values = stored(layer)
        if torch.is_tensor(keys) and keys.numel():
            state |= {"keys": keys, "values": values}
    if isinstance(layer, DynamicSlidingWindowLayer):
        state["seen"] = torch.tensor([layer.cumulative_length, int(layer.record_past)])
    if isinstance(layer, DynamicIndexedLayer) and layer.is_indexer_initialized:
        state["indexer_keys"] = layer.indexer_keys
        if layer.indexer_position_ids is not None:
            state["indexer_positions"] = layer.indexer_position_ids
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        state["records_past"] = torch.tensor([int(layer.record_past)])
        for number in range(layer.number_of_states):
            if layer.is_conv_states_initialized[number]:
                state[f"conv.{number}"] = layer.conv_states[number]
            if layer.is_recurrent_states_initialized[number]:
                state[f"recurrent.{number}"] = layer.recurrent_states[number]
    return {name: tensor.cpu().contiguous() for name, tensor in state.items()}


# The other worker may be anybody's. Names decide nothing here: the layers were made by this worker's own family, and an
# example that it computed itself says which tensors each keeps, of which shape and dtype. So what comes can only be
# other numbers, of which those that are not finite are refused. Wrong numbers that are finite are for audits to find.
def restore_layer_untrusted(
    layer: Any,
    example: Any,
    state: Tensors,
    n_rows: int,
    n_tokens: int,
) -> None:
    """Give a new layer what another one kept of ``n_tokens``; ``example`` is the same layer after one token of one row.

    Raises Refused or RemoteProtocolError for what does not fit; the layer is then not to be used.
    """
    if not n_tokens:
        return
    expected = layer_state(example)
    positions = {"indexer_positions"} if isinstance(example, DynamicIndexedLayer) else set()
    if missing := expected.keys() - state.keys():
        raise RemoteProtocolError(f"lacks {', '.join(sorted(missing))}")
    if unknown := state.keys() - expected.keys() - positions:
        raise RemoteProtocolError(f"has {', '.join(sorted(unknown))}, which such a layer does not keep")
    if isinstance(example, LinearAttentionCacheLayerMixin):
        _restore_states(layer, example, state, n_rows, n_tokens)
    if isinstance(example, DynamicIndexedLayer):
        _restore_indexer(layer, example, state, n_rows, n_tokens)
    if "keys" in expected:
        _restore_tokens(layer, example, state, n_rows, n_tokens)


def whole_numbers(tensor: torch.Tensor, n: int) -> list[int]:
    """Read ``n`` whole numbers of what came. Raises RemoteProtocolError."""
    if tensor.dtype != torch.int64 or tensor.numel() != n:
        raise RemoteProtocolError(f"expected {n} whole numbers, got {tuple(tensor.shape)} of {tensor.dtype}")
    return [int(value) for value in tensor.flatten().tolist()]


def _restore_tokens(
    layer: Any,
    example: Any,
    state: Tensors,
    n_rows: int,
    n_tokens: int,
) -> None:
    """Restore keys and values: of every token, or of a window and what is recorded before it."""
    keys = state["keys"]
    values = state["values"]
    has_window = isinstance(example, DynamicSlidingWindowLayer)
    is_slab = isinstance(example, SlabLayer)
    n = keys.shape[2] if keys.ndim == 4 else -1
    if not (0 < n <= n_tokens and (n == n_tokens or has_window)):
        raise Refused(Code.BAD_SHAPE, f"keys {tuple(keys.shape)} of {n_tokens} tokens")
    for received, reference in zip((keys, values), stored(example), strict=True):
        expected = (n_rows, reference.shape[1], n, reference.shape[3])
        _check_tensor(received, reference, expected)
        _check_finite(example.read(received) if is_slab else received)
    if has_window:
        seen, records_past = whole_numbers(state["seen"], 2)
        n_window = min(n_tokens, example.sliding_window - 1)
        if seen != n_tokens or not (n == n_window or (records_past and n >= n_window)):
            raise Refused(Code.BAD_SHAPE, f"{n} of {seen} tokens are kept, expected {n_window} of {n_tokens}")
    if is_slab:
        layer.put(keys.to(example.device), values.to(example.device))
        return
    device = example.keys.device
    DynamicLayer.lazy_initialization(layer, keys.to(device), values.to(device))
    layer.keys = keys.to(device)
    layer.values = values.to(device)
    if has_window:
        layer._sliding_window_tensor = layer._sliding_window_tensor.to(device)
        layer.cumulative_length = seen
        layer.record_past = bool(records_past)


def _restore_indexer(
    layer: Any,
    example: Any,
    state: Tensors,
    n_rows: int,
    n_tokens: int,
) -> None:
    """Restore an indexer's keys, and their positions where the layer keeps these."""
    if not example.is_indexer_initialized:
        return
    keys = state["indexer_keys"]
    positions = state.get("indexer_positions")
    _check_tensor(keys, example.indexer_keys, (n_rows, n_tokens, example.indexer_keys.shape[-1]))
    _check_finite(keys)
    if positions is not None:
        reference = example.indexer_position_ids
        if reference is None:
            raise RemoteProtocolError("positions of an indexer that keeps none")
        _check_tensor(positions, reference, (reference.shape[0], n_rows, n_tokens))
        layer.indexer_position_ids = positions.to(reference.device)
    layer.lazy_initialization_indexer(keys.to(example.indexer_keys.device))
    layer.indexer_keys = keys.to(example.indexer_keys.device)


def _restore_states(
    layer: Any,
    example: Any,
    state: Tensors,
    n_rows: int,
    n_tokens: int,
) -> None:
    """Restore the inputs that a convolution looks back at, and a recurrence's sum.

    Of inputs there are more where the past is recorded.
    """
    (records_past,) = whole_numbers(state["records_past"], 1)
    layer.record_past = bool(records_past)
    layer.device = example.device
    layer.dtype = example.dtype
    for number in range(example.number_of_states):
        if example.is_conv_states_initialized[number]:
            inputs = state[f"conv.{number}"]
            reference = example.conv_states[number]
            n_kernel = example.conv_kernel_size[number]
            n = inputs.shape[-1] if inputs.ndim else 0
            if not (n == n_kernel or (records_past and 0 < n <= n_kernel + n_tokens)):
                raise Refused(Code.BAD_SHAPE, f"conv.{number} keeps {n} inputs of {n_tokens} tokens, not {n_kernel}")
            _check_tensor(inputs, reference, (n_rows, *reference.shape[1:-1], n))
            _check_finite(inputs)
            layer.conv_states[number] = inputs.to(reference.device)
            layer.conv_kernel_size[number] = n_kernel
            layer.is_conv_states_initialized[number] = True
        if example.is_recurrent_states_initialized[number]:
            total = state[f"recurrent.{number}"]
            reference = example.recurrent_states[number]
            _check_tensor(total, reference, (n_rows, *reference.shape[1:]))
            _check_finite(total)
            layer.recurrent_states[number] = total.to(reference.device)
            layer.is_recurrent_states_initialized[number] = True
        layer.has_previous_state[number] = example.has_previous_state[number]


def _check_tensor(
    received: torch.Tensor,
    reference: torch.Tensor,
    expected: tuple[int, ...],
) -> None:
    if tuple(received.shape) != expected or received.dtype != reference.dtype:
        text = f"expected {expected} of {reference.dtype}, got {tuple(received.shape)} of {received.dtype}"
        raise Refused(Code.BAD_SHAPE, text)


def _check_finite(received: torch.Tensor) -> None:
    if not torch.isfinite(received).all():
        raise Refused(Code.NOT_FINITE, "the caches hold values that are not finite")
