"""Joining: ask one member whether an invite still counts, before anything is written down."""

from __future__ import annotations

import logging
import random
import time
from dataclasses import dataclass

import trio

from swarmd.errors import Code, ConfigError, PeerError, Refused, SwarmUnavailable
from swarmd.net.api import Purpose
from swarmd.net.exchange import Exchange
from swarmd.net.libp2p.host import HandshakeFailed, HostOptions, Libp2pNetwork
from swarmd.net.rpc import Channel, Rpc
from swarmd.node.members.link_probes import LinkProbes
from swarmd.plan.owner.health import NARROW_LINK
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.membership.invite import SwarmKeys
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import AnyMessage, Hello
from swarmd.values import PeerId

logger = logging.getLogger(__name__)


class _Visitor:
    """A guest that says hello and listens to nothing else."""

    def __init__(self, exchange: Exchange, certificate: tuple[bytes, ...]) -> None:
        self._exchange = exchange
        self._certificate = certificate

    def hello(self) -> Hello:
        """Show the certificate, whatever it is worth."""
        return Hello(certificate=self._certificate, agent="swarmd join")

    def admit(self, peer: PeerId, hello: Hello) -> None:
        """Check a member's own certificate. Raises Refused."""
        self._exchange.admit(peer, hello)

    async def handle(self, channel: Channel, message: AnyMessage, frame: Frame) -> bool:
        """Answer nothing."""
        return False

    def gone(self, peer: PeerId, purpose: Purpose) -> None:
        """Miss nobody."""


@dataclass(frozen=True, slots=True)
class CheckinResult:
    """What the swarm says: its catalog, or that a founder has to approve first; and of this machine's clock ("")."""

    catalog: bytes | None = None
    waits: bool = False
    wrong_clock: str = ""


# Nothing is written before a member has answered: a folder with a wrong key would have to be cleaned up by hand. The
# kind of failure decides what the user is told:
#
#     every handshake fails, or one member knows the invite as revoked   ConfigError: another invite is needed
#     a founder has to approve first                                     no error: ``waits``
#     nobody answers                                                     SwarmUnavailable: worth another try
async def check_in(
    keys: SwarmKeys, identity: Identity, certificate: tuple[bytes, ...], bootstrap: dict[PeerId, tuple[str, ...]]
) -> CheckinResult:
    """Exchange once with any of ``bootstrap``.

    Raises ConfigError when the swarm says no (wrong key, revoked, expired), SwarmUnavailable when nobody answers.
    """
    network = Libp2pNetwork(identity, keys.psk, HostOptions(certificate=certificate))
    exchange = Exchange(keys, time.time)
    rpc = Rpc(network, _Visitor(exchange, certificate))
    failures: list[str] = []
    n_mismatches = 0
    waits = False
    async with network.running(), trio.open_nursery() as nursery:
        await nursery.start(rpc.run)
        for peer, addresses in bootstrap.items():
            network.learn(peer, addresses)
            try:
                await exchange.pull(rpc, peer)
                failures = []
                break
            except Refused as error:
                if error.code == Code.WAITS:
                    failures = []
                    waits = True
                    break
                if error.code in (Code.REVOKED, Code.NOT_A_MEMBER):
                    failures = [f"refused: {error}"]
                    n_mismatches = len(bootstrap)
                    break
                failures.append(f"{', '.join(addresses)}: {error}")
            except HandshakeFailed as error:
                n_mismatches += 1
                failures.append(str(error))
            except PeerError as error:
                has_met = peer in exchange.roster.met
                failures.append(f"{error}{await explain_silence(rpc, peer, addresses) if has_met else ''}")
        nursery.cancel_scope.cancel()
        wrong_clock = exchange.describe_wrong_clock()
    if not failures and bootstrap:
        return CheckinResult(exchange.book.catalog_raw, waits, wrong_clock)
    if wrong_clock:
        failures.append(wrong_clock)
    if n_mismatches == len(bootstrap) and failures:
        raise ConfigError(f"the swarm does not let this machine in: {'; '.join(failures)}")
    raise SwarmUnavailable(f"no member answers: {'; '.join(failures) or 'the invite names no address'}")


async def explain_silence(rpc: Rpc, peer: PeerId, addresses: tuple[str, ...]) -> str:
    """Say whether it is for its size that a member that said hello did not answer; empty where it is not."""
    probes = LinkProbes(rpc, random.Random(), lambda _: addresses)
    await probes.probe_sizes(peer, may_reconnect=True)
    return f"; small messages pass, large ones do not: MTU? {NARROW_LINK}" if probes.n_losing_large() else ""
