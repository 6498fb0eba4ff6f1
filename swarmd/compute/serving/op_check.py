"""An op as a client sent it, checked against its session before anything of that changes."""

from __future__ import annotations

import torch

from swarmd.compute.serving.incoming_state import KEPT_TIMES
from swarmd.compute.serving.session_state import SessionState, order_after
from swarmd.errors import Code, Refused
from swarmd.protocol.accounts.taken_tokens import MOST_TRIED
from swarmd.protocol.fields import MOST_ABSENT
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.alternatives import count_alternative_tokens
from swarmd.protocol.wire.frames import MAX_PAYLOAD_BYTES
from swarmd.protocol.wire.messages import Op, count_cropped
from swarmd.wire.tensors import Inputs, is_finite, unpack_untrusted

POSITION_BYTES = 5  # of a token: where it is, and whether it is padding
LEAST_KEPT_EDITS = 64  # of a session, however short: each takes what a token of each row does


# An op could name rows that are not there, crop more than there is, bring other shapes than the session's, numbers
# that are not finite, or positions without end (rotary tables grow with them). It could also be small and cost
# much: codes that unpack to more than a frame, edits by the thousand that the history has to keep. All of that is
# refused here, before the caches are touched, so that a session stays usable after a refusal.
def read_op_untrusted(state: SessionState, op: Op, payload: memoryview) -> Inputs | None:
    """Read what an op brings, if it brings tokens. Raises Refused or RemoteProtocolError."""
    n_cropped = count_cropped(op.edits)
    n_tokens = state.n_entered - n_cropped
    n_absent = max(0, state.n_absent - n_cropped)
    for edit in op.edits:
        if edit.rows is None:
            continue
        if len(edit.rows) != state.n_rows or max(edit.rows) >= state.n_rows:
            raise Refused(Code.BAD_SHAPE, f"a reorder of {len(edit.rows)} rows in a batch of {state.n_rows}")
    if n_tokens < 0:
        raise Refused(Code.BAD_SHAPE, f"a crop past the start: the session holds {state.n_entered} tokens")
    n_cached = state.count_cached(n_cropped)
    if n_cached and (why := state.cache.refuses_crop(n_cached)):
        raise Refused(Code.UNSUPPORTED, f"{n_cached} tokens cannot be taken back: {why}")
    if n_absent and op.tensor is not None:
        raise Refused(Code.BAD_SHAPE, f"tokens behind {n_absent} that are void: a crop has to take those away first")
    if n_absent + op.absent > MOST_ABSENT:
        raise Refused(Code.TOO_LONG, f"{n_absent + op.absent} tokens that are void; at most {MOST_ABSENT} may be")
    n_alternative = _check_alternatives(op, n_tokens)
    n_new = op.absent + (0 if op.tensor is None else op.tensor.t - n_alternative)
    if n_tokens + n_new > state.max_tokens:
        raise Refused(Code.TOO_LONG, f"{n_tokens} tokens and {n_new} more, this session reserved {state.max_tokens}")
    n_edits = state.history.recent_edits + messages.count_changes(op.edits, op.tensor is not None)
    if n_edits > LEAST_KEPT_EDITS + KEPT_TIMES * state.max_tokens:
        text = f"{state.history.recent_edits} edits of separate ops are kept for replay already"
        raise Refused(Code.TOO_LONG, text)
    if op.tensor is None:
        return None
    shape = (op.tensor.b, op.tensor.d, op.tensor.dtype)
    dtype_name = str(state.engine.dtype).removeprefix("torch.")
    expected = (state.n_rows, state.engine.hidden_size, dtype_name)
    if shape != expected:
        raise Refused(Code.BAD_SHAPE, f"expected (batch, hidden, dtype) {expected}, got {shape}")
    token_bytes = op.tensor.d * state.engine.dtype.itemsize + POSITION_BYTES
    n_bytes = op.tensor.b * op.tensor.t * token_bytes
    if n_bytes > MAX_PAYLOAD_BYTES:  # however small it came: its answer may not be coded
        raise Refused(Code.BAD_SHAPE, f"an op of {n_bytes} B when it is not coded; at most {MAX_PAYLOAD_BYTES}")
    if state.history.recent_tokens > KEPT_TIMES * state.max_tokens:
        raise Refused(
            Code.TOO_LONG, f"{state.history.recent_tokens} tokens of separate ops are kept for replay already"
        )
    hidden, positions, mask = unpack_untrusted(op.tensor, payload)
    if not is_finite(hidden):
        raise Refused(Code.NOT_FINITE, f"op {op.seq} holds values that are not finite")
    if why := state.engine.refuses_rows(hidden):
        raise Refused(Code.BAD_SHAPE, f"op {op.seq}: {why}")
    first_place, last_place = map(int, torch.aminmax(positions))
    if first_place < 0 or last_place > state.max_tokens:
        raise Refused(Code.BAD_SHAPE, f"positions outside 0 to {state.max_tokens}")
    order = order_after(op.edits, state.n_rows)
    if why := state.cache.refuses_places(positions, mask, n_tokens, order):
        raise Refused(Code.BAD_SHAPE, why)
    return hidden, positions, mask


def _check_alternatives(op: Op, n_tokens: int) -> int:
    """Count the tokens of an op's alternatives, to ``n_tokens`` that the session holds then. Raises Refused."""
    if not op.alternatives:
        return 0
    n_alternative = count_alternative_tokens(op.alternatives)
    n_op = 0 if op.tensor is None else op.tensor.t
    if n_alternative >= n_op or n_op > MOST_TRIED:
        text = f"{n_alternative} tokens of alternatives among the {n_op} of an op, which has {MOST_TRIED} at most then"
        raise Refused(Code.BAD_SHAPE, text)
    if op.base is not None or any(alternative.n_before > n_tokens for alternative in op.alternatives):
        raise Refused(Code.BAD_SHAPE, f"an alternative to other tokens than the {n_tokens} that the session holds")
    return n_alternative
