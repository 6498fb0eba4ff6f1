"""Ask the router of this home to forward a TCP port over IPv4: PCP (RFC 6887), or its older form NAT-PMP (RFC 6886).

Both are one exchange of datagrams with the router itself. No library that is kept speaks them; the messages are a few
fields each. Which machine the router is, only Linux says in a file.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path
from typing import Any, Literal, TypeVar

import trio

from swarmd.errors import RemoteProtocolError, Unreachable
from swarmd.plan.links.dialing import is_private

CONTROL_PORT = 5351  # of routers, for both
ROUTES = Path("/proc/net/route")  # Linux' IPv4 routes: numbers in hexadecimal, the machine's byte order
NO_HOST = "00000000"  # 0.0.0.0 in that file: as a destination everything, as a router none
WAITS_S = (0.25, 0.5, 1.0)  # for an answer, before it is asked again: NAT-PMP's, which begins sooner than PCP's
MAX_BYTES = 1100  # of a message (RFC 6887, 7)
NONCE_BYTES = 12  # RFC 6887, 11.1

PCP = 2  # its version, as messages name it
NAT_PMP = 0  # its version
MAP = 1  # PCP's opcode for a mapping (RFC 6887, 19.4)
MAP_TCP = 2  # NAT-PMP's opcode (RFC 6886, 3.3)
ANSWER = 0x80  # the highest bit of an answer's opcode
TCP = 6  # as IP names it
PCP_ERRORS = {  # RFC 6887, 7.4
    1: "it knows another version",
    2: "it may not",
    7: "it is not connected",
    8: "it has no ports left",
    10: "this machine has too many",
    11: "it has no such address",
    12: "another router is in between",
}
NAT_PMP_ERRORS = {
    1: "it knows another version",
    2: "it may not",
    3: "it is not connected, or another router is in between",
    4: "it has no ports left",
}
PCP_MAP = struct.Struct("!BBxxI16s12sB3xHH16s")  # RFC 6887, 7.1 and 11.1
PCP_ANSWER = struct.Struct("!BBxBII12x12sB3xHH16s")
NAT_PMP_ADDRESS = bytes((NAT_PMP, 0))
NAT_PMP_ADDRESS_ANSWER = struct.Struct("!BBHI4s")  # RFC 6886, 3.2
NAT_PMP_MAP = struct.Struct("!BBxxHHI")  # 3.3
NAT_PMP_ANSWER = struct.Struct("!BBHIHHI")
T = TypeVar("T")

Spoken = Literal["PCP", "NAT-PMP"]


@dataclass(frozen=True, slots=True)
class PortGrant:
    """A port of the router, and its address, that lead to a port of this machine for ``lease_s``, as it was granted."""

    host: str
    port: int
    spoken: Spoken
    lease_s: int


class WrongVersionError(Exception):
    """The router knows NAT-PMP only."""


class BehindAnotherError(Unreachable):
    """A router whose own address nobody outside can dial: no port of it leads here from outside."""

    def __init__(self, host: str = "") -> None:
        named = f" (this one's own address is {host}, which nobody outside can dial)" if host else ""
        super().__init__(f"another router is in between{named}")


class NoRouterError(Unreachable):
    """Nobody answers as a router does: there is none, or it does not speak what it was asked in."""


async def map_port(port: int, nonce: bytes, lease_s: int) -> PortGrant:
    """Have the router's ``port``, or another, forwarded to this machine's. ``lease_s`` 0 takes it back.

    The nonce (12 bytes) names who may change the mapping, after a restart too. Raises NoRouterError or Unreachable.
    """
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        try:
            await asking.connect((str(find_gateway()), CONTROL_PORT))
            own_host = IPv4Address(asking.getsockname()[0])
            request = encode_pcp_map(nonce, own_host, port, lease_s)
            try:
                return await _exchange_datagrams(asking, request, lambda data: read_pcp_answer(data, nonce, port))
            except WrongVersionError:
                host = await _exchange_datagrams(asking, NAT_PMP_ADDRESS, read_nat_pmp_address)
                request = encode_nat_pmp_map(port, lease_s)
                return await _exchange_datagrams(asking, request, lambda data: read_nat_pmp_answer(data, port, host))
        except OSError as error:
            raise NoRouterError(f"nothing by PCP or NAT-PMP ({error.strerror})") from None


async def _exchange_datagrams(
    asking: trio.socket.SocketType,
    message: bytes,
    read: Callable[[bytes], T],
) -> T:
    """The first answer that is one to this message; others are no answer. Raises Unreachable, OSError."""
    for wait_s in WAITS_S:
        await asking.send(message)
        with trio.move_on_after(wait_s):
            while True:
                try:
                    return read(await asking.recv(MAX_BYTES))
                except RemoteProtocolError:
                    continue
    raise NoRouterError("nothing by PCP or NAT-PMP (no answer)")


def find_gateway() -> IPv4Address:
    """The router that leads elsewhere. Raises Unreachable."""
    try:
        rows = [line.split() for line in ROUTES.read_text(encoding="utf-8").splitlines()[1:]]
    except OSError:
        raise NoRouterError("this system does not say which router it has") from None
    default_routes = []
    for row in rows:
        router = row[2]
        is_default = row[1] == row[7] == NO_HOST  # destination and mask
        if is_default and router != NO_HOST:
            default_routes.append((int(row[6]), router))  # the least metric is preferred
    if not default_routes:
        raise NoRouterError("this machine has no router")
    _, router = min(default_routes)
    return IPv4Address(struct.pack("=I", int(router, 16)))


# --- messages --------------------------------------------------------------------------------------------------
#
# An answer is a datagram, so anybody can send one that says it comes from the router. PCP's has the nonce that this
# machine drew, which nobody off the network can know; NAT-PMP's has nothing of the kind, so only the port is compared.


def encode_pcp_map(nonce: bytes, own_host: IPv4Address, port: int, lease_s: int) -> bytes:
    any_host = IPv6Address("::ffff:0.0.0.0").packed
    return PCP_MAP.pack(PCP, MAP, lease_s, IPv6Address(f"::ffff:{own_host}").packed, nonce, TCP, port, port, any_host)


def read_pcp_answer(data: bytes, nonce: bytes, port: int) -> PortGrant:
    """Raises RemoteProtocolError for what is no answer, Unreachable for a refusal, WrongVersionError."""
    if data[:1] == bytes((NAT_PMP,)):
        raise WrongVersionError
    version, opcode, result, lease_s, _, named, protocol, internal_port, external_port, host = _unpack_answer(
        PCP_ANSWER, data
    )
    if (version, opcode, named, protocol, internal_port) != (PCP, ANSWER | MAP, nonce, TCP, port):
        raise RemoteProtocolError("another's answer")
    address = IPv6Address(host).ipv4_mapped
    if result and address is not None and is_behind_another(address):
        raise BehindAnotherError(str(address))  # miniupnpd says "no ports left" (8) then, with its true address
    _require_success(result, PCP_ERRORS)
    if address is None:
        raise RemoteProtocolError("an answer without an IPv4 address")
    return PortGrant(str(address), external_port, "PCP", lease_s)


def encode_nat_pmp_map(port: int, lease_s: int) -> bytes:
    """NAT-PMP's request for a port (RFC 6886, 3.3); port 0 and lease 0 take it back."""
    return NAT_PMP_MAP.pack(NAT_PMP, MAP_TCP, port, port if lease_s else 0, lease_s)


def read_nat_pmp_answer(data: bytes, port: int, host: IPv4Address) -> PortGrant:
    """The router's port, of its address ``host``. Raises RemoteProtocolError or Unreachable."""
    version, opcode, result, _, internal_port, external_port, lease_s = _unpack_answer(NAT_PMP_ANSWER, data)
    if (version, opcode, internal_port) != (NAT_PMP, ANSWER | MAP_TCP, port):
        raise RemoteProtocolError("another's answer")
    _require_success(result, NAT_PMP_ERRORS)
    return PortGrant(str(host), external_port, "NAT-PMP", lease_s)


def read_nat_pmp_address(data: bytes) -> IPv4Address:
    """The router's own address. Raises RemoteProtocolError or Unreachable."""
    version, opcode, result, _, host = _unpack_answer(NAT_PMP_ADDRESS_ANSWER, data)
    if (version, opcode) != (NAT_PMP, ANSWER):
        raise RemoteProtocolError("another's answer")
    _require_success(result, NAT_PMP_ERRORS)
    return IPv4Address(host)


def _unpack_answer(form: struct.Struct, data: bytes) -> tuple[Any, ...]:
    if len(data) < form.size:
        raise RemoteProtocolError(f"an answer of {len(data)} bytes, expected {form.size}")
    return form.unpack_from(data)


def is_behind_another(host: IPv4Address) -> bool:
    """Is a router's own address one that nobody outside can dial: private, or a carrier's (100.64.0.0/10)?"""
    return is_private(host) and not host.is_unspecified


def _require_success(result: int, says: Mapping[int, str]) -> None:
    if result:
        raise Unreachable(f"the router opens no port: {says.get(result, f'error {result}')}")
