"""Members that claim blocks, change their claims and are always full: honest servers stay where they are."""

from __future__ import annotations

import random
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import trio
from trio.testing import MockClock

from swarmd.errors import Code, Refused
from swarmd.node.serving.balancer import Balancer, BalancerServices, Turnover
from swarmd.node.serving.trials import APART_S, JOINING_S, REFUSALS, Trials, claimant_of
from swarmd.plan.chains.placement import Target
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.layouts.nearness import Surroundings
from swarmd.plan.members.record_book import RecordBook
from swarmd.protocol.membership.catalog import Catalog
from swarmd.protocol.membership.identity import Membership
from swarmd.protocol.membership.records import AnyRecord, PeerRecord, SpanRecord, VerifiedRecord
from swarmd.protocol.wire.messages import OpenSession
from swarmd.values import Decision, ModelId, PeerId, Span

MODEL = ModelId("m" * 64)
N_BLOCKS, N_HONEST = 12, 9
LOOK_S, SHIFT_S, LOAD_S = 60.0, 600.0, 90.0
HOURS = 1


class World:
    """Servers that hold four blocks each, two hostile ones, and what everybody sees of them."""

    def __init__(self, n_hostile: int) -> None:
        self.rng = random.Random(3)
        self.spans = {f"h{n:02}": Span(4 * (n % 3), 4 * (n % 3) + 4) for n in range(N_HONEST)}
        self.hostile = [f"x{n}" for n in range(n_hostile)]
        self.spans |= dict.fromkeys(self.hostile, Span(0, 4))
        self.loading: set[str] = set()
        self.n_moves, self.n_tried = 0, 0
        self._seen: tuple[Any, SwarmView] | None = None

    def view(self) -> SwarmView:
        now = dict(self.spans), set(self.loading)
        if self._seen is None or self._seen[0] != now:
            self._seen = now, self._fresh()
        return self._seen[1]

    def _fresh(self) -> SwarmView:
        book = RecordBook(catalog=Catalog(version=1, models={"model": (MODEL, N_BLOCKS)}))
        common = {"sequence": 1, "issued_at": 0, "expires_at": 10**9, "certificate": ()}
        for peer, span in self.spans.items():
            speed = 800.0 if peer in self.hostile else 50.0
            fields = {"state": "joining" if peer in self.loading else "online", "moves_left": 4}
            about = {"model": MODEL, "start": span.start, "end": span.end, "decode_tokens_per_s": speed}
            records: list[AnyRecord] = [
                PeerRecord(peer=peer, up_since=1, **common),
                SpanRecord(peer=peer, **common, **about, **fields),
            ]
            for record in records:
                book.add(VerifiedRecord(record, Membership(PeerId(peer), "member", (peer.encode(),), 10**9), b""))
        return book.view()

    def trials(self, me: str) -> Trials:
        async def call(peer: PeerId, opening: Any, timeout_s: float) -> None:
            assert isinstance(opening, OpenSession)
            self.n_tried += 1
            await trio.sleep(0.05)
            if peer in self.hostile or peer in self.loading:
                raise Refused(Code.NO_CAPACITY, "full", 5.0)
            assert self.spans[peer].covers(Span(opening.start, opening.end))

        network = SimpleNamespace(peer_id=me, learn=lambda *_: None)
        rpc: Any = SimpleNamespace(network=network, call=call, find_channel=lambda *_: None)
        return Trials(rpc, SimpleNamespace(addresses_of=lambda _: ()), self.rng)  # type: ignore[arg-type]

    async def serve(self, me: str, trials: Any) -> None:
        async def move(target: Decision[Target]) -> bool:
            assert target.action.span is not None
            self.n_moves += 1
            self.spans[me] = target.action.span
            self.loading.add(me)
            await trio.sleep(LOAD_S)
            self.loading.discard(me)
            return True

        clock = lambda: 10_000 + trio.current_time()  # noqa: E731
        services = BalancerServices(
            view=self.view,
            steady_clock=clock,
            rng=self.rng,
            interval_s=LOOK_S,
            turnover=Turnover(clock),
            trials=trials,
            look_around=lambda spans, n_blocks: Surroundings(spans, n_blocks, {}, None),
        )
        await Balancer(services, (me, 0), move).run()

    async def shift(self) -> None:
        """Claim what is held least, and leave it when somebody has gone elsewhere."""
        while True:
            for hostile in self.hostile:
                start = 4 * self.rng.randrange(3)
                self.spans[hostile] = Span(start, start + 4)
            await trio.sleep(SHIFT_S)


class Believing:
    """Trials that believe every claim."""

    def select_believed(self, spans: Any) -> list[SpanRecord]:
        return list(spans)

    async def try_some(self, spans: Any) -> None: ...

    async def find_serving(self, spans: Any) -> set[Any]:
        return {claimant_of(s) for s in spans}


async def n_moves(n_hostile: int, is_believing: bool = False) -> int:
    world = World(n_hostile)
    with trio.move_on_after(HOURS * 3_600):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(world.shift)
            for peer in list(world.spans):
                if peer not in world.hostile:
                    nursery.start_soon(world.serve, peer, Believing() if is_believing else world.trials(peer))
    if not is_believing:
        assert world.n_tried <= 3 * N_HONEST * HOURS * 3_600 / LOOK_S, "a few sessions each look"
    return world.n_moves


async def test_claims_that_never_serve_move_nobody(virtual_time: MockClock) -> None:
    assert await n_moves(0) == 0
    assert await n_moves(2, is_believing=True) >= 3, "to and fro"
    assert await n_moves(2) == 0


def claim(peer: str, state: str = "online") -> SpanRecord:
    common = {"sequence": 1, "issued_at": 0, "expires_at": 10**9, "certificate": ()}
    return SpanRecord(peer=peer, model=MODEL, start=0, end=4, state=state, **common)  # type: ignore[arg-type]


async def test_who_is_full_for_a_moment_counts_and_who_serves_again_counts_again(virtual_time: MockClock) -> None:
    world = World(2)
    trials, full, other = world.trials("h00"), claim("x0"), claim("h01")
    for _ in range(5):
        assert not await trials.find_serving([full])
        assert trials.select_believed([full, other]) == [full, other], "all of it within a moment"
    for _ in range(REFUSALS - 1):
        await trio.sleep(APART_S)
        await trials.find_serving([full])
    assert trials.select_believed([full, other]) == [other]
    assert trials.select_believed([full]) == [full], "with nobody left the fault may be here"
    world.hostile.remove("x0")
    assert await trials.find_serving([full]) == {("x0", 0)}
    assert trials.select_believed([full, other]) == [full, other]


async def test_who_loads_for_ever_counts_no_more(virtual_time: MockClock) -> None:
    trials, loading, other = World(0).trials("h00"), claim("h02", "joining"), claim("h01")
    assert trials.select_believed([loading, other]) == [loading, other]
    await trio.sleep(JOINING_S + 1)
    assert trials.select_believed([loading, other]) == [other]


async def test_who_may_not_use_the_swarm_learns_nothing_of_others(virtual_time: MockClock) -> None:
    trials, other = World(0).trials("h00"), claim("h01")

    async def refuse(peer: PeerId, request: Any, timeout_s: float) -> None:
        raise Refused(Code.NOT_ALLOWED, "the invite of this member is for: serve; not to use")

    trials._rpc.call = refuse  # type: ignore[method-assign,assignment]
    with suppress(Refused):
        assert await trials.find_serving([other]) == {("h01", 0)}
