"""Connections that this peer begins: which address is tried when, from which port, and what became of each.

``plan.links.dialing`` orders the addresses, ``plan.links.dial_budget`` says whether one may be tried now. Handles rows
8 and 9 (the likeliest address first and the next soon after, without a negative cache) and 18 of docs/libp2p-faults.md.
"""

from __future__ import annotations

import errno
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass

import trio
from libp2p.abc import INetConn, IRawConnection
from libp2p.network.exceptions import SwarmException
from libp2p.network.swarm import Swarm
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError
from libp2p.security.noise.exceptions import PeerIDMismatchesPubkey
from libp2p.security.pnet.protector import new_protected_conn
from libp2p.transport.exceptions import OpenConnectionError
from libp2p.transport.tcp.tcp import TCP
from multiaddr import Multiaddr

from swarmd.net.interfaces import expand_wildcards, own_networks
from swarmd.net.libp2p.own_port import connect_from, ports_of, reserve_port
from swarmd.net.traffic import UsedUpError
from swarmd.plan.links.dial_budget import DialBudget
from swarmd.plan.links.dialing import Attempt, is_circuit, order_attempts

UPGRADE_TIMEOUT_S = 3.0  # Noise and yamux; a silent socket is given up
OWN_PORT_TIMEOUT_S = 6.0  # for all addresses together: two that are silent, or a row that answer fast

PORT_TAKEN_ERRORS = (
    errno.EADDRNOTAVAIL,
    errno.EADDRINUSE,
)  # another connection from this port to that address is there


class HandshakeError(SwarmException):
    """Somebody listens there, but the upgrade to an encrypted connection failed."""


@dataclass(frozen=True, slots=True)
class Failure:
    """What became of one address; ``is_garbled``: something answered that is not of this swarm."""

    text: str
    is_garbled: bool


class Dialler:
    """Dials for one swarm, which upgrades what is dialled. ``dial_circuit`` makes the wire of one through a relay.

    ``is_used_up``: nothing more may pass this month.
    """

    circuits_of: dict[ID, tuple[str, ...]]
    """Addresses through relays, which are not in the peerstore: the library would read them as the relays' own."""
    dial_circuit: Callable[[str, ID], Awaitable[IRawConnection]]

    def __init__(self, swarm: Swarm, is_used_up: Callable[[], bool]) -> None:
        self.circuits_of = {}
        self._swarm = swarm
        self._is_used_up = is_used_up
        self._tcp = TCP()
        self._budget = DialBudget()
        self._reserved_port = 0

    async def dial(self, peer_id: ID) -> INetConn:
        """Try all known addresses, the likeliest first. Raises SwarmException with what became of each."""
        addresses = (*self._known_addresses(peer_id), *self.circuits_of.get(peer_id, ()))
        return await self.dial_addresses(addresses, peer_id)

    async def dial_addresses(self, addresses: Sequence[str], peer_id: ID) -> INetConn:
        """Make a connection, the likeliest address first. Raises SwarmException with what became of each."""

        async def attempt(address: str) -> INetConn | Failure:
            return await self._attempt_dial(address, peer_id)

        outcome = await race_attempts(self._order(addresses), attempt)
        if isinstance(outcome, INetConn):
            return outcome
        failures = ", ".join(failure.text for failure in outcome) or "no address of it is known that leads there"
        if any(failure.is_garbled for failure in outcome):
            raise HandshakeError(f"the swarm key does not match, or something else listens at {failures}")
        raise SwarmException(f"cannot reach {peer_id}: {failures}")

    async def dial_over(self, version: int, peer_id: ID) -> INetConn:
        """Make a connection over one version of IP, 4 or 6. Raises SwarmException."""
        kinds = (f"/ip{version}/", f"/dns{version}/", "/dns/")
        addresses = tuple(address for address in self._known_addresses(peer_id) if address.startswith(kinds))
        return await self.dial_addresses(addresses, peer_id)

    def knows(self, peer_id: ID) -> bool:
        """Is there an address of a peer?"""
        return bool(self._known_addresses(peer_id))

    def _known_addresses(self, peer_id: ID) -> list[str]:
        try:
            return [str(address) for address in self._swarm.peerstore.addrs(peer_id)]
        except PeerStoreError:
            return []

    def _order(self, addresses: Sequence[str]) -> list[Attempt]:
        own_addresses = expand_wildcards(tuple(map(str, self._listen_addresses())))
        return order_attempts(addresses, own_networks(), list(own_addresses))

    def _listen_addresses(self) -> list[Multiaddr]:
        return [address for listener in self._swarm.listeners.values() for address in listener.get_addrs()]

    @contextmanager
    def own_port(self) -> Iterator[None]:
        """Keep a port to dial from, as routers know who dials by it: the one that it listens on, or any.

        Who listens dials from that port only where a router has to know it: two that dialled each other from there in
        the same moment would make one connection, on which both begin.
        """
        with reserve_port(self._listen_addresses()) as self._reserved_port:
            yield

    @property
    def _own_port(self) -> int:
        """An address may have come after the start: then it is the port that this peer listens on there."""
        return next(ports_of(self._listen_addresses()), self._reserved_port)

    async def dial_from_own_port(self, peer_id: ID) -> INetConn:
        """A connection beside those that there are. Raises SwarmException."""
        with trio.move_on_after(OWN_PORT_TIMEOUT_S):
            for attempt in self._order(self._known_addresses(peer_id)):
                with suppress(OpenConnectionError, SwarmException), trio.move_on_after(UPGRADE_TIMEOUT_S):
                    raw = await connect_from(self._own_port, _parse_untrusted(attempt.address))
                    return await self._upgrade_wire(raw, peer_id)
        raise SwarmException(f"{peer_id} cannot be dialled from port {self._own_port}")

    async def punch(self, address: str, peer_id: ID, is_initiator: bool) -> None:
        """Connect with who connects here in the same moment. Raises SwarmException."""
        try:
            raw = await connect_from(self._own_port, _parse_untrusted(address))
        except OpenConnectionError as error:
            raise SwarmException(f"no connection to {address}: {error}") from None
        if is_initiator:
            await self._upgrade_wire(raw, peer_id)
            return
        with as_swarm_failure():
            muxed = await self._swarm.upgrade_inbound_raw_conn(raw, Multiaddr(address))
        if muxed.peer_id != peer_id:
            await muxed.close()
            raise SwarmException(f"{muxed.peer_id} answers at {address}, not {peer_id}")

    async def does_answer(self, address: str, peer_id: ID) -> bool:
        """Does a peer answer at an address, with its key, over a connection made and ended for that?"""
        raw: IRawConnection | None = None
        try:
            raw = await self._open_wire(address, peer_id)
            with as_swarm_failure():
                await self._swarm.upgrader.upgrade_security(_protect_wire(raw, self._swarm.psk), True, peer_id)
        except (OpenConnectionError, SwarmException):
            return False
        finally:
            if raw is not None:
                with trio.CancelScope(shield=True), trio.move_on_after(1):
                    await raw.close()
        return True

    async def _attempt_dial(
        self,
        address: str,
        peer_id: ID,
    ) -> INetConn | Failure:
        """One attempt: the connection, or why there is none."""
        peer = peer_id.to_base58()
        is_relayed = is_circuit(address)
        wait_s = 0.0 if is_relayed else self._budget.take(address, peer, trio.current_time())
        if wait_s:
            return Failure(f"{address} (dialled for others just now; again in {wait_s:.0f} s)", is_garbled=False)
        is_connected = False
        cause = "no answer in time"
        with trio.move_on_after(UPGRADE_TIMEOUT_S):
            try:
                raw = await self._open_wire(address, peer_id)
                is_connected = True
                connection = await self._upgrade_wire(raw, peer_id)
                self._budget.met(address, peer)
                return connection
            except OpenConnectionError as error:
                cause = str(error) if is_relayed else "connection refused"
            except SwarmException as error:
                root = _cause_chain(error)[-1]
                if isinstance(root, PeerIDMismatchesPubkey):
                    return Failure(f"{address} (another peer answers there)", is_garbled=False)
                if not isinstance(root, trio.TooSlowError):
                    cause = f"the handshake failed: {type(root).__name__}"
        return Failure(f"{address} ({cause})", is_garbled=is_connected and not is_relayed)

    async def _open_wire(self, address: str, peer_id: ID) -> IRawConnection:
        """The bytes of a connection, before anything is said over them. Raises OpenConnectionError.

        Who does not listen dials from its own port: a relay then sees where others can meet it.
        """
        if self._is_used_up():
            raise OpenConnectionError(str(UsedUpError()))
        if is_circuit(address):
            return await self.dial_circuit(address, peer_id)
        if not self._listen_addresses() and address.startswith("/ip4/"):
            try:
                return await connect_from(self._own_port, _parse_untrusted(address))
            except OpenConnectionError as error:
                root = _cause_chain(error)[-1]
                if not isinstance(root, OSError) or root.errno not in PORT_TAKEN_ERRORS:
                    raise
        return await self._tcp.dial(_parse_untrusted(address))

    async def _upgrade_wire(self, raw: IRawConnection, peer_id: ID) -> INetConn:
        """Upgrade what this side began; it is closed when that fails. Raises SwarmException."""
        made: INetConn | None = None
        try:
            with as_swarm_failure():
                made = await self._swarm.upgrade_outbound_raw_conn(_protect_wire(raw, self._swarm.psk), peer_id)
                return made
        finally:
            if made is None:
                with trio.CancelScope(shield=True), trio.move_on_after(1):
                    await raw.close()


async def race_attempts(
    planned: Sequence[Attempt], attempt: Callable[[str], Awaitable[INetConn | Failure]]
) -> INetConn | list[Failure]:
    """The connection of whichever attempt succeeds first, or what became of each, in their order."""
    # "Happy eyeballs" (RFC 8305): each attempt has its own task. It begins at its time, or as soon as one before it
    # has failed, so that a refused address costs no wait. The first that succeeds cancels all others.
    won: list[INetConn] = []
    failed: dict[int, Failure] = {}
    turns = [trio.Event() for _ in planned]

    async def wait_and_try(index: int, after_s: float, address: str) -> None:
        with trio.move_on_after(after_s):
            await turns[index].wait()
        outcome = await attempt(address)
        if not isinstance(outcome, Failure):
            won.append(outcome)
            nursery.cancel_scope.cancel()
            return
        failed[index] = outcome
        following = next((i for i in range(len(planned)) if i not in failed), None)
        if following is not None:
            turns[following].set()

    async with trio.open_nursery() as nursery:
        for index, entry in enumerate(planned):
            nursery.start_soon(wait_and_try, index, entry.after_s, entry.address)
    return won[0] if won else [failed[index] for index in sorted(failed)]


@contextmanager
def as_swarm_failure() -> Iterator[None]:
    """Whatever the other side's bytes make the library raise in a handshake is a SwarmException (row 18)."""
    try:
        yield
    except SwarmException:
        raise
    except Exception as error:
        raise SwarmException(f"the handshake failed: {type(error).__name__}") from error


def _protect_wire(raw: IRawConnection, psk: str | None) -> IRawConnection:
    return new_protected_conn(raw, psk) if psk is not None else raw


def _parse_untrusted(address: str) -> Multiaddr:
    """Raises OpenConnectionError for what is no address."""
    try:
        return Multiaddr(address)
    except (ValueError, LookupError, TypeError):
        raise OpenConnectionError(f"{address[:80]!r} is no address") from None


def _cause_chain(error: BaseException) -> list[BaseException]:
    """An error, and what caused it, the root last."""
    chain = [error]
    while chain[-1].__cause__ is not None:
        chain.append(chain[-1].__cause__)
    return chain
