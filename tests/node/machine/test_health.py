"""Who speaks as this machine, and what others' clocks say."""

from __future__ import annotations

from typing import Any

from swarmd.node.machine.health import CLONED_FOR_S, MAX_CLOCKS, Health
from swarmd.plan.chains.view import SwarmView
from swarmd.protocol.membership.catalog import Catalog
from swarmd.protocol.membership.records import PeerRecord
from swarmd.protocol.wire.messages import Hello
from swarmd.status import DirectoryStatus, HealthRow
from swarmd.values import PeerId

ME = PeerId("me")
DIRECTORY = DirectoryStatus(known_peers=0, last_exchange_s=None, reason="")


class HealthScene:
    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.health = Health(ME, "1.0", lambda: self.now)

    def view(self, issued_at: int, up_since: int) -> SwarmView:
        times: dict[str, Any] = {"sequence": 1, "issued_at": issued_at, "expires_at": issued_at + 60, "certificate": ()}
        return SwarmView({ME: PeerRecord(peer=ME, up_since=up_since, **times)}, (), Catalog())

    def row(self, kind: str, view: SwarmView) -> HealthRow:
        rows = self.health.snapshot(view, DIRECTORY, None, (), (), {})
        return next(row for row in rows if row.kind == kind)


def test_a_copy_of_this_machine_is_noticed_and_forgotten_again() -> None:
    world = HealthScene()
    own_view = world.view(1_000_005, 1_000_000)
    assert world.row("identity", own_view).is_fine
    assert world.row("identity", world.view(999_990, 999_000)).is_fine, "of this machine, before it was restarted"
    world.now += 10
    assert world.row("identity", world.view(1_000_008, 999_000)).is_fine is False
    assert world.row("identity", own_view).is_fine is False, "though its own record is the newer one by now"
    world.now += CLONED_FOR_S + 1
    assert world.row("identity", own_view).is_fine


def test_clocks_of_whoever_says_hello() -> None:
    world = HealthScene()
    view = world.view(1_000_000, 1_000_000)
    assert world.row("clock", view).is_fine is None
    world.health.note_hello(PeerId("old"), Hello())
    assert world.row("clock", view).is_fine is None, "an older version tells no time"
    world.health.note_hello(PeerId("a"), Hello(now=1_000_120))
    assert world.row("clock", view).text == "120 s behind 1 of 1 other members"
    for n in range(2 * MAX_CLOCKS):
        world.health.note_hello(PeerId(str(n)), Hello(now=1_000_000))
    assert world.row("clock", view).text == f"within 30 s of {MAX_CLOCKS} of {MAX_CLOCKS} other members"
