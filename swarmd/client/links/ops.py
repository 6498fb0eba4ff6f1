"""What a step becomes on the wire, and what an answer becomes in the model: cutting, and reading back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch

from swarmd.client.links.link import SessionOptions, SessionServices
from swarmd.errors import RemoteProtocolError
from swarmd.net.interfaces import is_loopback
from swarmd.plan.chains.batching import tokens_of_op
from swarmd.plan.chains.codec import choose_codec
from swarmd.protocol.understanding import understanding_of
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import Op
from swarmd.protocol.wire.tensors import CHANGES, CODECS, max_tokens_per_frame
from swarmd.values import Decision, PeerId
from swarmd.wire import top
from swarmd.wire.history import SentOp
from swarmd.wire.tensors import unpack_untrusted
from swarmd.wire.top import Top

MAX_OP_BYTES = 8 * 2**20  # half a frame: other sessions' frames come between


def codec_for(swarm: SessionServices, terms: SessionOptions, peers: list[PeerId]) -> Decision[str]:
    """Choose a session's codec by the trips of its chain, and the slower direction of each peer. Raises ConfigError.

    A peer that announces nothing but loopback is on this machine: however long a busy machine takes, no link is slow.
    Changes against what was sent before are fine-tuning's: a session has none, and chooses by its links.
    """
    view, me = swarm.view(), swarm.rpc.network.peer_id
    known = swarm.trips(view.serving(terms.model))
    here = {peer for peer in peers if is_loopback(swarm.addresses_of(peer))}
    peers = [peer for peer in peers if peer not in here]
    pairs = [(a, b) for a, b in itertools.pairwise([me, *peers, me]) if a != b]
    trips = [trip for a, b in pairs if (trip := known.get((a, b), known.get((b, a)))) is not None]
    records = [view.peers.get(peer) for peer in peers]
    rates = [rate for r in records if r for rate in (r.up_bytes_per_s, r.down_bytes_per_s) if rate is not None]
    known_to_all = frozenset(CODECS).intersection(*(understanding_of(r).codecs for r in records))
    asked = "raw" if terms.verify == 1 else "auto" if terms.codec == CHANGES else terms.codec
    return choose_codec(asked, terms.grade, terms.dtype, trips, rates, known_to_all)


def cut(step: SentOp, prefill_tokens_per_s: Sequence[float]) -> list[SentOp]:
    """Make the ops of one step: one for a token, several for a long prompt, so that all hops work at the same time."""
    if step.hidden is None or step.positions is None:
        return [step]
    b, t, d = step.hidden.shape
    n_tokens = max_tokens_per_frame(b, d, str(step.hidden.dtype).removeprefix("torch."), MAX_OP_BYTES)
    n_tokens = min(n_tokens, tokens_of_op(b, t, prefill_tokens_per_s))
    parts = []
    for number, at in enumerate(range(0, t, n_tokens)):
        window = slice(at, at + n_tokens)
        parts.append(
            replace(
                step,
                seq=step.seq + number,
                edits=step.edits if at == 0 else (),
                hidden=step.hidden[:, window],
                positions=step.positions[:, window],
                mask=None if step.mask is None else step.mask[:, window],
            )
        )
    return parts


class WrongCount(RemoteProtocolError):
    """An answer of another number of tokens than were asked for."""


def read_answer(op: Op, frame: Frame, entered: torch.Tensor, want: int | None = None) -> torch.Tensor:
    """The last block's output for hidden states [b, t, d] that ``entered``; tokens that did not come are zeros.

    Of each row at least the last ``want`` tokens (None: all) must have come. Raises WrongCount for other tokens than
    that, which any hop may have lost or added, and RemoteProtocolError for what the last one would have refused itself:
    another shape or dtype than what entered, values that are not finite.
    """
    b, t, d = entered.shape
    least = t if want is None else min(want, t)
    out = entered[:, :0] if op.tensor is None else unpack_untrusted(op.tensor, frame.payload)[0]
    if (out.shape[0], out.shape[2], out.dtype) != (b, d, entered.dtype):
        raise RemoteProtocolError(
            f"expected hidden states {tuple(entered.shape)} {entered.dtype}, got {tuple(out.shape)} {out.dtype}"
        )
    if not torch.isfinite(out).all():
        raise RemoteProtocolError("hidden states that are not finite")
    if not least <= out.shape[1] <= t:
        raise WrongCount(f"expected {least} to {t} tokens, got {out.shape[1]}")
    missing = t - out.shape[1]
    return torch.cat([out.new_zeros(b, missing, d), out], 1) if missing else out


def read_top(op: Op, want: int | None, vocabulary: int) -> Top | None:
    """The largest logits of the last ``want`` tokens, that came with them; None where none were asked for, or given.

    Raises RemoteProtocolError for what cannot be logits.
    """
    if not vocabulary or not op.logits or op.tensor is None or op.tensor.t != want:
        return None
    return top.unpack_untrusted(op.logits, op.tensor.b * op.tensor.t, vocabulary)
