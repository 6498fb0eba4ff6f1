"""The decisions of training together: who counts, who reduces, who waits, who is too late."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmd.errors import IntegrityError
from swarmd.plan.runs import partition
from swarmd.plan.runs.arrivals import Arrivals
from swarmd.plan.runs.ballot import Acceptor, find_bound_commit
from swarmd.plan.runs.contributions import WeighedContributions, find_outliers
from swarmd.plan.runs.ledger import Ledger
from swarmd.plan.runs.partition import PartitionMember, Sizes
from swarmd.plan.runs.progress import (
    LONGEST_HOLD_S,
    Action,
    MemberProgress,
    decide_action,
    forecast_round,
    hold_s,
    leader_order,
)
from swarmd.plan.runs.recovery import DonorOffer, choose_path, restorable_epoch
from swarmd.plan.runs.samples import permute_index, row_of, shard_of
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.runs import commit as commits
from swarmd.protocol.runs.commit import Commit, CountedContribution
from swarmd.protocol.runs.recipe import Batch, Recipe, Schedule, Stop, start_run
from swarmd.values import PeerId

OWNER = Identity(b"o" * 32)
RUN = start_run(Recipe("r", "0" * 64, "1" * 64, batch=Batch(target=10), anchors=(OWNER.peer_id,)), OWNER, 1)
ANCHORS = {0: (OWNER.peer_id,)}
A, B, C, D = (PeerId(name) for name in "abcd")


def commit_after(ledger: Ledger, *counted: CountedContribution, **changes: object) -> Commit:
    fields: dict[str, object] = {
        "run": RUN.genesis,
        "epoch": ledger.epoch + 1,
        "parent": ledger.head,
        "generation": 0,
        "contributors": counted,
        "average": b"a" * 32,
        "state": b"s" * 32,
        "learning_rate": RUN.recipe.learning_rate(ledger.steps + 1),
    }
    return Commit(**{**fields, **changes})  # type: ignore[arg-type]


def sealed(commit: Commit) -> commits.SealedCommit:
    body = commits.encode(commit)
    return commits.read_untrusted(commits.seal(body, (1, "p"), {0: commits.sign(body, (1, "p"), OWNER)}), ANCHORS)


# --- ballots -----------------------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.integers(0, 2**32))
def test_at_most_one_commit_is_chosen(seed: int) -> None:
    """Proposers and acceptors, messages lost at random: no two bodies ever get majorities."""
    rng = random.Random(seed)
    acceptors = [Acceptor(b"p") for _ in range(3)]
    votes: dict[tuple[object, bytes], set[int]] = {}
    for turn in range(12):
        proposer = rng.randrange(3)
        ballot = (rng.randrange(1, 6), f"{proposer}/{turn}")
        promises = []
        for i, acceptor in enumerate(acceptors):
            promised = acceptor.prepare(ballot).action if rng.random() < 0.7 else None
            if promised is not None:
                promises.append((acceptor.accepted, acceptor.body))
                acceptors[i] = promised
        if len(promises) < 2:
            continue
        body = find_bound_commit(promises) or f"body of {proposer}/{turn}".encode()
        for i, acceptor in enumerate(acceptors):
            accepted = acceptor.accept(ballot, body).action if rng.random() < 0.6 else None
            if accepted is not None:
                acceptors[i] = accepted
                votes.setdefault((ballot, body), set()).add(i)
    chosen = {body for (_, body), who in votes.items() if len(who) >= 2}
    assert len(chosen) <= 1


def test_acceptor_takes_one_commit_in_a_ballot() -> None:
    acceptor = Acceptor(b"p").accept((1, "a"), b"one").action
    assert acceptor is not None
    assert acceptor.accept((1, "a"), b"two").action is None
    assert acceptor.prepare((0, "z")).action is None


# --- the ledger --------------------------------------------------------------------------------------------------


def test_ledger_refuses_what_cannot_follow() -> None:
    ledger = Ledger(RUN)
    assert ledger.add(sealed(commit_after(ledger, CountedContribution("a", 0, 4, 1.0, 1.0))))
    first = ledger.sealed[0]
    assert not ledger.add(first)
    for wrong, why in [
        (commit_after(ledger, CountedContribution("a", 3, 4, 1.0, 1.0)), "counted twice"),
        (commit_after(ledger, CountedContribution("a", 4, 4, 1.0, 1.0), parent=RUN.genesis), "parent"),
        (commit_after(ledger, CountedContribution("a", 4, 4, 1.0, 1.0), learning_rate=9.0), "learning rate"),
        (commit_after(ledger, CountedContribution("a", 4, 4, 1.0, 1.0), run=b"x" * 32), "another run"),
    ]:
        with pytest.raises(IntegrityError, match=why):
            ledger.add(sealed(wrong))
    back = commit_after(ledger, restores=RUN.genesis, average=b"", learning_rate=0.0)
    assert ledger.add(sealed(back))
    assert (ledger.epoch, ledger.steps, ledger.next_draw["a"]) == (2, 0, 4)


def test_commit_of_who_is_no_anchor_does_not_count() -> None:
    body = commits.encode(commit_after(Ledger(RUN), CountedContribution("a", 0, 1, 1.0, 1.0)))
    stranger = Identity(b"s" * 32)
    for signatures in ({0: commits.sign(body, (1, "p"), stranger)}, {}, {1: commits.sign(body, (1, "p"), OWNER)}):
        with pytest.raises(IntegrityError):
            commits.read_untrusted(commits.seal(body, (1, "p"), signatures), ANCHORS)
    with pytest.raises(IntegrityError):  # signed, but in another ballot
        commits.read_untrusted(commits.seal(body, (2, "p"), {0: commits.sign(body, (1, "p"), OWNER)}), ANCHORS)


@given(st.binary(max_size=300))
def test_commits_from_anywhere_raise_one_error_only(raw: bytes) -> None:
    with pytest.raises(IntegrityError):
        commits.read_untrusted(raw, ANCHORS)


# --- samples -----------------------------------------------------------------------------------------------------


@given(st.integers(1, 300), st.text(max_size=5))
def test_permutation_is_one(n: int, key: str) -> None:
    assert sorted(permute_index(key, i, n) for i in range(n)) == list(range(n))


def test_peer_sees_every_row_once_before_any_again_and_one_shard_at_a_time() -> None:
    shard_rows = (7, 5, 7)
    rows = [row_of(3, "peer", draw, shard_rows) for draw in range(19)]
    assert sorted(rows) == list(range(19))
    shards = [shard_of(row, shard_rows)[0] for row in rows]
    assert len(list(itertools.groupby(shards))) == 3
    assert rows != [row_of(3, "other", draw, shard_rows) for draw in range(19)]


# --- progress ----------------------------------------------------------------------------------------------------


def test_decisions_explain_themselves() -> None:
    me = MemberProgress(A, 3, b"h", 4, 2.0)
    same = MemberProgress(B, 3, b"h", 3, 1.0, age_s=1.0)
    assert decide_action(me, [same], 100).action is Action.CONTINUE
    assert decide_action(me, [same], 8).action is Action.JOIN_ROUND
    ahead = decide_action(me, [MemberProgress(B, 5, b"x", 0, 1.0)], 8)
    assert ahead.action is Action.CATCH_UP
    assert "newest at 5" in ahead.reason
    assert decide_action(me, [MemberProgress(B, 3, b"other", 0, 1.0)], 100).action is Action.CATCH_UP
    assert forecast_round([me, same], b"h", 14).left_s == pytest.approx(2.0)
    assert forecast_round([], b"h", 14).left_s is None


def test_leaders_follow_one_rule_and_a_leaver_moves_nobody_else() -> None:
    order = leader_order(b"h", [A, B, C, D])
    assert leader_order(b"h", [D, C, B, A]) == order
    assert leader_order(b"h", [p for p in order if p != order[1]]) == [order[0], *order[2:]]
    assert len({tuple(leader_order(bytes([i]), [A, B, C, D])) for i in range(20)}) > 3


def test_deadlines_follow_what_was_seen() -> None:
    arrivals = Arrivals(least_s=0.1, first_s=9.0)
    assert arrivals.limit_s() == 9.0
    for seconds in (1.0, 1.1, 0.9, 1.0, 1.05, 60.0):
        arrivals.add(seconds)
    assert 1.0 < arrivals.limit_s() < 2.0, "one that took for ever moves nothing"
    steady = Arrivals(least_s=0.1, first_s=9.0)
    for _ in range(8):
        steady.add(2.0)
    assert steady.limit_s() > 2.0, "what takes as long as ever is not late"


# --- partition ---------------------------------------------------------------------------------------------------


def test_clients_reduce_nothing_and_slow_links_little() -> None:
    members = [
        PartitionMember(PeerId(str(i)), up_bytes_per_s=r, down_bytes_per_s=r)
        for i, r in enumerate((1e6, 5e6, 1e7, 1e7))
    ]
    plan = partition.divide_vector(members, Sizes(40_000_000)).action
    assert plan.shares[0] <= 0.01
    assert plan.shares[1] < plan.shares[2]
    assert sum(plan.shares) == pytest.approx(1)
    assert plan.expected_s < partition.plan_equal_parts(members, Sizes(40_000_000)).expected_s / 1.4
    client = [PartitionMember(A, can_reduce=False), PartitionMember(B)]
    assert partition.divide_vector(client, Sizes(1_000)).action.shares == (0.0, 1.0)
    with pytest.raises(ValueError, match="can reduce"):
        partition.divide_vector([PartitionMember(A, can_reduce=False)], Sizes(1_000))


def test_equal_links_mean_equal_parts() -> None:
    members = [PartitionMember(PeerId(str(i)), up_bytes_per_s=1e6, down_bytes_per_s=1e6) for i in range(5)]
    assert partition.divide_vector(members, Sizes(1_000_000)).action.shares == pytest.approx((0.2,) * 5)


@given(st.lists(st.floats(1e5, 1e9), min_size=1, max_size=8), st.integers(1, 5_000))
def test_no_plan_is_worse_than_equal_parts_and_ranges_cover_all(rates: list[float], n: int) -> None:
    members = [PartitionMember(PeerId(str(i)), up_bytes_per_s=r, down_bytes_per_s=2 * r) for i, r in enumerate(rates)]
    plan = partition.divide_vector(members, Sizes(4 * n)).action
    # shares below one per cent are given to the others, which may cost a little
    assert plan.expected_s <= partition.plan_equal_parts(members, Sizes(4 * n)).expected_s * 1.1 + 1e-9
    ranges = partition.cut_ranges(plan.shares, n)
    assert len(ranges) == len(members)
    assert [x for a, z in ranges for x in range(a, z)] == list(range(n))


# --- contributions -----------------------------------------------------------------------------------------------


def test_outliers_are_named_with_their_reason() -> None:
    members = {
        A: WeighedContributions(10, 1.0),
        B: WeighedContributions(10, 1.2),
        C: WeighedContributions(10, 30.0),
        D: WeighedContributions(10, math.nan),
    }
    found = find_outliers(members, [])
    assert set(found) == {C, D}
    assert "limit" in found[C]
    assert find_outliers({A: WeighedContributions(10, 1.0), B: WeighedContributions(10, 30.0)}, []) == {}, (
        "two cannot tell who is right"
    )
    assert set(
        find_outliers(
            {A: WeighedContributions(10, 1.0), B: WeighedContributions(10, 30.0)}, [WeighedContributions(10, 1.0)] * 8
        )
    ) == {B}
    assert find_outliers({A: WeighedContributions(10, 30.0)}, [WeighedContributions(10, 1.0)] * 8) == {}, (
        "somebody must be left"
    )
    few = {A: WeighedContributions(100, 1.0), B: WeighedContributions(100, 1.0), C: WeighedContributions(1, 30.0)}
    assert find_outliers(few, []) == {}, "the mean of one sample is noisier"


# --- recovery ----------------------------------------------------------------------------------------------------


def test_the_cheaper_way_and_the_majority_win() -> None:
    offers = {A: DonorOffer(9, b"x", 3), B: DonorOffer(9, b"x", 1), C: DonorOffer(9, b"liar", 9)}
    near = choose_path(7, 9, offers, 10, 30).action
    assert near is not None
    assert (near.state, near.donors) == (b"", (A, C))
    far = choose_path(1, 9, offers, 10, 30).action
    assert far is not None
    assert (far.epoch, far.state, far.donors) == (9, b"x", (A, B))
    assert choose_path(9, 9, {}, 10, 30).action is None
    assert restorable_epoch(9, [3, 7]) == 7
    assert restorable_epoch(9, [9, 7]) is None


def test_learning_rates() -> None:
    recipe = Recipe("r", "m", "d")
    assert recipe.learning_rate(1) == recipe.optimizer.learning_rate
    for decay in ("linear", "cosine"):
        short = Recipe("r", "m", "d", schedule=Schedule(decay=decay), stop=Stop(steps=4))
        rates = [short.learning_rate(step) / short.optimizer.learning_rate for step in range(1, 5)]
        assert rates[0] == 1
        assert rates == sorted(rates, reverse=True)
        assert rates[-1] == pytest.approx(0.25 if decay == "linear" else 0.1464, abs=1e-4), "as transformers' schedules"
        assert Recipe("r", "m", "d", schedule=Schedule(decay=decay), stop=Stop(steps=1)).learning_rate(1) > 0
    assert np.isclose(RUN.recipe.learning_rate(500), 1e-3)


def test_who_audits_first_is_forecast_to_gather_later() -> None:
    audits, computes = MemberProgress(A, 3, b"h", 2, 4.0, audit_left=40), MemberProgress(B, 3, b"h", 10, 2.0)
    total = forecast_round([audits, computes], b"h", 32)
    assert total.n_samples == 12
    assert total.left_s == 10.0  # 20 samples by one at 2/s, when the other has audited
    assert forecast_round([audits, computes], b"h", 38).left_s == 11.0  # and 6 by both
    assert forecast_round([audits], b"h", 32).left_s == 17.5
    later = MemberProgress(A, 3, b"h", 2, 4.0, age_s=11.0, audit_left=40)
    assert forecast_round([later], b"h", 32).n_samples == 6


def test_a_round_waits_for_a_micro_batch_by_what_its_member_is_worth() -> None:
    assert hold_s(10.0, [10.0, 10.0], has_samples=True) == LONGEST_HOLD_S
    assert hold_s(1.0, [20.0, 20.0], has_samples=True) < 0.15
    assert hold_s(1.0, [20.0, 20.0], has_samples=False) < 0.15
    assert hold_s(1.0, [20.0], has_samples=False) == math.inf, "one contributor alone does not count"
    assert hold_s(0.0, [20.0], has_samples=True) == LONGEST_HOLD_S, "nobody knows yet how fast it is"
