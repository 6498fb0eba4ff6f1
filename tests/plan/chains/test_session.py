"""The rules of a hop: which ops count, and who is suspected when."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.errors import Code
from swarmd.plan.chains.session import SUSPECT_AFTER_S, HopState, OpVerdict, Watch, accept_op, judge_op
from swarmd.protocol.wire.messages import Op
from swarmd.values import PeerId

CLIENT, BEFORE, STRANGER = PeerId("client"), PeerId("before"), PeerId("stranger")


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


def test_silence_is_suspicious_only_while_something_is_outstanding() -> None:
    watch = Watch()
    assert watch.suspicion(100.0) is None
    watch.on_sent(1, 100.0)
    assert watch.suspicion(100.0 + SUSPECT_AFTER_S - 0.1) is None
    assert "no sign of progress on op 1" in (watch.suspicion(100.0 + SUSPECT_AFTER_S) or "")
    watch.on_progress(0, 102.0)
    assert watch.suspicion(104.0) is None, "progress was reported, nothing finished: a long prefill is not death"
    watch.on_settled(1)
    assert watch.suspicion(1000.0) is None
    watch.on_sent(2, 2000.0)
    assert watch.suspicion(2001.0) is None, "the silence before counts for nothing"
