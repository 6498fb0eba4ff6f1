"""When a round begins, decided without network or clock: who has joined, who is late, whom nobody waits for."""

from __future__ import annotations

import pytest

from swarmd.errors import Code, Refused
from swarmd.plan.runs.arrivals import Arrivals
from swarmd.plan.runs.ledger import Ledger
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.runs.recipe import Batch, Recipe, start_run
from swarmd.protocol.wire.rounds import JoinRound
from swarmd.train.rounds.gathering import BeginRound, Gathering, PostponeRound, WaitForMembers
from swarmd.values import PeerId

OWNER = Identity(b"o" * 32)
ME, OTHER, LATE = PeerId("me"), PeerId("other"), PeerId("late")
FIRST_WAIT_S = 4.0


def joining(n: int, *, first: int = 0, receives: bool = True) -> JoinRound:
    return JoinRound(id=1, run="r", parent=b"", first=first, n=n, loss=1.0, receives=receives)


@pytest.fixture
def gathering() -> Gathering:
    """One of eight samples, that this peer has all itself, begun at 100 s."""
    recipe = Recipe("r", "0" * 64, "1" * 64, batch=Batch(target=8, micro=2, tokens=8), anchors=(OWNER.peer_id,))
    opened = Gathering(
        ME, Ledger(start_run(recipe, OWNER, 1)), Arrivals(least_s=1.5, first_s=FIRST_WAIT_S), lambda: 8, 100.0
    )
    opened.join(ME, joining(8), 100.0)
    return opened


def test_it_begins_at_once_when_nobody_else_is_expected(gathering: Gathering) -> None:
    assert gathering.advance([], 100.0) == BeginRound()


def test_who_is_expected_is_waited_for_until_that_took_longer_than_ever(gathering: Gathering) -> None:
    gathering.join(OTHER, joining(0), 100.0)
    assert gathering.advance([OTHER, LATE], 100.0 + FIRST_WAIT_S) == WaitForMembers()
    assert gathering.waits_for == "1 more members"
    assert gathering.advance([OTHER, LATE], 100.1 + FIRST_WAIT_S) == BeginRound()
    assert gathering.missing == [LATE]
    gathering.join(LATE, joining(2), 105.0)
    assert not gathering.missing, "it has come, if late"


def test_nobody_who_has_gone_is_waited_for(gathering: Gathering) -> None:
    gathering.drop_member(OTHER)
    assert gathering.advance([OTHER], 100.0) == BeginRound()
    gathering.join(OTHER, joining(2), 100.5)
    assert OTHER in gathering.present, "it has come again"


def test_a_leader_alone_begins_nothing_while_others_are_expected(gathering: Gathering) -> None:
    """If it vanished after the commit, nobody would hold the average."""
    gathering.join(OTHER, joining(0, receives=False), 100.0)
    step = gathering.advance([OTHER, LATE], 105.0)
    assert step == PostponeRound("8 of 8 samples are here, members late: 1")


def test_too_few_samples_begin_nothing(gathering: Gathering) -> None:
    gathering.join(ME, joining(7), 100.0)
    assert isinstance(gathering.advance([], 100.0), PostponeRound)


def test_who_comes_after_the_group_is_formed_waits_for_the_next_round(gathering: Gathering) -> None:
    gathering.join(OTHER, joining(2), 100.0)
    gathering.close([ME, OTHER])
    gathering.join(OTHER, joining(2), 101.0)  # it asks again: it is in it already
    with pytest.raises(Refused, match="begun without you"):
        gathering.join(LATE, joining(2), 101.0)
    assert LATE not in gathering.joined


def test_samples_that_are_counted_already_are_refused(gathering: Gathering) -> None:
    with pytest.raises(Refused) as refused:
        gathering.join(OTHER, joining(2, first=5), 100.0)
    assert refused.value.code is Code.MALFORMED
    assert OTHER not in gathering.joined
