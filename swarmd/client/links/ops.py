"""What a step becomes on the wire, and what an answer becomes in the model: cutting, and reading back."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from swarmd.client.links.link import SessionOptions, SessionServices
from swarmd.errors import RemoteProtocolError
from swarmd.net.interfaces import is_loopback
from swarmd.plan.chains.batching import tokens_of_op
from swarmd.plan.chains.codec import choose_codec
from swarmd.protocol.understanding import understanding_of
from swarmd.protocol.wire.alternatives import Alternative, count_alternative_tokens
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import Edit, Op
from swarmd.protocol.wire.tensors import CHANGES, CODECS, max_tokens_per_frame
from swarmd.values import Decision, PeerId
from swarmd.wire import top
from swarmd.wire.history import SentOp
from swarmd.wire.tensors import is_finite, unpack_untrusted
from swarmd.wire.top import Top

MAX_OP_BYTES = 8 * 2**20  # half a frame: other sessions' frames come between


@dataclass(frozen=True, slots=True)
class StepInput:
    """What one step sends through a chain: tokens, after edits of the caches.

    hidden: [b, t, d], positions and mask: [b, t]; no hidden states: edits only; no mask: no padding. With
    ``record_past`` servers keep what a cache would forget, so that it can be cropped. Of each row the last ``want``
    tokens are needed (None: all), and with a ``vocabulary`` their largest logits, too, where the last hop has a head.
    The last tokens are those of ``alternatives``, which caches do not keep, and which are needed beside the others.
    """

    hidden: torch.Tensor | None
    positions: torch.Tensor | None
    edits: tuple[Edit, ...] = ()
    mask: torch.Tensor | None = None
    record_past: bool = False
    want: int | None = None
    vocabulary: int = 0
    alternatives: tuple[Alternative, ...] = ()


def codec_for(swarm: SessionServices, terms: SessionOptions, peers: list[PeerId]) -> Decision[str]:
    """Choose a session's codec by the trips of its chain, and the slower direction of each peer. Raises ConfigError.

    A peer that announces nothing but loopback is on this machine: however long a busy machine takes, no link is slow.
    Changes against what was sent before are fine-tuning's: a session has none, and chooses by its links.
    """
    view = swarm.view()
    client = swarm.rpc.network.peer_id
    known_trips = swarm.trips(view.serving(terms.model))
    remote_peers = [peer for peer in peers if not is_loopback(swarm.addresses_of(peer))]
    trips = []
    for sender, receiver in itertools.pairwise([client, *remote_peers, client]):
        trip = known_trips.get((sender, receiver), known_trips.get((receiver, sender)))
        if trip is not None and sender != receiver:
            trips.append(trip)
    records = [view.peers.get(peer) for peer in remote_peers]
    rates = []
    for record in records:
        if record:
            rates += [rate for rate in (record.up_bytes_per_s, record.down_bytes_per_s) if rate is not None]
    known_to_all = frozenset(CODECS).intersection(*(understanding_of(record).codecs for record in records))
    requested = "auto" if terms.codec == CHANGES else terms.codec
    if terms.verify == 1:
        requested = "raw"
    return choose_codec(requested, terms.grade, terms.dtype, trips, rates, known_to_all)


def split_step(step: SentOp, prefill_tokens_per_s: Sequence[float], n_members: int = 1) -> list[SentOp]:
    """Make the ops of one step: one for a token, several for a long prompt, so that all hops work at the same time.

    ``n_members``: of the largest team that shares an op.
    """
    if step.hidden is None or step.positions is None:
        return [step]
    b, t, d = step.hidden.shape
    dtype = str(step.hidden.dtype).removeprefix("torch.")
    fits_frame = max_tokens_per_frame(b, d, dtype, MAX_OP_BYTES)
    n_tokens = min(fits_frame, tokens_of_op(b, t, prefill_tokens_per_s, n_members))
    parts = []
    for number, offset in enumerate(range(0, t, n_tokens)):
        window = slice(offset, offset + n_tokens)
        parts.append(
            replace(
                step,
                seq=step.seq + number,
                edits=step.edits if offset == 0 else (),
                hidden=step.hidden[:, window],
                positions=step.positions[:, window],
                mask=None if step.mask is None else step.mask[:, window],
            )
        )
    return parts


class WrongCount(RemoteProtocolError):
    """An answer of another number of tokens than were asked for."""


def count_answered(op: Op, sent: SentOp, want: int | None) -> tuple[int, int]:
    """Count the tokens of each row that an answer may have, and those that it must: of alternatives all, or none."""
    n_alternative = count_alternative_tokens(op.alternatives)
    if op.alternatives not in ((), sent.alternatives):
        raise RemoteProtocolError(f"alternatives of {n_alternative} tokens, others than were sent")
    n_most = sent.n_kept + n_alternative
    return n_most, n_most if want is None else min(want, sent.n_kept) + n_alternative


def read_answer(op: Op, frame: Frame, sent: SentOp, want: int | None = None) -> torch.Tensor:
    """The last block's output for hidden states [b, t, d] that were sent; tokens that did not come are zeros.

    Of each row at least the last ``want`` tokens (None: all) must have come, and behind them those of alternatives, if
    every hop computed them. Raises WrongCount for other tokens than that, which any hop may have lost or added, and
    RemoteProtocolError for what the last one would have refused itself: another shape or dtype than what entered,
    values that are not finite.
    """
    entered = sent.hidden
    assert entered is not None
    n_most, n_least = count_answered(op, sent, want)
    b, _, d = entered.shape
    out = entered[:, :0]
    if op.tensor is not None:
        out, _, _ = unpack_untrusted(op.tensor, frame.payload)
    has_shape = out.shape[0] == b and out.shape[2] == d
    if not has_shape or out.dtype != entered.dtype:
        raise RemoteProtocolError(
            f"expected hidden states {(b, n_most, d)} {entered.dtype}, got {tuple(out.shape)} {out.dtype}"
        )
    if not is_finite(out):
        raise RemoteProtocolError("hidden states that are not finite")
    if not n_least <= out.shape[1] <= n_most:
        raise WrongCount(f"expected {n_least} to {n_most} tokens, got {out.shape[1]}")
    n_missing = n_most - out.shape[1]
    if not n_missing:
        return out
    return torch.cat([out.new_zeros(b, n_missing, d), out], 1)


def read_top(op: Op, sent: SentOp, want: int | None, vocabulary: int) -> Top | None:
    """The largest logits of the last ``want`` tokens and of alternatives; None where none were asked for, or given.

    Raises RemoteProtocolError for what cannot be logits.
    """
    if not vocabulary or not op.logits or op.tensor is None or want is None:
        return None
    if op.tensor.t != count_answered(op, sent, want)[1]:
        return None
    return top.unpack_untrusted(op.logits, op.tensor.b * op.tensor.t, vocabulary)
