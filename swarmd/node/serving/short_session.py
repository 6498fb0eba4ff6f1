"""A session of one hop with another server, for a moment: to try whether it takes one, or what it computes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import trio

from swarmd.errors import PeerError
from swarmd.net.exchange import Exchange
from swarmd.net.rpc import CALL_TIMEOUT_S, Rpc
from swarmd.protocol.membership.records import SpanRecord
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage, CloseSession, OpenSession
from swarmd.values import PeerId, Span

CLOSE_TIMEOUT_S = 1.0  # to say that it is over, whatever happened


def opening_of(
    key: bytes,
    target: SpanRecord,
    hop: Span,
    max_tokens: int,
    *,
    receipts: bool = False,
) -> OpenSession:
    """What opens a session with a server, as a client does; its ``id`` is given when it is sent."""
    return OpenSession(
        session=key,
        model=target.model,
        start=hop.start,
        end=hop.end,
        epoch=1,
        max_tokens=max_tokens,
        dtype=target.dtype,
        receipts=receipts,
    )


@asynccontextmanager
async def short_session(
    rpc: Rpc, exchange: Exchange, peer: PeerId, opening: OpenSession, timeout_s: float = CALL_TIMEOUT_S
) -> AsyncIterator[tuple[AnyMessage, Frame]]:
    """Open a session, give what the server answered, and close it in any case. Raises PeerError."""
    rpc.network.learn(peer, exchange.addresses_of(peer))
    try:
        yield await rpc.call(peer, opening, timeout_s=timeout_s)
    finally:
        channel = rpc.find_channel(peer)
        if channel is not None:
            closing = CloseSession(session=opening.session, start=opening.start)
            deadline = trio.current_time() + CLOSE_TIMEOUT_S
            with suppress(PeerError), trio.CancelScope(shield=True, deadline=deadline):
                await channel.send(closing)
