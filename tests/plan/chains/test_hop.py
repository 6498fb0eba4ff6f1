"""A hop of a session as a server keeps it: what it takes of whom, what waits, and what time says of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.errors import Code, Refused
from swarmd.plan.chains.hop import (
    ABANDONED_LEASE_S,
    LEASE_S,
    UNUSED_LEASE_S,
    HopState,
    OpVerdict,
    SessionHop,
    WaitingOps,
    accept_op,
    judge_op,
)
from swarmd.plan.chains.void_ops import MOST_WINDOWS, VoidOps
from swarmd.plan.chains.watch import PROGRESS_INTERVAL_S, SUSPECT_AFTER_S
from swarmd.protocol.wire.messages import Edit, Inherited, Op, Reroute, Void, count_changes
from swarmd.values import PeerId, Span

CLIENT = PeerId("client")
BEFORE = PeerId("before")
NEXT = PeerId("next")
STRANGER = PeerId("stranger")
SESSION = b"s" * 16


def state(received: int = 4, epoch: int = 2) -> HopState:
    return HopState(CLIENT, BEFORE, epoch, received)


@pytest.mark.parametrize(
    ("op", "sender", "verdict", "code"),
    [
        (Op(epoch=2, seq=5), BEFORE, OpVerdict.EXECUTE, None),
        (Op(epoch=2, seq=5), CLIENT, OpVerdict.EXECUTE, None),
        (Op(epoch=2, seq=4), BEFORE, OpVerdict.DUPLICATE, None),
        (Op(epoch=2, seq=6), BEFORE, OpVerdict.REFUSE, Code.OP_GAP),
        (Op(epoch=2, seq=0), CLIENT, OpVerdict.REFUSE, Code.MALFORMED),
        (Op(epoch=1, seq=5), BEFORE, OpVerdict.REFUSE, Code.STALE_EPOCH),
        (Op(epoch=3, seq=5), BEFORE, OpVerdict.REFUSE, Code.STALE_EPOCH),
        (Op(epoch=2, seq=5), STRANGER, OpVerdict.REFUSE, Code.STRANGER),
        (Op(epoch=2, seq=4, base=(0, 1), silent_through=4), BEFORE, OpVerdict.REFUSE, Code.OP_GAP),
    ],
)
def test_ops_are_judged(op: Op, sender: PeerId, verdict: OpVerdict, code: Code | None) -> None:
    decision = judge_op(state(), op, sender)
    assert decision.action.verdict is verdict
    assert code is None or decision.action.code is code
    assert decision.reason


def test_merged_history_comes_in_order_and_only_to_a_new_hop() -> None:
    new = HopState(CLIENT, BEFORE, 2)
    parts = [Op(epoch=2, seq=40, base=(i, 3), silent_through=40) for i in range(3)]
    assert judge_op(new, parts[1], BEFORE).action.verdict is OpVerdict.REFUSE
    for part in parts:
        assert judge_op(new, part, BEFORE).action.verdict is OpVerdict.EXECUTE
        accept_op(new, part)
    assert new.received == 40
    assert judge_op(new, Op(epoch=2, seq=41), BEFORE).action.verdict is OpVerdict.EXECUTE


@given(st.lists(st.tuples(st.integers(1, 12), st.integers(1, 3), st.sampled_from([CLIENT, BEFORE, STRANGER]))))
def test_whatever_comes_ops_are_executed_once_and_in_order(tries: list[tuple[int, int, PeerId]]) -> None:
    hop, executed = state(received=0), []
    for seq, epoch, sender in tries:
        op = Op(seq=seq, epoch=epoch)
        if judge_op(hop, op, sender).action.verdict is OpVerdict.EXECUTE:
            accept_op(hop, op)
            executed.append(seq)
    assert executed == list(range(1, len(executed) + 1))


@pytest.mark.parametrize(("n_bytes", "n_edits", "n_fit"), [(100, 0, 10), (1, 5, 2), (1, 1, 10)])
def test_what_waits_is_bounded_until_it_is_finished(n_bytes: int, n_edits: int, n_fit: int) -> None:
    waiting = WaitingOps(limit_bytes=1_000, limit_edits=10)
    for seq in range(1, n_fit + 1):
        waiting.add(seq, n_bytes, n_edits, finished=0)
    with pytest.raises(Refused, match="wait to be computed") as caught:
        waiting.add(n_fit + 1, n_bytes, n_edits, finished=0)
    assert caught.value.code is Code.TOO_LONG
    waiting.add(n_fit + 1, n_bytes, n_edits, finished=1)


def test_an_op_without_tokens_is_work_even_with_nothing_to_edit() -> None:
    assert count_changes((), True) == 0
    assert count_changes((), False) == 1
    assert count_changes((Edit(crop=1), Edit(crop=0)), True) == 2


def hop(**fields: Any) -> SessionHop:
    """A hop that pushes to the next one, and was opened at second 0."""
    defaults: dict[str, Any] = {"successor": NEXT, "push": True, "waiting": WaitingOps(1_000, 10)}
    return SessionHop(HopState(CLIENT, BEFORE), Span(4, 8), **{**defaults, **fields})


def op(seq: int, epoch: int = 1, **fields: Any) -> Op:
    return Op(session=SESSION, start=4, epoch=epoch, seq=seq, **fields)


def accept(served: SessionHop, seq: int, now: float = 0.0) -> None:
    assert served.judge(op(seq), BEFORE, now) is OpVerdict.EXECUTE
    served.count(op(seq), 10)
    served.accept(op(seq), memoryview(b""))


def test_an_op_is_taken_once_and_its_sender_hears_of_it_again() -> None:
    served = hop()
    accept(served, 1, now=5.0)
    assert (served.state.received, served.sender, served.used_at) == (1, BEFORE, 5.0)
    served.told_finished = 1
    assert served.judge(op(1), CLIENT, 6.0) is OpVerdict.DUPLICATE
    assert served.told_finished == -1, "a sender that asks twice has not heard"
    assert served.sender == CLIENT


@pytest.mark.parametrize(
    ("message", "sender", "code"),
    [
        (op(1), NEXT, Code.STRANGER),
        (op(1, epoch=2), BEFORE, Code.STALE_EPOCH),
        (op(2), BEFORE, Code.OP_GAP),
        (op(1, needs=("a thing of tomorrow",)), BEFORE, Code.UNSUPPORTED),
    ],
)
def test_an_op_that_is_refused_changes_nothing(message: Op, sender: PeerId, code: Code) -> None:
    served = hop()
    with pytest.raises(Refused) as caught:
        served.judge(message, sender, 9.0)
    assert caught.value.code is code
    assert served == hop()


def test_more_than_may_wait_is_refused_before_it_is_accepted() -> None:
    served = hop(waiting=WaitingOps(15, 10))
    accept(served, 1)
    served.judge(op(2), BEFORE, 0.0)
    with pytest.raises(Refused, match="wait to be computed"):
        served.count(op(2), 10)
    assert served.state.received == 1
    served.finish(1)
    accept(served, 2)


def test_a_reroute_changes_neighbours_and_forgets_a_suspicion() -> None:
    served = hop(suspected=True)
    served.watch.on_sent(7, 0.0)
    reroute = Reroute(session=SESSION, start=4, epoch=2, predecessor="other", successor="", settled=3)
    served.reroute(reroute, now=8.0)
    assert (served.state.epoch, served.state.predecessor, served.sender) == (2, "other", "other")
    assert served.successor is None
    assert not served.suspected
    assert not served.watch.is_waiting()
    with pytest.raises(Refused, match="this hop is at 2"):
        served.reroute(Reroute(session=SESSION, start=4, epoch=1, predecessor="", successor="", settled=0), now=9.0)


def test_only_its_client_may_ask_and_only_of_this_epoch() -> None:
    served = hop()
    served.require_client(CLIENT)
    with pytest.raises(Refused, match="did not open this session"):
        served.require_client(BEFORE)
    served.require_epoch(2)
    with pytest.raises(Refused, match="epoch 2, this hop is at 1"):
        served.require_epoch(2, exactly=True)


def test_caches_are_inherited_once_and_in_their_epoch() -> None:
    heir = hop(inherit_from=PeerId("old"))
    message = Inherited(session=SESSION, start=4, epoch=1, seq=6, tokens=20)
    assert not heir.inherit(Inherited(session=SESSION, start=4, epoch=2, seq=6, tokens=20))
    assert heir.inherit(message)
    assert (heir.state.received, heir.state.finished) == (6, 6)
    assert not heir.inherit(message)


def test_a_silent_successor_is_suspected_only_where_this_server_pushes_to_it() -> None:
    for push in (True, False):
        served = hop(push=push)
        served.watch.on_sent(1, 0.0)
        assert served.suspicion(SUSPECT_AFTER_S - 0.1) is None
        assert (served.suspicion(SUSPECT_AFTER_S + 0.1) is not None) is push


def test_its_sender_hears_how_far_it_is_while_work_is_under_way_and_once_after() -> None:
    served = hop()
    assert not served.is_report_due(10.0), "nobody speaks without work"
    accept(served, 1)
    assert not served.is_report_due(PROGRESS_INTERVAL_S - 0.1)
    assert served.is_report_due(PROGRESS_INTERVAL_S)
    served.finish(1)
    assert not served.is_busy
    assert served.is_report_due(PROGRESS_INTERVAL_S), "that it is finished"
    served.told_finished = 1
    assert not served.is_report_due(10.0)


@pytest.mark.parametrize(
    ("n_ops", "is_client_here", "lease_s"),
    [(0, True, UNUSED_LEASE_S), (0, False, UNUSED_LEASE_S), (1, True, LEASE_S), (1, False, ABANDONED_LEASE_S)],
)
def test_a_hop_that_nobody_uses_expires(n_ops: int, is_client_here: bool, lease_s: float) -> None:
    served = hop()
    for seq in range(1, n_ops + 1):
        accept(served, seq)
        assert not served.is_expired(lease_s + 1, is_client_here), "not while it computes"
        served.finish(seq)
    assert not served.is_expired(lease_s, is_client_here)
    assert served.is_expired(lease_s + 1, is_client_here)


# --- void ops ---------------------------------------------------------------------------------------------------


def void(first: int, last: int, epoch: int = 1) -> Void:
    return Void(session=SESSION, start=4, epoch=epoch, first=first, last=last)


def test_ops_that_are_void_may_not_have_come_yet() -> None:
    served = hop()
    accept(served, 1)
    assert served.note_void(void(2, 5))
    assert [served.void.covers(seq) for seq in (1, 2, 5, 6)] == [False, True, True, False]


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (void(3, 2), "from behind to before"),
        (void(0, 1), "ops are numbered from 1"),
        (void(2, 2 + MOST_WINDOWS), "far beyond what came"),
        (void(2, 3, epoch=2), "of a chain that is no more, or not yet"),
    ],
)
def test_what_no_client_has_to_say_is_void_nowhere(message: Void, why: str) -> None:
    served = hop()
    accept(served, 1)
    assert not served.note_void(message), why
    assert not any(served.void.covers(seq) for seq in range(2 * MOST_WINDOWS)), why


def test_a_flood_of_voids_costs_the_worker_no_frames() -> None:
    served = hop()
    accept(served, 1)
    n_passed_on = sum(served.note_void(void(2, last)) for last in [*range(2, 200), *range(2, 200)] for _ in range(3))
    assert n_passed_on == 1, "each has to name ops beyond those named before"
    n_passed_on = sum(served.note_void(void(first, first)) for first in range(1_000))
    assert n_passed_on <= MOST_WINDOWS


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), max_size=50), st.integers(0, 60))
def test_only_named_ops_are_void(named: list[tuple[int, int]], received: int) -> None:
    ops = VoidOps()
    taken = [(first, last) for first, last in named if ops.add(first, last, received)]
    for seq in range(received, 200):
        assert ops.covers(seq) == any(first <= seq <= last for first, last in taken)
