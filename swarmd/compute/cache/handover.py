"""A session's caches and history as bytes, for another worker that holds the same blocks, and back again.

The format is safetensors: names, shapes and raw numbers, no code. What comes is checked against the session that was
opened for it before anything of it is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from swarmd.compute.cache.cache_state import whole_numbers
from swarmd.compute.cache.session_cache import SessionCache, Tensors
from swarmd.errors import Code, Refused, RemoteProtocolError
from swarmd.protocol.untrusted import decode
from swarmd.protocol.wire.messages import Edit
from swarmd.wire.history import History, SentOp

MAX_RECENT = 4_096  # single ops of a session beside its merged history
UNREADABLE = (SafetensorError, RemoteProtocolError, LookupError, ValueError, TypeError, RuntimeError, ArithmeticError)


# What is in the bytes, by the names of the tensors:
#
#     n_tokens, mask                     how far the session is; padding, where there is any
#     layer.I.NAME, or others            what the cache exports (``SessionCache.export_state``)
#     base.{hidden, positions, mask}     the merged history, and base.reached: its last op
#     recent.N.{hidden, ..., seq, edits} the ops after it, one by one
#
# A peer could send anything under these names. Nothing is believed but what fits the session that was opened: rows,
# width and dtype, as many tokens as were reserved, finite values, layers like those of an example that was computed
# here, and a history without gaps that ends at the op which the caches reach. A session that was half filled when a
# check fails is dropped by its owner.
def pack_state(
    cache: SessionCache,
    history: History,
    mask: torch.Tensor | None,
    n_tokens: int,
) -> bytes:
    """Encode one session's state. Raises Refused for caches that cannot be handed over."""
    tensors: Tensors = {"n_tokens": torch.tensor(n_tokens), **cache.export_state()}
    if mask is not None:
        tensors["mask"] = mask.cpu().to(torch.uint8).contiguous()
    merged = next(iter(history.base(1 << 62)), None)
    if merged is not None:
        _put_op(tensors, "base", merged[2])
    tensors["base.reached"] = torch.tensor([history.base_seq, int(history.merge().record_past)])
    recent = list(history.after(0))
    if history.merge().n_absent or any(sent.n_absent for sent in recent):
        raise Refused(Code.UNSUPPORTED, "tokens that were tried ahead are void, and not cropped yet")
    if len(recent) > MAX_RECENT:
        raise Refused(Code.UNSUPPORTED, f"{len(recent)} separate ops are more than can be handed over")
    for number, sent in enumerate(recent):
        _put_op(tensors, f"recent.{number}", sent)
        tensors[f"recent.{number}.seq"] = torch.tensor([sent.seq, int(sent.record_past)])
        edits = msgspec.msgpack.encode(sent.edits)
        tensors[f"recent.{number}.edits"] = torch.frombuffer(bytearray(edits), dtype=torch.uint8)
    raw: bytes = save(tensors)
    return raw


@dataclass(frozen=True, slots=True)
class StateShape:
    """What state must fit: rows, tokens that were reserved, hidden size and dtype, and the op that it reaches."""

    n_rows: int
    max_tokens: int
    hidden: int
    dtype: torch.dtype
    seq: int


def unpack_state_untrusted(
    raw: bytes, cache: SessionCache, history: History, example: SessionCache, shape: StateShape
) -> tuple[int, torch.Tensor | None]:
    """Put encoded state in place; returns (tokens, mask). ``example`` is a cache of the same hop with one token in it.

    Raises Refused, after which the session is to be dropped.
    """
    try:
        tensors = load(raw)
        n_tokens = whole_numbers(tensors["n_tokens"], 1)[0]
        if not 0 <= n_tokens <= shape.max_tokens:
            raise Refused(Code.TOO_LONG, f"caches of {n_tokens} tokens, this session reserved {shape.max_tokens}")
        cache.restore_untrusted(tensors, example, shape.n_rows, n_tokens)
        _restore_history(tensors, history, shape)
        mask = tensors.get("mask")
        if mask is None:
            return n_tokens, None
        if tuple(mask.shape) != (shape.n_rows, n_tokens) or mask.dtype != torch.uint8:
            raise Refused(Code.BAD_SHAPE, f"a mask of {tuple(mask.shape)} for {shape.n_rows} rows of {n_tokens} tokens")
        return n_tokens, mask.long()
    except UNREADABLE as error:
        raise Refused(Code.MALFORMED, f"caches that do not parse: {error}") from None


def _restore_history(tensors: Tensors, history: History, shape: StateShape) -> None:
    """Check and take over what was sent on: the merged part, then the ops after it, up to the op the state reaches."""
    base_seq, base_records = whole_numbers(tensors["base.reached"], 2)
    n_recent = sum(name.endswith(".seq") for name in tensors)
    if not 0 <= base_seq <= shape.seq or n_recent > MAX_RECENT:
        raise Refused(Code.MALFORMED, f"history up to op {base_seq} and {n_recent} more, for op {shape.seq}")
    if "base.hidden" in tensors:
        history.add(_get_op(tensors, "base", base_seq, base_records, shape))
        history.settle(base_seq)
    history.merge().base_seq = base_seq
    reached = base_seq
    n_tokens = history.n_tokens
    for number in range(n_recent):
        seq, record_past = whole_numbers(tensors[f"recent.{number}.seq"], 2)
        sent = _get_op(tensors, f"recent.{number}", seq, record_past, shape)
        for edit in sent.edits:
            n_tokens -= edit.crop or 0
            rows = edit.rows or ()
            has_wrong_rows = bool(rows) and (len(rows) != shape.n_rows or max(rows) >= shape.n_rows)
            if n_tokens < 0 or has_wrong_rows:
                raise Refused(Code.MALFORMED, f"op {seq} of the history holds an edit that does not fit")
        n_tokens += 0 if sent.hidden is None else sent.hidden.shape[1]
        if seq != reached + 1:
            raise Refused(Code.MALFORMED, f"op {seq} of the history follows op {reached}")
        reached = seq
        history.add(sent)
    if reached != shape.seq:
        raise Refused(Code.MALFORMED, f"a history up to op {reached}, for op {shape.seq}")


def _put_op(tensors: Tensors, name: str, sent: SentOp) -> None:
    for part, value in zip(("hidden", "positions", "mask"), sent.kept() or (), strict=False):
        if value is not None:  # alternatives are left out: the client sees that they do not come
            tensors[f"{name}.{part}"] = value.contiguous()


def _get_op(
    tensors: Tensors,
    name: str,
    seq: int,
    record_past: int,
    shape: StateShape,
) -> SentOp:
    """Read one op of the history and check that it fits. Raises Refused or RemoteProtocolError."""
    hidden = tensors.get(f"{name}.hidden")
    positions = tensors.get(f"{name}.positions")
    mask = tensors.get(f"{name}.mask")
    if hidden is not None:
        n = hidden.shape[1] if hidden.ndim == 3 else -1
        expected = (shape.n_rows, n, shape.hidden)
        is_fit = n > 0 and tuple(hidden.shape) == expected and hidden.dtype == shape.dtype
        has_positions = positions is not None and _is_row_table(
            positions,
            torch.int32,
            shape.n_rows,
            n,
        )
        is_mask_fit = mask is None or _is_row_table(mask, torch.uint8, shape.n_rows, n)
        if not (is_fit and has_positions and is_mask_fit):
            raise Refused(Code.BAD_SHAPE, f"{name} of the history does not fit {shape.n_rows} rows of {shape.hidden}")
    edits: tuple[Edit, ...] = ()
    if (raw := tensors.get(f"{name}.edits")) is not None:
        edits = decode(bytes(raw.tolist()), tuple[Edit, ...], "edits")
    return SentOp(seq, edits, hidden, positions, mask, bool(record_past))


def _is_row_table(
    tensor: torch.Tensor,
    dtype: torch.dtype,
    n_rows: int,
    n: int,
) -> bool:
    """Does it hold one value of this type for each token of each row?"""
    return tuple(tensor.shape) == (n_rows, n) and tensor.dtype == dtype
