"""A member that lies in a round of a training run: as a reducer, a contributor, a leader, or to the anchors.

Virtual time, the real trainers. Whatever it does, each update is the mean of honest gradients, the run goes on, and
nobody but the liar loses its standing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import pytest
import trio
from msgspec.structs import replace
from trio.testing import MockClock

from swarmd.errors import Refused
from swarmd.net.rpc import Channel
from swarmd.protocol.fields import Message
from swarmd.protocol.runs import backing
from swarmd.protocol.runs import commit as commits
from swarmd.protocol.runs.backing import N_DIRECTIONS, BackedCommit, ContributionShare, sign_assent, sign_share
from swarmd.protocol.runs.commit import Commit
from swarmd.protocol.runs.recipe import Parts, RunOrder, sign_order
from swarmd.protocol.wire.rounds import Beat, Prepare, Propose, Reduced
from swarmd.train.rounds.parts import ReducedPart
from swarmd.train.rounds.round import Round
from swarmd.train.rounds.versions import GroupVersions
from swarmd.train.store.anchor import Anchor
from swarmd.train.vectors.state import Vector
from swarmd.values import PeerId
from tests.train.world import Member, TrainingWorld, check_ledger, replay, training

N_UPDATES = 6  # in some of which the liar takes part, until it is found out
LONGEST_S = 60.0  # of an update, whatever a liar does: rounds that fail, and a leader that is done without


def check(world: TrainingWorld, honest: list[Member], liar: Member) -> None:
    """Every update is what the samples in the ledger come to, and only the liar is blamed."""
    check_standing(honest, liar)
    state = honest[0].trainer.state
    assert state is not None
    expected = replay(world, honest[0].trainer.ledger, state.epoch)
    np.testing.assert_allclose(state.parameters, expected, rtol=1e-3, atol=1e-3)
    check_ledger(world)


def check_standing(honest: list[Member], liar: Member) -> None:
    shunned = {p for m in honest for p in m.trainer.members.shunned()}
    assert shunned <= {liar.peer}, "an honest member was blamed"


# --- a reducer -----------------------------------------------------------------------------------------------------


class Lying:
    """Has the rounds of one member return something else than what its parts come to; counts how often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, liar: Member, lie: Callable[[Vector], Vector]) -> None:
        self.n = 0
        self._lie = lie
        reduce = Round._reduce_parts

        async def reduce_and_lie(live: Round) -> None:
            if live._me == liar.peer:
                live._off_loop = self._lying
            await reduce(live)

        monkeypatch.setattr(Round, "_reduce_parts", reduce_and_lie)

    async def _lying(self, function: Callable[..., Any], *arguments: Any) -> Any:
        result = function(*arguments)
        part = getattr(function, "__self__", None)
        if not isinstance(part, ReducedPart):
            return result
        self.n += 1
        place = slice(result.start - part.start, result.start - part.start + result.n)
        coded = part.codec.code(self._lie(part.total[place]))
        part.total[place] = coded.values
        return dataclasses.replace(result, payload=coded.payload(0, result.n))


@pytest.mark.parametrize(
    "lie",
    [lambda v: v * 1e6, lambda v: v * -3, lambda v: v * math.nan, lambda v: v * math.inf, lambda v: v * 1.01],
    ids=["larger", "reversed", "nan", "infinite", "a little"],
)
async def test_reducer_that_returns_something_else(
    virtual_time: MockClock, monkeypatch: pytest.MonkeyPatch, lie: Callable[[Vector], Vector]
) -> None:
    async with training(seed=21) as world:
        await world.until(3)
        liar, *honest = world.trainers()
        lying = Lying(monkeypatch, liar, lie)
        assert max(await world.pace(N_UPDATES, honest)) < LONGEST_S
        assert lying.n, "it had nothing to reduce"
        check(world, honest, liar)


@pytest.mark.parametrize("codec", ["float16", "int8"])
async def test_reducer_that_hides_behind_rounding(
    virtual_time: MockClock, monkeypatch: pytest.MonkeyPatch, codec: str
) -> None:
    """What rounding excuses is far less than a different mean."""
    parts = Parts(codec=codec)  # type: ignore[arg-type]
    async with training(seed=21, n_elements=3 * 4_096, parts=parts) as world:
        await world.until(3)
        liar, *honest = world.trainers()
        lying = Lying(monkeypatch, liar, lambda v: v * 1.5)
        assert max(await world.pace(N_UPDATES, honest)) < LONGEST_S
        assert lying.n, "it had nothing to reduce"
        check_standing(honest, liar)
        assert any(liar.peer in m.trainer.members.shunned() for m in honest)


@pytest.mark.parametrize("to", ["one", "half", "all"])
async def test_reducer_that_tells_members_different_results(
    virtual_time: MockClock, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    async with training(seed=22, n=5) as world:
        await world.until(3)
        liar, *honest = world.trainers()
        victims = {m.peer for m in honest[: {"one": 1, "half": 2, "all": 4}[to]]}
        n_lies = lie_on_the_way(monkeypatch, liar, Reduced, victims)
        assert max(await world.pace(N_UPDATES, honest)) < LONGEST_S
        assert n_lies
        check(world, honest, liar)


def lie_on_the_way(
    monkeypatch: pytest.MonkeyPatch, liar: Member, kind: type, victims: Collection[PeerId] | None = None
) -> list[Message]:
    """Have a member send other numbers than it has, to some or to all; returns what it lied about, as it goes."""
    send, open_channel = Channel.send, liar.rpc.channel
    mine, lies = set[Channel](), list[Message]()

    async def lying(channel: Channel, message: Message, payload: Any = b"") -> None:
        if isinstance(message, kind) and channel in mine and (victims is None or channel.peer in victims):
            payload = (np.frombuffer(payload, "f4") * -2).tobytes()
            lies.append(message)
        await send(channel, message, payload)

    async def open_mine(*arguments: Any) -> Channel:
        channel = await open_channel(*arguments)
        mine.add(channel)
        return channel

    liar.rpc.channel = open_mine  # type: ignore[method-assign]
    monkeypatch.setattr(Channel, "send", lying)
    return lies


def says(liar: Member, change: Callable[[Beat], Beat]) -> None:
    """What a member tells its leader from now on."""
    tell = liar.trainer.joining.participation._tell

    async def lying(peer: PeerId, message: Message, payload: bytes = b"") -> None:
        await tell(peer, change(message) if isinstance(message, Beat) else message, payload)

    liar.trainer.joining.participation._tell = lying


@pytest.mark.parametrize(
    "change",
    [
        lambda b: replace(b, received=tuple(replace(r, squares=None, fault="not finite") for r in b.received)),
        lambda b: replace(b, received=tuple(replace(r, squares=1e20) for r in b.received)),
        lambda b: replace(b, received=tuple(replace(r, squares=0.0) for r in b.received)),
        lambda b: replace(b, received=()),
        lambda b: replace(b, reductions=tuple(replace(r, fault="not finite") for r in b.reductions)),
        lambda b: replace(b, reductions=tuple(replace(r, digest=b"x" * 16) for r in b.reductions)),
        lambda b: replace(b, reductions=tuple(replace(r, n_elements=0) for r in b.reductions), result=b""),
        lambda b: replace(b, reductions=()),
        lambda b: replace(b, result=b"x" * 32),
        lambda b: replace(b, share=None),
        lambda b: replace(b, share=b.share and replace(b.share, squares=0.0)),
        lambda b: replace(b, assent=b"x" * 64),
    ],
)
async def test_member_that_tells_its_leader_lies(virtual_time: MockClock, change: Callable[[Beat], Beat]) -> None:
    async with training(seed=23) as world:
        await world.until(3)
        liar, *honest = world.trainers()
        says(liar, change)
        assert max(await world.pace(N_UPDATES, honest)) < LONGEST_S
        check(world, honest, liar)
        n_wasted = sum(m.trainer.work.n_wasted for m in honest)
        assert n_wasted < sum(m.trainer.work.n_counted for m in honest) / 2


async def test_gradient_of_zeros_is_no_work(virtual_time: MockClock) -> None:
    async with training(seed=24, n=3) as world:
        lazy = world.add()
        assert lazy.source is not None
        lazy.source.spoil = np.zeros_like
        await world.until(N_UPDATES)
        assert not any(lazy.peer in peers for peers in world.contributors(world.epoch))


# --- a leader ------------------------------------------------------------------------------------------------------


async def test_leader_that_leaves_everybody_out(virtual_time: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would be the only one to count, with what it likes: no anchor signs, and others lead."""
    async with training(seed=25) as world:
        await world.until(3)
        liar, *honest = world.trainers()
        lost = GroupVersions._find_lost

        def lie(versions: GroupVersions, now: float) -> dict[PeerId, str]:
            if versions._basis.me == liar.peer and versions.group.version == 0:
                return {p: "I say so" for p in versions._seen if p != liar.peer}
            return lost(versions, now)

        monkeypatch.setattr(GroupVersions, "_find_lost", lie)
        await world.pace(N_UPDATES)
        assert all(len(peers) > 1 for peers in world.contributors(N_UPDATES))
        check(world, honest, liar)


async def test_leader_that_shows_other_shares(virtual_time: MockClock, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit whose losses are not what was signed: nobody stands for it."""
    async with training(seed=26) as world:
        await world.until(3)
        liar, *honest = world.trainers()
        make = GroupVersions._make_commit

        def lie(versions: GroupVersions, shares: tuple[ContributionShare, ...], average: bytes) -> Commit:
            made = make(versions, shares, average)
            if versions._basis.me != liar.peer:
                return made
            return replace(made, contributors=tuple(replace(c, loss=0.0) for c in made.contributors))

        monkeypatch.setattr(GroupVersions, "_make_commit", lie)
        await world.pace(N_UPDATES)
        assert all(c.loss > 0 for s in world.ledger.sealed for c in s.commit.contributors)
        check(world, honest, liar)


# --- the anchors ---------------------------------------------------------------------------------------------------


async def propose(liar: Member, anchor: Member, proposed: bytes) -> bytes:
    """Bring something to an anchor over a channel of one's own. Raises Refused."""
    ballot = (1_000, f"{liar.peer}/x")
    run, head = liar.trainer.run_spec.id, liar.trainer.ledger.head
    await liar.rpc.call(anchor.peer, Prepare(run=run, parent=head, ballot=ballot), purpose="bulk")
    asked = await liar.rpc.call(anchor.peer, Propose(run=run, ballot=ballot), proposed, 10.0, purpose="bulk")
    return asked[0].signature  # type: ignore[no-any-return]


def made_up(liar: Member, others: tuple[Member, ...] = (), **changes: Any) -> bytes:
    """A commit that no round made, with every signature that its maker has: of samples that it says it computed."""
    ledger, state = liar.trainer.ledger, liar.trainer.state
    average, norm = b"\1" * 32, 1.0
    if ledger.sealed:
        norm = ledger.sealed[-1].commit.contributors[0].norm
    root = state.root if state is not None else b"\2" * 32
    shares = []
    for member in (liar, *others):
        first, n = ledger.next_draw.get(member.peer, 0), 64
        share = ContributionShare(first, n, 1.0, (norm * n) ** 2, (0.0,) * N_DIRECTIONS)
        shares.append(sign_share(share, ledger.head, root, average, liar.identity))
    commit = Commit(
        run=ledger.run.genesis,
        epoch=ledger.epoch + 1,
        parent=ledger.head,
        generation=0,
        contributors=tuple(s.counted(m.peer) for s, m in zip(shares, (liar, *others), strict=True)),
        average=average,
        state=root,
        learning_rate=ledger.run.recipe.learning_rate(ledger.steps + 1),
    )
    body = commits.encode(replace(commit, **changes))
    if changes.get("restores"):
        return backing.encode(BackedCommit(body))
    return backing.encode(BackedCommit(body, tuple(shares), ((0, sign_assent(body, liar.identity)),)))


async def test_anchor_signs_no_commit_that_no_round_made(virtual_time: MockClock) -> None:
    async with training(seed=27) as world:
        liar = world.add("reduce")
        await world.until(3)
        honest = [m for m in world.trainers() if m is not liar]
        anchor = world.members[world.anchors[0].peer_id]
        alone = "one contributor alone"
        cases: list[tuple[Callable[[], bytes], str]] = [
            (lambda: made_up(liar), alone),
            (lambda: made_up(liar, (honest[0],)), "signature of a share"),
            (lambda: backing.encode(BackedCommit(backing.read_untrusted(made_up(liar))[1].body)), "0 shares"),
            (
                lambda: backing.encode(replace(backing.read_untrusted(made_up(liar))[1], assents=())),
                "most must",
            ),
            (
                lambda: made_up(
                    liar,
                    contributors=(),
                    average=b"",
                    learning_rate=0.0,
                    restores=world.run.genesis,
                ),
                "newest state",
            ),
        ]
        for make, said in cases:
            with pytest.raises(Refused, match=said):
                await propose(liar, anchor, make())
        await world.pace(3)
        check(world, honest, liar)


async def test_owner_takes_a_run_back_whose_newest_state_nobody_gives(
    virtual_time: MockClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A commit that most anchors were brought to sign, and a member that says for ever that it has the state."""
    async with training(seed=30) as world:
        liar = world.add("reduce")
        await world.until(3)
        anchor = world.members[world.anchors[0].peer_id]

        async def trusts(anchor: Anchor, commit: Commit, backed: BackedCommit) -> None: ...

        honestly = Anchor._check_backing
        monkeypatch.setattr(Anchor, "_check_backing", trusts)
        ballot = (1_000, f"{liar.peer}/x")
        proposed = made_up(liar)
        signature = await propose(liar, anchor, proposed)
        monkeypatch.setattr(Anchor, "_check_backing", honestly)
        raw = commits.seal(backing.read_untrusted(proposed)[1].body, ballot, {0: signature})
        record = liar.trainer.record

        def lies() -> dict[str, Any]:
            return {**record(), "state_epoch": liar.trainer.ledger.epoch, "state": b"x" * 32}

        liar.trainer.record = lies  # type: ignore[method-assign]
        await liar.trainer.chronicle.spread_commit(liar.trainer.joining._tasks, raw, [m.peer for m in world.trainers()])
        await trio.sleep(300)
        bad = world.epoch
        assert all(m.trainer.state is not None and m.trainer.state.epoch < bad for m in world.trainers())
        chronicle = world.trainers()[0].trainer.chronicle
        order = RunOrder(world.run.id, 1, back_from=chronicle.ledger.head, back_to=chronicle.ledger.digest_at(bad - 1))
        order_raw = sign_order(order, world.anchors[0])
        for member in world.members.values():
            member.trainer.chronicle.take_order_untrusted(order_raw)
        await world.until(bad + 4, within_s=120)
        assert world.ledger.sealed[bad].commit.restores == order.back_to
        liar.trainer.record = record  # type: ignore[method-assign]


async def test_who_computes_on_alone_counts_when_nobody_else_lives(virtual_time: MockClock) -> None:
    """The others of two have gone, or only say that they compute: the run goes on, soon or in the end."""
    async with training(seed=28, n=2) as world:
        await world.until(3)
        _, lost = world.trainers()
        world.crash(lost)
        begun = trio.current_time()
        await world.until(world.epoch + 2)
        assert trio.current_time() - begun < LONGEST_S


async def test_proposer_that_raises_ballots_stops_nobody(virtual_time: MockClock) -> None:
    """It asks for promises as fast as it can, each under a higher ballot."""
    async with training(seed=29) as world:
        liar = world.add("reduce")
        await world.until(3)
        usual = float(np.mean(await world.pace(4)))
        anchor = world.members[world.anchors[0].peer_id]

        async def flood() -> None:
            for number in range(10, 10**9, 50):
                ask = Prepare(run=world.run.id, parent=world.ledger.head, ballot=(number, f"{liar.peer}/x"))
                with contextlib.suppress(Refused):
                    await liar.rpc.call(anchor.peer, ask, purpose="bulk")
                await trio.sleep(0.05)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(flood)
            assert np.mean(await world.pace(4)) < 3 * usual
            nursery.cancel_scope.cancel()
        check(world, [m for m in world.trainers() if m is not liar], liar)
