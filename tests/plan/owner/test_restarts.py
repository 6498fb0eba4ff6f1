"""When a worker that ended is started again."""

from __future__ import annotations

from swarmd.plan.owner.restarts import FIRST_PAUSE_S, LONGEST_PAUSE_S, STEADY_S, RestartPolicy


def test_pauses_double_while_it_ends_soon_and_begin_anew_once_it_has_run() -> None:
    policy = RestartPolicy()
    pauses = []
    for _ in range(9):
        policy.note_end(ran_s=1.0)
        pauses.append(policy.pause_s)
    assert pauses[:3] == [2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
    assert policy.n_soon == 9
    policy.note_end(STEADY_S + 1)
    assert (policy.pause_s, policy.n_soon) == (FIRST_PAUSE_S, 0)
