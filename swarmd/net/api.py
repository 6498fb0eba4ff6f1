"""The port between swarmd and a network: streams of bytes to peers by key, and a slow index of small values.

Production passes ``net.libp2p``, tests and the simulator ``net.sim``; tests/contract holds both to the same
behaviour. Streams carry bytes with backpressure; frames and requests are ``net.rpc``'s.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

from swarmd.plan.links.reachability import ReachabilityReport
from swarmd.values import PeerId

Way = Literal["direct", "relayed", "reversed", "punched"]
"""A connection that one side dialled, goes through a third, was dialled by the side that was sought, or by both."""
Purpose = Literal["interactive", "bulk", "weights", "training", "averaging", "ticket"]
PURPOSES: tuple[Purpose, ...] = (
    "interactive",
    "bulk",
    "weights",
    "training",
    "averaging",
)  # of channels; tickets are below (net.direct)
ONE_WAY: tuple[Purpose, ...] = ("bulk", "weights")  # who opened a channel asks, the other side answers


if TYPE_CHECKING:  # the stubs of trio-typing, a dependency of libp2p, hide trio's own types and keep this one apart
    from trio_typing import TaskStatus as TaskStatus
else:
    from trio import TaskStatus as TaskStatus


class Stream(Protocol):
    """One ordered, reliable, authenticated byte stream to one peer."""

    peer: PeerId

    async def send(self, data: bytes) -> None:
        """Send all of ``data``, or raise Unreachable. Cancelling in the middle resets the stream, no more.

        A task that is cancelled already sends nothing, and the stream goes on.
        """

    def can_send(self, n_bytes: int) -> bool:
        """Would ``n_bytes`` leave now, without waiting for the peer to read or for another writer?"""

    async def receive(self) -> bytes:
        """Return some bytes, b"" at a clean end. Raises Unreachable when the peer or the connection is gone."""

    async def aclose(self) -> None:
        """Tell the peer that no more will come."""

    async def reset(self) -> None:
        """Drop the stream both ways at once."""


StreamHandler = Callable[[Stream], Awaitable[None]]


class Network(Protocol):
    """Streams to peers. Every call that waits for a peer has a deadline inside."""

    peer_id: PeerId

    def addresses(self) -> tuple[str, ...]:
        """Where others can reach this peer, as multiaddrs that end in /p2p/ID."""

    def learn(self, peer: PeerId, addresses: tuple[str, ...]) -> None:
        """Remember where a peer was said to be."""

    def set_handler(self, purpose: Purpose, handler: StreamHandler) -> None:
        """Serve inbound streams of one purpose. What escapes the handler resets its stream, nothing else."""

    async def open_stream(self, peer: PeerId, purpose: Purpose) -> Stream:
        """Connect if need be and open a stream. Raises Unreachable, PeerTimeout or RemoteProtocolError."""

    def remote_host(self, peer: PeerId) -> str | None:
        """Where a connected peer could be dialled again; None when it cannot, or is not connected."""

    def way_to(self, peer: PeerId) -> Way | None:
        """How this peer is connected with another; None when it is not."""

    async def disconnect(self, peer: PeerId) -> None:
        """End every connection to a peer."""


@dataclass(frozen=True, slots=True)
class Relayed:
    """Somebody that is relayed for: whose share it takes, and whether it may be kept reachable."""

    sponsor: bytes
    may_reserve: bool


MayRelay = Callable[[PeerId, tuple[bytes, ...]], Relayed | None]
"""Judges who asks, with which certificate; None: nobody that is relayed for."""


class NatTraversal(Protocol):
    """What a peer behind a router needs to be reached, and what it can do for others. All raise PeerError."""

    async def ask_dial_back(self, peer: PeerId, version: int) -> ReachabilityReport:
        """Have a member try to connect to this peer over one version of IP, 4 or 6."""

    async def hold_reservation(self, relay: PeerId, on_held: Callable[[], None]) -> None:
        """Be reachable through a relay until that ends; calls ``on_held`` once it is so."""

    def reached_at_port(self, port: int) -> None:
        """A port of the router leads here: members that try are to try it."""

    def listening_port(self) -> int | None:
        """The TCP port that others find this peer at; None when it does not listen."""

    def missing_addresses(self) -> Mapping[str, str]:
        """What it is to listen on and cannot yet, and why."""

    def own_hosts(self) -> tuple[str, ...]:
        """The IP addresses that it listens on, and those that its owner announces."""

    def announce(self, also: tuple[str, ...], without: frozenset[int]) -> None:
        """Name these addresses beside the interfaces' own, as multiaddrs that end in /p2p/ID.

        Public ones of these IP versions are left out, but for those that the owner announces.
        """

    def is_open(self, is_open: bool) -> None:
        """Others can dial this peer at its addresses: who is reached through a relay is told to do so."""

    def relay_for(self, may_relay: MayRelay | None) -> None:
        """Connect those to others that this knows, by the certificates that they show; None: nobody."""

    @property
    def n_relayed(self) -> int:
        """How many circuits go through this peer now."""


class RecordStore(Protocol):
    """The rendezvous: a slow, eventually consistent index that is right for joining and wrong for each request."""

    async def join(self, peers: list[PeerId]) -> None:
        """Enter through peers that are connected already."""

    async def put(self, key: str, value: bytes) -> None: ...

    async def get(self, key: str) -> bytes | None: ...

    async def provide(self, key: str) -> None: ...

    async def find_providers(self, key: str) -> dict[PeerId, tuple[str, ...]]:
        """Return peers that provide ``key`` with their addresses, this peer left out."""
