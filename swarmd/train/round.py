"""One round as each of its members lives it: send parts, reduce a part, gather the average. The leader is elsewhere.

Contributions go to their reducers in chunks, in order; a reducer sums what every member has sent so far, in member
order, and sends it on at once. It keeps the contributions: when the group changes (a higher version, without a dead
member, or with a dead reducer's part given to others) results are made anew from what is there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import numpy as np
import trio

from swarmd.errors import OutOfStep, PeerError
from swarmd.net.rpc import Channel, Rpc
from swarmd.net.tasks import Tasks
from swarmd.protocol.backing import Share
from swarmd.protocol.rounds import Beat, Contribution, Group, GroupPart, Received, Reduced, Reduction
from swarmd.train.accounts import Account, Given, account_for, given_to
from swarmd.train.codecs import Codec, Coded, read_reduced
from swarmd.train.groups import counted_of
from swarmd.train.parts import MOST_SQUARES, Part, Result, chunk_of
from swarmd.train.state import Vector
from swarmd.train.sums import squares_of
from swarmd.train.world import News, OffLoop
from swarmd.values import PeerId

BEAT_INTERVAL_S = 0.5  # a sign of life from who is slow, small beside any deadline
CHANGES_WITHIN_S = 10.0  # for the word of a new group, which comes by another channel


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
        self._parts: dict[tuple[int, int], Part] = {}
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
    def receives(self) -> bool:
        return any(m.peer == self._me and m.receives for m in self.group.members)

    @property
    def share_here(self) -> float:
        """How much of the average this peer has, or has made, as a share of the whole."""
        n = sum(upto - start for start, upto in self._got.items())
        return (n + sum(p.reduced_to - p.start for p in self._own_parts())) / self.group.n_elements

    async def take_contribution(self, peer: PeerId, message: Contribution, payload: memoryview) -> None:
        """A member's numbers for a part that is reduced here. Raises RemoteProtocolError."""
        part = await self._part_at(message.start)
        if part is None or not any(m.peer == peer and m.n for m in self.group.members):
            raise OutOfStep(f"a contribution of {peer} from element {message.start} on, not reduced here")
        if not part.lacks(peer, message.start, message.n_elements):
            return
        fresh = (await self._read(self._codec.read, payload, message.n_elements))[0]
        if part.lacks(peer, message.start, message.n_elements):  # it may have come again meanwhile
            part.take(peer, message.start, fresh, payload)
            self._notify(done=part.is_done_with(peer))

    async def take_reduced(self, peer: PeerId, message: Reduced, payload: memoryview) -> None:
        """Averaged numbers from a reducer. Raises RemoteProtocolError."""
        with trio.move_on_after(CHANGES_WITHIN_S):
            while message.version > self.group.version:
                await self._news.wait()
        part = next((p for p in self.group.parts if p.start <= message.start < p.end), None)
        if not self._lacks_results(message, part):
            return
        end = message.start + message.n_elements
        if part is None or self.group.members[part.reducer].peer != peer or end > part.end:
            raise OutOfStep(f"results from element {message.start} on, which {peer} does not reduce")
        if message.start > (upto := self._got.get(part.start, part.start)):
            raise OutOfStep(f"results of {peer} from element {message.start}, expected {upto}")
        counted = counted_of(self.group)
        n = len(counted), sum(m.n for m in counted)
        values = await self._read(read_reduced, self._codec, payload, message.n_elements, *n)
        if not self._lacks_results(message, part):
            return
        if not squares_of(values) < MOST_SQUARES:
            self._faults[part.reducer] = "its results are not finite, or beyond all bounds"
            self._beat_now.set()
            return
        assert self.average is not None
        self.average[message.start : end] = values
        self._got[part.start] = end
        self._notify()

    def _lacks_results(self, message: Reduced, part: GroupPart | None) -> bool:
        """Are these of the present version, and not here yet?"""
        is_of_now = message.version == self.group.version and self.average is not None and not self.result
        return is_of_now and (
            part is None or message.start + message.n_elements > self._got.get(part.start, part.start)
        )

    async def _read(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What was sent, decoded: in a thread where that takes long."""
        return function(*arguments) if self._codec.is_plain else await self._off_loop(function, *arguments)

    # --- versions ----------------------------------------------------------------------------------------------

    def _use(self, group: Group) -> None:
        self.group = group
        self.average: Vector | None = np.empty(group.n_elements, group.dtype) if self.receives else None
        self.result = b""
        self.account: Account | None = None
        self._got: dict[int, int] = {}
        self._squares: Mapping[int, float] = {}  # of this peer's numbers, by the place of who reduces them
        self._faults: dict[int, str] = {}  # of results, by the place of their reducer
        self._share: Share | None = None
        self._assent = b""
        for given in group.parts:
            if group.members[given.reducer].peer == self._me:
                self._reduce_part(given)

    def _reduce_part(self, given: GroupPart) -> None:
        """Begin a part, or begin its sums anew."""
        if known := self._parts.get((given.start, given.end)):
            known.begin_again()
            return
        total: Vector = np.empty(given.end - given.start, self.group.dtype)
        own = (self._me, self._given) if self._given is not None else None
        self._parts[given.start, given.end] = Part(given.start, given.end, self._chunk, self._codec, total, own)

    def _own_parts(self) -> list[Part]:
        """Parts of the present version that are reduced here."""
        mine = [(p.start, p.end) for p in self.group.parts if self.group.members[p.reducer].peer == self._me]
        return [self._parts[key] for key in mine]

    async def _part_at(self, start: int) -> Part | None:
        """The part that begins at or before an element; the group that gives it to this peer may be on its way."""
        with trio.move_on_after(CHANGES_WITHIN_S):
            while (found := next((p for p in self._parts.values() if p.start <= start < p.end), None)) is None:
                await self._news.wait()
            return found
        return None

    # --- sending -----------------------------------------------------------------------------------------------

    def _start_senders(self) -> None:
        if self._vector is not None:
            for peer in {self.group.members[p.reducer].peer for p in self.group.parts}:
                self._start_sender("parts", PeerId(peer))
        if self._own_parts():
            for member in self.group.members:
                if member.receives:
                    self._start_sender("results", PeerId(member.peer))

    def _start_sender(self, what: str, peer: PeerId) -> None:
        if self._tasks.is_open and peer != self._me and (what, peer) not in self._sending:
            self._sending.add((what, peer))
            self._tasks.start_soon(self._contribute if what == "parts" else self._give_results, peer)

    async def _contribute(self, peer: PeerId) -> None:
        """Send this peer's numbers for every part that ``peer`` reduces, now or in a later version."""
        channel: Channel | None = None
        done = set[tuple[int, int]]()
        while True:
            if channel is not None and not channel.is_open:  # what it carried may not have arrived
                channel, done = None, set()
            wanted = [(p.start, p.end) for p in self.group.parts if self.group.members[p.reducer].peer == peer]
            todo = [key for key in wanted if key not in done]
            if not todo:
                await self._news.wait()
                continue
            try:
                channel = channel or await self._open(peer)
                for at, stop in self._cuts(*todo[0]):
                    assert self._given is not None
                    message = Contribution(run=self.group.run, round=self.group.round, start=at, n_elements=stop - at)
                    await channel.send(message, self._given.payload(at, stop))
                done.add(todo[0])
            except PeerError:  # a connection may come back; the leader sees it if not
                await trio.sleep(BEAT_INTERVAL_S)

    async def _give_results(self, peer: PeerId) -> None:
        """Send each sum on as soon as it is made, for whatever version is the present one."""
        channel: Channel | None = None
        version, sent = -1, set[int]()
        while True:
            if channel is not None and not channel.is_open:
                channel, sent = None, set()
            if version != self.group.version:
                version, sent = self.group.version, set()
            ready = next((r for p in self._own_parts() for r in p.results if r.start not in sent), None)
            if ready is None:
                await self._news.wait()
                continue
            try:
                if channel is None:
                    channel = await self._open(peer)
                    continue  # the group may have changed meanwhile
                await self._give_result(channel, version, ready)
                sent.add(ready.start)
            except PeerError:
                await trio.sleep(BEAT_INTERVAL_S)

    async def _give_result(self, channel: Channel, version: int, result: Result) -> None:
        message = Reduced(
            run=self.group.run,
            round=self.group.round,
            version=version,
            start=result.start,
            n_elements=result.n,
        )
        await channel.send(message, result.payload)

    async def _open(self, peer: PeerId) -> Channel:
        """A channel for numbers, whose end will be noticed. Raises PeerError."""
        channel = await self._rpc.channel(peer, "averaging")
        self._tasks.start_soon(self._notice_end, channel)
        return channel

    async def _notice_end(self, channel: Channel) -> None:
        await channel.ended.wait()
        self._notify()

    # --- reducing and gathering --------------------------------------------------------------------------------

    async def _reduce(self) -> None:
        """Sum what is there of every counted member, part by part."""
        while True:
            version, news = self.group.version, self._news.mark()
            counted = [PeerId(m.peer) for m in counted_of(self.group)]
            total = sum(m.n for m in counted_of(self.group))
            for part in self._own_parts():
                while version == self.group.version and (chunk := part.next_chunk(counted)):
                    result = await self._off_loop(part.reduce, counted, total, *chunk, part.total)
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
            if self.average is not None and not self.result:
                own = self._own_parts()
                is_whole = all(
                    self._got.get(p.start, p.start) == p.end
                    for p in self.group.parts
                    if self.group.members[p.reducer].peer != self._me
                )
                if is_whole and all(part.reduced_to == part.end for part in own):
                    average = self.average
                    for part in own:
                        average[part.start : part.end] = part.total
                    digest = await self._off_loop(self._digest, average)
                    mine = self._vector if self._counts else None
                    counted = [PeerId(m.peer) for m in counted_of(self.group)]
                    taken = [(p.start, {peer: p.values[peer] for peer in counted}) for p in own]
                    asked = self.group, digest, average, mine, taken, self._codec
                    account = await self._off_loop(account_for, *asked)
                    if version == self.group.version:
                        self.account, self.result = account, digest
                        self._share = self._sign(digest, account.given) if account.given is not None else None
                        self._beat_now.set()
            await news.wait()

    async def _measure_own(self, version: int) -> None:
        """How large this peer's numbers are for each reducer: none of them can say otherwise then."""
        if self._vector is None or self._squares:
            return
        squares = defaultdict[int, float](float)
        for part in self.group.parts:
            squares[part.reducer] += await self._off_loop(squares_of, self._vector[part.start : part.end])
        if version == self.group.version:
            self._squares = squares

    @property
    def _counts(self) -> bool:
        return any(m.peer == self._me for m in counted_of(self.group))

    # --- small things ------------------------------------------------------------------------------------------

    def _beat(self) -> Beat:
        """What the leader is told: what is here of each member's numbers and of each reducer's results."""
        received = []
        own, account = self._own_parts(), self.account
        for place, member in enumerate(self.group.members):
            if own and member.n:
                peer = PeerId(member.peer)
                here = sum(p.upto.get(peer, p.start) - p.start for p in own)
                squares = sum(p.squares.get(peer, 0.0) for p in own)
                if not squares < MOST_SQUARES:
                    received.append(Received(place, here, None, "its gradient is not finite, or beyond all bounds"))
                else:
                    is_whole = here == sum(p.end - p.start for p in own)
                    sums = account.taken.get(peer, ()) if account is not None else ()
                    received.append(Received(place, here, squares if is_whole else None, sums=sums))
        return Beat(
            run=self.group.run,
            round=self.group.round,
            version=self.group.version,
            received=tuple(received),
            reductions=tuple(self._reduction(r) for r in sorted({p.reducer for p in self.group.parts})),
            result=self.result,
            share=self._share,
            assent=self._assent,
        )

    def _reduction(self, place: int) -> Reduction:
        """What is here of one reducer's results."""
        parts = [p for p in self.group.parts if p.reducer == place]
        if self.group.members[place].peer == self._me:
            here = sum(p.reduced_to - p.start for p in self._own_parts())
        else:
            here = sum(self._got.get(p.start, p.start) - p.start for p in parts)
        squares = self._squares.get(place, MOST_SQUARES) if self._counts else MOST_SQUARES
        sums = self.account.reductions[place] if self.account is not None else (b"", (), (), 0.0)
        return Reduction(place, here, squares if squares < MOST_SQUARES else None, self._faults.get(place, ""), *sums)

    def _cuts(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        for at in range(start, end, self._chunk):
            yield at, min(end, at + self._chunk)

    def _notify(self, done: bool = False) -> None:
        self.moved_at = trio.current_time()
        self._news.notify()
        if done:
            self._beat_now.set()
