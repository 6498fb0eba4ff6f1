"""When a worker that ended is started again."""

from __future__ import annotations

import signal

import pytest

from swarmd.plan.owner.restarts import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    MAX_LOAD_CRASHES,
    STEADY_S,
    RestartPolicy,
    WorkerEnd,
)

OUT_OF_MEMORY = WorkerEnd(-signal.SIGKILL, is_memory_short=True)
KILLED_BY_SOMEBODY = WorkerEnd(-signal.SIGKILL, is_memory_short=False)
KILLED = WorkerEnd(-signal.SIGKILL)  # where nobody counts what is killed for memory


def test_pauses_double_while_it_ends_soon_and_begin_anew_once_it_has_run() -> None:
    policy = RestartPolicy()
    pauses = []
    for _ in range(9):
        policy.note_end(WorkerEnd(1), ran_s=1.0, was_loading=False)
        pauses.append(policy.pause_s)
    assert pauses[:3] == [2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    policy.note_end(WorkerEnd(1), STEADY_S + 1, was_loading=False)
    assert policy.pause_s == FIRST_PAUSE_S


@pytest.mark.parametrize(
    ("statuses", "is_suspect"),
    [
        ([-signal.SIGSEGV, -signal.SIGILL], True),
        ([-signal.SIGSEGV, 0, -signal.SIGBUS], True),
        ([-signal.SIGSEGV], False),
        ([-signal.SIGKILL] * 5, False),  # by its owner, by the system for want of memory, by the daemon for silence
        ([-signal.SIGTERM, 1, 0], False),
    ],
)
def test_crashes_soon_after_a_start_and_nothing_else_make_compiled_code_suspect(
    statuses: list[int], is_suspect: bool
) -> None:
    policy = RestartPolicy()
    for status in statuses:
        policy.note_end(WorkerEnd(status), 1.0, was_loading=False)
    assert policy.is_compiled_code_suspect == is_suspect
    policy.note_end(WorkerEnd(-signal.SIGSEGV), STEADY_S + 1, was_loading=False)
    assert not policy.is_compiled_code_suspect, "it ran for long between"


@pytest.mark.parametrize(
    ("ends", "is_too_large"),
    [
        ([(OUT_OF_MEMORY, True), (OUT_OF_MEMORY, True)], True),
        ([(OUT_OF_MEMORY, False), (OUT_OF_MEMORY, True)], True),  # what is measured after loading takes memory, too
        ([(OUT_OF_MEMORY, True)], False),  # another program may have taken memory for a moment
        ([(OUT_OF_MEMORY, True), (WorkerEnd(0), False), (OUT_OF_MEMORY, True)], False),
        ([(KILLED_BY_SOMEBODY, True)] * 5, False),
        ([(KILLED, True), (KILLED, True)], True),  # who kills a worker that loads, again and again, is the system
        ([(KILLED, False)] * 5, False),
        ([(WorkerEnd(-signal.SIGKILL, is_memory_short=True, is_by_daemon=True), True)] * 5, False),
        ([(WorkerEnd(-signal.SIGSEGV, is_memory_short=True), True)] * 5, False),
    ],
)
def test_a_worker_that_is_killed_twice_for_want_of_memory_is_too_large(
    ends: list[tuple[WorkerEnd, bool]], is_too_large: bool
) -> None:
    policy = RestartPolicy()
    for end, was_loading in ends:
        policy.note_end(end, 1.0, was_loading)
    assert policy.is_too_large == is_too_large


def test_crashes_while_loading_are_hopeless_after_those_with_and_without_compiled_code() -> None:
    policy = RestartPolicy()
    crash = WorkerEnd(-signal.SIGABRT)
    for _ in range(MAX_LOAD_CRASHES):
        assert not policy.is_unloadable
        policy.note_end(crash, 2 * STEADY_S, was_loading=True)
    assert policy.is_unloadable
    policy.note_end(crash, 1.0, was_loading=False)
    assert not policy.is_unloadable, "it was online: the files load"


def test_loading_for_long_is_no_steady_run() -> None:
    policy = RestartPolicy()
    for _ in range(2):
        policy.note_end(OUT_OF_MEMORY, 10 * STEADY_S, was_loading=True)
    assert policy.is_too_large
    policy.note_end(OUT_OF_MEMORY, 10 * STEADY_S, was_loading=False)
    assert not policy.is_too_large, "it served for long: what took the memory was not its blocks"


@pytest.mark.parametrize(
    ("end", "last_words", "reason"),
    [
        (OUT_OF_MEMORY, "", "the worker was killed by the system for want of memory"),
        (KILLED_BY_SOMEBODY, "", "the worker was killed by somebody"),
        (KILLED, "", "the worker was killed, by somebody or by the system for want of memory"),
        (KILLED, "KeyError: 7", "the worker ended: KeyError: 7"),
        (WorkerEnd(-signal.SIGSEGV), "", "the worker crashed (SIGSEGV)"),
        (WorkerEnd(-signal.SIGKILL, is_by_daemon=True), "", "the worker ended"),
        (WorkerEnd(3), "", "the worker ended"),
    ],
)
def test_why_a_worker_ended_is_said_as_far_as_it_is_known(end: WorkerEnd, last_words: str, reason: str) -> None:
    assert end.describe(last_words) == reason
