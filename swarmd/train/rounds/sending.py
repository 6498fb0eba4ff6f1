"""Brings what a member has to the others of a round: its numbers, subtotals, results; to each by channels of its own.

A peer that cannot be reached is tried again; what was under way when a channel ended is sent again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from functools import partial

import trio

from swarmd.errors import PeerError
from swarmd.net.rpc import Channel, Rpc
from swarmd.net.tasks import Tasks
from swarmd.protocol.wire.rounds import Contribution, Group, Reduced, Subtotal
from swarmd.train.rounds.duties import Duties, Key
from swarmd.train.rounds.round_progress import PresentVersion
from swarmd.train.store.services import Wakeups
from swarmd.train.vectors.codecs import Buffer, CodedVector
from swarmd.values import PeerId

BEAT_INTERVAL_S = 0.5  # a sign of life from who is slow, small beside any deadline


class Sending:
    """See the module. ``coded``: this peer's contribution; ``news``: of ``present`` more can be sent on."""

    def __init__(
        self,
        rpc: Rpc,
        tasks: Tasks,
        coded: CodedVector | None,
        chunk: int,
        present: PresentVersion,
    ) -> None:
        self.news = Wakeups()
        self._rpc = rpc
        self._me = rpc.network.peer_id
        self._tasks = tasks
        self._coded = coded
        self._chunk = chunk
        self._present = present
        self._begun: set[tuple[str, PeerId]] = set()
        self._group: Group
        self._duties: Duties

    def follow(self, group: Group, duties: Duties) -> None:
        """Send what is due in this version of the group."""
        self._group = group
        self._duties = duties
        for peer in duties.gives if self._coded is not None else ():
            self._begin_sending("parts", peer, self._send_contribution)
        for peer in duties.passes:
            self._begin_sending("subtotals", peer, partial(self._send_on, self._ready_subtotals))
        for peer in duties.tells:
            self._begin_sending("results", peer, partial(self._send_on, self._ready_results))
        self.news.notify()

    def _begin_sending(
        self,
        purpose: str,
        peer: PeerId,
        send: Callable[[PeerId], Awaitable[None]],
    ) -> None:
        if self._tasks.is_open and peer != self._me and (purpose, peer) not in self._begun:
            self._begun.add((purpose, peer))
            self._tasks.start_soon(send, peer)

    # A channel tells nothing of what arrived before it ended. So what went over one that has ended is sent again from
    # the start; who receives it drops what it has. With that a lost connection costs bytes, and no bookkeeping.

    async def _send_contribution(self, peer: PeerId) -> None:
        """Send this peer's numbers for every part that ``peer`` adds up, now or in a later version."""
        channel: Channel | None = None
        sent = set[Key]()
        while True:
            if channel is not None and not channel.is_open:  # what it carried may not have arrived
                channel = None
                sent = set()
            due = self._duties.gives.get(peer, ())
            todo = [key for key in due if key not in sent]
            if not todo:
                await self.news.wait()
                continue
            try:
                channel = channel or await self._open_channel(peer)
                await self._send_part(channel, todo[0])
                sent.add(todo[0])
            except PeerError:  # a connection may come back; the leader sees it if not
                await trio.sleep(BEAT_INTERVAL_S)

    async def _send_part(self, channel: Channel, key: Key) -> None:
        """Send this peer's numbers for one part."""
        assert self._coded is not None
        group = self._group
        start, end = key
        for first in range(start, end, self._chunk):
            n = min(self._chunk, end - first)
            message = Contribution(
                run=group.run,
                round=group.round,
                part=key,
                start=first,
                n_elements=n,
            )
            await channel.send(message, self._coded.payload(first, first + n))

    async def _send_on(
        self, ready_for: Callable[[PeerId], Iterator[tuple[Subtotal | Reduced, Buffer]]], peer: PeerId
    ) -> None:
        """Send each sum or average on as soon as it is there, for whatever version is the present one."""
        channel: Channel | None = None
        version = -1
        sent = set[int]()
        while True:
            if channel is not None and not channel.is_open:
                channel = None
                sent = set()
            if version != self._group.version:
                version = self._group.version
                sent = set()
            ready = next((r for r in ready_for(peer) if r[0].start not in sent), None)
            if ready is None:
                await self.news.wait()
                continue
            try:
                if channel is None:
                    channel = await self._open_channel(peer)
                    continue  # the group may have changed meanwhile
                message, payload = ready
                await channel.send(message, payload)
                sent.add(message.start)
            except PeerError:
                await trio.sleep(BEAT_INTERVAL_S)

    def _ready_subtotals(self, peer: PeerId) -> Iterator[tuple[Subtotal, Buffer]]:
        """Yield what goes up to a parent, as far as it is there."""
        group = self._group
        ready = self._present.progress.ready_parts.sums
        for key in self._duties.passes.get(peer, ()):
            for result in ready[key]:
                message = Subtotal(
                    run=group.run,
                    round=group.round,
                    version=group.version,
                    part=key,
                    start=result.start,
                    n_elements=result.n,
                )
                yield message, result.payload

    def _ready_results(self, peer: PeerId) -> Iterator[tuple[Reduced, Buffer]]:
        """Yield what goes down to a child, as far as it is there."""
        group = self._group
        ready = self._present.progress.ready_parts.averages
        for part in self._duties.tells.get(peer, ()):
            for result in ready[part.start, part.end]:
                message = Reduced(
                    run=group.run,
                    round=group.round,
                    version=group.version,
                    start=result.start,
                    n_elements=result.n,
                )
                yield message, result.payload

    async def _open_channel(self, peer: PeerId) -> Channel:
        """Open a channel for numbers, whose end will be noticed. Raises PeerError."""
        channel = await self._rpc.channel(peer, "averaging")
        self._tasks.start_soon(self._notice_end, channel)
        return channel

    async def _notice_end(self, channel: Channel) -> None:
        await channel.ended.wait()
        self.news.notify()
