"""Followers on other machines, for all tests of teams."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from swarmd.protocol.wire.worker import LoadSpan
from tests.compute.teams.far_team import FarFollower


@pytest.fixture
def far() -> Iterator[Callable[[LoadSpan, int], list[FarFollower]]]:
    """Starts followers as a daemon of another machine does, for what they are asked, and so many."""
    started: list[FarFollower] = []

    def start(load: LoadSpan, n: int) -> list[FarFollower]:
        started.extend(FarFollower(load) for _ in range(n))
        return started

    yield start
    for follower in started:
        follower.close()
