"""A clock that is wrong, or is set by hours or years while its daemon runs: it is told, and nobody is banned for it."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from swarmd.daemon import Daemon
from swarmd.errors import NoRoute, Refused, first_error
from swarmd.status import HealthRow
from swarmd.values import Span
from tests.sim.swarm import SimSwarm

DAY_S = 86_400.0


class ClockOfOne:
    """The clock of one machine, which may be set."""

    def __init__(self, swarm: SimSwarm, set_by_s: float = 0.0) -> None:
        self.set_by_s = set_by_s
        self._swarm = swarm

    def __call__(self) -> float:
        return self._swarm.wall_clock() + self.set_by_s


def clock_of(daemon: Daemon) -> HealthRow:
    return next(row for row in daemon.owner.status().health if row.kind == "clock")


@pytest.mark.parametrize(
    ("set_by_s", "text"),
    [(5 * 3_600.0, "5 hours ahead of 2 of 2"), (-400 * DAY_S, "400 days behind 2 of 2")],
)
async def test_a_clock_that_is_set_while_its_daemon_runs(virtual_time: MockClock, set_by_s: float, text: str) -> None:
    async with trio.open_nursery() as nursery:
        swarm = SimSwarm(nursery, 4, seed=7)
        clock = ClockOfOne(swarm)
        others = [await swarm.add(Span(0, 4)) for _ in range(2)]
        one = await swarm.add(Span(0, 4), wall_clock=clock)
        await trio.sleep(20)
        daemons = [swarm.daemons[peer][0] for peer in (one, *others)]
        assert swarm.views_agree()
        assert all(clock_of(daemon).is_fine for daemon in daemons)
        clock.set_by_s = set_by_s
        await trio.sleep(70)
        row = clock_of(daemons[0])
        assert row.is_fine is False
        assert text in row.text
        assert all(clock_of(daemon).is_fine for daemon in daemons[1:]), "one of two others is right"
        assert not any(daemon.rpc.standing.rows() for daemon in daemons), "nobody has done anything wrong"
        clock.set_by_s = 0.0
        await trio.sleep(70)
        assert clock_of(daemons[0]).is_fine
        assert swarm.views_agree()
        nursery.cancel_scope.cancel()


async def test_members_whose_clocks_are_half_a_minute_wrong_know_each_other(virtual_time: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        swarm = SimSwarm(nursery, 4, seed=4)
        for ahead_s in (-30.0, 0.0, 30.0):
            await swarm.add(Span(0, 4), wall_clock=ClockOfOne(swarm, ahead_s))
        await trio.sleep(20)
        for _ in range(60):
            await trio.sleep(5)
            assert swarm.views_agree(), f"after {trio.current_time():.0f} s"
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("set_by_s", [-2 * 3_600.0, 2 * 3_600.0, -400 * DAY_S])
async def test_what_a_client_cannot_have_with_a_wrong_clock_says_so(virtual_time: MockClock, set_by_s: float) -> None:
    async with trio.open_nursery() as nursery:
        swarm = SimSwarm(nursery, 4, seed=3)
        await swarm.add(Span(0, 4))
        await trio.sleep(30)
        client = await swarm.client(ClockOfOne(swarm, set_by_s))
        with pytest.raises(NoRoute, match=r"no live server holds blocks .*this machine's clock may be wrong: it says"):
            await client.wait_for(swarm.model, 4, 1.0)
        with pytest.raises(NoRoute, match="this machine's clock may be wrong"):
            await client.open_session(swarm.terms(8))
        nursery.cancel_scope.cancel()


async def test_a_member_whose_time_is_over_by_a_wrong_clock_says_so(virtual_time: MockClock) -> None:
    """Who refuses tells its time: it is the only one who is known here."""
    async with trio.open_nursery() as nursery:
        swarm = SimSwarm(nursery, 4, seed=3)
        await swarm.add(Span(0, 4))
        await trio.sleep(30)
        with pytest.RaisesGroup(pytest.RaisesExc(Refused), flatten_subgroups=True) as caught:
            await swarm.client(ClockOfOne(swarm, 4_000 * DAY_S))
        refusal = first_error(caught.value)
        assert "expired" in str(refusal)
        assert "this machine's clock may be wrong" in str(refusal)
        nursery.cancel_scope.cancel()
