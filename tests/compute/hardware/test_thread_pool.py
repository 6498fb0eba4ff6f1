"""Threads that make one call together: each its part, all at once, while that is faster than one alone."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest

from swarmd.compute.hardware.thread_pool import LOOK_INTERVAL, PoolTiming, ThreadPool


@pytest.mark.parametrize("n", [1, 2, 4])
def test_each_makes_its_part_and_all_are_there_at_once(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PoolTiming, "choose_together", lambda timing: True)
    pool = ThreadPool(n)
    barrier = threading.Barrier(n)
    names = set[str]()
    for _ in range(50):
        parts: list[int] = []

        def call(part: int, of: int, parts: list[int] = parts) -> None:
            assert of == n
            parts.append(part)
            names.add(threading.current_thread().name)
            barrier.wait(20)

        pool.run(1, call)
        assert sorted(parts) == list(range(n))
    assert len(names) == n, "the same threads each time"


def ways(timing: PoolTiming, n: int, together_s: float, alone_s: float) -> list[bool]:
    """How so many calls are made, which take so long."""
    made = []
    for _ in range(n):
        made.append(is_together := timing.choose_together())
        timing.record(is_together, together_s if is_together else alone_s)
    return made


def test_a_call_that_comes_while_the_others_are_at_one_is_made_alone() -> None:
    """Two calls in turn among three threads would wait for each other."""
    pool = ThreadPool(2)
    made = list[tuple[int, int]]()

    def call(part: int, parts: int) -> None:
        if part == 0:
            pool.run(1, lambda part, parts: made.append((part, parts)))

    pool.run(1, call)
    assert made == [(0, 1)]


def test_whoever_is_interrupted_goes_on_alone() -> None:
    """Where the others are then, nobody knows."""
    pool = ThreadPool(2)
    made = list[int]()

    def interrupted(part: int, parts: int) -> None:
        if part == 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.run(1, interrupted)
    pool.run(1, lambda part, parts: made.append(parts))
    assert made == [1]


FORKED = """
import os, threading
from swarmd.compute.hardware.thread_pool import shared_thread_pool

both = threading.Barrier(2)
shared_thread_pool(2).run(1, lambda part, parts: parts == 1 or both.wait(20))
if child := os.fork():
    raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
both = threading.Barrier(2)
try:
    shared_thread_pool(2).run(1, lambda part, parts: parts == 1 or both.wait(20))
    os._exit(0)
finally:
    os._exit(1)
"""


def test_a_forked_child_has_threads_of_its_own() -> None:
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=60)


@pytest.mark.parametrize("is_worth", [True, False])
def test_it_is_made_the_faster_way_and_now_and_then_the_other(is_worth: bool) -> None:
    timing = PoolTiming()
    assert ways(timing, 6, 2.0 - is_worth, 1.0 + is_worth) == [True] * 3 + [False] * 3, "both are tried"
    made = ways(timing, 10 * LOOK_INTERVAL, 2.0 - is_worth, 1.0 + is_worth)
    assert 0 < made.count(not is_worth) <= 45


def test_slow_beginnings_are_soon_forgotten() -> None:
    timing = PoolTiming()
    ways(timing, 6, 9.0, 2.0)
    assert all(ways(timing, 60, 1.0, 2.0)[30:38])


def test_somebody_else_uses_the_processors_for_a_while() -> None:
    timing = PoolTiming()
    for together_s in (1.0, 5.0, 1.0):
        last = ways(timing, 20 * LOOK_INTERVAL, together_s, 2.0)[-LOOK_INTERVAL:]
        assert last.count(together_s < 2.0) >= LOOK_INTERVAL - 3
