"""Who speaks as this machine, and what others' clocks say."""

from __future__ import annotations

from typing import Any

import trio
from trio.testing import MockClock

from swarmd.node.machine.health import CLONED_FOR_S, Health
from swarmd.plan.chains.view import SwarmView
from swarmd.protocol.membership.catalog import Catalog
from swarmd.protocol.membership.records import PeerRecord
from swarmd.status import DirectoryStatus, HealthRow
from swarmd.values import PeerId

ME = PeerId("me")
DIRECTORY = DirectoryStatus(known_peers=0, last_exchange_s=None, reason="")


class HealthScene:
    def __init__(self) -> None:
        self.clocks_s: list[float] = []
        self.health = Health(ME, "1.0", lambda: 1_000_000 + trio.current_time(), lambda: self.clocks_s)

    def view(self, issued_at: int, up_since: int) -> SwarmView:
        times: dict[str, Any] = {"sequence": 1, "issued_at": issued_at, "expires_at": issued_at + 60, "certificate": ()}
        return SwarmView({ME: PeerRecord(peer=ME, up_since=up_since, **times)}, (), Catalog())

    def row(self, kind: str, view: SwarmView) -> HealthRow:
        rows = self.health.snapshot(view, DIRECTORY, None, (), (), {})
        return next(row for row in rows if row.kind == kind)


async def test_a_copy_of_this_machine_is_noticed_and_forgotten_again(virtual_time: MockClock) -> None:
    world = HealthScene()
    own_view = world.view(1_000_005, 1_000_000)
    assert world.row("identity", own_view).is_fine
    assert world.row("identity", world.view(999_990, 999_000)).is_fine, "of this machine, before it was restarted"
    await trio.sleep(10)
    assert world.row("identity", world.view(1_000_008, 999_000)).is_fine is False
    assert world.row("identity", own_view).is_fine is False, "though its own record is the newer one by now"
    await trio.sleep(CLONED_FOR_S + 1)
    assert world.row("identity", own_view).is_fine


async def test_clocks_are_those_that_were_heard_of_late(virtual_time: MockClock) -> None:
    world = HealthScene()
    view = world.view(1_000_000, 1_000_000)
    assert world.row("clock", view).is_fine is None
    world.clocks_s = [7_200.0]
    clock = world.row("clock", view)
    assert clock.text == "it says 1970-01-12 13:46 UTC, 2 hours behind 1 of 1 other members"
    assert "timedatectl set-ntp true" in clock.remedy
