"""A session's caches and history as bytes, for another worker that holds the same blocks, and back again.

The format is safetensors: names, shapes and raw numbers, no code. What comes is checked against the session that was
opened for it before anything of it is used.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save
from transformers.cache_utils import DynamicSlidingWindowLayer

from swarmd.compute.history import History, Sent
from swarmd.compute.kvcache import SlabLayer, SpanCache
from swarmd.errors import Code, Refused, RemoteProtocolError
from swarmd.protocol.messages import Edit
from swarmd.protocol.untrusted import decode

Tensors = dict[str, torch.Tensor]
MAX_RECENT = 4_096


def pack_state(cache: SpanCache, history: History, mask: torch.Tensor | None, n_tokens: int) -> bytes:
    """Encode one session's state. Raises Refused for layers that keep more than keys and values."""
    if any(type(layer) not in (SlabLayer, DynamicSlidingWindowLayer) for layer in cache.owned):
        raise Refused(Code.UNSUPPORTED, "this family's caches cannot be handed over")
    tensors: Tensors = {"n_tokens": torch.tensor(n_tokens)}
    if mask is not None:
        tensors["mask"] = mask.cpu().to(torch.uint8).contiguous()
    for index, layer in enumerate(cache.owned):
        if torch.is_tensor(layer.keys) and layer.keys.numel():
            tensors[f"layer.{index}.keys"] = layer.keys.cpu().contiguous()
            tensors[f"layer.{index}.values"] = layer.values.cpu().contiguous()
        if hasattr(layer, "cumulative_length"):
            tensors[f"layer.{index}.seen"] = torch.tensor([layer.cumulative_length, int(layer.record_past)])
    whole = next(iter(history.base(1 << 62)), None)
    if whole is not None:
        _put(tensors, "base", whole[2])
    tensors["base.reached"] = torch.tensor([history.base_seq, int(history.record_past)])
    for number, sent in enumerate(history.after(0)):
        _put(tensors, f"recent.{number}", sent)
        tensors[f"recent.{number}.seq"] = torch.tensor([sent.seq, int(sent.record_past)])
        edits = msgspec.msgpack.encode(sent.edits)
        tensors[f"recent.{number}.edits"] = torch.frombuffer(bytearray(edits), dtype=torch.uint8)
    raw: bytes = save(tensors)
    return raw


def unpack_state_untrusted(
    raw: bytes, cache: SpanCache, history: History, n_rows: int, max_tokens: int, like: SpanCache
) -> tuple[int, torch.Tensor | None]:
    """Put encoded state in place; returns (tokens, mask). ``like`` is a cache of the same hop with one token in it.

    Raises Refused, after which the session is to be dropped.
    """
    try:
        tensors = load(raw)
        n_tokens = int(tensors["n_tokens"])
        if not 0 <= n_tokens <= max_tokens:
            raise Refused(Code.TOO_LONG, f"caches of {n_tokens} tokens, this session reserved {max_tokens}")
        for index, layer in enumerate(cache.owned):
            _restore(layer, like.owned[index], tensors, index, (n_rows, n_tokens))
        reached = tensors["base.reached"].tolist()
        if "base.hidden" in tensors:
            history.add(_get(tensors, "base", *reached))
            history.settle(reached[0])
        number = 0
        while f"recent.{number}.seq" in tensors and number < MAX_RECENT:
            history.add(_get(tensors, f"recent.{number}", *tensors[f"recent.{number}.seq"].tolist()))
            number += 1
        mask = tensors.get("mask")
        if mask is not None and tuple(mask.shape) != (n_rows, n_tokens):
            raise Refused(Code.BAD_SHAPE, f"a mask of shape {tuple(mask.shape)} for {n_rows} rows of {n_tokens} tokens")
        return n_tokens, mask
    except (SafetensorError, RemoteProtocolError, KeyError, ValueError, TypeError, RuntimeError, IndexError) as error:
        raise Refused(Code.MALFORMED, f"caches that do not parse: {error}") from None


def _restore(layer: Any, like: Any, tensors: Tensors, index: int, size: tuple[int, int]) -> None:
    (n_rows, n_tokens), records = size, hasattr(layer, "cumulative_length")
    keys, values = tensors.get(f"layer.{index}.keys"), tensors.get(f"layer.{index}.values")
    if keys is None or values is None:
        if n_tokens:
            raise Refused(Code.MALFORMED, f"the caches lack layer {index}")
        return
    n = keys.shape[2] if keys.ndim == 4 else -1
    for came, known in ((keys, like.keys), (values, like.values)):
        expected = (n_rows, known.shape[1], n, known.shape[3])
        if not (0 < n <= n_tokens and (n == n_tokens or records) and tuple(came.shape) == expected):
            text = f"layer {index}: expected {expected} for {n_tokens} tokens, got {tuple(came.shape)}"
            raise Refused(Code.BAD_SHAPE, text)
        if came.dtype != known.dtype:
            raise Refused(Code.BAD_SHAPE, f"layer {index}: expected {known.dtype}, got {came.dtype}")
    if not (torch.isfinite(keys).all() and torch.isfinite(values).all()):
        raise Refused(Code.NOT_FINITE, f"layer {index} of the caches holds values that are not finite")
    layer.update(keys.to(like.keys.device), values.to(like.keys.device))
    if records:
        seen, records_past = tensors[f"layer.{index}.seen"].tolist()
        layer.keys, layer.values = keys.to(like.keys.device), values.to(like.keys.device)
        layer.cumulative_length, layer.record_past = int(seen), bool(records_past)


def _put(tensors: Tensors, name: str, sent: Sent) -> None:
    for part, value in (("hidden", sent.hidden), ("positions", sent.positions), ("mask", sent.mask)):
        if value is not None:
            tensors[f"{name}.{part}"] = value.contiguous()


def _get(tensors: Tensors, name: str, seq: int, record_past: int) -> Sent:
    hidden, positions, mask = (tensors.get(f"{name}.{part}") for part in ("hidden", "positions", "mask"))
    edits: tuple[Edit, ...] = ()
    if (raw := tensors.get(f"{name}.edits")) is not None:
        edits = decode(bytes(raw.tolist()), tuple[Edit, ...], "edits")
    return Sent(seq, edits, hidden, positions, mask, bool(record_past))
