"""A hostile member in five lines: whatever it likes to send, over the real channels.

attacker = Attacker(swarm)
await attacker.start(nursery)
await attacker.send(server, Records(), payload)
codes = await attacker.codes_for(server, message, payload)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import trio

from swarmd.net.exchange import Exchange
from swarmd.net.rpc import Channel, Rpc
from swarmd.protocol.fields import Message
from swarmd.protocol.membership.identity import Identity, certify
from swarmd.protocol.membership.records import AnyRecord, ExchangeBody, PeerRecord, SpanRecord, sign
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage, Hello, OpenSession, Records, Refusal
from swarmd.values import PeerId, Span
from tests.sim.swarm import EPOCH_S, SimSwarm, toy_checkpoint

KEY = b"a" * 16
LIFE_S = 60


class Attacker:
    """A member with a valid certificate and bad intentions: sends anything, notes every refusal."""

    def __init__(self, swarm: SimSwarm, certificate: tuple[bytes, ...] | None = None) -> None:
        self.swarm = swarm
        self.identity, own = swarm._identity()
        self.certificate = own if certificate is None else certificate
        self.network = swarm.world.join(self.identity.peer_id)
        self.rpc = Rpc(self.network, self)
        self.exchange = Exchange(swarm.keys, swarm.wall_clock)
        self.refusals: list[Refusal] = []

    async def start(self, nursery: trio.Nursery) -> None:
        nursery.start_soon(self.network.run)
        await nursery.start(self.rpc.run)

    def hello(self) -> Hello:
        return Hello(certificate=self.certificate)

    def admit(self, peer: PeerId, hello: Hello) -> None:
        self.exchange.roster.admit(peer, hello)

    async def handle(self, channel: Channel, message: AnyMessage, frame: Frame) -> bool:
        if isinstance(message, Refusal):
            self.refusals.append(message)
        return isinstance(message, Refusal)

    def gone(self, peer: PeerId, purpose: str) -> None: ...

    async def send(self, peer: PeerId, message: Message, payload: bytes = b"") -> None:
        channel = await self.rpc.channel(peer, "bulk")
        await channel.send(message, payload)

    async def announce(self, peer: PeerId, raws: Sequence[bytes]) -> None:
        await self.send(peer, Records(), msgspec.msgpack.encode(ExchangeBody(envelopes=list(raws))))

    async def codes_for(self, peer: PeerId, message: Message, payload: bytes = b"") -> list[str]:
        """Send one message and wait for what comes back."""
        self.refusals.clear()
        channel = await self.rpc.channel(peer)
        await channel.send(message, payload)
        await trio.sleep(1)
        return [r.code for r in self.refusals]

    async def open(self, peer: PeerId, **changes: object) -> None:
        fields = {
            "session": KEY,
            "model": toy_checkpoint(4)[1],
            "start": 0,
            "end": 4,
            "epoch": 1,
            "max_tokens": 64,
            **changes,
        }
        await self.rpc.call(peer, OpenSession(**fields))  # type: ignore[arg-type]

    def says(self, kind: type[AnyRecord] = PeerRecord, **fields: Any) -> bytes:
        """A record of its own, as absurd as it likes."""
        return record_of(self.identity, self.certificate, self.swarm.wall_clock(), kind, **fields)


async def served(nursery: trio.Nursery, seed: int) -> tuple[SimSwarm, PeerId]:
    """A swarm of one server that holds all four blocks."""
    swarm = SimSwarm(nursery, 4, seed=seed)
    server = await swarm.add(Span(0, 4))
    while min(swarm.coverage()) < 1:
        await trio.sleep(0.5)
    return swarm, server


def record_of(
    identity: Identity, certificate: tuple[bytes, ...], now: float, kind: type[AnyRecord] = PeerRecord, **fields: Any
) -> bytes:
    """Anybody's signed record."""
    common: dict[str, Any] = {
        "peer": identity.peer_id,
        "sequence": int(now * 1000),
        "issued_at": int(now),
        "expires_at": int(now) + LIFE_S,
        "certificate": certificate,
    }
    return sign(kind(**{**common, **fields}), identity)


class Invite:
    """A leaked invite: as many members as its holder likes, each with as many clients."""

    def __init__(self, founder: Identity, seed: bytes = b"i" * 32, until: int = EPOCH_S + 10**6) -> None:
        self.key = Identity(seed)
        self.until = until
        self._first = certify(founder, self.key.public_key, "invite", until)
        self._n = 0

    def member(self) -> tuple[Identity, tuple[bytes, ...]]:
        self._n += 1
        identity = Identity(self.key.public_key[:24] + self._n.to_bytes(8, "big"))
        return identity, (self._first, certify(self.key, identity.public_key, "member", self.until))

    def client_of(self, member: Identity, certificate: tuple[bytes, ...]) -> tuple[Identity, tuple[bytes, ...]]:
        self._n += 1
        identity = Identity(self.key.public_key[:24] + self._n.to_bytes(8, "big"))
        return identity, (*certificate, certify(member, identity.public_key, "client", self.until))


__all__ = ["KEY", "Attacker", "Invite", "SpanRecord", "record_of"]
