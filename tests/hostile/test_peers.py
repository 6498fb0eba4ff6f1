"""A member that sends nonsense gets a refusal code; the server goes on, and other sessions are unharmed."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import torch
import trio
import trio.testing

from swarmd.client.links.ops import StepInput
from swarmd.client.sessions.session import ChainSession
from swarmd.errors import Code, PeerError, Refused
from swarmd.net.rpc import MAX_CHANNELS
from swarmd.plan.chains.hop import UNUSED_LEASE_S
from swarmd.plan.members.record_book import MAX_RECORDS_OF_A_PEER
from swarmd.protocol.fields import TensorMeta
from swarmd.protocol.membership.catalog import Catalog, sign_catalog
from swarmd.protocol.membership.identity import Identity, certify
from swarmd.protocol.membership.records import ExchangeBody, PeerRecord, SpanRecord, sign
from swarmd.protocol.wire import frames, messages
from swarmd.protocol.wire.messages import CachePart, Edit, HandOver, Op
from swarmd.values import PeerId
from swarmd.wire.tensors import pack
from tests.hostile.kit import Attacker, served
from tests.sim.swarm import EPOCH_S, HIDDEN, Reference, SimSwarm, toy_checkpoint

KEY = b"a" * 16


class Scene:
    def __init__(self, swarm: SimSwarm, server: PeerId, attacker: Attacker, victim: ChainSession) -> None:
        self.swarm, self.server, self.attacker, self.victim = swarm, server, attacker, victim
        self._reference = Reference(4)

    async def victim_is_well(self) -> None:
        hidden = torch.randn(1, 1, HIDDEN, generator=torch.Generator().manual_seed(1))
        for _ in range(3):
            out = await self.victim.step(StepInput(hidden, torch.zeros(1, 1, dtype=torch.int32)))
            torch.testing.assert_close(out, self._reference.step(hidden))
        assert not self.victim.statistics.repairs


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            swarm, server = await served(nursery, 2)
            attacker = Attacker(swarm)
            await attacker.start(nursery)
            client = await swarm.client()
            victim = await client.open_session(swarm.terms(1000))
            stage = Scene(swarm, server, attacker, victim)
            await stage.victim_is_well()
            yield stage
            await stage.victim_is_well()
            nursery.cancel_scope.cancel()


def op(n_tokens: int = 1, hidden: int = HIDDEN, fill: float = 0.5, **changes: object) -> tuple[Op, bytes]:
    tensor = torch.full((1, n_tokens, hidden), fill)
    meta, payload = pack(tensor, torch.zeros(1, n_tokens, dtype=torch.int32), None)
    fields = {"session": KEY, "epoch": 1, "seq": 1, "tensor": meta, **changes}
    return Op(**fields), payload  # type: ignore[arg-type]


async def test_ops_without_session_or_by_strangers_are_refused(virtual_time: trio.testing.MockClock) -> None:
    async with scene() as s:
        assert await s.attacker.codes_for(s.server, *op()) == [Code.NO_SESSION]
        stolen, payload = op(session=s.victim.key, seq=4)
        assert await s.attacker.codes_for(s.server, stolen, payload) == [Code.STRANGER]
        with pytest.raises(Refused) as caught:
            await s.attacker.open(s.server, session=s.victim.key)
        assert caught.value.code is Code.STRANGER
        close = messages.CloseSession(session=s.victim.key)
        assert await s.attacker.codes_for(s.server, close) == [Code.STRANGER]


async def test_nobody_has_ops_of_others_void(virtual_time: trio.testing.MockClock) -> None:
    async with scene() as s:  # whose victim goes on after it, and gets every token
        void = messages.Void(session=s.victim.key, epoch=1, first=4, last=9)
        assert await s.attacker.codes_for(s.server, void) == [Code.STRANGER]
        assert await s.attacker.codes_for(s.server, messages.Void(session=KEY, epoch=1, first=1, last=1)) == [
            Code.NO_SESSION
        ]


async def test_what_builds_upon_void_ops_is_refused(virtual_time: trio.testing.MockClock) -> None:
    async with scene() as s:
        await s.attacker.open(s.server, session=KEY)
        floods = [messages.Void(session=KEY, epoch=1, first=1, last=last) for last in (1, 1, 3, 10**6)]
        for flood in floods:  # the first counts, and the third
            assert await s.attacker.codes_for(s.server, flood) == []
        assert await s.attacker.codes_for(s.server, *op(seq=1)) == []
        assert await s.attacker.codes_for(s.server, *op(seq=2)) == [Code.BAD_SHAPE]


async def test_an_op_before_the_first_ends_no_worker(virtual_time: trio.testing.MockClock) -> None:
    async with scene() as s:  # what was resent of it was no message: the worker ended, and all sessions on it
        await s.attacker.open(s.server, session=KEY)
        assert await s.attacker.codes_for(s.server, *op(seq=0)) == [Code.MALFORMED]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"seq": 3}, Code.OP_GAP),
        ({"epoch": 0}, Code.STALE_EPOCH),
        ({"epoch": 9}, Code.STALE_EPOCH),
        ({"needs": ("telepathy",)}, Code.UNSUPPORTED),
        ({"hidden": 7}, Code.BAD_SHAPE),
        ({"fill": float("nan")}, Code.NOT_FINITE),
        ({"fill": float("inf")}, Code.NOT_FINITE),
        ({"n_tokens": 65}, Code.TOO_LONG),
        ({"tensor": None, "absent": 65}, Code.TOO_LONG),
        ({"edits": (Edit(crop=5),)}, Code.BAD_SHAPE),
        ({"edits": (Edit(rows=(0, 3)),)}, Code.BAD_SHAPE),
        ({"base": (1, 3), "silent_through": 9}, Code.OP_GAP),
        ({"tensor": TensorMeta(1, 2, HIDDEN)}, Code.MALFORMED),
        ({"tensor": TensorMeta(1, 1, HIDDEN, "float8")}, Code.BAD_SHAPE),
    ],
    ids=str,
)
async def test_bad_ops_get_their_code(
    virtual_time: trio.testing.MockClock, changes: dict[str, object], code: Code
) -> None:
    async with scene() as s:
        await s.attacker.open(s.server)
        assert await s.attacker.codes_for(s.server, *op(**changes)) == [code]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"model": "f" * 64}, Code.NOT_SERVING),
        ({"end": 9}, Code.NOT_SERVING),
        ({"start": 2, "end": 2}, Code.NOT_SERVING),
        ({"dtype": "float16"}, Code.UNSUPPORTED),
        ({"needs": ("telepathy",)}, Code.UNSUPPORTED),
        ({"numerics": "other"}, Code.NUMERICS_DIFFER),
        ({"successor": "0"}, Code.MALFORMED),
        ({"predecessor": "not a peer id"}, Code.MALFORMED),
        ({"max_tokens": 2_000_000}, Code.TOO_LONG),
    ],
    ids=str,
)
async def test_bad_openings_get_their_code(
    virtual_time: trio.testing.MockClock, changes: dict[str, object], code: Code
) -> None:
    async with scene() as s:
        with pytest.raises(Refused) as caught:
            await s.attacker.open(s.server, **changes)
        assert caught.value.code is code


async def test_nobody_reserves_more_than_a_share(virtual_time: trio.testing.MockClock) -> None:
    async with scene() as s:
        await s.attacker.open(s.server, max_tokens=450_000)
        with pytest.raises(Refused, match="holds 450000 of at most 500000") as caught:
            await s.attacker.open(s.server, session=b"b" * 16, max_tokens=100_000)
        assert caught.value.retry_after_s


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 64,
        b"\1\0\0\5\xff\xff\xff\xff",
        frames.encode(b"no header at all"),
        frames.encode(messages.encode(Op())[:-3]),
        frames.encode(messages.encode(messages.Records()), b"not records"),
        frames.encode(messages.encode(messages.Records()), b"\x81\xa1x" + b"\x91" * 20_000),
        frames.encode(messages.encode(messages.ExchangeDigest(id=1)), b"\x91" * 20_000),
        frames.encode(messages.encode(messages.ExchangeDigest(id=1)), bytes(5 << 20)),
    ],
    ids=["random", "absurd length", "no header", "half a header", "bad records", "deep", "deep digest", "big digest"],
)
async def test_garbage_ends_that_channel_only(virtual_time: trio.testing.MockClock, data: bytes) -> None:
    async with scene() as s:
        channel = await s.attacker.rpc.channel(s.server)
        await channel.stream.send(data)
        await trio.sleep(1)
        assert not channel.is_open
        daemon = s.swarm.daemons[s.server][0]
        assert daemon.rpc.standing.count(s.attacker.identity.peer_id) == 1


async def test_half_a_frame_and_silence_holds_nobody_up(virtual_time: trio.testing.MockClock) -> None:
    async with scene() as s:
        channel = await s.attacker.rpc.channel(s.server)
        await channel.stream.send(frames.encode(messages.encode(Op()), bytes(1000))[:200])
        await trio.sleep(1)


async def test_strangers_do_not_get_in(virtual_time: trio.testing.MockClock) -> None:
    async with scene() as s:
        foreign = Identity(b"\7" * 32)
        for certificate in [(certify(foreign, foreign.public_key, "member", EPOCH_S * 2),), (), (b"junk",)]:
            outsider = Attacker(s.swarm, certificate)
            s.swarm._nursery.start_soon(outsider.network.run)
            await s.swarm._nursery.start(outsider.rpc.run)
            with pytest.raises(PeerError):
                await outsider.open(s.server)


async def test_a_peer_that_answers_a_dial_with_another_ones_certificate_is_a_peer_error(
    virtual_time: trio.testing.MockClock,
) -> None:
    async with scene() as s:
        daemon = s.swarm.daemons[s.server][0]
        s.attacker.certificate = daemon.hello().certificate
        for channel in s.attacker.rpc._channels.of(s.server):
            if channel.purpose == "interactive":
                await channel.close()
        await trio.sleep(1)
        with pytest.raises(PeerError, match="was issued to"):
            await daemon.rpc.channel(s.attacker.identity.peer_id, "bulk")
        assert daemon.rpc.standing.count(s.attacker.identity.peer_id) == 1


async def test_one_peer_opens_few_channels_and_announces_few_records(virtual_time: trio.testing.MockClock) -> None:
    async with scene() as s:
        channels = []
        for _ in range(MAX_CHANNELS):
            channels.append(await s.attacker.rpc._open_channel(s.server, "bulk"))
        with pytest.raises(PeerError):
            channels.append(await s.attacker.rpc._open_channel(s.server, "bulk"))
        now = int(s.swarm.wall_clock())
        common = {"peer": s.attacker.identity.peer_id, "sequence": 1, "issued_at": now, "expires_at": now + 60}
        spans = [
            SpanRecord(**common, certificate=s.attacker.certificate, model=f"{i:064}", start=0, end=1)  # type: ignore[arg-type]
            for i in range(MAX_RECORDS_OF_A_PEER + 10)
        ]
        body = msgspec.msgpack.encode(ExchangeBody(envelopes=[sign(r, s.attacker.identity) for r in spans]))
        await channels[0].send(messages.Records(), body)
        await trio.sleep(1)
        book = s.swarm.daemons[s.server][0].exchange.book
        assert sum(k.startswith(s.attacker.identity.peer_id) for k in book.entries) == MAX_RECORDS_OF_A_PEER


async def test_a_revoked_member_is_turned_out(virtual_time: trio.testing.MockClock) -> None:
    async with scene() as s:
        await s.attacker.open(s.server)
        catalog = Catalog(
            version=2, models={"toy": (toy_checkpoint(4)[1], 4)}, revoked=(s.attacker.identity.public_key,)
        )
        daemon = s.swarm.daemons[s.server][0]
        daemon.exchange.merge_catalog_untrusted(sign_catalog(catalog, s.swarm._founder))
        await trio.sleep(1)
        assert daemon.rpc.find_channel(s.attacker.identity.peer_id) is None
        with pytest.raises(PeerError):
            await s.attacker.open(s.server)


async def test_records_of_others_cannot_be_forged(virtual_time: trio.testing.MockClock) -> None:
    async with scene() as s:
        now = int(s.swarm.wall_clock())
        lie = PeerRecord(
            peer=s.server, sequence=2**50, issued_at=now, expires_at=now + 60, certificate=s.attacker.certificate
        )
        body = msgspec.msgpack.encode(ExchangeBody(envelopes=[sign(lie, s.attacker.identity)]))
        channel = await s.attacker.rpc.channel(s.server)
        await channel.send(messages.Records(), body)
        await trio.sleep(1)
        daemon = s.swarm.daemons[s.server][0]
        assert daemon.directory.view().peers[s.server].sequence < 2**50
        assert daemon.rpc.standing.count(s.attacker.identity.peer_id) == 1


async def test_caches_from_a_stranger_or_for_no_heir_are_refused(virtual_time: trio.testing.MockClock) -> None:
    async with scene() as s:
        part = CachePart(session=s.victim.key, start=0, epoch=1, digest=b"\0" * 32)
        assert await s.attacker.codes_for(s.server, part, b"junk") == [Code.STRANGER]
        await s.attacker.open(s.server)
        mine = msgspec.structs.replace(part, session=KEY)
        assert await s.attacker.codes_for(s.server, mine, b"junk") == [Code.STRANGER]


async def test_caches_that_are_not_what_was_announced_cost_their_own_session_only(
    virtual_time: trio.testing.MockClock,
) -> None:
    async with scene() as s:
        part = CachePart(session=KEY, start=0, epoch=1, digest=b"\0" * 32)
        for payload in (b"junk", b""):
            await s.attacker.open(s.server, inherit=s.attacker.identity.peer_id)
            assert await s.attacker.codes_for(s.server, part, payload) == [Code.SESSION_LOST]
        await s.attacker.open(s.server, inherit=s.attacker.identity.peer_id)
        late = msgspec.structs.replace(part, part=3, n_parts=9)
        assert await s.attacker.codes_for(s.server, late, b"junk") == [Code.SESSION_LOST]


async def test_only_its_client_can_have_a_session_handed_over(virtual_time: trio.testing.MockClock) -> None:
    async with scene() as s:
        request = HandOver(id=7, session=s.victim.key, start=0, epoch=2, to=s.attacker.identity.peer_id)
        assert await s.attacker.codes_for(s.server, request) == [Code.STRANGER]


async def test_an_unknown_codec_is_refused(virtual_time: trio.testing.MockClock) -> None:
    async with scene() as s:
        with pytest.raises(Refused, match="knows the codecs raw"):
            await s.attacker.open(s.server, codec="zip")


async def test_a_reservation_that_is_not_used_expires(virtual_time: trio.testing.MockClock) -> None:
    async with scene() as s:
        (hosting,) = s.swarm.daemons[s.server][0].hosts
        ledger = hosting.server.ledger  # type: ignore[union-attr]
        before = ledger.free_tokens
        await s.attacker.open(s.server, max_tokens=5_000)
        assert ledger.free_tokens == before - 5_000
        await trio.sleep(UNUSED_LEASE_S + 1)
        assert ledger.free_tokens == before


@pytest.mark.parametrize("receipts", [False, True])
async def test_what_nobody_signs_for_is_counted_all_the_same(
    virtual_time: trio.testing.MockClock, receipts: bool, tmp_path: Path
) -> None:
    async with scene() as s:
        daemon = s.swarm.daemons[s.server][0]
        daemon.books._database.file = tmp_path / "books.db"
        await s.attacker.open(s.server, receipts=receipts)
        await s.attacker.codes_for(s.server, *op(n_tokens=5))
        await s.attacker.send(s.server, messages.CloseSession(session=KEY))
        daemon.books.save()
        assert daemon.books.served()[s.attacker.identity.public_key] == 5 * 4, "tokens times blocks"
        daemon.books._database.file = None
