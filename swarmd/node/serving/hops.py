"""The hops of sessions that a server holds for others: their state, and how frames find them.

A hop knows its client, its predecessor and its successor, and is found by the block where it starts or ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field

import trio

from swarmd.errors import Code, Refused
from swarmd.plan.chains import timing
from swarmd.plan.chains.session import HopState, Watch
from swarmd.protocol.accounts.receipt import Trail
from swarmd.protocol.accounts.usage_receipt import SignedUsageReceipt, UsageReceipt
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import Frame, FrameDecoder
from swarmd.protocol.wire.messages import AnyMessage, Refusal
from swarmd.status import HopTimes, SessionRow
from swarmd.values import PeerId, Span

N_TIMED = 64  # passes that the times of a hop are medians of

Key = tuple[bytes, int]
"""A hop's session (or lane) and its first block."""
Deliver = Callable[[PeerId, AnyMessage, Frame], Awaitable[None]]
"""Hands a frame to whichever hop of this peer it is for. Raises Refused."""


@dataclass(slots=True)
class SessionHop:
    """One hop of one session on this server. ``successor`` is None when outputs go to the client.

    ``trail``: what receipts are made of; None when the client wants none. ``bill``: the last that it has signed.
    """

    state: HopState
    span: Span
    successor: PeerId | None
    push: bool = False
    watch: Watch = field(default_factory=Watch)
    told_finished: int = 0
    told_at: float = 0.0
    sender: PeerId | None = None
    suspected: bool = False
    used_at: float = 0.0
    why: str = ""
    inherit_from: PeerId | None = None
    limit_bytes: int = 0
    limit_edits: int = 0
    trail: Trail | None = None
    bill: tuple[UsageReceipt, SignedUsageReceipt] | None = None
    unfinished: deque[tuple[int, int, int]] = field(default_factory=deque)
    waiting_bytes: int = 0
    waiting_edits: int = 0
    passes: deque[timing.Times] = field(default_factory=lambda: deque(maxlen=N_TIMED))

    def times(self) -> tuple[HopTimes, ...]:
        """What passes take here and at the hops before, of those that went alike with the last one."""
        alike = [passed for passed in self.passes if timing.is_same_path(passed, self.passes[-1])]
        return tuple(
            HopTimes(start=start, waiting_ms=1e3 * waiting_s, computing_ms=1e3 * computing_s)
            for start, waiting_s, computing_s in timing.medians_s(alike)
        )

    def take_in(self, seq: int, n_bytes: int, n_edits: int) -> None:
        """Count an op until it is finished. Raises Refused when more waits here than the session can ever need.

        An edit is work, however few bytes it takes.
        """
        while self.unfinished and self.unfinished[0][0] <= self.state.finished:
            _, n_bytes_done, n_edits_done = self.unfinished.popleft()
            self.waiting_bytes -= n_bytes_done
            self.waiting_edits -= n_edits_done
        if self.waiting_bytes + n_bytes > self.limit_bytes:
            raise Refused(Code.TOO_LONG, f"more than {self.limit_bytes} B of this session wait to be computed")
        if self.waiting_edits + n_edits > self.limit_edits:
            raise Refused(Code.TOO_LONG, f"more than {self.limit_edits} edits of this session wait to be computed")
        self.unfinished.append((seq, n_bytes, n_edits))
        self.waiting_bytes += n_bytes
        self.waiting_edits += n_edits


def session_lost(key: Key, reason: str) -> Refusal:
    """What a client is told whose hop, of a session or a lane, is over."""
    session, start = key
    return Refusal(
        code=Code.SESSION_LOST.value,
        message=reason[:500],
        session=session,
        start=start,
    )


def session_rows(hops: Hops) -> tuple[SessionRow, ...]:
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
        for key, hop in hops.items()
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
