"""Who else is in a run, from the records that this peer has seen: how fresh they are, and who does not answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from swarmd.net.standing import Standing
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.runs.progress import MemberProgress
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.membership.records import RECORD_LIFETIME_S, RunRecord
from swarmd.values import PeerId, RunId

SUSPECT_FOR_S = float(RECORD_LIFETIME_S)  # who did not answer, at most: by then the record from before has expired


@dataclass(slots=True)
class _MemberNews:
    """The latest record of a member, and when it was first seen here."""

    sequence: int
    seen_at: float

    def written_by(self, now: float) -> int:
        """The highest sequence of a record that its peer has written before ``now``: they are its clock, in ms."""
        return self.sequence + int(1_000 * (now - self.seen_at))


@dataclass(frozen=True, slots=True)
class _Suspicion:
    """Until when a peer is done without, unless it says something: a record after ``sequence``, or a message."""

    until: float
    sequence: int


@dataclass(frozen=True, slots=True)
class _Commit:
    """The newest commit that this peer knows, and since when."""

    epoch: int = 0
    head: bytes = b""
    parent: bytes = b""
    contributors: frozenset[str] = frozenset()
    known_at: float = 0.0


@dataclass(slots=True)
class Members:
    """See the module. Ages count from when a record was first seen here, whatever its clock says.

    ``run``: whose ledger they keep; ``whole``: the run that this is a stage of, or the same.
    """

    run: RunId
    whole: RunId
    me: PeerId
    view: Callable[[], SwarmView]
    learn: Callable[[PeerId, tuple[str, ...]], None]
    standing: Standing
    _last_news: dict[PeerId, _MemberNews] = field(default_factory=dict)
    _suspects: dict[PeerId, _Suspicion] = field(default_factory=dict)
    _distrusted: dict[PeerId, bytes] = field(default_factory=dict)
    _last: _Commit = field(default_factory=_Commit)

    def look(self, now: float, with_suspects: bool = False) -> dict[PeerId, RunRecord]:
        """Return the other members' records, without those that do not answer or have lost their standing.

        ``with_suspects``: those, too, that did not answer: others may hear them.
        """
        records = {}
        for record in self.view().in_ledger(self.run):
            peer = PeerId(record.peer)
            if peer == self.me:
                continue
            last_news = self._last_news.get(peer)
            if last_news is None or last_news.sequence != record.sequence:
                self._last_news[peer] = _MemberNews(record.sequence, now)
                peer_record = self.view().peers.get(peer)
                if peer_record is not None:
                    self.learn(peer, peer_record.addresses)
            is_silent = not with_suspects and self._is_suspect(record, now)
            is_distrusted = self._distrusted.get(peer) == record.head
            if is_silent or is_distrusted or self.standing.is_shunned(peer):
                continue
            records[peer] = record
        return records

    def suspect(self, peer: PeerId, now: float) -> None:
        """Do without a peer that does not answer, until it says something.

        What it wrote before and what others pass on late says nothing: a record counts that it wrote afterwards.
        """
        last_news = self._last_news.get(peer)
        sequence = last_news.written_by(now) if last_news is not None else 0
        self._suspects[peer] = _Suspicion(now + SUSPECT_FOR_S, sequence)

    def _is_suspect(self, record: RunRecord, now: float) -> bool:
        suspicion = self._suspects.get(PeerId(record.peer))
        return suspicion is not None and now < suspicion.until and record.sequence <= suspicion.sequence

    def vouch(self, peer: PeerId) -> None:
        """Note that a peer has just said something: it lives."""
        self._suspects.pop(peer, None)

    def record_faults(self, witnesses_by_peer: Mapping[PeerId, set[PeerId]]) -> None:
        """Note that others found fault with these peers' numbers, in a round that was led here."""
        for peer, witnesses in witnesses_by_peer.items():
            if witnesses & {self.me, peer}:  # seen here, or said by the peer itself: nobody else need be believed
                self.standing.fault(peer, Fault.FAULTY_NUMBERS, "in a round of a training run")
                continue
            for witness in sorted(witnesses):  # others may lie: each counts once
                self.standing.fault(peer, Fault.FAULTY_NUMBERS, f"in a round, says {witness[-8:]}", witness)

    def shunned(self) -> list[PeerId]:
        """List members that have lost their standing here."""
        return self.standing.shunned()

    def distrust(self, peer: PeerId) -> None:
        """Do without a peer that has nothing to show for the commit that it names, until it names another."""
        for record in self.view().in_ledger(self.run):
            if record.peer == peer:
                self._distrusted[peer] = record.head

    def look_again(self) -> None:
        """Suspect nobody: others say that some of them live."""
        self._suspects.clear()

    def forgive(self) -> None:
        """Give all another chance: nobody else is left."""
        self.look_again()
        self._distrusted.clear()

    def note_commit(
        self,
        epoch: int,
        head: bytes,
        contributors: frozenset[str],
        now: float,
    ) -> None:
        """Note a commit: its contributors go on from there, though their records may not say so yet."""
        self._last = _Commit(epoch, head, self._last.head, contributors, now)

    def progress(self, now: float, with_suspects: bool = False) -> list[MemberProgress]:
        """Return how far the others are that compute."""
        members = []
        for peer, record in self.look(now, with_suspects).items():
            if record.role != "train":
                continue
            if self._is_moving_on(peer, record):
                progress = MemberProgress(
                    peer,
                    epoch=self._last.epoch,
                    head=self._last.head,
                    n_samples=0,
                    samples_per_s=record.samples_per_s,
                    age_s=now - self._last.known_at,
                )
            else:
                progress = MemberProgress(
                    peer,
                    epoch=record.epoch,
                    head=record.head,
                    n_samples=record.n_samples,
                    samples_per_s=record.samples_per_s,
                    age_s=now - self._last_news[peer].seen_at,
                    audit_left=record.audit_left,
                )
            members.append(progress)
        return members

    def newest_epoch(self, now: float) -> int:
        """Return the newest update that another member says it knows, whether it computes or only signs.

        One that names the commit which is the newest here has no later one.
        """
        return max((r.epoch for r in self.look(now).values() if r.head != self._last.head), default=0)

    def states(self) -> dict[PeerId, int]:
        """Return of which update the others say that they have the state, whether they answer or not."""
        records = [r for r in self.view().in_ledger(self.run) if r.peer != self.me]
        return {PeerId(r.peer): r.state_epoch for r in records if r.state_epoch is not None}

    def are_stages_past(self, update: int, anchors: Sequence[PeerId]) -> bool:
        """Has another stage of the run ended a later update, by the word of most anchors, who keep all ledgers?"""
        n_past: Counter[str] = Counter()
        for record in self.view().in_run(self.whole):
            if record.run != self.run and record.peer in anchors and record.epoch > update:
                n_past[record.run] += 1
        return any(2 * n > len(anchors) for n in n_past.values())

    def participants(self, head: bytes, now: float) -> list[PeerId]:
        """List who takes part in the round after ``head``: those who compute on it, and those who only reduce.

        In a stage all that hold it do, samples or not: else an average would be lost with the one who had some.
        """
        records = self.look(now)
        others = [p for p, r in records.items() if r.role == "reduce" and r.head == head]
        computing = self.computing(head, now)
        if self.run != self.whole:
            heads = {head, self._last.parent} if self._last.head == head else {head}
            holding = [p for p, r in records.items() if r.role == "train" and r.state_epoch is not None]
            others += [p for p in holding if records[p].head in heads and p not in computing]
        return computing + others

    def computing(self, head: bytes, now: float) -> list[PeerId]:
        """List who computes on a commit."""
        return [p.peer for p in self.progress(now) if p.head == head and p.samples_per_s > 0]

    def _is_moving_on(self, peer: PeerId, record: RunRecord) -> bool:
        return peer in self._last.contributors and record.epoch == self._last.epoch - 1
