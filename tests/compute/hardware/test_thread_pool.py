"""Threads that make one call together: each its part, all at once, while that is faster than one alone."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from swarmd.compute.hardware.thread_pool import LOOK_INTERVAL, TeamTiming, ThreadTeam


@pytest.mark.parametrize("n", [1, 2, 4])
def test_each_makes_its_part_and_all_are_there_at_once(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TeamTiming, "is_together", lambda worth: True)
    team, there, names = ThreadTeam(n), threading.Barrier(n), set[str]()
    for _ in range(50):
        parts: list[int] = []

        def call(part: int, of: int, parts: list[int] = parts) -> None:
            assert of == n
            parts.append(part)
            names.add(threading.current_thread().name)
            there.wait(20)

        team.run(1, call)
        assert sorted(parts) == list(range(n))
    assert len(names) == n, "the same threads each time"


def ways(worth: TeamTiming, n: int, together_s: float, alone_s: float) -> list[bool]:
    """How so many calls are made, which take so long."""
    made = []
    for _ in range(n):
        made.append(is_together := worth.is_together())
        worth.took(is_together, together_s if is_together else alone_s)
    return made


def test_a_call_that_comes_while_the_others_are_at_one_is_made_alone() -> None:
    """Two calls in turn among three threads would wait for each other."""
    team, made = ThreadTeam(2), list[tuple[int, int]]()

    def call(part: int, parts: int) -> None:
        if part == 0:
            team.run(1, lambda part, parts: made.append((part, parts)))

    team.run(1, call)
    assert made == [(0, 1)]


def test_whoever_is_interrupted_goes_on_alone() -> None:
    """Where the others are then, nobody knows."""
    team, made = ThreadTeam(2), list[int]()

    def interrupted(part: int, parts: int) -> None:
        if part == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        team.run(1, interrupted)
    team.run(1, lambda part, parts: made.append(parts))
    assert made == [1]


FORKED = """
import os, threading
from swarmd.compute.hardware.thread_pool import common_team

both = threading.Barrier(2)
common_team(2).run(1, lambda part, parts: parts == 1 or both.wait(20))
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
both = threading.Barrier(2)
try:
    common_team(2).run(1, lambda part, parts: parts == 1 or both.wait(20))
    os._exit(0)
finally:
    os._exit(1)
"""


def test_a_forked_child_has_threads_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=60)


@pytest.mark.parametrize("is_worth", [True, False])
def test_it_is_made_the_faster_way_and_now_and_then_the_other(is_worth: bool) -> None:
    worth = TeamTiming()
    assert ways(worth, 6, 2.0 - is_worth, 1.0 + is_worth) == [True] * 3 + [False] * 3, "both are tried"
    made = ways(worth, 10 * LOOK_INTERVAL, 2.0 - is_worth, 1.0 + is_worth)
    assert 0 < made.count(not is_worth) <= 45


def test_slow_beginnings_are_soon_forgotten() -> None:
    worth = TeamTiming()
    ways(worth, 6, 9.0, 2.0)
    assert all(ways(worth, 60, 1.0, 2.0)[30:38])


def test_somebody_else_uses_the_processors_for_a_while() -> None:
    worth = TeamTiming()
    for together_s in (1.0, 5.0, 1.0):
        last = ways(worth, 20 * LOOK_INTERVAL, together_s, 2.0)[-LOOK_INTERVAL:]
        assert last.count(together_s < 2.0) >= LOOK_INTERVAL - 3
