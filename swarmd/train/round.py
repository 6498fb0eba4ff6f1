"""One round as each of its members lives it: send parts, reduce a part, gather the average. The leader is elsewhere.

Contributions go to their reducers in chunks, in order; a reducer sums what every member has sent so far, in member
order, and sends it on at once. It keeps the contributions: when the group changes (a higher version, without a dead
member, or with a dead reducer's part given to others) results are made anew from what is there.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import trio

from swarmd.errors import OutOfStep, PeerError, RemoteProtocolError
from swarmd.net.rpc import Channel, Rpc
from swarmd.net.tasks import Tasks
from swarmd.protocol.rounds import Beat, Contribution, Group, GroupPart, Received, Reduced
from swarmd.train.state import Vector
from swarmd.train.world import News, OffLoop
from swarmd.values import PeerId

CHUNK_BYTES = 512 * 1024  # of a part that is reduced while the next one travels
BLOCK_ELEMENTS = 1 << 16  # summed at a time: fits a core's cache
BEAT_INTERVAL_S = 0.5  # a sign of life from who is slow, small beside any deadline
MOST_SQUARES = 1e29  # of a contribution: what is no number is not below it either
MOST_ELEMENTS = 2**34  # of a vector: 64 GiB in float32
CHANGES_WITHIN_S = 10.0  # for the word of a new group, which comes by another channel


@dataclass(slots=True)
class _Part:
    """A part that this peer reduces: what came from each member, how far the sum is, and the sum."""

    start: int
    end: int
    total: Vector
    values: dict[PeerId, Vector] = field(default_factory=dict)
    upto: dict[PeerId, int] = field(default_factory=dict)
    squares: dict[PeerId, float] = field(default_factory=dict)
    reduced_to: int = 0


def check_group(group: Group, before: Group | None, n_elements: int | None, dtype: str) -> None:
    """Refuse a group that does not divide this peer's vector among its members. Raises RemoteProtocolError.

    ``n_elements`` is None where this peer has no vector of its own.
    """
    peers = [m.peer for m in group.members]
    edges = [0, *(p.end for p in group.parts)]
    is_divided = [p.start for p in group.parts] == edges[:-1] and edges[-1] == group.n_elements
    is_ours = group.dtype == dtype and n_elements in (None, group.n_elements)
    is_sound = is_ours and 0 < group.n_elements < MOST_ELEMENTS and len(set(peers)) == len(peers)
    if not is_sound or not is_divided:
        raise RemoteProtocolError("a group that does not divide the run's vector among its members")
    if any(p.start >= p.end or p.reducer >= len(peers) for p in group.parts):
        raise RemoteProtocolError("a group with an empty part, or one that nobody reduces")
    if not any(m.n and m.is_counted for m in group.members):
        raise RemoteProtocolError("a group of which nobody counts")
    if before is not None and ([(m.peer, m.first, m.n) for m in before.members]) != [
        (m.peer, m.first, m.n) for m in group.members
    ]:
        raise RemoteProtocolError("another version of a group with other members")


class Round:
    """See the module. ``vector`` is this peer's sum of gradients, or None; it must not change until the end."""

    def __init__(
        self,
        rpc: Rpc,
        group: Group,
        vector: Vector | None,
        digest: Callable[[Vector], bytes],
        off_loop: OffLoop[object],
    ) -> None:
        self.group = group
        self.average: Vector | None = None
        self.result = b""
        self._rpc = rpc
        self._me = rpc.network.peer_id
        self._vector = vector
        self._digest = digest
        self._off_loop = off_loop
        self._parts: dict[tuple[int, int], _Part] = {}
        self._got: dict[int, int] = {}
        self._news = News()
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
    def dtype(self) -> np.dtype[np.floating]:
        return np.dtype(self.group.dtype)

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
        values = self._values(payload)
        end = message.start + len(values)
        if part is None or not any(m.peer == peer and m.n for m in self.group.members) or end > part.end:
            raise OutOfStep(f"a contribution of {peer} to elements [{message.start}, {end}), not reduced here")
        upto = part.upto.get(peer, part.start)
        if not part.squares.get(peer, 0.0) < MOST_SQUARES:
            return
        if message.start > upto:
            raise OutOfStep(f"a contribution of {peer} from element {message.start}, expected {upto}")
        fresh = values[upto - message.start :]
        if not len(fresh):
            return
        squares = part.squares.get(peer, 0.0) + float(np.dot(fresh, fresh))
        if squares < MOST_SQUARES:  # else, and where it is no number, it is not summed, and the leader hears of it
            kept = part.values.setdefault(peer, np.empty(part.end - part.start, self.dtype))
            kept[upto - part.start : end - part.start] = fresh
            part.upto[peer] = end
        part.squares[peer] = squares
        self._notify(done=end == part.end or not squares < MOST_SQUARES)

    async def take_reduced(self, peer: PeerId, message: Reduced, payload: memoryview) -> None:
        """Averaged numbers from a reducer. Raises RemoteProtocolError."""
        with trio.move_on_after(CHANGES_WITHIN_S):
            while message.version > self.group.version:
                await self._news.wait()
        if message.version != self.group.version or self.average is None or self.result:
            return
        values = self._values(payload)
        part = next((p for p in self.group.parts if p.start <= message.start < p.end), None)
        if part is None or self.group.members[part.reducer].peer != peer or message.start + len(values) > part.end:
            raise OutOfStep(f"results from element {message.start} on, which {peer} does not reduce")
        upto = self._got.get(part.start, part.start)
        if message.start > upto:
            raise OutOfStep(f"results of {peer} from element {message.start}, expected {upto}")
        if not math.isfinite(float(np.dot(values, values))):
            raise RemoteProtocolError(f"results of {peer} that are not finite")
        fresh = values[upto - message.start :]
        self.average[upto : upto + len(fresh)] = fresh
        self._got[part.start] = upto + len(fresh)
        self._notify()

    # --- versions ----------------------------------------------------------------------------------------------

    def _use(self, group: Group) -> None:
        self.group = group
        self.average = np.empty(group.n_elements, self.dtype) if self.receives else None
        self.result, self._got = b"", {}
        for given in group.parts:
            if group.members[given.reducer].peer == self._me:
                self._reduce_part(given)

    def _reduce_part(self, given: GroupPart) -> None:
        """Begin a part, or begin its sums anew."""
        known = self._parts.get((given.start, given.end))
        total = np.empty(given.end - given.start, self.dtype)
        if known is not None:
            known.total, known.reduced_to = total, given.start
            return
        part = self._parts[given.start, given.end] = _Part(given.start, given.end, total, reduced_to=given.start)
        if self._vector is not None:
            own = self._vector[part.start : part.end]
            part.values[self._me], part.squares[self._me] = own, float(np.dot(own, own))
            part.upto[self._me] = part.end if part.squares[self._me] < MOST_SQUARES else part.start

    def _own_parts(self) -> list[_Part]:
        """Parts of the present version that are reduced here."""
        mine = [(p.start, p.end) for p in self.group.parts if self.group.members[p.reducer].peer == self._me]
        return [self._parts[key] for key in mine]

    async def _part_at(self, start: int) -> _Part | None:
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
        done: set[tuple[int, int]] = set()
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
                    assert self._vector is not None
                    message = Contribution(run=self.group.run, round=self.group.round, start=at)
                    await channel.send(message, self._vector[at:stop].view(np.uint8).data)
                done.add(todo[0])
            except PeerError:  # a connection may come back; the leader sees it if not
                await trio.sleep(BEAT_INTERVAL_S)

    async def _give_results(self, peer: PeerId) -> None:
        """Send each sum on as soon as it is made, for whatever version is the present one."""
        channel: Channel | None = None
        version, sent = -1, dict[int, int]()
        while True:
            if channel is not None and not channel.is_open:
                channel, sent = None, {}
            if version != self.group.version:
                version, sent = self.group.version, {}
            ready = [p for p in self._own_parts() if sent.get(p.start, p.start) < p.reduced_to]
            if not ready:
                await self._news.wait()
                continue
            try:
                if channel is None:
                    channel = await self._open(peer)
                    continue  # the group may have changed meanwhile
                part = ready[0]
                at = sent.get(part.start, part.start)
                stop = min(part.reduced_to, at + self._chunk())
                message = Reduced(run=self.group.run, round=self.group.round, version=version, start=at)
                await channel.send(message, part.total[at - part.start : stop - part.start].view(np.uint8).data)
                sent[part.start] = stop
            except PeerError:
                await trio.sleep(BEAT_INTERVAL_S)

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
            counted = [PeerId(m.peer) for m in self.group.members if m.n and m.is_counted]
            total = sum(m.n for m in self.group.members if m.is_counted)
            for part in self._own_parts():
                upto = min((part.upto.get(peer, part.start) for peer in counted), default=part.start)
                if upto > part.reduced_to:
                    low, high = part.reduced_to - part.start, upto - part.start
                    sources = [part.values[peer][low:high] for peer in counted]
                    await self._off_loop(_average, sources, part.total[low:high], total)
                    if version == self.group.version:
                        part.reduced_to = upto
                        self._notify()
            if version == self.group.version:
                await news.wait()

    async def _gather(self) -> None:
        """Notice when the whole average of a version is here, and hash it."""
        while True:
            news, version = self._news.mark(), self.group.version
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
                    if version == self.group.version:
                        assert isinstance(digest, bytes)
                        self.result = digest
                        self._beat_now.set()
            await news.wait()

    # --- small things ------------------------------------------------------------------------------------------

    def _beat(self) -> Beat:
        """What the leader is told: of each member how much is here, and what this peer has of the results."""
        received = []
        places = {m.peer: i for i, m in enumerate(self.group.members)}
        own = self._own_parts()
        for peer, place in places.items():
            if own and self.group.members[place].n:
                here = sum(p.upto.get(PeerId(peer), p.start) - p.start for p in own)
                squares = sum(p.squares.get(PeerId(peer), 0.0) for p in own)
                if not squares < MOST_SQUARES:
                    received.append(Received(place, here, None, "its gradient is not finite, or beyond all bounds"))
                else:
                    is_whole = here == sum(p.end - p.start for p in own)
                    received.append(Received(place, here, squares if is_whole else None))
        gathered = sum(upto - start for start, upto in self._got.items())
        return Beat(
            run=self.group.run,
            round=self.group.round,
            version=self.group.version,
            n_results_bytes=gathered,
            received=tuple(received),
            result=self.result,
        )

    def _values(self, payload: memoryview) -> Vector:
        if len(payload) % self.dtype.itemsize:
            raise RemoteProtocolError(f"{len(payload)} B are no whole number of {self.group.dtype}")
        return np.frombuffer(payload, self.dtype)

    def _chunk(self) -> int:
        return CHUNK_BYTES // self.dtype.itemsize

    def _cuts(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        for at in range(start, end, self._chunk()):
            yield at, min(end, at + self._chunk())

    def _notify(self, done: bool = False) -> None:
        self._news.notify()
        if done:
            self._beat_now.set()


def _average(sources: list[Vector], out: Vector, n_samples: int) -> None:
    """The sum of ``sources`` in their order, divided by the number of samples."""
    for at in range(0, len(out), BLOCK_ELEMENTS):
        block = out[at : at + BLOCK_ELEMENTS]
        block[:] = sources[0][at : at + BLOCK_ELEMENTS]
        for source in sources[1:]:
            block += source[at : at + BLOCK_ELEMENTS]
        block /= n_samples
