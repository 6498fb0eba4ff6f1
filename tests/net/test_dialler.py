"""Attempts to dial that race, and tasks that wait for the same one: in virtual time, without a socket."""

from __future__ import annotations

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from swarmd.errors import Unreachable
from swarmd.net.libp2p.dialler import Failure, race_attempts
from swarmd.net.libp2p.host import SharedAttempts
from swarmd.plan.links.dialing import Attempt
from swarmd.values import PeerId

PLANNED = (Attempt("near", 0.0), Attempt("far", 5.0), Attempt("farther", 10.0))
PEER = PeerId("somebody")


async def race(outcomes: dict[str, tuple[float, Any]]) -> tuple[Any, float, list[str]]:
    """Race attempts that last so long each and end so; returns what came of it, when, and which were begun."""
    begun: list[str] = []

    async def attempt(address: str) -> Any:
        begun.append(address)
        lasts_s, outcome = outcomes[address]
        await trio.sleep(lasts_s)
        return outcome

    outcome = await race_attempts(PLANNED, attempt)
    return outcome, trio.current_time(), begun


def refused(address: str) -> Failure:
    return Failure(f"{address} (connection refused)", is_garbled=False)


async def test_the_first_that_succeeds_ends_the_others(autojump_clock: MockClock) -> None:
    began_at = trio.current_time()
    won, ended_at, begun = await race({"near": (60.0, "near"), "far": (1.0, "far"), "farther": (1.0, "farther")})
    assert (won, ended_at - began_at, begun) == ("far", pytest.approx(6.0), ["near", "far"])


async def test_an_address_that_is_refused_costs_no_wait(autojump_clock: MockClock) -> None:
    began_at = trio.current_time()
    outcomes: dict[str, tuple[float, Any]] = {address: (0.0, refused(address)) for address in ("near", "far")}
    won, ended_at, _ = await race({**outcomes, "farther": (0.5, "farther")})
    assert (won, ended_at - began_at) == ("farther", pytest.approx(0.5))


async def test_what_became_of_each_is_told_in_their_order(autojump_clock: MockClock) -> None:
    failures, _, _ = await race(
        {"near": (9.0, refused("near")), "far": (0.0, refused("far")), "farther": (0.0, refused("farther"))}
    )
    assert failures == [refused(attempt.address) for attempt in PLANNED]


async def test_tasks_that_want_the_same_peer_share_one_attempt_and_its_failure(autojump_clock: MockClock) -> None:
    attempts = SharedAttempts()
    n_made = 0
    failures: list[str] = []

    async def fail() -> None:
        nonlocal n_made
        n_made += 1
        await trio.sleep(1)
        raise Unreachable("nobody answers")

    async def want() -> None:
        with pytest.raises(Unreachable, match="nobody answers"):
            await attempts.run(PEER, fail)
        failures.append("nobody answers")

    async with trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(want)
    assert (n_made, len(failures), attempts.has(PEER)) == (1, 3, False)
    await want()
    assert n_made == 2, "a failure is not remembered"
