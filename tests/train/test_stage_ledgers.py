"""What runs in stages sign: which stages a run has, whose draws a commit counts, and what of it cannot be."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from swarmd.errors import IntegrityError
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.runs import backing
from swarmd.protocol.runs import commit as commits
from swarmd.protocol.runs.backing import ContributionShare
from swarmd.protocol.runs.commit import Commit, CountedContribution, DrawRange
from swarmd.protocol.runs.recipe import (
    Recipe,
    Run,
    RunOrder,
    read_order_untrusted,
    read_run_untrusted,
    sign_order,
    start_run,
)
from swarmd.train.vectors.work import UncountedWork, join_ranges

OWNER = Identity(bytes(32))
ME = OWNER.peer_id


def run_in(stages: Any = (0, 2), **recipe: Any) -> Run:
    made = Recipe("r", "0" * 64, "1" * 64, anchors=(ME,), stages=stages, **recipe)
    return start_run(made, OWNER, 1)


def test_each_stage_has_a_ledger_of_its_own() -> None:
    run = run_in()
    stages = run.stages
    assert [stage.stage for stage in stages] == [0, 1, 2]
    assert len({run.id, *(stage.id for stage in stages)}) == 4
    assert {stage.whole for stage in stages} == {run.id}
    assert read_run_untrusted(run.raw).in_stage(2) == stages[2]
    for stage in (-1, 3):
        with pytest.raises(IntegrityError, match="has no stage"):
            run.in_stage(stage)
    whole = run_in(())
    assert whole.stages == [whole]
    with pytest.raises(IntegrityError, match="has no stage"):
        whole.in_stage(0)


@pytest.mark.parametrize("stages", [2, "auto", (1, 2), (0, 2, 2), (0, 3, 2)])
def test_a_signed_run_names_first_blocks_in_order(stages: Any) -> None:
    with pytest.raises(IntegrityError, match="stages"):
        run_in(stages)


@pytest.mark.parametrize("recipe", [{"synchronisation": "diloco"}, {"train": "lora"}, {"precision": "float64"}])
def test_a_signed_run_whose_stages_cannot_be_is_none(recipe: dict[str, Any]) -> None:
    with pytest.raises(IntegrityError):
        run_in(**recipe)


def test_orders_are_of_the_whole_run() -> None:
    run = run_in()
    raw = sign_order(RunOrder(run.id, 1, state="stopped"), OWNER)
    for stage in run.stages:
        assert read_order_untrusted(raw, stage).state == "stopped"


def commit_of(draws: Any, late: tuple[int, ...] = (), n: int = 6) -> Commit:
    counted = CountedContribution(ME, 0, n, 1.0, 1.0)
    return Commit(bytes(32), 1, bytes(32), 0, (counted,), bytes(32), bytes(32), 0.1, late=late, draws=draws, norm=2.0)


@pytest.mark.parametrize(
    "commit",
    [
        commit_of(((DrawRange("d", 0, 4), DrawRange("d", 8, 2)),)),
        commit_of(((DrawRange("d", 0, 4), DrawRange("d", 0, 2)),)),  # a multiset: some counted twice
        commit_of(((DrawRange("d", 0, 2, is_late=True), DrawRange("e", 0, 4)),), late=(2,)),
    ],
)
def test_commits_say_whose_draws_they_count(commit: Commit) -> None:
    assert commits.read_body_untrusted(commits.encode(commit)) == commit


@pytest.mark.parametrize(
    ("commit", "what"),
    [
        (commit_of(((DrawRange("d", 0, 5),),)), "other draws than it counts"),
        (commit_of(((DrawRange("d", 0, 6),), (DrawRange("d", 6, 1),))), "of each contributor"),
        (commit_of(((DrawRange("d", 0, 6, is_late=True),),)), "other late draws"),
        (commit_of(((DrawRange("d", 0, 6),),), late=(2,)), "other late draws"),
    ],
)
def test_commits_of_draws_that_do_not_add_up_are_refused(commit: Commit, what: str) -> None:
    with pytest.raises(IntegrityError, match=what):
        commits.read_body_untrusted(commits.encode(commit))


def test_a_contributor_signs_its_draws() -> None:
    share = ContributionShare(0, 6, 1.0, 1.0, (0.0,) * 4, draws=(DrawRange("d", 0, 6),))
    signed = backing.sign_share(share, bytes(32), bytes(32), bytes(32), OWNER)
    backing.check_share_untrusted(signed, ME, bytes(32), bytes(32), bytes(32))
    for draws in ((), (DrawRange("d", 1, 6),), (DrawRange("d", 0, 6, is_late=True),)):
        other = msgspec.structs.replace(signed, draws=draws)
        with pytest.raises(IntegrityError):
            backing.check_share_untrusted(other, ME, bytes(32), bytes(32), bytes(32))
    counted = (signed.counted(ME),)
    right = msgspec.structs.replace(commit_of((signed.draws,)), contributors=counted)
    backing.check_shares_untrusted(right, (signed,))
    forged = msgspec.structs.replace(right, draws=((DrawRange("e", 0, 6),),))
    with pytest.raises(IntegrityError, match="drawn"):
        backing.check_shares_untrusted(forged, (signed,))


def test_ranges_are_joined_where_they_follow_one_another() -> None:
    ranges = [DrawRange("d", 4, 2), DrawRange("d", 0, 4), DrawRange("d", 0, 2), DrawRange("e", 6, 2)]
    assert join_ranges(ranges) == (
        DrawRange("d", 0, 4),
        DrawRange("d", 0, 2),
        DrawRange("d", 4, 2),
        DrawRange("e", 6, 2),
    )
    late = DrawRange("d", 4, 2, is_late=True)
    assert join_ranges([DrawRange("d", 0, 4), late]) == (late, DrawRange("d", 0, 4))


def test_what_a_round_did_not_count_is_added_to_again() -> None:
    work = UncountedWork(ME, overlaps=False)
    total = np.ones(4, np.float32)
    work.add(0, 2, 1.0, total, drawn=(DrawRange("d", 0, 2),))
    work.lend()
    assert (work.offered.n, work.since.n) == (2, 0)
    assert work.offered.vector is total, "it is lent, and not copied"
    work.take_back()
    assert (work.offered.n, work.since.n) == (0, 2)
    work.add(2, 2, 1.0, total, drawn=(DrawRange("d", 2, 2),))
    assert work.since.draws == (DrawRange("d", 0, 4),)


def test_a_second_sum_is_added_to_one_that_a_round_did_not_count() -> None:
    work = UncountedWork(ME, overlaps=True)
    first, second = np.ones(4, np.float32), np.full(4, 2.0, np.float32)
    work.add(0, 2, 1.0, first, drawn=(DrawRange("d", 0, 2),))
    work.lend()
    work.add(2, 4, 3.0, second, drawn=(DrawRange("d", 2, 4),), late=4)
    work.lend()
    offered = work.offered
    assert (offered.n, offered.loss, offered.late, offered.draws) == (6, 4.0, 4, (DrawRange("d", 0, 6),))
    assert offered.vector is first
    assert first.tolist() == [3.0] * 4
