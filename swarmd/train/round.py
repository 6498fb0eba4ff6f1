"""One round as each of its members lives it: give numbers, add up what others give, gather the average.

Numbers go up a tree for each part (plan.topology, train.duties) in chunks, in order; who adds up sums what everybody
below has sent so far, in member order, and sends it on at once, and the averages that the root makes go down the same
way. Contributions are kept: when the group changes (a higher version, without a dead member, or with a dead one's part
given to others) sums are made anew from what is there. The leader is elsewhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import trio

from swarmd.errors import OutOfStep, PeerError
from swarmd.net.rpc import Channel, Rpc
from swarmd.net.tasks import Tasks
from swarmd.protocol.backing import Share
from swarmd.protocol.rounds import Beat, Contribution, Group, Reduced, Subtotal
from swarmd.train import beats
from swarmd.train.accounts import Account, Given, account_for, flow_of, given_to
from swarmd.train.codecs import Buffer, Codec, Coded
from swarmd.train.coded_sums import read_reduced, read_subtotal
from swarmd.train.duties import Key, duties_of
from swarmd.train.groups import counted_of
from swarmd.train.parts import MOST_SQUARES, Part, Result, chunk_of
from swarmd.train.state import Vector
from swarmd.train.sums import squares_of
from swarmd.train.world import News, OffLoop
from swarmd.values import PeerId

BEAT_INTERVAL_S = 0.5  # a sign of life from who is slow, small beside any deadline
CHANGES_WITHIN_S = 10.0  # for the word of a new group, which comes by another channel


Numbers = Contribution | Subtotal | Reduced
Ready = tuple[Subtotal | Reduced, Buffer]
"""What can be sent on."""


class Round:
    """See the module. ``given`` is this peer's contribution, or None; it must not change until the end."""

    def __init__(
        self,
        rpc: Rpc,
        group: Group,
        codec: Codec,
        given: Coded | None,
        digest: Callable[[Vector], bytes],
        sign: Callable[[bytes, Given], Share],
        off_loop: OffLoop[Any],
    ) -> None:
        self._sign = sign
        self._codec = codec
        self._chunk = chunk_of(codec)
        self._rpc = rpc
        self._me = rpc.network.peer_id
        self._given = given
        self._vector = given.values if given is not None else None
        self._digest = digest
        self._off_loop = off_loop
        self._parts: dict[Key, Part] = {}
        self._news = News()
        self.moved_at = trio.current_time()
        self._beat_now = trio.Event()
        self._tasks = Tasks()
        self._sending: set[tuple[str, PeerId]] = set()
        self._use(group)

    # --- what the trainer calls --------------------------------------------------------------------------------

    async def run(self, beat: Callable[[Beat], Awaitable[None]]) -> None:
        """Take part until cancelled; ``beat`` brings signs of life to the leader."""
        async with self._tasks.open(), trio.open_nursery() as nursery:
            self._start_senders()
            nursery.start_soon(self._reduce)
            nursery.start_soon(self._gather)
            while True:
                self._beat_now = trio.Event()
                await beat(self._beat())
                with trio.move_on_after(BEAT_INTERVAL_S):
                    await self._beat_now.wait()

    def change(self, group: Group) -> None:
        """The leader has changed the group."""
        if group.round != self.group.round or group.version <= self.group.version:
            return
        self._use(group)
        self._start_senders()
        self._notify()

    @property
    def share_here(self) -> float:
        """How much of the average this peer has, or has made, as a share of the whole."""
        n = sum(upto - start for start, upto in self._got.items())
        own = (self._parts[key] for key in self._duties.averages)
        return (n + sum(p.reduced_to - p.start for p in own)) / self.group.n_elements

    async def take(self, peer: PeerId, message: Numbers, payload: memoryview) -> None:
        """Numbers that a member sends, whichever. Raises RemoteProtocolError."""
        match message:
            case Contribution():
                await self._take_contribution(peer, message, payload)
            case Subtotal():
                await self._take_subtotal(peer, message, payload)
            case Reduced():
                await self._take_reduced(peer, message, payload)

    async def _take_contribution(self, peer: PeerId, message: Contribution, payload: memoryview) -> None:
        """A member's numbers for a part that is added up here. Raises RemoteProtocolError."""
        part = await self._part(message.part)
        if part is None or not any(m.peer == peer and m.n for m in self.group.members):
            raise OutOfStep(f"a contribution of {peer} from element {message.start} on, not added up here")
        if not part.lacks(peer, message.start, message.n_elements):
            return
        fresh = (await self._read(self._codec.read, payload, message.n_elements))[0]
        if part.lacks(peer, message.start, message.n_elements):  # it may have come again meanwhile
            part.take(peer, message.start, fresh, payload)
            self._notify(done=part.is_done_with(peer))

    async def _take_subtotal(self, peer: PeerId, message: Subtotal, payload: memoryview) -> None:
        """What all below a member give, for a part that is added up here. Raises RemoteProtocolError."""
        await self._until(message.version)
        if message.version != self.group.version:
            return
        sources = self._duties.sources.get(message.part, ())
        source = next((s for s in sources if s.peer == peer and s.is_subtotal), None)
        if source is None:
            raise OutOfStep(f"a subtotal of {peer} from element {message.start} on, not added up here")
        part = self._parts[message.part]
        if not part.lacks(peer, message.start, message.n_elements, is_subtotal=True):
            return
        fresh = await self._read(read_subtotal, self._codec, payload, message.n_elements, source.n_contributors)
        if message.version != self.group.version:
            return
        if part.lacks(peer, message.start, message.n_elements, is_subtotal=True):
            part.take(peer, message.start, fresh, payload, is_subtotal=True)
            self._notify(done=part.is_done_with(peer, is_subtotal=True))

    async def _take_reduced(self, peer: PeerId, message: Reduced, payload: memoryview) -> None:
        """Averaged numbers from their reducer, or by way of others. Raises RemoteProtocolError."""
        await self._until(message.version)
        part = next((p for p in self.group.parts if p.start <= message.start < p.end), None)
        key = (part.start, part.end) if part is not None else (0, 0)
        if not self._lacks_results(message, key):
            return
        end = message.start + message.n_elements
        if part is None or self._duties.bringers.get(key) != peer or end > part.end:
            raise OutOfStep(f"results from element {message.start} on, which {peer} does not bring")
        if message.start > (upto := self._got.get(part.start, part.start)):
            raise OutOfStep(f"results of {peer} from element {message.start}, expected {upto}")
        counted = counted_of(self.group)
        n = len(counted), sum(m.n for m in counted)
        values = await self._read(read_reduced, self._codec, payload, message.n_elements, *n)
        if not self._lacks_results(message, key):
            return
        if not squares_of(values) < MOST_SQUARES:
            self._faults[part.reducer] = "its results are not finite, or beyond all bounds"
            self._beat_now.set()
            return
        assert self.average is not None
        self.average[message.start : end] = values
        self._got[part.start] = end
        if part.start in self._relayed:
            self._relayed[part.start].append(Result(message.start, message.n_elements, bytes(payload)))
        self._notify()

    def _lacks_results(self, message: Reduced, key: Key) -> bool:
        """Are these of the present version, and not here yet?"""
        is_wanted = self.average is not None and not self.result and message.version == self.group.version
        return is_wanted and message.start + message.n_elements > self._got.get(key[0], key[0])

    async def _until(self, version: int) -> None:
        """Wait for the word of a version; it comes by another channel."""
        with trio.move_on_after(CHANGES_WITHIN_S):
            while version > self.group.version:
                await self._news.wait()

    async def _read(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What was sent, decoded: in a thread where that takes long."""
        return function(*arguments) if self._codec.is_plain else await self._off_loop(function, *arguments)

    # --- versions ----------------------------------------------------------------------------------------------

    def _use(self, group: Group) -> None:
        self.group = group
        is_given = any(m.peer == self._me and m.receives for m in group.members)
        self.average: Vector | None = np.empty(group.n_elements, group.dtype) if is_given else None
        self.result = b""
        self.account: Account | None = None
        self._duties = duties_of(group, self._me)
        self._got: dict[int, int] = {}
        self._relayed: dict[int, list[Result]] = {
            p.start: []
            for parts in self._duties.tells.values()
            for p in parts
            if (p.start, p.end) in self._duties.bringers
        }
        self._squares: dict[PeerId, float] = {}  # of this peer's numbers, by whom they go to
        self._faults: dict[int, str] = {}  # of results, by the place of their reducer
        self._share: Share | None = None
        self._assent = b""
        for start, end in self._duties.sources:
            if known := self._parts.get((start, end)):
                known.begin_again()
                continue
            total: Vector = np.empty(end - start, group.dtype)
            own = (self._me, self._given) if self._given is not None else None
            self._parts[start, end] = Part(start, end, self._chunk, self._codec, total, own)

    async def _part(self, key: Key) -> Part | None:
        """A part that is added up here; the group that gives it to this peer may be on its way."""
        with trio.move_on_after(CHANGES_WITHIN_S):
            while key not in self._parts:
                await self._news.wait()
        return self._parts.get(key)

    # --- sending -----------------------------------------------------------------------------------------------

    def _start_senders(self) -> None:
        duties = self._duties
        for peer in duties.gives if self._vector is not None else ():
            self._start_sender("parts", peer, self._contribute)
        for peer in duties.passes:
            self._start_sender("subtotals", peer, partial(self._send_on, self._subtotals_for))
        for peer in duties.tells:
            self._start_sender("results", peer, partial(self._send_on, self._results_for))

    def _start_sender(self, what: str, peer: PeerId, send: Callable[[PeerId], Awaitable[None]]) -> None:
        if self._tasks.is_open and peer != self._me and (what, peer) not in self._sending:
            self._sending.add((what, peer))
            self._tasks.start_soon(send, peer)

    async def _contribute(self, peer: PeerId) -> None:
        """Send this peer's numbers for every part that ``peer`` adds up, now or in a later version."""
        channel: Channel | None = None
        done = set[Key]()
        while True:
            if channel is not None and not channel.is_open:  # what it carried may not have arrived
                channel, done = None, set()
            todo = [key for key in self._duties.gives.get(peer, ()) if key not in done]
            if not todo:
                await self._news.wait()
                continue
            try:
                channel = channel or await self._open(peer)
                await self._give(channel, todo[0])
                done.add(todo[0])
            except PeerError:  # a connection may come back; the leader sees it if not
                await trio.sleep(BEAT_INTERVAL_S)

    async def _give(self, channel: Channel, key: Key) -> None:
        """Send this peer's numbers for one part."""
        assert self._given is not None
        run, number, (start, end) = self.group.run, self.group.round, key
        for at in range(start, end, self._chunk):
            n = min(self._chunk, end - at)
            message = Contribution(run=run, round=number, part=key, start=at, n_elements=n)
            await channel.send(message, self._given.payload(at, at + n))

    async def _send_on(self, ready_for: Callable[[PeerId], Iterable[Ready]], peer: PeerId) -> None:
        """Send each sum or average on as soon as it is made, for whatever version is the present one."""
        channel: Channel | None = None
        version, sent = -1, set[int]()
        while True:
            if channel is not None and not channel.is_open:
                channel, sent = None, set()
            if version != self.group.version:
                version, sent = self.group.version, set()
            ready = next((r for r in ready_for(peer) if r[0].start not in sent), None)
            if ready is None:
                await self._news.wait()
                continue
            try:
                if channel is None:
                    channel = await self._open(peer)
                    continue  # the group may have changed meanwhile
                message, payload = ready
                await channel.send(message, payload)
                sent.add(message.start)
            except PeerError:
                await trio.sleep(BEAT_INTERVAL_S)

    def _subtotals_for(self, peer: PeerId) -> Iterator[tuple[Subtotal, Buffer]]:
        """What goes up to a parent, as far as it is there."""
        group = self.group
        for key in self._duties.passes.get(peer, ()):
            for made in self._parts[key].results:
                yield Subtotal(group.run, group.round, group.version, key, made.start, made.n), made.payload

    def _results_for(self, peer: PeerId) -> Iterator[tuple[Reduced, Buffer]]:
        """What goes down to a child, as far as it is there."""
        group = self.group
        for part in self._duties.tells.get(peer, ()):
            is_own = (part.start, part.end) in self._duties.averages
            for made in self._parts[part.start, part.end].results if is_own else self._relayed[part.start]:
                yield Reduced(group.run, group.round, group.version, made.start, made.n), made.payload

    async def _open(self, peer: PeerId) -> Channel:
        """A channel for numbers, whose end will be noticed. Raises PeerError."""
        channel = await self._rpc.channel(peer, "averaging")
        self._tasks.start_soon(self._notice_end, channel)
        return channel

    async def _notice_end(self, channel: Channel) -> None:
        await channel.ended.wait()
        self._notify()

    # --- adding up and gathering ---------------------------------------------------------------------------------

    async def _reduce(self) -> None:
        """Add up what is there of everybody below, part by part."""
        while True:
            version, news, duties = self.group.version, self._news.mark(), self._duties
            total = sum(m.n for m in counted_of(self.group))
            for key, sources in duties.sources.items():
                part = self._parts[key]
                n_samples = total if key in duties.averages else None
                while version == self.group.version and (chunk := part.next_chunk(sources)):
                    result = await self._off_loop(part.reduce, sources, n_samples, *chunk, part.total)
                    if version == self.group.version:
                        part.results.append(result)
                        self._notify()
            if version == self.group.version:
                await news.wait()

    def assent(self, signature: bytes) -> None:
        """This peer stands for the commit that the leader has shown it."""
        self._assent = signature
        self._beat_now.set()

    async def give_share(self, average: bytes) -> None:
        """Sign what this peer gave to an average that others have, before it is here."""
        version = self.group.version
        if self._vector is not None and self._counts and self._share is None:
            given = await self._off_loop(given_to, self.group, average, self._vector)
            if version == self.group.version and self._share is None:
                self._share = self._sign(average, given)
                self._beat_now.set()

    async def _gather(self) -> None:
        """Notice when the whole average of a version is here, hash it, and account for it."""
        while True:
            news, version = self._news.mark(), self.group.version
            await self._measure_own(version)
            if self.average is not None and not self.result and self._is_whole():
                average = self.average
                for key in self._duties.averages:
                    average[slice(*key)] = self._parts[key].total
                digest = await self._off_loop(self._digest, average)
                mine = (self._me, self._vector) if self._counts and self._vector is not None else None
                flow = flow_of(self._duties, self._parts, mine[1] if mine is not None else None)
                asked = self.group, digest, average, mine, flow, self._codec
                account = await self._off_loop(account_for, *asked)
                if version == self.group.version:
                    self.account, self.result = account, digest
                    self._share = self._sign(digest, account.given) if account.given is not None else None
                    self._beat_now.set()
            await news.wait()

    def _is_whole(self) -> bool:
        are_here = all(self._got.get(start, start) == end for start, end in self._duties.bringers)
        return are_here and all(self._parts[key].reduced_to == key[1] for key in self._duties.sources)

    async def _measure_own(self, version: int) -> None:
        """How large this peer's numbers are for each that gets some: none of them can say otherwise then."""
        if self._vector is None or self._squares:
            return
        squares: dict[PeerId, float] = {}
        for peer, keys in self._duties.gives.items():
            squares[peer] = 0.0
            for start, end in keys:
                squares[peer] += await self._off_loop(squares_of, self._vector[start:end])
        if version == self.group.version:
            self._squares = squares

    @property
    def _counts(self) -> bool:
        return any(m.peer == self._me for m in counted_of(self.group))

    # --- small things ------------------------------------------------------------------------------------------

    def _beat(self) -> Beat:
        """What the leader is told."""
        here = {start: upto - start for start, upto in self._got.items()}
        here |= {key[0]: self._parts[key].reduced_to - key[0] for key in self._duties.averages}
        parts = {key: self._parts[key] for key in self._duties.sources}
        said = beats.Said(here, parts, self._squares if self._counts else {}, self._faults, self.account)
        return beats.beat_of(self.group, self._duties, said, self.result, self._share, self._assent)

    def _notify(self, done: bool = False) -> None:
        self.moved_at = trio.current_time()
        self._news.notify()
        if done:
            self._beat_now.set()
