"""When a leader begins its round: with whom, and after how long."""

from __future__ import annotations

import random
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from swarmd.errors import Code, Refused
from swarmd.plan.runs.ledger import Ledger
from swarmd.plan.runs.outcome import Timing
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.runs.recipe import Batch, Recipe, RunOrder, start_run
from swarmd.protocol.wire.rounds import Beat, JoinRound, Prepare, Promised, Received
from swarmd.train.rounds.leader import Leader, TooEarly
from swarmd.train.rounds.versions import RoundBasis
from swarmd.train.store.proposer import Proposer, RoundFailed
from swarmd.values import PeerId

OWNER = Identity(b"o" * 32)
OTHER_ANCHOR, SILENT = (Identity(bytes([n]) * 32).peer_id for n in (1, 2))
ME, OTHER = PeerId("me"), PeerId("other")


class Begun(Exception):
    """The leader has gone to the anchors."""


async def begun(anchor: PeerId, request: object, payload: bytes) -> tuple[object, bytes]:
    raise Begun


def leader_among(
    *expected: PeerId,
    anchors: tuple[str, ...] = (OWNER.peer_id,),
    ask_anchor: Any = begun,
    why_not_alone: Any = None,
) -> Leader:
    recipe = Recipe("r", "0" * 64, "1" * 64, batch=Batch(target=8, micro=2, tokens=8), anchors=anchors)
    run = start_run(recipe, OWNER, 1)

    async def tell(peer: PeerId, message: object, payload: bytes) -> None: ...

    ledger, order = Ledger(run), RunOrder(run.id, 0)
    proposer = Proposer(ME, ledger, order, random.Random(1), ask_anchor)
    return Leader(
        RoundBasis(
            ME, ledger.head, ledger, order.generation, Timing(), lambda average: 1.0, lambda: 8, lambda average: 0.0
        ),
        proposer,
        tell=tell,
        expected=lambda: expected,
        why_not_alone=why_not_alone or nothing_against,
    )


def joining(n: int, receives: bool = True) -> JoinRound:
    return JoinRound(
        id=1, run="r", parent=b"", state=b"s" * 32, first=0, n=n, loss=1.0, n_elements=8, dtype="float32",
        receives=receives, can_reduce=True, up_bytes_per_s=None, down_bytes_per_s=None,
    )  # fmt: skip


async def nothing_against(contributor: PeerId) -> tuple[str, float]:
    return "", 0.0


async def begins(leader: Leader) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        await leader.lead()
    assert raised.group_contains(Begun)


async def test_leader_does_not_go_alone_while_others_are_expected(virtual_time: MockClock) -> None:
    """It would be the only one to hold the average of what it has signed."""
    leader = leader_among(OTHER)
    leader.join(ME, joining(8))
    with pytest.raises(TooEarly, match="members late: 1"):
        await leader.lead()
    assert leader.gathering.missing == [OTHER]


async def test_leader_goes_alone_when_nobody_is_expected(virtual_time: MockClock) -> None:
    leader = leader_among()
    leader.join(ME, joining(8))
    await begins(leader)


async def test_leader_begins_no_round_that_anchors_must_refuse(virtual_time: MockClock) -> None:
    """One contributes, others compute and answer; the leader says why, and when to look again."""
    asked = []

    async def why_not_alone(contributor: PeerId) -> tuple[str, float]:
        asked.append(contributor)
        return "one contributor alone counts in 40 s", 1.5

    leader = leader_among(OTHER, why_not_alone=why_not_alone)
    leader.join(ME, joining(8))
    leader.join(OTHER, joining(0))
    with pytest.raises(TooEarly, match="one contributor alone counts in 40 s") as early:
        await leader.lead()
    assert early.value.wait_s == 1.5
    assert asked == [ME]
    leader.join(OTHER, joining(1))
    await begins(leader)


async def test_leader_goes_without_the_late_when_two_will_hold_the_average(virtual_time: MockClock) -> None:
    leader = leader_among(OTHER, PeerId("late"))
    leader.join(ME, joining(8))
    leader.join(OTHER, joining(0))
    before = trio.current_time()
    await begins(leader)
    assert trio.current_time() > before


async def test_a_member_that_only_reduces_holds_no_average(virtual_time: MockClock) -> None:
    leader = leader_among(OTHER, PeerId("late"))
    leader.join(ME, joining(8))
    leader.join(OTHER, joining(0, receives=False))
    with pytest.raises(TooEarly):
        await leader.lead()


async def test_leader_learns_how_late_others_are(virtual_time: MockClock) -> None:
    leader = leader_among(*(PeerId(f"p{i}") for i in range(5)))
    leader.join(ME, joining(8))
    before = leader._basis.timing.joins.limit_s()
    for i in range(5):
        await trio.sleep(3.0 if i else 0.0)
        leader.join(PeerId(f"p{i}"), joining(2))
    await begins(leader)
    assert leader._basis.timing.joins.limit_s() > before


async def test_leader_that_cannot_take_part_gives_up_its_round(virtual_time: MockClock) -> None:
    """All others have the average; it has nothing, and nobody else is to blame."""

    async def promise(anchor: PeerId, request: Any, payload: bytes) -> tuple[object, bytes]:
        return Promised(promised=request.ballot), b""

    leader = leader_among(OTHER, anchors=(OWNER.peer_id,), ask_anchor=promise)
    leader.join(ME, joining(4))
    leader.join(OTHER, joining(4))

    async def beats() -> None:
        while True:
            await trio.sleep(0.5)
            if leader.versions is not None:
                group = leader.versions.group
                place = [m.peer for m in group.members].index(OTHER)
                received = (Received(member=place, n_elements=8, squares=1.0),)
                leader.take_beat(OTHER, Beat(group.run, group.round, group.version, received, result=b"r" * 32))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(beats)
        with trio.fail_after(60), pytest.raises(RoundFailed, match="nobody to go on without"):
            await leader.lead()
        nursery.cancel_scope.cancel()


async def test_silent_anchor_is_not_waited_for_when_the_others_have_said_no(virtual_time: MockClock) -> None:
    """A leader that stopped had a higher ballot, and is an anchor itself: the next ballot follows at once."""
    numbers: list[int] = []

    async def ask_anchor(anchor: PeerId, message: Any, payload: bytes) -> tuple[object, bytes]:
        assert isinstance(message, Prepare)
        if anchor == SILENT:
            await trio.sleep_forever()
        if message.ballot[0] > 1:
            raise Begun
        numbers.append(message.ballot[0])
        return Promised(promised=(1, "zzz")), b""

    leader = leader_among(anchors=(OWNER.peer_id, OTHER_ANCHOR, SILENT), ask_anchor=ask_anchor)
    leader.join(ME, joining(8))
    with trio.fail_after(1):
        await begins(leader)
    assert numbers == [1, 1]


async def test_one_anchor_that_says_there_is_more_does_not_stop_the_others(virtual_time: MockClock) -> None:
    """It may lie; where most say so, the proposal is for nothing."""
    n_stale = 1

    async def ask_anchor(anchor: PeerId, message: Any, payload: bytes) -> tuple[object, bytes]:
        assert isinstance(message, Prepare)
        if anchors.index(anchor) < n_stale:
            raise Refused(Code.STALE_EPOCH, "I know more commits")
        await trio.sleep(0.1)
        return Promised(promised=message.ballot), b""

    anchors = (OTHER_ANCHOR, OWNER.peer_id, SILENT)
    run = start_run(Recipe("r", "0" * 64, "1" * 64, anchors=anchors), OWNER, 1)
    proposer = Proposer(ME, Ledger(run), RunOrder(run.id, 0), random.Random(1), ask_anchor)
    assert await proposer.collect_promises() == b"", "the two others bind it to nothing"
    n_stale = 2
    with pytest.raises(Refused, match="more commits"):
        await proposer.collect_promises()
