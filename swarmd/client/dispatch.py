"""Gives each message that reaches a client to the session, lane or run whose key it bears; lets members in."""

from __future__ import annotations

from typing import Protocol

from swarmd.client.links.link import Listeners
from swarmd.client.sessions.session import ChainSession
from swarmd.client.tuning.lane import Lane
from swarmd.net.api import Purpose
from swarmd.net.exchange import Exchange
from swarmd.net.rpc import Channel
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage, ExchangeDigest, Hello, Ping, Pong, Records
from swarmd.values import PeerId

LISTENER_OF_PURPOSE: dict[str, type] = {"interactive": ChainSession, "training": Lane}
"""Whose messages travel on the channels of a purpose."""


class RunGuest(Protocol):
    """What takes part in a training run from a client's process (train.collaboration)."""

    async def handle(self, channel: Channel, message: AnyMessage, frame: Frame) -> None: ...

    def gone(self, peer: PeerId) -> None: ...


class MessageDispatch:
    """The owner of a client's Rpc. ``listeners`` holds sessions and lanes by their keys, ``runs`` guests by theirs."""

    def __init__(self, exchange: Exchange, certificate: tuple[bytes, ...]) -> None:
        self.listeners: Listeners = {}
        self.runs: dict[str, RunGuest] = {}
        self._exchange = exchange
        self._certificate = certificate

    def hello(self) -> Hello:
        return Hello(certificate=self._certificate, agent="swarmd client")

    def admit(self, peer: PeerId, hello: Hello) -> None:
        self._exchange.admit(peer, hello)

    async def handle(self, channel: Channel, message: AnyMessage, frame: Frame) -> bool:
        """Give a message to the session, lane or run that it is for; False for one that nothing here takes."""
        listener = self.listeners.get(getattr(message, "session", None) or b"")
        if listener is not None:
            await listener.on_message(channel.peer, message, frame)
        elif isinstance(message, Records):
            await self._exchange.take(channel, frame)
        elif isinstance(message, ExchangeDigest):
            await self._exchange.answer(channel, message, frame)
        elif isinstance(message, Ping):
            await channel.send(Pong(re=message.id))
        elif (guest := self.runs.get(getattr(message, "run", ""))) is not None:
            await guest.handle(channel, message, frame)
        else:
            return False
        return True

    def gone(self, peer: PeerId, purpose: Purpose) -> None:
        """Tell sessions or lanes, and runs, that a connection ended."""
        kind = LISTENER_OF_PURPOSE.get(purpose)
        for listener in list(self.listeners.values()):
            if kind is not None and isinstance(listener, kind):
                listener.on_gone(peer)
        for guest in list(self.runs.values()):
            guest.gone(peer)
