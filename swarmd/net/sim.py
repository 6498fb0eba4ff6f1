"""A network in memory with the same API as libp2p's: latency, bandwidth, crashes and cuts, in virtual time.

A ``SimWorld`` is seeded and holds every peer; tests run it under trio's MockClock with deterministic scheduling
(tests/conftest.py). What a cut or crash does here is what TCP does: a crash is seen by the others at once, a
cut is silence until somebody's deadline.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import trio

from swarmd.errors import PeerTimeout, Unreachable
from swarmd.net.api import Purpose, StreamHandler, TaskStatus, Way
from swarmd.values import PeerId

CONNECT_TIMEOUT_S = 4.0  # as libp2p's, host.py
WINDOW_BYTES = 4 * 2**20  # sent and not read, before a sender waits: as yamux after it has grown
PACKET_BYTES = 16 * 2**10  # that a shared line carries at once: a sign of life comes between those of a part
QUEUE_S = 0.05  # what routers hold before a shared line
INDEX = PeerId("index")


@dataclass(frozen=True, slots=True)
class SimLink:
    """One direction between two peers."""

    latency_s: float = 0.02
    bytes_per_s: float = 12.5e6


@dataclass
class Line:
    """A peer's uplink or downlink, which all of its streams share: packets of each in turn pass one after the other."""

    bytes_per_s: float
    free_at: float = 0.0
    n_bytes: int = 0
    _turn: trio.StrictFIFOLock = field(default_factory=trio.StrictFIFOLock)

    async def carry(self, n_bytes: int) -> float:
        """Wait for a place in the queue before it, packet by packet; returns when the last will be through."""
        for start in range(0, n_bytes, PACKET_BYTES):
            async with self._turn:
                await trio.sleep_until(self.free_at - QUEUE_S)
                packet_bytes = min(PACKET_BYTES, n_bytes - start)
                self.free_at = max(self.free_at, trio.current_time()) + packet_bytes / self.bytes_per_s
                self.n_bytes += packet_bytes
        return self.free_at


class SimWorld:
    """Every simulated peer, the links between them, and the shared rendezvous.

    ``up`` and ``down``: lines of peers that have such; elsewhere each stream has its link for itself. Peers of one of
    ``sites`` may share a line, and what passes between them takes none.
    """

    def __init__(self, seed: int = 0, link: SimLink | None = None) -> None:
        self.rng = random.Random(seed)
        self.link = link or SimLink()
        self.links: dict[tuple[PeerId, PeerId], SimLink] = {}
        self.up: dict[PeerId, Line] = {}
        self.down: dict[PeerId, Line] = {}
        self.sites: dict[PeerId, str] = {}
        self.networks: dict[PeerId, SimNetwork] = {}
        self.values: dict[str, bytes] = {}
        self.providers: dict[str, dict[PeerId, tuple[str, ...]]] = {}
        self.lookup_s = 0.5
        self._cut: set[frozenset[PeerId]] = set()

    def join(self, peer: PeerId) -> SimNetwork:
        """Put a peer on the network."""
        network = SimNetwork(self, peer)
        self.networks[peer] = network
        return network

    def crash(self, peer: PeerId) -> None:
        """Take a peer off the network at once: its streams end, nobody can reach it."""
        network = self.networks.pop(peer)
        network.is_up = False
        for stream in list(network.streams):
            stream.fail()

    def cut(self, a: PeerId, b: PeerId) -> None:
        """Let nothing pass between two peers, and tell neither."""
        self._cut.add(frozenset((a, b)))

    def heal(self, a: PeerId, b: PeerId) -> None:
        """Undo a cut: what was on its way arrives."""
        self._cut.discard(frozenset((a, b)))
        for network in self.networks.values():
            for stream in network.streams:
                stream.wake()

    @property
    def has_cuts(self) -> bool:
        return bool(self._cut)

    def is_cut(self, a: PeerId, b: PeerId) -> bool:
        return frozenset((a, b)) in self._cut

    def link_between(self, source: PeerId, target: PeerId) -> SimLink:
        return self.links.get((source, target), self.link)

    def lines_between(self, source: PeerId, target: PeerId) -> list[Line]:
        """What all that passes between two peers has to share."""
        if source in self.sites and self.sites[source] == self.sites.get(target):
            return []
        lines = (self.up.get(source), self.down.get(target))
        return [line for line in lines if line is not None]


# How bytes travel in virtual time:
#
#     send --> own link or lines (bandwidth) --> latency --> inbox of ``other`` --> receive
#              the sender waits while the far inbox holds more than WINDOW_BYTES
#
# A cut loses nothing and delivers nothing: receivers wait until it heals. A crash empties both inboxes at once.


class SimStream:
    """One end of a stream; ``other`` is its far end."""

    def __init__(self, world: SimWorld, local: PeerId, peer: PeerId) -> None:
        self.peer = peer
        self.local = local
        self.other: SimStream
        self._world = world
        self._inbox: deque[tuple[float, bytes]] = deque()
        self._inbox_bytes = 0
        self._line_free_at = 0.0
        self._failed = False
        self._closed = False
        self._changed = trio.Event()

    async def send(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        try:
            await self._send(data)
        except trio.Cancelled:
            self.fail()
            raise

    async def _send(self, data: bytes) -> None:
        far_end = self.other
        while far_end._inbox_bytes > WINDOW_BYTES and not self._failed:
            await self._changed.wait()
        if self._failed or self._closed:
            raise Unreachable(f"the stream to {self.peer} is gone")
        link = self._world.link_between(self.local, self.peer)
        starts = max(trio.current_time(), self._line_free_at)
        self._line_free_at = starts + len(data) / link.bytes_per_s
        for line in self._world.lines_between(self.local, self.peer):
            self._line_free_at = max(self._line_free_at, await line.carry(len(data)))
        far_end._inbox.append((self._line_free_at + link.latency_s, data))
        far_end._inbox_bytes += len(data)
        far_end.wake()

    def can_send(self, n_bytes: int) -> bool:
        return self.other._inbox_bytes + n_bytes <= WINDOW_BYTES

    async def receive(self) -> bytes:
        while True:
            if self._inbox and not self._world.is_cut(self.local, self.peer):
                arrives_at, data = self._inbox[0]
                if arrives_at <= trio.current_time():
                    self._inbox.popleft()
                    self._inbox_bytes -= len(data)
                    self.other.wake()
                    return data
                with trio.move_on_at(arrives_at):
                    await self._changed.wait()
                continue
            if self._failed:
                raise Unreachable(f"the stream from {self.peer} is gone")
            if self.other._closed and not self._inbox:
                return b""
            await self._changed.wait()

    async def aclose(self) -> None:
        await trio.lowlevel.checkpoint()
        self._closed = True
        self.other.wake()

    async def reset(self) -> None:
        await trio.lowlevel.checkpoint()
        self.fail()

    def fail(self) -> None:
        for end in (self, self.other):
            end._failed = True
            end._inbox.clear()  # what had not arrived never will
            end._inbox_bytes = 0
            network = self._world.networks.get(end.local)
            if network is not None:
                network.streams.discard(end)
            end.wake()

    def wake(self) -> None:
        self._changed.set()
        self._changed = trio.Event()


class SimNetwork:
    """See ``net.api.Network``."""

    def __init__(self, world: SimWorld, peer: PeerId) -> None:
        self.peer_id = peer
        self.is_up = True
        self.streams: set[SimStream] = set()
        self._world = world
        self._handlers: dict[Purpose, StreamHandler] = {}
        self._nursery: trio.Nursery | None = None

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    def addresses(self) -> tuple[str, ...]:
        return (f"/sim/{self.peer_id}/p2p/{self.peer_id}",)

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        pass

    def set_handler(self, purpose: Purpose, handler: StreamHandler) -> None:
        self._handlers[purpose] = handler

    async def open_stream(self, peer: PeerId, purpose: Purpose) -> SimStream:
        link = self._world.link_between(self.peer_id, peer)
        await trio.sleep(2 * link.latency_s)
        target = self._world.networks.get(peer)
        if self._world.is_cut(self.peer_id, peer):
            await trio.sleep(CONNECT_TIMEOUT_S)
            raise PeerTimeout(f"{peer} did not answer within {CONNECT_TIMEOUT_S} s")
        if target is None or target._nursery is None or purpose not in target._handlers:
            raise Unreachable(f"{peer} cannot be reached: connection refused")
        near_end = SimStream(self._world, self.peer_id, peer)
        far_end = SimStream(self._world, peer, self.peer_id)
        near_end.other = far_end
        far_end.other = near_end
        self.streams.add(near_end)
        target.streams.add(far_end)
        target._nursery.start_soon(target._serve_stream, purpose, far_end)
        return near_end

    def remote_host(self, peer: PeerId) -> str | None:
        return None

    def way_to(self, peer: PeerId) -> Way | None:
        return "direct" if any(stream.peer == peer for stream in self.streams) else None

    async def disconnect(self, peer: PeerId) -> None:
        await trio.lowlevel.checkpoint()
        for stream in [s for s in self.streams if s.peer == peer]:
            stream.fail()

    async def _serve_stream(self, purpose: Purpose, stream: SimStream) -> None:
        try:
            await self._handlers[purpose](stream)
        except Exception:  # noqa: BLE001 - the stream-handler guard, as in net/libp2p
            stream.fail()


class SimRecordStore:
    """See ``net.api.RecordStore``: one table in the world, slow to answer, and out of reach when cut from INDEX."""

    def __init__(self, world: SimWorld, peer: PeerId) -> None:
        self._world = world
        self._peer = peer

    async def join(self, peers: list[PeerId]) -> None:
        await trio.lowlevel.checkpoint()

    async def put(self, key: str, value: bytes) -> None:
        await self._wait_for_index()
        self._world.values[key] = value

    async def get(self, key: str) -> bytes | None:
        await self._wait_for_index()
        return self._world.values.get(key)

    async def provide(self, key: str) -> None:
        await self._wait_for_index()
        network = self._world.networks.get(self._peer)
        if network is not None:
            self._world.providers.setdefault(key, {})[self._peer] = network.addresses()

    async def find_providers(self, key: str) -> dict[PeerId, tuple[str, ...]]:
        await self._wait_for_index()
        providers = self._world.providers.get(key, {})
        live = [peer for peer in providers if peer != self._peer]
        sample = self._world.rng.sample(live, min(20, len(live)))
        return {peer: providers[peer] for peer in sample}

    async def _wait_for_index(self) -> None:
        await trio.sleep(self._world.lookup_s)
        if self._world.is_cut(self._peer, INDEX):
            await trio.sleep(CONNECT_TIMEOUT_S)
            raise PeerTimeout("the index does not answer")
