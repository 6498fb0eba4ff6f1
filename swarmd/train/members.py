"""Who else is in a run, from the records that this peer has seen: how fresh they are, and who does not answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from swarmd.plan.progress import Progress
from swarmd.plan.view import SwarmView
from swarmd.protocol.records import RunRecord
from swarmd.values import PeerId, RunId

SUSPECT_FOR_S = 15.0


@dataclass(slots=True)
class _Heard:
    sequence: int
    at: float


@dataclass(slots=True)
class Members:
    """See the module. Ages count from when a record was first seen here, whatever its clock says."""

    run: RunId
    me: PeerId
    view: Callable[[], SwarmView]
    _heard: dict[PeerId, _Heard] = field(default_factory=dict)
    _suspects: dict[PeerId, float] = field(default_factory=dict)

    def look(self, now: float) -> dict[PeerId, RunRecord]:
        """The other members' records, those left out that do not answer."""
        found = {}
        for record in self.view().in_run(self.run):
            peer = PeerId(record.peer)
            if peer == self.me:
                continue
            heard = self._heard.get(peer)
            if heard is None or heard.sequence != record.sequence:
                self._heard[peer] = _Heard(record.sequence, now)
                if heard is not None:
                    self._suspects.pop(peer, None)  # it lives
            if self._suspects.get(peer, 0.0) <= now:
                found[peer] = record
        return found

    def suspect(self, peer: PeerId, now: float) -> None:
        """A peer does not answer: do without it until it says something, or for a while."""
        self._suspects[peer] = now + SUSPECT_FOR_S

    def forgive(self) -> None:
        """Nobody else is left: give all another chance."""
        self._suspects.clear()

    def progress(self, now: float) -> list[Progress]:
        """How far the others are that compute."""
        return [
            Progress(peer, r.epoch, r.head, r.n_samples, r.samples_per_s, now - self._heard[peer].at)
            for peer, r in self.look(now).items()
            if r.role == "train"
        ]

    def at(self, head: bytes, now: float) -> list[PeerId]:
        """Who takes part in the round after ``head``: those who compute on it, and those who only reduce."""
        found = []
        for peer, record in self.look(now).items():
            computes = record.role == "train" and record.head == head and record.samples_per_s > 0
            if computes or (record.role == "reduce" and record.head == head):
                found.append(peer)
        return found

    def leaders(self, head: bytes, now: float) -> list[PeerId]:
        """Who may lead that round: those who compute on it and can be dialled."""
        return [peer for peer, r in self.look(now).items() if r.role == "train" and r.head == head and r.can_be_dialled]
