"""Records between peers: how their views of the swarm become equal.

Each side of an exchange sends what the other lacks, so any one reply can reveal the whole swarm. Used by daemons
(which also announce) and by clients (which only listen). What arrives is verified here and nowhere else.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

import msgspec
import trio

from swarmd.errors import Forged, IntegrityError, PeerError, Refused, RemoteProtocolError
from swarmd.net.interfaces import own_networks
from swarmd.net.roster import MAX_REMEMBERED_MEMBERS, Roster
from swarmd.net.rpc import Channel, Rpc
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.members.buckets import BucketDigest
from swarmd.plan.members.record_book import MAX_RECORDS, Naming, RecordBook, short_name
from swarmd.plan.owner.clock import MemberClocks, describe_wrong_clock
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.fields import Count, Text
from swarmd.protocol.membership import records
from swarmd.protocol.membership.beats import ChainBeat
from swarmd.protocol.membership.catalog import MAX_AHEAD_S, Right, read_catalog_untrusted
from swarmd.protocol.membership.identity import Membership, read_links_untrusted
from swarmd.protocol.membership.invite import SwarmKeys
from swarmd.protocol.membership.records import ExchangeBody, PeerRecord
from swarmd.protocol.understanding import BEATS, CHARTERS, MINOR, SHORT_DIGESTS
from swarmd.protocol.untrusted import decode
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import ExchangeDigest, ExchangeReply, Hello, Records
from swarmd.values import PeerId, format_moment

logger = logging.getLogger(__name__)

EXCHANGE_TIMEOUT_S = 8.0  # a digest of 20,000 records on a slow link
PUSH_TIMEOUT_S = 2.0  # to one peer: the others wait for it
N_AT_ONCE = 16  # records to check before others work: 5 ms of signatures
BEATS_AT_ONCE = 64  # to check before others work: 7 ms of hashes, where somebody sends the last beat of each chain
STALL_S = 30.0  # in which this process has looked at nothing: it was stopped, or asleep, or its clock was set
LEAST_INTERVAL_S = 0.1  # between two records of one key: news waits half of it longer than it would
MAX_DIGEST_BYTES = 4 * 2**20  # 20,000 records of about 100 bytes, twice
Digest = dict[Text, Count]


class Exchange:
    """One process's record book, and the messages that keep it up to date."""

    def __init__(self, keys: SwarmKeys, wall_clock: Callable[[], float], minor: int = MINOR) -> None:
        self.book = RecordBook()
        self._minor = minor
        self.keys = keys
        self.roster = Roster(keys, wall_clock)
        self._catalog_news = trio.Event()
        self._record_news = trio.Event()
        self._wall_clock = wall_clock
        self.book.talked_with = self.roster.met
        self._clocks = MemberClocks()
        self._view: SwarmView | None = None
        self._looked_at = wall_clock()
        self._merging = trio.Lock()
        self._taken_at: dict[str, float] = {}
        self._told_charters: dict[PeerId, int] = {}

    def view(self) -> SwarmView:
        """The current picture; made anew only after something changed."""
        if self.book.expire(self.now()) or self._view is None:
            rights_of = self._rights_of if self.roster.admission.are_limited else None
            self._view = self.book.view(own_networks, rights_of)
        return self._view

    def _rights_of(self, membership: Membership) -> tuple[Right, ...]:
        admission_pass = self.roster.find_pass(membership)
        return () if admission_pass is None else admission_pass.may

    def _end_of(self, membership: Membership) -> float:
        admission_pass = self.roster.find_pass(membership)
        return -math.inf if admission_pass is None else admission_pass.ends_at

    def now(self) -> float:
        """Unix seconds. Nobody is blamed for a silence that was this process's own: it would believe itself alone."""
        now = self._wall_clock()
        stalled_s = now - self._looked_at
        self._looked_at = now
        if abs(stalled_s) > STALL_S:
            logger.info("this process heard nothing for %.0f s, and goes on from what it knew", stalled_s)
            self.book.excuse_silence(stalled_s)
        return now

    def admit(self, peer: PeerId, hello: Hello) -> None:
        """Let in the peer at the other end of a stream, if it is a member. Raises Refused or IntegrityError."""
        self._note_clock(peer, hello.now)  # first: with a wrong clock here, no certificate may count
        self.roster.admit(peer, hello)

    def clocks_s(self) -> list[float]:
        """How far other members' clocks were ahead of this machine's within the last minute."""
        return self._clocks.fresh_s(trio.current_time())

    def describe_wrong_clock(self) -> str:
        """Say that this machine's clock may be wrong, if others' say so: nothing counts then. Else ""."""
        return describe_wrong_clock(self.now(), self.clocks_s())

    def _note_clock(self, peer: PeerId, peer_time: int, took_s: float = 0.0) -> None:
        """Note what a peer's clock said in an answer that took so long; 0 is nothing."""
        if peer_time:
            ahead_s = peer_time - (self.now() - took_s / 2)
            self._clocks.note(peer, ahead_s, trio.current_time())

    def merge_untrusted(
        self, raw: bytes, is_own: bool = False, beats: Mapping[bytes, ChainBeat] = MappingProxyType({})
    ) -> bool:
        """Take one record if it counts. Raises IntegrityError for a forged one; returns whether it was news.

        ``beats`` came with it, by their chains. What would not be taken in any case is not checked: signatures cost a
        hundred times as much.
        """
        # Cheap questions come first: a peer that repeats old records, or sends one key's again and again, makes this
        # side do little. What the claim says is believed only to turn it down: before a record is taken, its bytes
        # are verified.
        claim = records.read_claim(raw)
        now = trio.current_time()
        if not is_own and now - self._taken_at.get(claim.key, -math.inf) < LEAST_INTERVAL_S:
            return False
        vouchers = tuple(link.key for link in read_links_untrusted(claim.certificate)[:-1])
        decision = self.book.wants(claim.key, claim.sequence, claim.peer, vouchers)
        if not decision.action:
            logger.debug("no record of %s: %s", claim.peer, decision.reason)
            return False
        try:
            verified = records.read_untrusted(raw, self.roster.admission.founders.ever, self.now(), beats)
            membership_ends_at = self.roster.require_pass(verified.membership).ends_at
        except Refused:
            return False
        if verified.record.expires_at > membership_ends_at:
            return False  # it outlives its certificate
        is_news = self.book.add(verified).action
        self.roster.note_record(PeerId(claim.peer), verified.membership)
        if is_news:
            self._view = None
            self._note_taken(verified.key, now)
        return is_news

    def _note_taken(self, key: str, now: float) -> None:
        if len(self._taken_at) >= MAX_RECORDS:
            recent = {k: taken_at for k, taken_at in self._taken_at.items() if now - taken_at < LEAST_INTERVAL_S}
            self._taken_at = recent
        self._taken_at[key] = now

    def merge_catalog_untrusted(self, raw: bytes) -> bool:
        """Take a catalog that is newer. One that does not follow the charters known here counts for nothing.

        Raises IntegrityError for a forged one.
        """
        # A founder that was voted out still has a key that signs. Charters follow each other, so a catalog must begin
        # with all charters known here: an older fork of them is of founders that are no more.
        catalog = read_catalog_untrusted(raw, self.keys.founder_key)
        known_charters = max(self.keys.charters, self.book.catalog.charters, key=len)
        follows = catalog.charters[: len(known_charters)] == known_charters
        if not follows:
            logger.warning("a catalog of other founders does not count: version %s", catalog.rank)
            return False
        if catalog.version > self.now() + MAX_AHEAD_S:
            signed, now = format_moment(catalog.version), format_moment(self.now())
            logger.warning("a catalog signed at %s does not count: this machine's clock says %s", signed, now)
            return False
        is_news = self.book.add_catalog(catalog, raw).action
        if is_news:
            self._view = None
            self.roster.follow(catalog)
            self.book.keep_members(self._end_of)
            self._catalog_news.set()
        return is_news

    async def next_catalog(self) -> None:
        """Return once a newer catalog has come since this was last asked."""
        await self._catalog_news.wait()
        self._catalog_news = trio.Event()

    async def next_record(self) -> None:
        """Return once another member's record has come since this was last asked."""
        await self._record_news.wait()
        self._record_news = trio.Event()

    async def merge_body_untrusted(self, payload: memoryview) -> ExchangeBody:
        """Take all that one frame brought, and let others work meanwhile. Raises Forged when any of it is."""
        body = decode(payload, ExchangeBody, "a records payload")
        try:
            if body.catalog is not None and not self.merge_catalog_untrusted(body.catalog):
                body = msgspec.structs.replace(body, catalog=None)  # no news
            beats = {beat.chain: beat for beat in body.beats}
            for first in range(0, len(body.envelopes), N_AT_ONCE):
                async with self._merging:  # one frame's after the other's: who sends many waits for himself
                    for raw in body.envelopes[first : first + N_AT_ONCE]:
                        if self.merge_untrusted(raw, beats=beats):
                            self._record_news.set()
            for first in range(0, len(body.beats), BEATS_AT_ONCE):
                async with self._merging:
                    self.book.take_beats_untrusted(body.beats[first : first + BEATS_AT_ONCE], self.now())
        except IntegrityError as error:
            raise Forged(f"records that do not verify: {error}") from None
        return body

    async def pull(self, rpc: Rpc, peer: PeerId, timeout_s: float = EXCHANGE_TIMEOUT_S) -> bool:
        """Send a peer my digest, take what I lack, send what it lacks; was there any? Raises PeerError."""
        # One exchange in three messages, or four, after which both books are equal:
        #
        #     here                                     there
        #     ExchangeDigest: hashes of buckets, ---->
        #       numbers of beats                <----  ExchangeReply: newer beats, chains whose beats are wanted;
        #                                              sequence numbers of what is in buckets that differ
        #     Records: those that are newer here, ---->
        #       beats wanted, names wanted      <----  Records: those that are wanted
        #
        # With members that know no beats it is sequence numbers of all records, then records and names, then records.
        record = self.view().peers.get(peer)
        minor = 0 if record is None else min(record.minor, self._minor)
        naming = short_name if minor >= SHORT_DIGESTS else str
        is_bucketed = minor >= BEATS
        digest = self.book.bucket_digest() if is_bucketed else self.book.digest(naming)
        charters, root, version = self.book.catalog.rank if self.book.catalog_raw else (0, 0, 0)
        request = ExchangeDigest(
            catalog_version=version,
            catalog_root=root,
            catalog_charters=charters,
            is_short=naming is short_name,
            is_bucketed=is_bucketed,
            minor=self._minor,
        )
        begun = trio.current_time()
        try:
            reply, frame = await rpc.call(peer, request, msgspec.msgpack.encode(digest), timeout_s, "bulk")
        except Refused as error:
            self._note_clock(peer, error.peer_time)
            raise
        if not isinstance(reply, ExchangeReply):
            raise RemoteProtocolError(f"expected an exchange reply, got {type(reply).__name__}")
        self._note_clock(peer, reply.now, trio.current_time() - begun)
        try:
            body = await self.merge_body_untrusted(frame.payload)
            if isinstance(digest, BucketDigest):
                answer = self._answer_differences(len(digest.numbers), body)
            else:
                answer = self._give(body.want, naming, is_bucketed)
        except RemoteProtocolError as error:
            fault = Fault.FORGED if isinstance(error, Forged) else Fault.MALFORMED
            rpc.standing.fault(peer, fault, str(error))
            raise
        if answer != ExchangeBody():
            channel = await rpc.channel(peer, "bulk")
            if answer.envelopes and self._is_news_to(peer):  # else its founders are not known there
                answer = msgspec.structs.replace(answer, catalog=self.book.catalog_raw)
            await channel.send(Records(), msgspec.msgpack.encode(answer))
        return bool(answer.envelopes or answer.want or body.envelopes or body.catalog)

    def _answer_differences(self, n: int, body: ExchangeBody) -> ExchangeBody:
        """What another member lacks, and what is wanted of it, by what it has said of ``n`` buckets."""
        ours, _ = self.book.told_of(n, body.buckets)
        envelopes, want = self.book.compare_names(ours, body.digest if body.buckets else {})
        newer_here, newer_there = self.book.compare_beats(body.numbers)
        beats = [*self.book.last_beats([*body.want_beats, *newer_here]), *self.book.beats_for(envelopes)]
        return ExchangeBody(envelopes=envelopes, want=want, beats=beats, want_beats=newer_there)

    def _give(self, want: Iterable[str], naming: Naming = short_name, knows_beats: bool = True) -> ExchangeBody:
        """The records that somebody wants, and the beats that prove them."""
        envelopes = self.book.pick({*want}, naming, knows_beats)
        return ExchangeBody(envelopes=envelopes, beats=self.book.beats_for(envelopes))

    async def take(self, channel: Channel, frame: Frame) -> None:
        """Take records that came by themselves, or at the end of an exchange, and give what is wanted in return."""
        body = await self.merge_body_untrusted(frame.payload)
        if body.want or body.want_beats:
            answer = self._give(body.want)
            beats = [*answer.beats, *self.book.last_beats(body.want_beats)]
            await channel.send(Records(), msgspec.msgpack.encode(msgspec.structs.replace(answer, beats=beats)))

    async def push(
        self,
        rpc: Rpc,
        raws: list[bytes],
        peers: Iterable[PeerId],
        catalog: bool = False,
        beats: Sequence[ChainBeat] = (),
    ) -> None:
        """Take this process's own records and beats, and tell those of ``peers`` that are connected in bulk.

        Each of them within 2 s; of beats alone they hear in exchanges.
        """
        own_beats = {beat.chain: beat for beat in beats}
        for raw in raws:
            self.merge_untrusted(raw, is_own=True, beats=own_beats)
        self.book.take_beats_untrusted(beats, self.now())
        if not raws and not catalog:
            return
        body = ExchangeBody(envelopes=raws, beats=[*beats])
        plain = msgspec.msgpack.encode(body)
        with_catalog = (
            msgspec.msgpack.encode(msgspec.structs.replace(body, catalog=self.book.catalog_raw)) if catalog else plain
        )
        is_for_all = all(map(self.book.is_for_all, raws))
        for peer in peers:
            channel = rpc.find_channel(peer, "bulk")
            if channel is not None and (is_for_all or self._knows_beats(peer)):
                with suppress(PeerError), trio.move_on_after(PUSH_TIMEOUT_S):
                    await channel.send(Records(), with_catalog if self._reads_charters(peer) else plain)

    async def answer(self, channel: Channel, message: ExchangeDigest, frame: Frame) -> None:
        """Answer somebody's digest with what it lacks and what this side wants."""
        if len(frame.payload) > MAX_DIGEST_BYTES:
            raise RemoteProtocolError(f"a digest of {len(frame.payload)} B; the limit is {MAX_DIGEST_BYTES}")
        if message.is_bucketed:
            differs = self.book.compare_buckets(decode(frame.payload, BucketDigest, "a digest"))
            names, numbers = self.book.told_of(differs.n, differs.buckets)
            body = ExchangeBody(
                beats=self.book.last_beats(differs.newer_here),
                want_beats=differs.newer_there,
                buckets=differs.buckets,
                digest=names,
                numbers=numbers,
            )
        else:
            naming = short_name if message.is_short else str
            sequences = decode(frame.payload, Digest, "a digest")
            send, want = self.book.compare(sequences, naming, message.minor >= BEATS)
            body = ExchangeBody(envelopes=send, want=want, beats=self.book.beats_for(send))
        peer_rank = (message.catalog_charters, message.catalog_root, message.catalog_version)
        is_newer = not any(peer_rank) or self.book.catalog.rank > peer_rank
        catalog = self.book.catalog_raw if is_newer and self._reads_charters(channel.peer) else None
        body = msgspec.structs.replace(body, catalog=catalog)
        reply = ExchangeReply(re=message.id, now=int(self.now()))
        await channel.answer(reply, msgspec.msgpack.encode(body))

    def _knows_beats(self, peer: PeerId) -> bool:
        record = self.view().peers.get(peer)
        return record is not None and record.minor >= BEATS

    def _reads_charters(self, peer: PeerId) -> bool:
        """May this catalog be sent to a peer? Versions before charters take one by another founder for forged."""
        record = self.view().peers.get(peer)
        return not self.book.catalog.charters or record is None or record.minor >= CHARTERS

    def _is_news_to(self, peer: PeerId) -> bool:
        """Is this the first time that a peer is sent records under the charters of now?"""
        n = len(self.book.catalog.charters)
        is_news = n > self._told_charters.pop(peer, 0) and self._reads_charters(peer)
        self._told_charters[peer] = n
        if len(self._told_charters) > MAX_REMEMBERED_MEMBERS:
            del self._told_charters[next(iter(self._told_charters))]
        return is_news

    def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        """The multiaddrs that a peer has announced."""
        record = self.view().peers.get(peer)
        return record.addresses if isinstance(record, PeerRecord) else ()
