"""A hop of a session as a server keeps it: what it takes of whom, what waits, and what time says of it."""

from __future__ import annotations

from typing import Any

import pytest

from swarmd.errors import Code, Refused
from swarmd.plan.chains.hop import ABANDONED_LEASE_S, UNUSED_LEASE_S, SessionHop, WaitingOps
from swarmd.plan.chains.session import LEASE_S, PROGRESS_INTERVAL_S, SUSPECT_AFTER_S, HopState, OpVerdict
from swarmd.protocol.wire.messages import Edit, Inherited, Op, Reroute, count_changes
from swarmd.values import PeerId, Span

CLIENT = PeerId("client")
BEFORE = PeerId("before")
NEXT = PeerId("next")
SESSION = b"s" * 16


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
