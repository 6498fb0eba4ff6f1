"""When a worker that ended is started again."""

from __future__ import annotations

import signal

import pytest

from swarmd.plan.owner.restarts import FIRST_PAUSE_S, LONGEST_PAUSE_S, STEADY_S, RestartPolicy


def test_pauses_double_while_it_ends_soon_and_begin_anew_once_it_has_run() -> None:
    policy = RestartPolicy()
    pauses = []
    for _ in range(9):
        policy.note_end(ran_s=1.0, status=1)
        pauses.append(policy.pause_s)
    assert pauses[:3] == [2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    policy.note_end(STEADY_S + 1, status=1)
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
        policy.note_end(1.0, status)
    assert policy.is_compiled_code_suspect == is_suspect
    policy.note_end(STEADY_S + 1, -signal.SIGSEGV)
    assert not policy.is_compiled_code_suspect, "it ran for long between"
