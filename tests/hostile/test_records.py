"""A member that announces what cannot be, or far too much: nobody else is crowded out, and nobody believes it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock

from swarmd.config import Serve
from swarmd.errors import Forged, IntegrityError, Refused
from swarmd.net import exchange as exchanges
from swarmd.net.exchange import Exchange
from swarmd.net.rpc import Channel
from swarmd.node.serving.trials import Trials
from swarmd.plan.chains.placement import Own
from swarmd.plan.members import record_book
from swarmd.plan.members.record_book import MAX_PEERS_OF_A_VOUCHER, MAX_RECORDS_OF_A_VOUCHER
from swarmd.protocol.membership import records
from swarmd.protocol.membership.beats import ChainBeat, SecretChain
from swarmd.protocol.membership.identity import Identity, certify
from swarmd.protocol.membership.invite import SwarmKeys
from swarmd.protocol.membership.records import (
    MAX_LIFETIME_S,
    AnyRecord,
    Envelope,
    ExchangeBody,
    PeerRecord,
    RunRecord,
    SpanRecord,
    read_untrusted,
)
from swarmd.protocol.understanding import OURS
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage, ExchangeDigest, ExchangeReply, Records
from swarmd.values import Span
from tests.hostile.kit import Attacker, Invite, record_of, served
from tests.sim.swarm import EPOCH_S, SimSwarm

FOUNDER = Identity(b"f" * 32)
KEYS = SwarmKeys("sim", FOUNDER.public_key, b"\0" * 32)


def some_exchange() -> Exchange:
    return Exchange(KEYS, lambda: EPOCH_S)


def direct(number: int) -> tuple[Identity, tuple[bytes, ...]]:
    """A member that the founder brought in itself."""
    identity = Identity(number.to_bytes(32, "big"))
    return identity, (certify(FOUNDER, identity.public_key, "member", EPOCH_S + 10**6),)


@pytest.mark.parametrize(
    ("fields", "error", "said"),
    [
        ({"expires_at": EPOCH_S - 1}, IntegrityError, "before it begins"),
        ({"issued_at": 32_503_680_000, "expires_at": 32_503_680_060}, Refused, "from the future"),
        ({"issued_at": EPOCH_S + 600, "expires_at": EPOCH_S + 660}, Refused, "from the future"),
    ],
)
def test_records_of_impossible_times_are_refused_by_name(
    fields: dict[str, Any], error: type[Exception], said: str
) -> None:
    invite = Invite(FOUNDER, until=EPOCH_S + 1_000)
    raw = record_of(*invite.member(), EPOCH_S, **fields)
    with pytest.raises(error, match=said):
        read_untrusted(raw, FOUNDER.public_key, EPOCH_S)
    read_untrusted(record_of(*invite.member(), EPOCH_S), FOUNDER.public_key, EPOCH_S)


async def test_a_record_that_outlives_its_certificate_does_not_count(virtual_time: MockClock) -> None:
    exchange = some_exchange()
    assert not exchange.merge_untrusted(record_of(*Invite(FOUNDER, until=EPOCH_S + 30).member(), EPOCH_S))
    assert exchange.merge_untrusted(record_of(*Invite(FOUNDER, until=EPOCH_S + 90).member(), EPOCH_S))


def test_who_is_certified_for_a_while_announces_no_longer() -> None:
    _, certificate = Invite(FOUNDER, until=EPOCH_S + 6).member()
    until = some_exchange().roster.pass_of(certificate).ends_at
    assert records.expiry_of(EPOCH_S, until) == EPOCH_S + 6
    assert records.expiry_of(EPOCH_S, EPOCH_S + 10**6) == EPOCH_S + records.RECORD_LIFETIME_S


@pytest.mark.parametrize("kind", ["members", "clients", "records"])
async def test_one_invite_cannot_crowd_out_others(kind: str, virtual_time: MockClock) -> None:
    """However many identities or records come of it, there is room for others; and asking is cheap."""
    invite, exchange = Invite(FOUNDER), some_exchange()
    member = invite.member()
    n_taken = 0
    for number in range(2 * MAX_RECORDS_OF_A_VOUCHER):
        more: dict[str, Any] = {}
        sort: type[AnyRecord] = PeerRecord
        if kind == "members":
            who = invite.member()
        elif kind == "clients":
            who, sort, more = invite.client_of(*member), RunRecord, {"run": "r" * 64}
        else:
            if number % record_book.MAX_RECORDS_OF_A_PEER == 0:
                member = invite.member()
            who, sort, more = member, RunRecord, {"run": f"{number:064}"}
        n_taken += exchange.merge_untrusted(record_of(*who, EPOCH_S, sort, **more))
    assert n_taken <= MAX_RECORDS_OF_A_VOUCHER
    assert len({e.record.peer for e in exchange.book.entries.values()}) <= MAX_PEERS_OF_A_VOUCHER
    assert exchange.merge_untrusted(record_of(*direct(1), EPOCH_S))
    assert exchange.merge_untrusted(record_of(*Invite(FOUNDER, b"j" * 32).member(), EPOCH_S))


async def test_what_is_not_wanted_is_not_checked(monkeypatch: pytest.MonkeyPatch, virtual_time: MockClock) -> None:
    """A signature costs as much as a hundred refusals."""
    invite, exchange = Invite(FOUNDER), some_exchange()
    for _ in range(MAX_PEERS_OF_A_VOUCHER):
        assert exchange.merge_untrusted(record_of(*invite.member(), EPOCH_S))
    n_checked = 0

    def count(*arguments: Any) -> Any:
        nonlocal n_checked
        n_checked += 1
        return read_untrusted(*arguments)

    monkeypatch.setattr(records, "read_untrusted", count)
    for _ in range(500):
        assert not exchange.merge_untrusted(record_of(*invite.member(), EPOCH_S))
    known = record_of(*direct(1), EPOCH_S)
    for _ in range(500):
        exchange.merge_untrusted(known)
    newer = [record_of(*direct(1), EPOCH_S, sequence=2**50 + i) for i in range(500)]
    assert not any(exchange.merge_untrusted(raw) for raw in newer), "news of one key every 0.1 s is enough"
    assert n_checked == 1


def test_an_expired_record_gives_back_its_place() -> None:
    invite, book = Invite(FOUNDER), record_book.RecordBook()
    for second in range(3):
        taken = [
            book.add(read_untrusted(record_of(*invite.member(), EPOCH_S + second), KEYS.founder_key, EPOCH_S))
            for _ in range(50)
        ]
        assert all(t.action for t in taken) == (second < 2)
    book.expire(EPOCH_S + 61)
    book.expire(EPOCH_S + 1_000)
    assert not book.entries
    assert not book._n_of_peer
    assert not book._n_of_voucher
    assert not book._peers_of_voucher


def test_a_full_book_lets_go_of_a_crowd_and_of_nobody_that_was_talked_with(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_book, "MAX_RECORDS", 50)
    book, crowd = record_book.RecordBook(), Invite(FOUNDER)

    def taken(who: tuple[Identity, tuple[bytes, ...]]) -> bool:
        return book.add(read_untrusted(record_of(*who, EPOCH_S), KEYS.founder_key, EPOCH_S)).action

    members = [crowd.member() for _ in range(40)]
    book.talked_with = {identity.peer_id for identity, _ in members[-5:]}
    assert all(taken(who) for who in members)
    newcomers = [direct(number) for number in range(40)]
    assert all(taken(who) for who in newcomers)
    present = {e.record.peer for e in book.entries.values()}
    assert book.talked_with <= present
    assert {identity.peer_id for identity, _ in newcomers} <= present
    assert not taken(crowd.member())


async def test_a_frame_full_of_records_lets_others_work(virtual_time: MockClock) -> None:
    exchange, n_turns = some_exchange(), 0
    raws = [record_of(*Invite(FOUNDER, bytes([n]) * 32).member(), EPOCH_S) for n in range(160)]
    done = False

    async def work() -> None:
        nonlocal n_turns
        while not done:
            n_turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(work)
        await exchange.merge_body_untrusted(memoryview(msgspec.msgpack.encode(ExchangeBody(envelopes=raws))))
        done = True
    assert len(exchange.book.entries) == len(raws)
    assert n_turns >= len(raws) // exchanges.N_AT_ONCE - 1


@pytest.mark.parametrize("is_believed", [False, True])
async def test_a_claim_alone_moves_no_server(
    virtual_time: MockClock, monkeypatch: pytest.MonkeyPatch, is_believed: bool
) -> None:
    """Somebody says that it holds all blocks, faster than anything, and cannot be reached; believed, it moves one."""
    if is_believed:

        async def believe(trials: Trials, spans: list[SpanRecord]) -> set[Own]:
            return {(s.peer, s.slot) for s in spans}

        monkeypatch.setattr(Trials, "find_serving", believe)
    with trio.fail_after(3_000):
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery, 6, seed=8)
            honest = await swarm.add(Span(0, 6), is_fixed=False, hosted=(Serve("toy", max_blocks=3),))
            daemon = swarm.daemons[honest][0]
            while not any(h.is_online for h in daemon.hosts):
                await trio.sleep(1)

            def held() -> set[tuple[int, int]]:
                return {(s.start, s.end) for s in daemon.directory.view().spans if s.peer == honest}

            before = held()
            attacker = Attacker(swarm)
            await attacker.start(nursery)
            fields = {"model": swarm.model, "state": "online", "decode_tokens_per_s": 1e15}
            for number in range(1, 60):
                with trio.move_on_after(20):
                    claims = [
                        attacker.says(SpanRecord, **fields, start=0, end=3, sequence=number),
                        attacker.says(SpanRecord, **fields, start=0, end=1_024, slot=1, sequence=number),
                        attacker.says(addresses=("/ip4/192.0.2.1/tcp/1",), sequence=number),
                    ]
                    for raw in claims:
                        daemon.exchange.merge_untrusted(raw)
                    if number == 1:
                        swarm.world.crash(attacker.identity.peer_id)
                    await trio.sleep_forever()
            assert all(s.end <= 6 for s in daemon.directory.view().spans), "more blocks than the model has"
            assert (held() == before) == (not is_believed)
            nursery.cancel_scope.cancel()


def test_whoever_came_by_one_invite_has_one_sponsor_until_the_founder_enters_it() -> None:
    exchange, leaked = some_exchange(), Invite(FOUNDER)
    members = [leaked.member() for _ in range(3)]
    clients = [leaked.client_of(*members[0]) for _ in range(3)]
    sponsors = {exchange.roster.sponsor_of(exchange.roster.check(i.peer_id, c)) for i, c in (*members, *clients)}
    assert sponsors == {leaked.key.public_key}
    own, certificate = direct(1)
    assert exchange.roster.sponsor_of(exchange.roster.check(own.peer_id, certificate)) == own.public_key


def of_chain(**fields: Any) -> tuple[bytes, SecretChain]:
    """A member's record with a chain of beats, and the chain."""
    identity, certificate = direct(7)
    chain = SecretChain(identity.peer_id, b"s" * 16, EPOCH_S, 20, 100)
    common = {"chain": chain.end, "begun_at": EPOCH_S, "beat_s": 20, "expires_at": EPOCH_S + 2_000}
    return record_of(identity, certificate, EPOCH_S, **(common | fields)), chain


@pytest.mark.parametrize(
    "fields",
    [
        {"chain": b"short"},
        {"beat_s": 0},
        {"begun_at": EPOCH_S + 1},
        {"beat_s": 10_000},
        {"expires_at": EPOCH_S + 10**6},
    ],
    ids=str,
)
def test_chains_that_cannot_be_are_forged_or_of_a_later_version(fields: dict[str, Any]) -> None:
    raw, _ = of_chain(**fields)
    with pytest.raises((IntegrityError, Refused)):
        read_untrusted(raw, FOUNDER.public_key, EPOCH_S)
    read_untrusted(of_chain()[0], FOUNDER.public_key, EPOCH_S)


async def test_a_beat_that_was_made_up_is_its_senders_fault(virtual_time: MockClock) -> None:
    exchange = some_exchange()
    raw, chain = of_chain()
    body = ExchangeBody(envelopes=[raw], beats=[ChainBeat(chain.name, 5, b"x" * 16)])
    with pytest.raises(Forged):
        await exchange.merge_body_untrusted(memoryview(msgspec.msgpack.encode(body)))
    assert not exchange.book.entries
    assert exchange.merge_untrusted(raw)
    body = msgspec.structs.replace(body, envelopes=[])
    with pytest.raises(Forged):
        await exchange.merge_body_untrusted(memoryview(msgspec.msgpack.encode(body)))
    assert len(exchange.book.entries) == 1


async def test_who_repeats_anothers_beats_proves_nothing_of_itself(virtual_time: MockClock) -> None:
    """A chain belongs to one peer: the same end in another one's record is another chain, which has no beats."""
    raw, chain = of_chain()
    identity, certificate = direct(8)
    common = {"chain": chain.end, "begun_at": EPOCH_S, "beat_s": 20, "expires_at": EPOCH_S + 2_000}
    copied = record_of(identity, certificate, EPOCH_S, **common)
    exchange = some_exchange()
    assert exchange.merge_untrusted(raw)
    assert exchange.merge_untrusted(copied)
    (beat,) = chain.beats_at(EPOCH_S + 100)
    assert exchange.book.take_beats_untrusted([beat], EPOCH_S + 100) == 1
    exchange.book.expire(EPOCH_S + 110)
    assert {entry.raw for entry in exchange.book.entries.values()} == {raw}


async def test_an_answer_about_buckets_that_are_not_there_is_its_senders_fault(virtual_time: MockClock) -> None:
    async with trio.open_nursery() as nursery:
        swarm, server = await served(nursery, 3)
        attacker = Attacker(swarm)
        n_asked = 0

        async def handle(channel: Channel, message: AnyMessage, frame: Frame) -> bool:
            nonlocal n_asked
            if isinstance(message, ExchangeDigest):
                n_asked += 1
                body = msgspec.msgpack.encode(ExchangeBody(buckets=[4_096]))
                await channel.answer(ExchangeReply(re=message.id), body)
            return True

        attacker.handle = handle  # type: ignore[method-assign]
        await attacker.start(nursery)
        announced = attacker.says(minor=OURS.minor, addresses=attacker.network.addresses())
        await attacker.announce(server, [announced])
        await trio.sleep(60)
        assert n_asked > 0
        assert [*swarm.daemons[server][0].rpc.standing.rows()] == [attacker.identity.peer_id]
        nursery.cancel_scope.cancel()


async def test_an_older_client_is_told_of_all_and_pushed_nothing_that_it_takes_for_forged(
    virtual_time: MockClock,
) -> None:
    async with trio.open_nursery() as nursery:
        swarm, server = await served(nursery, 3)
        client = Attacker(swarm)  # an honest one of a version that knows no beats
        pushed: list[bytes] = []

        async def handle(channel: Channel, message: AnyMessage, frame: Frame) -> bool:
            if isinstance(message, Records):
                pushed.extend(msgspec.msgpack.decode(frame.payload, type=ExchangeBody).envelopes)
            return True

        client.handle = handle  # type: ignore[method-assign]
        await client.start(nursery)
        request = ExchangeDigest(is_short=True)
        _, frame = await client.rpc.call(server, request, msgspec.msgpack.encode({}), 5.0, "bulk")
        told = msgspec.msgpack.decode(frame.payload, type=ExchangeBody).envelopes
        swarm.daemons[server][0].directory._signer._generation = None  # it signs all anew
        swarm.daemons[server][0].directory.announce_soon()
        await trio.sleep(5)
        assert len(told) == len(pushed) == 2
        for raw in (*told, *pushed):
            envelope = msgspec.msgpack.decode(raw, type=Envelope)
            times = msgspec.msgpack.decode(envelope.body)
            assert times["expires_at"] - times["issued_at"] <= MAX_LIFETIME_S
        nursery.cancel_scope.cancel()
