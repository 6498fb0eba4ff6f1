"""Gathers what ``plan.owner.health`` judges: clocks, versions, who speaks as this machine, disk, device, workers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import trio

from swarmd.plan.chains.view import SwarmView
from swarmd.plan.owner.health import Facts, WorkerLife, check_health
from swarmd.resources import is_with_cards
from swarmd.status import DirectoryStatus, HealthRow
from swarmd.values import PeerId

CLONED_FOR_S = 600.0  # after its last word


class Health:
    """See the module. ``clocks_s``: how far other members' clocks are ahead, as far as they were heard of late.

    ``up_since``, in seconds since 1970, tells this daemon from another of the same key. ``version`` is what this daemon
    runs, read once: whoever asks for it from the package reads a file each time.
    """

    def __init__(
        self,
        me: PeerId,
        version: str,
        wall_clock: Callable[[], float],
        clocks_s: Callable[[], Sequence[float]],
    ) -> None:
        self._me = me
        self.version = version
        self._wall_clock = wall_clock
        self.up_since = self.now()
        self._clocks_s = clocks_s
        self._cloned_at = float("-inf")

    def now(self) -> int:
        """What this machine's clock says, in seconds since 1970."""
        return int(self._wall_clock())

    def note_clone(self, view: SwarmView) -> None:
        """Note whether there is a record of this very peer, made since it runs, that it did not make.

        Two machines with one key, as after a copied disk, disturb each other: each takes the other's records for newer.
        """
        own_record = view.peers.get(self._me)
        if own_record is not None and own_record.issued_at > self.up_since and own_record.up_since != self.up_since:
            self._cloned_at = trio.current_time()

    def snapshot(
        self,
        view: SwarmView,
        directory: DirectoryStatus,
        free_disk_bytes: int | None,
        devices: Sequence[str],
        workers: Sequence[WorkerLife],
        missing: Mapping[str, str],
        n_losing_large: int = 0,
    ) -> tuple[HealthRow, ...]:
        """Everything that was looked at, for people."""
        self.note_clone(view)
        other_records = [record for peer, record in view.peers.items() if peer != self._me]
        facts = Facts(
            version=self.version,
            versions=[record.version for record in other_records if record.version],
            now=self._wall_clock(),
            clocks_s=self._clocks_s(),
            is_cloned=trio.current_time() - self._cloned_at < CLONED_FOR_S,
            free_disk_bytes=free_disk_bytes,
            is_indexed=directory.is_indexed,
            index=directory.index,
            has_card=is_with_cards(),
            devices=devices,
            workers=workers,
            n_others=len(other_records),
            alone_s=directory.alone_s,
            exchanged=directory.reason,
            missing=missing,
            n_losing_large=n_losing_large,
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
