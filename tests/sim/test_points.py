"""Real daemons say where they are in the net, and a client estimates trips to servers that it has never asked."""

from __future__ import annotations

import itertools
import statistics

import trio

from swarmd.net.sim import SimLink
from swarmd.plan.links.coordinates import read_point_untrusted
from swarmd.values import PeerId, Span
from tests.sim.swarm import SimSwarm
from tests.virtual_time import in_virtual_time

NEAR_S, FAR_S = 0.004, 0.06  # one way, within a town and between two


async def find_errors() -> tuple[list[float], bool]:
    """How far estimates are from true round trips, as shares; and does a client know where it is?"""
    with trio.fail_after(3_600):
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery, 4, seed=1)
            towns: dict[PeerId, int] = {}
            for number in range(8):
                peer = await swarm.add(Span(0, 4))
                for other, town in towns.items():
                    link = SimLink(NEAR_S if town == number % 2 else FAR_S, 12.5e6)
                    swarm.world.links[peer, other] = swarm.world.links[other, peer] = link
                towns[peer] = number % 2
            client = await swarm.client()
            await trio.sleep(900)  # a quarter of an hour: round trips are measured each 30 s to 4 minutes
            await client.refresh()
            points = {s.peer: read_point_untrusted(s.point) for s in client.view().spans}
            errors = []
            for one, other in itertools.combinations(towns, 2):
                first, second = points[one], points[other]
                assert first is not None
                assert second is not None
                true_ms = 2e3 * (NEAR_S if towns[one] == towns[other] else FAR_S)
                errors.append(abs(first.round_trip_ms(second) - true_ms) / true_ms)
            point = client.locate(client.view().spans)
            nursery.cancel_scope.cancel()
    return errors, point is not None


def test_servers_of_two_towns_find_their_places() -> None:
    errors, is_client_placed = in_virtual_time(1, find_errors)
    assert statistics.median(errors) < 0.35
    assert is_client_placed
