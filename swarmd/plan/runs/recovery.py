"""How a peer that lags behind gets up to date: by the averages that it missed, or by a snapshot of the state."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmd.values import Decision, PeerId, count


@dataclass(frozen=True, slots=True)
class DonorOffer:
    """What a donor's record says: its update, the digest of its state there, and how many averages it still has."""

    epoch: int
    state: bytes
    n_averages: int


@dataclass(frozen=True, slots=True)
class RecoveryPath:
    """``averages``: fetch those of updates (from, to]. ``state``: fetch this snapshot, of update ``epoch``."""

    epoch: int
    donors: tuple[PeerId, ...]
    state: bytes = b""


def choose_path(
    held_epoch: int | None,
    newest: int,
    offers: Mapping[PeerId, DonorOffer],
    average_bytes: float,
    state_bytes: float,
) -> Decision[RecoveryPath | None]:
    """Choose what costs fewer bytes; inf is never. ``held_epoch``: the update of the state held here, None without any.

    A snapshot counts if most donors of the newest update that is offered name the same digest; a liar is outvoted.
    """
    missed = None if held_epoch is None else newest - held_epoch
    if missed is not None and missed * average_bytes <= state_bytes:
        fresh = [p for p, o in offers.items() if o.epoch >= newest and o.n_averages >= missed]
        givers = tuple(sorted(fresh))
        if givers:
            why = f"{count(missed, 'update')} behind, of which {count(len(givers), 'peer')} can give the averages"
            return Decision(RecoveryPath(newest, givers), why)
    offered_states = [o for o in offers.values() if o.state and o.epoch <= newest]
    offered_states = [o for o in offered_states if held_epoch is None or o.epoch > held_epoch]
    if not offered_states:
        return Decision(None, "nobody who is up to date offers its state yet")
    # Only digests of the newest update are compared: donors of different updates have different states by right.
    best = max(o.epoch for o in offered_states)
    votes = Counter(o.state for o in offered_states if o.epoch == best)
    state, n_votes = votes.most_common(1)[0]
    agreeing = [p for p, o in offers.items() if o.epoch == best and o.state == state]
    donors = tuple(sorted(agreeing))
    why = f"the state of update {best} on which {count(n_votes, 'peer')} agreed"
    return Decision(RecoveryPath(best, donors, state), why)


def restorable_epoch(newest: int, states: Sequence[int]) -> int | None:
    """Find the newest update whose state anybody has; None if that is the newest commit's."""
    best = max(states, default=None)
    return best if best is not None and best < newest else None
