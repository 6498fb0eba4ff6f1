"""The hops of sessions that a server holds for others: how frames find them, and what cache they are promised.

A hop knows its client, its predecessor and its successor, and is found by the block where it starts or ends.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from typing import Protocol

import trio

from swarmd.errors import Code, Refused
from swarmd.plan.chains.cache_admission import CacheLedger
from swarmd.plan.chains.hop import SessionHop
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import Frame, FrameDecoder
from swarmd.protocol.wire.messages import AnyMessage, Refusal
from swarmd.status import SessionRow
from swarmd.values import PeerId, Span

ACTIVE_S = 2.0  # a client that decodes takes a step more often than that

Key = tuple[bytes, int]
"""A hop's session (or lane) and its first block."""
Deliver = Callable[[PeerId, AnyMessage, Frame], Awaitable[None]]
"""Hands a frame to whichever hop of this peer it is for. Raises Refused."""


def session_lost(key: Key, reason: str) -> Refusal:
    """What a client is told whose hop, of a session or a lane, is over."""
    session, start = key
    return Refusal(
        code=Code.SESSION_LOST.value,
        message=reason[:500],
        session=session,
        start=start,
    )


# A frame that comes in names the block where its hop starts. What a successor sends back (progress, refusals, frames of
# a backward pass) names the block where this peer's hop ends. So hops are kept by their first block, with a second
# index by their end:
#
#     session s:   [0,4) ends at 4 --> another peer's [4,8)
#     _hops    (s, 0) -> hop           op from the client:          start = 0
#     _by_end  (s, 4) -> (s, 0)        progress from the successor: start = 4
#
# Two hops of one session may end at the same block for a moment, while a repair replaces one by the other. Then the
# newer one is found by its end, and removing the older one must not remove the newer one's entry.
class Hops:
    """Hops by session and first block; of those that end at one block the one that was put last is found there."""

    def __init__(self) -> None:
        self._hops: dict[Key, SessionHop] = {}
        self._by_end: dict[Key, Key] = {}
        self._has_come = trio.Event()

    async def wait_for_hop(self) -> None:
        """Return when there is a hop: a loop that looks after hops has nothing to do before."""
        while not self._hops:
            self._has_come = trio.Event()
            await self._has_come.wait()

    def __len__(self) -> int:
        return len(self._hops)

    def __iter__(self) -> Iterator[SessionHop]:
        return iter(self._hops.values())

    def __contains__(self, key: Key) -> bool:
        return key in self._hops

    def items(self) -> list[tuple[Key, SessionHop]]:
        """All of them at this moment: hops may come and go while a caller goes through them."""
        return list(self._hops.items())

    def get(self, key: Key) -> SessionHop | None:
        return self._hops.get(key)

    def put(self, key: Key, hop: SessionHop) -> None:
        """Enter a hop, in place of one that has the same key."""
        self.pop(key)
        self._hops[key] = hop
        self._by_end[key[0], hop.span.end] = key
        self._has_come.set()

    def pop(self, key: Key) -> SessionHop | None:
        """Remove a hop and return it; None where there is none."""
        hop = self._hops.pop(key, None)
        if hop is None:
            return None
        end_key = (key[0], hop.span.end)
        if self._by_end.get(end_key) == key:  # another hop may end there by now
            del self._by_end[end_key]
        return hop

    def ending_at(self, session: bytes, end: int) -> SessionHop | None:
        """Find the hop of a session that ends at a block."""
        key = self._by_end.get((session, end))
        return self._hops.get(key) if key else None

    def ends_at(self, session: bytes, block: int) -> bool:
        """Does a hop of this session end at a block?"""
        return (session, block) in self._by_end


class SessionTable:
    """The session hops of one server, each with its promise of cache.

    ``ledger`` promises; a hop that has ended gives its promise back.
    """

    def __init__(self, ledger: CacheLedger) -> None:
        self.ledger = ledger
        self.hops: Hops = Hops()
        self.refused: Counter[str] = Counter()  # by code, for people
        self._opening: Counter[Key] = Counter()  # of which the worker has not said yet that it is open

    def find(self, key: Key) -> SessionHop:
        """Find the hop of a session. Raises Refused where it is not here."""
        hop = self.hops.get(key)
        if hop is None:
            raise Refused(Code.NO_SESSION, f"no session {key[0].hex()[:8]} starts at block {key[1]} here")
        return hop

    def find_heir(self, peer: PeerId, key: Key) -> SessionHop:
        """Find the hop that waits for caches from a peer. Raises Refused."""
        hop = self.hops.get(key)
        if hop is None or hop.inherit_from != peer:
            raise Refused(Code.STRANGER, "no session here waits for caches from this peer")
        return hop

    def find_own(self, peer: PeerId, key: Key) -> SessionHop:
        """Find the hop of a session for its client. Raises Refused for anybody else."""
        hop = self.find(key)
        hop.require_client(peer)
        return hop

    def require_free(self, client: PeerId, session: bytes, span: Span) -> None:
        """Refuse a hop that would stand in the way of another client's. Raises Refused."""
        same_start = self.hops.get((session, span.start))
        same_end = self.hops.ending_at(session, span.end)
        for hop in (same_start, same_end):
            if hop is not None and hop.state.client != client:
                raise Refused(Code.STRANGER, "another client has a session of this name")

    def clashing_key(self, key: Key, end: int) -> Key | None:
        """Find a hop of the same session that begins elsewhere and ends at a block: what leaves could be of either."""
        other = self.hops.ending_at(key[0], end)
        return (key[0], other.span.start) if other is not None and other.span.start != key[1] else None

    def open(self, key: Key, hop: SessionHop) -> None:
        """Enter a hop, in place of one that has the same key."""
        self.hops.put(key, hop)
        self._opening[key] += 1

    def note_opened(self, key: Key) -> None:
        """Note that the worker has opened a hop: what it says from now on is of this one."""
        self._opening -= Counter([key])

    def is_opening(self, key: Key) -> bool:
        """May what the worker says still be of a session of this name that was here before?"""
        return self._opening[key] > 0

    def close(self, key: Key) -> SessionHop | None:
        """Remove a hop with its promise, and return it; None where there is none."""
        hop = self.hops.pop(key)
        if hop is not None:
            self.ledger.release(key)
        return hop

    def close_all(self) -> list[tuple[Key, SessionHop]]:
        """Remove all, for a worker that is gone, and return them."""
        self._opening.clear()
        closed = self.hops.items()
        for key, _ in closed:
            self.close(key)
        return closed

    def n_decoding(self, now: float) -> int:
        """Count the sessions that took a step just now."""
        used_at = [hop.used_at for hop in self.hops if hop.state.received]
        return sum(now - at_s < ACTIVE_S for at_s in used_at)

    def rows(self) -> tuple[SessionRow, ...]:
        """One row for each hop, for people."""
        return tuple(
            SessionRow(
                session=key[0].hex()[:12],
                client=hop.state.client,
                blocks=(hop.span.start, hop.span.end),
                received=hop.state.received,
                finished=hop.state.finished,
                epoch=hop.state.epoch,
                why=hop.why,
                times=hop.times(),
            )
            for key, hop in self.hops.items()
        )


class AboutHop(Protocol):
    """A message that names a session and the block where its hop starts."""

    @property
    def session(self) -> bytes: ...
    @property
    def start(self) -> int: ...


def key_of(message: AboutHop) -> Key:
    """The hop that a message is about."""
    return message.session, message.start


async def deliver_here(
    me: PeerId, raw: bytes, deliver: Deliver, on_refusal: Callable[[PeerId, Refusal], object]
) -> None:
    """Hand a frame to the next hop, which is on this peer too; a refusal goes back as it would from another peer."""
    (frame,) = FrameDecoder().feed_untrusted(raw)
    message = messages.decode_untrusted(frame.header)
    try:
        await deliver(me, message, frame)
    except Refused as error:
        on_refusal(me, messages.refusal_for(message, error))
