"""An op that a session has begun: its tokens are computed share by share, and lead to one answer.

session.begin --> piece, put, piece, put, ... --> nothing is left --answer--> session.keep
                    |                                    ^
                    +------ an op without tokens --------+
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.serving.session_state import SessionState
from swarmd.plan.chains.prefixes import PrefixExtension
from swarmd.protocol.fields import MOST_ABSENT, MOST_HOPS_TIMED
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.alternatives import count_alternative_tokens
from swarmd.protocol.wire.messages import Op
from swarmd.protocol.wire.worker import Done
from swarmd.wire.history import SentOp
from swarmd.wire.ops import encode_op
from swarmd.wire.tensors import Inputs, first_tokens
from swarmd.wire.top import MOST_WITH_LOGITS


class OpInProgress:
    """An op whose edits are applied and whose tokens are being computed.

    ``extension``: the session's prefix with these tokens.
    """

    def __init__(
        self,
        state: SessionState,
        op: Op,
        came_at: float,
        inputs: Inputs | None = None,
        extension: PrefixExtension | None = None,
    ) -> None:
        self.state = state
        self.op = op
        self.extension = extension
        self._came_at = came_at
        self._computed_s = 0.0
        self._inputs = inputs
        self._n_kept = 0 if inputs is None else inputs[0].shape[1] - count_alternative_tokens(op.alternatives)
        self._n_done = 0
        self._outs: list[torch.Tensor] = []
        self._alternative_outs: list[torch.Tensor] = []

    @property
    def is_void(self) -> bool:
        """Does nobody want its tokens any more?"""
        return is_void(self.state, self.op)

    def drop_tokens(self) -> None:
        """Compute none of its tokens: they are absent. None may be computed yet."""
        self.op = drop_tokens(self.op)
        self._inputs = None
        self._n_kept = 0
        self.extension = None
        self.state.n_absent += self.op.absent

    @property
    def has_tokens(self) -> bool:
        """Does it bring any tokens, computed or not?"""
        return self._inputs is not None

    @property
    def tokens_left(self) -> int:
        """Tokens of each row that it still needs, those of alternatives aside."""
        return self._n_kept - self._n_done

    @property
    def is_begun(self) -> bool:
        """Are some of its tokens computed?"""
        return self._n_done > 0

    @property
    def wanted_prefix(self) -> PrefixExtension | None:
        """What the cache will begin with once it is computed; None where that cannot come from another session."""
        return None if self._n_done else self.extension

    @property
    def is_interleavable(self) -> bool:
        """May the rest of it be computed in the midst of another pass?"""
        state = self.state
        if not state.can_share or state.lora is not None or self.op.alternatives:
            return False
        return state.engine.can_interleave(state.n_rows * self.tokens_left, state.hop, state.cache)

    def take_over(self, other: SessionState, n_tokens: int) -> None:
        """Take another session's cache and answers for the first ``n_tokens``, which are the same in both."""
        state = self.state
        start = state.n_tokens
        if n_tokens > start:
            state.cache.take_over(other.cache, start, n_tokens, state.engine.shares_prefixes)
            self.put(other.history.tokens(start, n_tokens).to(state.engine.device))

    def piece(self, n_tokens: int) -> SessionTokens:
        """Return the next ``n_tokens`` of each row, for a pass with others. ``put`` must follow."""
        assert self._inputs is not None
        state = self.state
        hidden, positions, _ = self._inputs
        if n_tokens != hidden.shape[1]:
            window = slice(self._n_done, self._n_done + n_tokens)
            hidden = hidden[:, window]
            positions = positions[:, window]
        device = state.engine.device
        hidden = hidden.to(device)
        positions = positions.long().to(device)
        return SessionTokens(
            hidden,
            positions,
            state.cache,
            state.n_tokens,
            state.lora,
            mask=None if state.mask is None else state.mask[:, : state.n_tokens + hidden.shape[1]],
            is_exact=state.history.is_exact,
        )

    def alternative_pieces(self) -> list[SessionTokens]:
        """Return the tokens of its alternatives, for the pass that completes it. ``put_alternatives`` must follow."""
        if not self.op.alternatives:
            return []
        assert self._inputs is not None
        state = self.state
        hidden, positions, _ = self._inputs
        device = state.engine.device
        pieces = []
        first = self._n_kept
        for number, alternative in enumerate(self.op.alternatives):
            window = slice(first, first + alternative.n)
            first += alternative.n
            pieces.append(
                SessionTokens(
                    hidden[:, window].to(device),
                    positions[:, window].long().to(device),
                    state.borrowed_cache(number, alternative.n_before),
                    alternative.n_before,
                    state.lora,
                )
            )
        return pieces

    def put_alternatives(self, outs: Sequence[torch.Tensor]) -> None:
        """Take what a pass gave for ``alternative_pieces``; nothing of it is kept but these."""
        self._alternative_outs = list(outs)

    def put(self, out: torch.Tensor) -> None:
        """Take what a pass gave for ``piece``."""
        self._outs.append(out)
        self._n_done += out.shape[1]
        self.state.n_tokens += out.shape[1]

    def add_time(self, seconds: float) -> None:
        """Count the time of a pass that it was part of."""
        self._computed_s += seconds

    def head_input(self) -> torch.Tensor | None:
        """Return what left of the tokens [t, d] whose largest logits the client asks for, if any. It is complete."""
        op = self.op
        n = op.want or 0
        is_last = self.state.is_last_hop and op.seq > op.silent_through and not self.is_void
        if not (op.top and is_last and self._outs and n):
            return None
        n += count_alternative_tokens(op.alternatives)
        hidden = self.sent().last(op.want or 0).hidden
        is_asked = hidden is not None and hidden.shape[1] == n and self.state.n_rows * n <= MOST_WITH_LOGITS
        return hidden.flatten(0, 1) if hidden is not None and is_asked else None

    def answer(self, now: float = 0.0, logits: bytes = b"") -> bytes:
        """Return the frame that the complete op leads to: the next hop's op, or Done. ``logits`` go with it."""
        op = self.op
        state = self.state
        if op.seq <= op.silent_through and state.hop.end >= op.replay_end:
            done = Done(session=state.session, start=state.hop.start, seq=op.seq)
            return messages.encode_frame(done)
        sent = self.sent()
        if self.is_void:
            sent = sent.without_tokens()
        elif op.want is not None and state.is_last_hop:
            sent = sent.last(op.want)
        header = msgspec.structs.replace(
            op, session=state.session, start=state.hop.end, logits=logits, needs=(), times=self._times(now)
        )
        return encode_op(header, sent, state.codec)

    def _times(self, now: float) -> tuple[tuple[int, int, int], ...] | None:
        """The times of the hops so far with this one's, where the client asks for them."""
        times = self.op.times
        if times is None or len(times) >= MOST_HOPS_TIMED:
            return times
        computed_us = int(1e6 * self._computed_s)
        elapsed_us = int(1e6 * (now - self._came_at))
        waited_us = max(0, elapsed_us - computed_us)
        return (*times, (self.state.hop.start, waited_us, computed_us))

    def sent(self) -> SentOp:
        """Return the complete op as it leaves this hop; what was computed in parts is put together once."""
        op = self.op
        if self._inputs is None:
            return SentOp(op.seq, op.edits, None, None, None, op.record_past, op.absent)
        _, positions, mask = self._inputs
        outs = [*self._outs, *self._alternative_outs]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, 1)
        self._outs = [out.cpu()]
        self._alternative_outs = []
        return SentOp(op.seq, op.edits, self._outs[0], positions, mask, op.record_past, op.absent, op.alternatives)


def is_void(state: SessionState, op: Op) -> bool:
    """Is an op void, and no longer than tries are?"""
    has_few = op.tensor is None or op.tensor.t + op.absent <= MOST_ABSENT
    return has_few and state.void.covers(op.seq)


def drop_tokens(op: Op) -> Op:
    """Return the same op with all of its tokens absent."""
    n_tokens = 0 if op.tensor is None else op.tensor.t - count_alternative_tokens(op.alternatives)
    return msgspec.structs.replace(op, tensor=None, absent=op.absent + n_tokens, alternatives=())


def leave_out_alternatives(op: Op, inputs: Inputs) -> tuple[Op, Inputs]:
    """Return the same op without its alternatives."""
    n_alternative = count_alternative_tokens(op.alternatives)
    n = inputs[0].shape[1] - n_alternative
    assert op.tensor is not None
    tensor = msgspec.structs.replace(op.tensor, t=n)
    return msgspec.structs.replace(op, tensor=tensor, alternatives=()), first_tokens(inputs, n)
