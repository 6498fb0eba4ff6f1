"""Takes what the hops of one session sign, asks for it, and signs their bills in return. ``receipts`` checks it."""

from __future__ import annotations

from swarmd.client.links.link import HopLink, SessionServices
from swarmd.client.sessions.chain import Chain
from swarmd.client.sessions.receipts import HopAccount
from swarmd.errors import Forged, IntegrityError, RemoteProtocolError
from swarmd.plan.chains.routing import Hop
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.understanding import VOIDS, understanding_of
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import ReceiptIs, Taken, WantReceipt
from swarmd.values import PeerId

RECEIPT_TIMEOUT_S = 5.0  # for a hop to sign what has passed


class ReceiptExchange:
    """The receipts and bills of one session's hops, as they come in."""

    def __init__(self, swarm: SessionServices, chain: Chain) -> None:
        self._swarm = swarm
        self._chain = chain

    async def ask_receipt(self, link: HopLink) -> HopAccount:
        """All that a hop has signed by now. Raises PeerError."""
        hop = link.hop
        request = WantReceipt(session=self._chain.key, start=hop.span.start)
        reply, frame = await self._swarm.rpc.call(hop.peer, request, timeout_s=RECEIPT_TIMEOUT_S)
        if not isinstance(reply, ReceiptIs):
            raise RemoteProtocolError(f"expected a receipt, got {type(reply).__name__}")
        try:
            return await self._enter_receipt(hop, reply, frame)
        except Forged as error:
            self._swarm.rpc.standing.fault(hop.peer, Fault.FORGED, str(error))
            raise

    async def take_receipt(self, peer: PeerId, message: ReceiptIs, frame: Frame) -> HopAccount:
        """Enter what a hop has signed. Raises Forged for a receipt that no hop of the session gives."""
        link = self._chain.link_at(message.start)
        if link is None or link.hop.peer != peer:
            return HopAccount()  # of a hop that is no more
        return await self._enter_receipt(link.hop, message, frame)

    async def _enter_receipt(self, hop: Hop, message: ReceiptIs, frame: Frame) -> HopAccount:
        """Enter it, and sign the bill that came with it."""
        place = (hop.peer, hop.span.start)
        end = hop.span.end
        now = self._swarm.wall_clock()
        accounts = self._chain.accounts
        is_older = understanding_of(self._swarm.view().peers.get(hop.peer)).minor < VOIDS
        try:
            account = accounts.take_untrusted(place, end, bytes(frame.payload), message.signature, now)
            limit = accounts.taken.n_computed if is_older else accounts.taken.n_owed
            taken = accounts.take_bill_untrusted(place, end, message.bill, message.given, self._swarm.identity, limit)
        except IntegrityError as error:
            raise Forged(str(error)) from None
        channel = self._swarm.rpc.find_channel(hop.peer)
        if channel is not None and taken is not None:
            signed = Taken(session=self._chain.key, start=hop.span.start, taken=taken)
            await channel.send(signed, message.bill)
        return account
