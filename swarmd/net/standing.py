"""The one place where a process remembers what it has seen of others: faults, bans, and whom it leaves out for now.

Rpc, donors, sessions, lanes and rounds tell it and ask it; the rules are ``plan.trust.standing``'s. What is held
against a peer survives a restart; that one was left out for a moment does not.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import trio

from swarmd.errors import ConfigError
from swarmd.plan.trust.standing import (
    LONGEST_BAN_S,
    Fault,
    FaultHistory,
    is_allowed,
    is_banned,
    is_shunned,
    leave_out,
    record_fault,
)
from swarmd.protocol.untrusted import read_json
from swarmd.status import FaultRow, StandingRow
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

MAX_PEERS = 4_096  # remembered; those with least against them are forgotten first
LEFT_OUT_S = 20.0  # after a first silence
LONGEST_LEFT_OUT_S = 600.0  # a server that was repaired is tried again after that
SAVE_INTERVAL_S = 10.0  # what is lost in a crash are the last faults only


class StandingRecord(msgspec.Struct):
    """What is held against one peer, as it is written down."""

    faults: dict[Fault, tuple[int, float]]
    at: float
    why: str
    banned_until: float
    n_bans: int


class StandingFile:
    """What is held against others, between two runs of a process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, histories: Mapping[PeerId, FaultHistory]) -> bool:
        """Write what is held against these peers; False where the disk takes nothing."""
        records = {
            peer: StandingRecord(
                faults={kind: pair for kind, pair in history.faults.items() if kind is not Fault.SILENT},
                at=history.at,
                why=history.why,
                banned_until=history.banned_until,
                n_bans=history.n_bans,
            )
            for peer, history in histories.items()
        }
        new_file = self._path.with_suffix(".new")
        try:
            new_file.write_bytes(msgspec.json.encode(records))
            new_file.replace(self._path)
        except OSError as error:
            logger.warning("cannot keep what was seen of others in %s: %s", self._path, error.strerror)
            return False
        return True

    def read(self, now: float) -> dict[PeerId, FaultHistory]:
        """Read what was held against others, at unix seconds ``now``; nothing of a file that is damaged."""
        if not self._path.is_file():
            return {}
        try:
            records = read_json(self._path, dict[str, StandingRecord], "it is made anew")
        except ConfigError as error:
            logger.warning("%s", error)
            return {}
        # The clock may have been wrong when this was written, or may be now: no ban gets longer than bans are.
        for record in records.values():
            record.at = min(record.at, now)
            record.banned_until = min(record.banned_until, now + LONGEST_BAN_S)
        return {PeerId(peer): FaultHistory(**msgspec.structs.asdict(record)) for peer, record in records.items()}


class Standing:
    """See the module. ``file`` keeps it between runs; ``clock`` is unix seconds that nobody sets, if there are any."""

    def __init__(
        self,
        clock: Callable[[], float] = trio.current_time,
        file: Path | None = None,
    ) -> None:
        self._clock = clock
        self._file = StandingFile(file) if file is not None else None
        self._histories = self._file.read(clock()) if self._file is not None else {}
        self._banned: list[PeerId] = []
        self._news = trio.Event()
        self._is_saved = True

    # --- what is told ----------------------------------------------------------------------------------------

    def fault(
        self,
        peer: PeerId,
        kind: Fault,
        why: str,
        witness: str = "",
    ) -> None:
        """A peer did something wrong, seen here or (``witness``) said by another."""
        decision = record_fault(self._history_of(peer), kind, why, self._clock(), witness)
        self._is_saved = False
        if decision.action:
            logger.warning("%s is %s", peer, decision.reason)
            self._banned.append(peer)
            self._news.set()

    def leave_out(
        self,
        peer: PeerId,
        why: str,
        for_s: float = LEFT_OUT_S,
        longest_s: float = LONGEST_LEFT_OUT_S,
        is_relayed: bool = False,
    ) -> None:
        """A peer gives no sign of life, or fails: do without it, longer each time until ``did_well``."""
        history = self._history_of(peer)
        now = self._clock()
        record_fault(history, Fault.SILENT, why, now)
        until = leave_out(history, now, for_s, longest_s, is_relayed)
        logger.info("leaving out %s for %.0f s: %s", peer, until - now, why)

    def did_well(self, peer: PeerId) -> None:
        """A peer did what was asked of it."""
        history = self._histories.get(peer)
        if history is not None:
            history.strikes = 0

    async def next_banned(self) -> PeerId:
        """Wait for somebody to be banned."""
        while not self._banned:
            self._news = trio.Event()
            await self._news.wait()
        return self._banned.pop(0)

    # --- what is asked ---------------------------------------------------------------------------------------

    def allows(self, peer: PeerId, is_last_resort: bool = False) -> bool:
        """May this peer be used now?"""
        history = self._histories.get(peer)
        return history is None or is_allowed(history, self._clock(), is_last_resort)

    def is_shunned(self, peer: PeerId) -> bool:
        """Has this peer lost its standing, whether it is there or not?"""
        history = self._histories.get(peer)
        return history is not None and is_shunned(history, self._clock())

    def shunned(self) -> list[PeerId]:
        """All peers that have lost their standing."""
        return sorted(peer for peer in self._histories if self.is_shunned(peer))

    def ban_left_s(self, peer: PeerId) -> float:
        """For how long a peer is banned from now on; 0 is not at all."""
        history = self._histories.get(peer)
        return max(0.0, history.banned_until - self._clock()) if history is not None else 0.0

    def count(self, peer: PeerId, *kinds: Fault) -> int:
        """How many faults of some kinds (or any that weighs something) were seen of a peer."""
        history = self._histories.get(peer)
        if history is None:
            return 0
        counted_kinds = kinds or tuple(set(Fault) - {Fault.SILENT})
        return sum(n for kind, (n, _) in history.faults.items() if kind in counted_kinds)

    def row(self, peer: PeerId) -> StandingRow | None:
        """What people are shown of a peer; None when nothing was ever seen."""
        history = self._histories.get(peer)
        if history is None or not history.faults:
            return None
        now = self._clock()
        rows = []
        for kind, (count, _) in sorted(history.faults.items()):
            weight = round(history.weight(kind, now), 3)
            rows.append(FaultRow(kind=str(kind), count=count, weight=weight))
        return StandingRow(
            score=round(history.score(now), 3),
            banned_s=round(self.ban_left_s(peer), 1),
            why=history.why,
            faults=tuple(rows),
        )

    def rows(self) -> dict[str, StandingRow]:
        """All who are left out or banned now, with the reason."""
        rows = {}
        for peer in sorted(self._histories):
            row = None if self.allows(peer) else self.row(peer)
            if row is not None:
                rows[str(peer)] = row
        return rows

    # --- between runs ----------------------------------------------------------------------------------------

    async def keep(self) -> None:
        """Write what is held against others to the file now and then, until cancelled, and at the end."""
        try:
            while True:
                await trio.sleep(SAVE_INTERVAL_S)
                self.save()
        finally:
            self.save()

    def save(self) -> None:
        """Write what is held against others now, if it has changed."""
        if self._file is not None and not self._is_saved:
            held = {peer: history for peer, history in self._histories.items() if self.count(peer)}
            self._is_saved = self._file.write(held)

    def _history_of(self, peer: PeerId) -> FaultHistory:
        # Identities cost nothing, so memory is bounded. Of a full table the peer with least against it is forgotten,
        # and those that are banned last: nobody gets rid of a ban by bringing in many others.
        if peer not in self._histories and len(self._histories) >= MAX_PEERS:
            now = self._clock()

            def weight_of(known: PeerId) -> tuple[bool, float]:
                history = self._histories[known]
                return is_banned(history, now), history.score(now)

            del self._histories[min(self._histories, key=weight_of)]
        return self._histories.setdefault(peer, FaultHistory(at=self._clock()))
