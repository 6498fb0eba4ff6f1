"""What of one session may wait at a hop: so many bytes, and so many edits, which are work of however few bytes."""

from __future__ import annotations

import pytest

from swarmd.errors import Code, Refused
from swarmd.node.serving.hops import SessionHop
from swarmd.plan.chains.session import HopState
from swarmd.protocol.wire.messages import Edit, count_changes
from swarmd.values import PeerId, Span

A = PeerId("a")


def hop() -> SessionHop:
    return SessionHop(HopState(A, A), Span(0, 4), None, limit_bytes=1_000, limit_edits=10)


@pytest.mark.parametrize(("n_bytes", "n_edits", "n_fit"), [(100, 0, 10), (1, 5, 2), (1, 1, 10)])
def test_what_waits_is_bounded_until_it_is_finished(n_bytes: int, n_edits: int, n_fit: int) -> None:
    waiting = hop()
    for seq in range(1, n_fit + 1):
        waiting.take_in(seq, n_bytes, n_edits)
    with pytest.raises(Refused, match="wait to be computed") as caught:
        waiting.take_in(n_fit + 1, n_bytes, n_edits)
    assert caught.value.code is Code.TOO_LONG
    waiting.state.finished = 1
    waiting.take_in(n_fit + 1, n_bytes, n_edits)


def test_an_op_without_tokens_is_work_even_with_nothing_to_edit() -> None:
    assert count_changes((), True) == 0
    assert count_changes((), False) == 1
    assert count_changes((Edit(crop=1), Edit(crop=0)), True) == 2
