"""What it costs a member to know who else is in a large swarm while nobody asks for anything, and how soon it knows.

    python -m benchmarks.members [--members 200 1000] [--minutes 10] [--before | --computed | --troubled]

Real record books, signatures, beats and exchanges; no network, and virtual time: messages arrive at once, and count
with frames, TCP's and IP's headers and acknowledgements (plan.links.traffic), without what encrypts and multiplexes.
Each member announces itself and a span. Told are bytes each way and CPU seconds of a member; then when a newcomer is
known to all, and when one that died is known to nobody. ``--before``: as members did that knew no beats, for a virtual
minute. A record is checked once for all, and its check counted for each (0.44 ms).

``--troubled``: a third of the members change within an hour, all without a word; clocks are up to 30 s wrong;
then the swarm is in two for five minutes. Told is for how long at most a live member was missing somewhere, and how
long it takes until all views are the same. With ``--old`` a tenth know no beats, and clocks are right.

``--computed`` adds up what each of so many sends from the sizes of its digest, beats and records, without the others:
for more than a thousand, whose books are too many to hold.
"""

from __future__ import annotations

import argparse
import heapq
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgspec
import trio
from trio.testing import MockClock

from swarmd.errors import Code, Refused, Unreachable
from swarmd.net.exchange import Exchange
from swarmd.node.members.record_signer import USED, RecordSigner
from swarmd.plan.links.traffic import ack_bytes, wire_bytes
from swarmd.plan.members.buckets import IN_A_BUCKET, BucketDigest
from swarmd.plan.members.pacing import NEWS_S, beat_s, exchange_s, next_exchange_s, rarely_s
from swarmd.plan.members.partners import N_NEIGHBOURS, Suspects, choose_partners
from swarmd.protocol.membership import records
from swarmd.protocol.membership.beats import MAX_SKEW_S, MOST_BEATS, SecretChain
from swarmd.protocol.membership.identity import Identity, certify
from swarmd.protocol.membership.invite import SwarmKeys
from swarmd.protocol.membership.records import VerifiedRecord
from swarmd.protocol.understanding import BEATS, OURS
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import encode_frame
from swarmd.values import PeerId

EPOCH_S, YEAR_S = 1_700_000_000, 31_536_000
FOUNDER = Identity(b"f" * 32)
KEYS = SwarmKeys("bench", FOUNDER.public_key, b"\0" * 32)
CHECK_S = 0.44e-3  # of CPU: two signatures
SETTLE_S = 120.0  # until all know all, and exchanges are quiet
OLD_ANNOUNCE_S, OLD_EXCHANGE_S = 20.0, 2.0  # before beats: there was always news
GIVE_UP_S = 900.0
NAMED_BYTES = 22  # of a record in a bucket that differs: its short name and sequence number
SKEW_S, CHURN, CUT_S, LOOK_S = 30.0, 0.3, 300.0, 2.0
HASH_S = 2e-6  # of CPU, to take a beat


def frame_of(payload: bytes) -> Frame:
    return Frame(b"", memoryview(payload), payload)


class Checks:
    """Checks a record once for all members, each of which gets a life of its own to follow."""

    def __init__(self) -> None:
        self.n = 0
        self._verified: dict[bytes, VerifiedRecord] = {}
        self._check = records.read_untrusted

    def read(self, raw: bytes, issuers: Any, now: float, beats: Any = None) -> VerifiedRecord:
        self.n += 1
        known = self._verified.get(raw)
        if known is None:
            known = self._verified[raw] = self._check(raw, issuers, now, beats or {})
        life = records.life_of(known.record, now)
        if life is not None and (beat := (beats or {}).get(life.chain)):
            life.take_untrusted(beat.number, beat.value, now)
        if life is not None and life.is_due_until + MAX_SKEW_S <= now:
            raise Refused(Code.REFUSED, "expired")
        return VerifiedRecord(known.record, known.membership, raw, life)


@dataclass
class Member:
    """One member's book, and what has passed between it and others."""

    swarm: Swarm
    number: int
    up_bytes: int = 0
    down_bytes: int = 0
    cpu_s: float = 0.0
    interval_s: float = 0.0
    skew_s: float = 0.0
    minor: int = OURS.minor
    met: set[PeerId] = field(default_factory=set)
    suspects: Suspects = field(default_factory=Suspects)
    gone: set[PeerId] = field(default_factory=set)  # did not answer when they were asked last
    standing: Any = field(default_factory=lambda: SimpleNamespace(fault=lambda *_: None))

    def __post_init__(self) -> None:
        identity = Identity((self.number + 1).to_bytes(32, "big"))
        certificate = (certify(FOUNDER, identity.public_key, "member", EPOCH_S + YEAR_S),)
        self.peer = identity.peer_id
        self.exchange = Exchange(KEYS, self.wall_clock)
        self.signer = RecordSigner(identity, certificate, self.exchange, self.wall_clock)

    def wall_clock(self) -> float:
        return EPOCH_S + self.swarm.now_s + self.skew_s

    def describe(self) -> list[dict[str, Any]]:
        addresses = (f"/ip4/203.0.113.{self.number % 250}/tcp/4001",)
        peer = {"kind": "peer", "addresses": addresses, "version": "1.0", "minor": self.minor, "codecs": OURS.codecs}
        trips = {str(n) * 52: 20.0 for n in range(8)}
        span = {"kind": "span", "model": "m" * 64, "start": 0, "end": 8, "state": "online", "round_trip_ms": trips}
        return [peer | {"device": "NVIDIA GeForce RTX 3060", "memory_bytes": 16 << 30, "cores": 8}, span]

    async def announce(self) -> None:
        members = self.exchange.view().peers
        know_beats = all(record.minor >= BEATS for record in members.values())
        announced = self.signer.renew(self.describe(), len(members), know_beats and self.minor >= BEATS)
        receivers = self.swarm.rng.sample(self.swarm.others(self), min(6, len(self.swarm.alive) - 1))
        await self.exchange.push(self, announced.news, [other.peer for other in receivers], beats=announced.beats)  # type: ignore[arg-type]

    async def exchange_once(self) -> None:
        members = self.exchange.view().peers.keys() - {self.peer}
        strangers = self.met - members or {other.peer for other in self.swarm.others(self) if not members}
        self.met |= members
        unasked = self.suspects.list_unasked(self.exchange.book.overdue(self.wall_clock()))
        connected = members - self.gone if len(members) <= N_NEIGHBOURS else set()
        partners = choose_partners(members, connected, strangers, unasked, self.swarm.rng.random())
        other = self.swarm.rng.choice(partners)
        self.suspects.note_asked(other)
        try:
            is_quiet = not await self.exchange.pull(self, other)  # type: ignore[arg-type]
            self.gone.discard(other)
        except Unreachable:
            is_quiet = False
            self.gone.add(other)
        self.interval_s = next_exchange_s(len(self.exchange.view().peers), self.interval_s, is_quiet)

    # what an exchange asks of its connections

    async def call(self, peer: PeerId, request: Any, payload: bytes, *_: Any) -> tuple[Any, Frame]:
        other = self.swarm.require(peer, self)
        self._count(other, request, payload)
        answers: list[tuple[Any, bytes]] = []

        async def answer(reply: Any, reply_payload: bytes) -> None:
            other._count(self, reply, reply_payload)
            answers.append((reply, reply_payload))

        channel = SimpleNamespace(peer=self.peer, answer=answer)
        await other.exchange.answer(channel, request, frame_of(payload))  # type: ignore[arg-type]
        ((reply, reply_payload),) = answers
        return reply, frame_of(reply_payload)

    def find_channel(self, peer: PeerId, purpose: str) -> Any:
        with suppress(Unreachable):
            return self._channel(self.swarm.require(peer, self))
        return None

    async def channel(self, peer: PeerId, purpose: str) -> Any:
        return self._channel(self.swarm.require(peer, self))

    def _channel(self, other: Member) -> Any:

        async def send(message: Any, payload: bytes) -> None:
            self._count(other, message, payload)
            await other.exchange.take(other._channel(self), frame_of(payload))

        return SimpleNamespace(peer=self.peer, send=send)

    def _count(self, other: Member, message: Any, payload: bytes) -> None:
        n_bytes = len(encode_frame(message, payload))
        self.up_bytes += wire_bytes(n_bytes)
        other.down_bytes += wire_bytes(n_bytes)
        other.up_bytes += ack_bytes(n_bytes)
        self.down_bytes += ack_bytes(n_bytes)


class Swarm:
    """All members, and what each does next."""

    def __init__(self, n: int, skew_s: float = 0.0, old_share: float = 0.0) -> None:
        self.rng = random.Random(n)
        self.now_s = 0.0
        self.alive: dict[str, Member] = {}
        self.is_cut = False
        self.n_seen = 0
        self._skew_s = skew_s
        self._old_share = old_share
        self._due: list[tuple[float, int, str, Member]] = []
        for _ in range(n):
            self.add()

    def add(self) -> Member:
        """Have one more, who knows nobody yet."""
        minor = BEATS - 1 if self.rng.random() < self._old_share else OURS.minor
        member = Member(self, self.n_seen, skew_s=self.rng.uniform(-self._skew_s, self._skew_s), minor=minor)
        self.n_seen += 1
        self.alive[member.peer] = member
        self._plan(self.rng.uniform(0, 20), "announce", member)
        self._plan(self.rng.uniform(0, 2), "exchange", member)
        return member

    def others(self, member: Member) -> list[Member]:
        return [other for other in self.alive.values() if other is not member]

    def require(self, peer: str, asking: Member) -> Member:
        other = self.alive.get(peer)
        if other is None or (self.is_cut and other.number % 2 != asking.number % 2):
            raise Unreachable(peer)
        return other

    def _plan(self, in_s: float, what: str, member: Member) -> None:
        heapq.heappush(self._due, (self.now_s + in_s, self.rng.getrandbits(32), what, member))

    async def introduce(self) -> None:
        """Have all know all, as they would after a while."""
        with_beats = all(member.minor >= BEATS for member in self.alive.values())
        announced = [(m, m.signer.renew(m.describe(), len(self.alive), with_beats)) for m in self.alive.values()]
        for member in self.alive.values():
            for _, announcement in announced:
                for raw in announcement.news:
                    member.exchange.merge_untrusted(raw, is_own=True)

    async def run(self, until_s: float) -> None:
        while self._due[0][0] < until_s:
            at, _, what, member = heapq.heappop(self._due)
            trio_clock.jump(at - self.now_s)
            self.now_s = at
            if member.peer not in self.alive:
                continue
            begun = time.process_time()
            if what == "announce":
                await member.announce()
                next_s = member.signer.next_beat_s()
            else:
                await member.exchange_once()
                interval_s = member.interval_s or NEWS_S if member.minor >= BEATS else OLD_EXCHANGE_S
                next_s = interval_s * self.rng.uniform(0.75, 1.25)
            member.cpu_s += time.process_time() - begun
            self._plan(next_s or OLD_ANNOUNCE_S, what, member)
        trio_clock.jump(until_s - self.now_s)
        self.now_s = until_s

    def knowing(self, peer: str) -> int:
        return sum(peer in member.exchange.view().peers for member in self.alive.values())

    async def wait(self, until: Callable[[], bool]) -> float:
        """Seconds until something is so."""
        begun_s = self.now_s
        while not until() and self.now_s < begun_s + GIVE_UP_S:
            await self.run(self.now_s + 1.0)
        return self.now_s - begun_s

    def missing(self) -> set[tuple[str, str]]:
        """Pairs of members that live, of which the first does not know the second."""
        alive = self.alive.keys()
        return {(m.peer, other) for m in self.alive.values() for other in alive - m.exchange.view().peers.keys()}

    def agree(self) -> bool:
        """Do all know exactly those who live?"""
        alive = self.alive.keys()
        return all(member.exchange.view().peers.keys() == alive for member in self.alive.values())


trio_clock = MockClock()
checks = Checks()


async def measure(n: int, with_beats: bool, minutes: float) -> None:
    swarm = Swarm(n, old_share=0.0 if with_beats else 1.0)
    await swarm.introduce()
    await swarm.run(SETTLE_S if with_beats else 40.0)
    members = [*swarm.alive.values()]
    for member in members:
        member.up_bytes = member.down_bytes = 0
        member.cpu_s = 0.0
    begun_s, n_checked = swarm.now_s, checks.n
    await swarm.run(begun_s + 60 * minutes)
    took_s = swarm.now_s - begun_s
    up, down = (8e-3 * sum(getattr(m, f"{way}_bytes") for m in members) / n / took_s for way in ("up", "down"))
    cpu = 100 * sum(m.cpu_s for m in members) / n / took_s
    checked = 100 * CHECK_S * (checks.n - n_checked) / n / took_s
    worst = max(len(swarm.alive) - len(m.exchange.view().peers) for m in members)
    newcomer = swarm.add()
    known_s = await swarm.wait(lambda: swarm.knowing(newcomer.peer) == len(swarm.alive))
    dead = members[0].peer
    del swarm.alive[dead]
    gone_s = await swarm.wait(lambda: not swarm.knowing(dead))
    print(
        f"{n} members, {'beats' if with_beats else 'before'}: {up:.1f} kbit/s up, {down:.1f} down, "
        f"{(up + down) / 8e3 * 86_400 / 1.048576:.0f} MiB a day, {cpu + checked:.2f} % of a core; "
        f"a newcomer is known after {known_s:.0f} s, a death after {gone_s:.0f} s; {worst} lived and were not known",
        flush=True,
    )


async def trouble(n: int, minutes: float, old_share: float) -> None:
    """Churn and wrong clocks, then a swarm in two."""
    swarm = Swarm(n, 0.0 if old_share else SKEW_S, old_share)  # records without beats live for twice that
    await swarm.introduce()
    await swarm.run(SETTLE_S)
    missing_since: dict[tuple[str, str], float] = {}
    joined_at: dict[str, float] = {}
    longest_s, known_s = 0.0, 0.0
    next_change_s = until_s = swarm.now_s
    until_s += 60 * minutes
    while swarm.now_s < until_s:
        await swarm.run(swarm.now_s + LOOK_S)
        if swarm.now_s >= next_change_s:
            next_change_s += 3_600 / (n * CHURN)
            leaver = swarm.rng.choice([*swarm.alive.values()])
            del swarm.alive[leaver.peer]
            joined_at[swarm.add().peer] = swarm.now_s
        missing = swarm.missing()
        for pair in missing_since.keys() - missing:
            since_s = missing_since.pop(pair)
            if since_s <= max(joined_at.get(peer, 0.0) for peer in pair) + LOOK_S:
                known_s = max(known_s, swarm.now_s - since_s)  # one of them had just come
            else:
                longest_s = max(longest_s, swarm.now_s - since_s)
        for pair in missing:
            missing_since.setdefault(pair, swarm.now_s)
    settled_s = await swarm.wait(swarm.agree)
    swarm.is_cut = True
    await swarm.run(swarm.now_s + CUT_S)
    swarm.is_cut = False
    healed_s = await swarm.wait(swarm.agree)
    print(
        f"{n} members, {old_share:.0%} without beats, troubled: a live one was missing for {longest_s:.0f} s at most, "
        f"newcomers for {known_s:.0f}; views are the same {settled_s:.0f} s after the last change, "
        f"and {healed_s:.0f} s after a cut",
        flush=True,
    )


async def compute(n: int) -> None:
    """Add up what one member of so many sends and gets."""
    swarm = Swarm(n)
    first, *others = swarm.alive.values()
    for member in (first, *others):
        for raw in member.signer.renew(member.describe(), n, True).news:
            first.exchange.merge_untrusted(raw, is_own=True)
    book = first.exchange.book
    begun = time.process_time()
    digest = msgspec.msgpack.encode(book.bucket_digest())
    digest_s = time.process_time() - begun
    begun = time.process_time()
    book.compare_buckets(msgspec.msgpack.decode(digest, type=BucketDigest))
    compare_s = time.process_time() - begun
    one = SecretChain("peer", b"s" * 16, 0, 1, 1).beats_at(1)
    beat_bytes = len(msgspec.msgpack.encode(one)) - 1
    raws = [entry.raw for entry in book.entries.values()]
    new_each_s = 1 / (USED * MOST_BEATS * beat_s(n)) + 1 / (2 * rarely_s(n))  # of what is measured half changes
    record_bytes = sum(map(len, raws)) + IN_A_BUCKET * n * NAMED_BYTES
    every_s = exchange_s(n)
    half_beats = n * beat_bytes * every_s / beat_s(n) / 2  # in each of two exchanges, one called and one answered
    messages = [(len(digest), 1 / every_s), (half_beats, 2 / every_s)]
    sent = sum((wire_bytes(int(size)) + ack_bytes(int(size))) * rate for size, rate in messages)
    sent += record_bytes * new_each_s
    cpu = 100 * (2 * (digest_s + compare_s) / every_s + n / beat_s(n) * HASH_S + 2 * n * new_each_s * CHECK_S)
    print(f"{n} members, computed: {8e-3 * sent:.0f} kbit/s each way, {cpu:.2f} % of a core; ", end="")
    print(
        f"beats each {beat_s(n)} s, exchanges each {every_s:.1f} s, a digest of {len(digest) / 1e3:.1f} kB", flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, nargs="+", default=[8, 100, 200, 1_000])
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--before", action="store_true")
    parser.add_argument("--computed", action="store_true")
    parser.add_argument("--troubled", action="store_true")
    parser.add_argument("--old", action="store_true")
    asked = parser.parse_args()
    records.read_untrusted = checks.read
    for n in asked.members:
        if asked.computed:
            trio.run(compute, n, clock=trio_clock)
        elif asked.troubled:
            trio.run(trouble, n, asked.minutes, 0.1 if asked.old else 0.0, clock=trio_clock)
        else:
            trio.run(measure, n, not asked.before, 1.0 if asked.before else asked.minutes, clock=trio_clock)


if __name__ == "__main__":
    main()
