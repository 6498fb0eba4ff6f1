"""What a trainer is given, and how its parts wake each other."""

from __future__ import annotations

import logging
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import trio

from swarmd.errors import PeerError
from swarmd.net.rpc import Channel, Rpc
from swarmd.plan.chains.view import SwarmView
from swarmd.protocol.fields import Message
from swarmd.protocol.membership.identity import Identity
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

TELL_TIMEOUT_S = 3.0  # to one member: a round goes on without who does not take it
T = TypeVar("T")
Tell = Callable[[PeerId, Message, bytes], Awaitable[None]]
"""Brings a message, with a payload, to one member, this peer included."""
OffLoop = Callable[..., Awaitable[T]]
"""Runs a function outside the event loop: in a thread, or at once where time is virtual."""


@dataclass(frozen=True, slots=True)
class TrainerServices:
    """The network, who this peer is, what it sees of the swarm, how work leaves the event loop.

    ``links`` gives this peer's measured bytes/s, up and down, ``share`` how much of its time it computes, ``near`` who
    is at the same site, as was measured; ``count`` hears of samples that were computed.
    """

    rpc: Rpc
    identity: Identity
    view: Callable[[], SwarmView]
    announce: Callable[[], None]
    off_loop: OffLoop[Any]
    rng: random.Random
    links: Callable[[], tuple[float | None, float | None]]
    can_be_dialled: Callable[[], bool]
    share: Callable[[], float] = lambda: 1.0
    near: Callable[[], frozenset[PeerId]] = frozenset
    count: Callable[[int], None] = lambda n: None


@dataclass(slots=True)
class Wakeups:
    """Something has changed: all that wait look again."""

    _event: trio.Event = field(default_factory=trio.Event)

    def notify(self) -> None:
        """Wake all that wait, and begin anew."""
        self._event.set()
        self._event = trio.Event()

    async def wait(self, longest_s: float = float("inf")) -> None:
        """Wait for the next change, or for so long."""
        event = self._event
        with trio.move_on_after(longest_s):
            await event.wait()

    def mark(self) -> trio.Event:
        """Return what is set at the next change from now on."""
        return self._event


async def tell_peer(
    rpc: Rpc,
    peer: PeerId,
    send: Callable[[Channel], Awaitable[None]],
) -> None:
    """Bring something to a peer within a bounded time; one that cannot be reached is not told, and will ask."""
    try:
        with trio.fail_after(TELL_TIMEOUT_S):
            await send(await rpc.channel(peer, "bulk"))
    except (PeerError, trio.TooSlowError) as error:
        logger.debug("%s was not told: %s", peer[-8:], error)
