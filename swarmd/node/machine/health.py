"""Gathers what ``plan.owner.health`` judges: clocks, versions, who speaks as this machine, disk, device, workers."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence

from swarmd.node.machine.presence import CARDS
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.owner.health import Facts, WorkerLife, check_health
from swarmd.protocol.wire.messages import Hello
from swarmd.status import DirectoryStatus, HealthRow
from swarmd.values import PeerId

MAX_CLOCKS = 256  # of the members that were heard last
CLONED_FOR_S = 600.0  # after its last word


class Health:
    """See the module. ``up_since``, in seconds since 1970, tells this daemon from another of the same key.

    ``version`` is what this daemon runs, read once: whoever asks for it from the package reads a file each time.
    """

    def __init__(
        self,
        me: PeerId,
        version: str,
        wall_clock: Callable[[], float],
    ) -> None:
        self._me = me
        self.version = version
        self._wall_clock = wall_clock
        self.up_since = self.now()
        self._clocks: dict[PeerId, float] = {}
        self._cloned_at = float("-inf")

    def now(self) -> int:
        """What this machine's clock says, in seconds since 1970."""
        return int(self._wall_clock())

    def note_hello(self, peer: PeerId, hello: Hello) -> None:
        """Note a member's clock, from its hello."""
        if hello.now:
            self._clocks.pop(peer, None)
            self._clocks[peer] = hello.now - self._wall_clock()
            if len(self._clocks) > MAX_CLOCKS:
                del self._clocks[next(iter(self._clocks))]

    def note_clone(self, view: SwarmView) -> None:
        """Note whether there is a record of this very peer, made since it runs, that it did not make.

        Two machines with one key, as after a copied disk, disturb each other: each takes the other's records for newer.
        """
        own_record = view.peers.get(self._me)
        if own_record is not None and own_record.issued_at > self.up_since and own_record.up_since != self.up_since:
            self._cloned_at = self._wall_clock()

    def snapshot(
        self,
        view: SwarmView,
        directory: DirectoryStatus,
        free_disk_bytes: int | None,
        devices: Sequence[str],
        workers: Sequence[WorkerLife],
    ) -> tuple[HealthRow, ...]:
        """Everything that was looked at, for people."""
        self.note_clone(view)
        other_records = [record for peer, record in view.peers.items() if peer != self._me]
        facts = Facts(
            version=self.version,
            versions=[record.version for record in other_records if record.version],
            clocks_s=list(self._clocks.values()),
            is_cloned=self._wall_clock() - self._cloned_at < CLONED_FOR_S,
            free_disk_bytes=free_disk_bytes,
            is_indexed=directory.is_indexed,
            index=directory.index,
            has_card=shutil.which(CARDS[0]) is not None,
            devices=devices,
            workers=workers,
        )
        return tuple(
            HealthRow(
                kind=finding.kind,
                is_fine=finding.is_fine,
                text=finding.text,
                remedy=finding.remedy,
            )
            for finding in check_health(facts)
        )
