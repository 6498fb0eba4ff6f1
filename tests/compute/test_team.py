"""Threads that make one call together: each its part, all at once, one call after the other."""

from __future__ import annotations

import threading

import pytest

from swarmd.compute.team import Team


@pytest.mark.parametrize("n", [1, 2, 4])
def test_each_makes_its_part_and_all_are_there_at_once(n: int) -> None:
    team, there, names = Team(n), threading.Barrier(n), set[str]()
    for _ in range(50):
        parts: list[int] = []

        def call(part: int, parts: list[int] = parts) -> None:
            parts.append(part)
            names.add(threading.current_thread().name)
            there.wait(20)

        team.run(call)
        assert sorted(parts) == list(range(n))
    assert len(names) == n, "the same threads each time"
