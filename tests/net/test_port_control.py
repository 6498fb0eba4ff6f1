"""PCP and NAT-PMP: the messages, and an exchange with a router on loopback."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from swarmd.errors import RemoteProtocolError, Unreachable
from swarmd.net import port_control
from swarmd.net.port_control import (
    NAT_PMP_ADDRESS,
    PortGrant,
    WrongVersionError,
    encode_nat_pmp_map,
    encode_pcp_map,
    find_gateway,
    map_port,
    read_nat_pmp_address,
    read_nat_pmp_answer,
    read_pcp_answer,
)

NONCE, PORT, OUTSIDE, LEASE_S = b"n" * 12, 4117, 4999, 3600
GRANTED_S = 120  # less than was asked for
HOST = "5.0.1.2"
MAPPED_HOST = IPv6Address(f"::ffff:{HOST}").packed


def pcp_answer(result: int = 0, nonce: bytes = NONCE, inside: int = PORT, host: bytes = MAPPED_HOST) -> bytes:
    """As RFC 6887 draws it, field by field."""
    header = bytes((2, 0x81, 0, result)) + GRANTED_S.to_bytes(4, "big") + bytes(4) + bytes(12)
    ports = inside.to_bytes(2, "big") + OUTSIDE.to_bytes(2, "big")
    return header + nonce + bytes((6, 0, 0, 0)) + ports + host


def nat_pmp_answer(result: int = 0, inside: int = PORT) -> bytes:
    ports = inside.to_bytes(2, "big") + OUTSIDE.to_bytes(2, "big")
    return bytes((0, 130, 0, result)) + bytes(4) + ports + GRANTED_S.to_bytes(4, "big")


def nat_pmp_address(result: int = 0) -> bytes:
    return bytes((0, 128, 0, result)) + bytes(4) + IPv4Address(HOST).packed


def test_messages_have_the_sizes_and_places_of_the_standards() -> None:
    message = encode_pcp_map(NONCE, IPv4Address("192.168.1.2"), PORT, LEASE_S)
    assert len(message) == 60
    assert message[:2] == b"\x02\x01"
    assert message[4:8] == LEASE_S.to_bytes(4, "big")
    assert message[8:24] == bytes(10) + b"\xff\xff" + bytes((192, 168, 1, 2))
    assert message[24:36] == NONCE
    assert message[36] == 6
    assert message[40:44] == PORT.to_bytes(2, "big") * 2
    assert message[44:60] == bytes(10) + b"\xff\xff" + bytes(4)
    assert encode_nat_pmp_map(PORT, LEASE_S) == bytes((0, 2, 0, 0)) + PORT.to_bytes(2, "big") * 2 + LEASE_S.to_bytes(
        4, "big"
    )
    assert encode_nat_pmp_map(PORT, 0)[6:] == bytes(6), "a mapping is taken back by port 0"


def test_answers_are_read() -> None:
    assert read_pcp_answer(pcp_answer(), NONCE, PORT) == PortGrant(HOST, OUTSIDE, "PCP", GRANTED_S)
    assert read_nat_pmp_answer(nat_pmp_answer(), PORT, IPv4Address(HOST)) == PortGrant(
        HOST, OUTSIDE, "NAT-PMP", GRANTED_S
    )
    assert str(read_nat_pmp_address(nat_pmp_address())) == HOST
    with pytest.raises(WrongVersionError):
        read_pcp_answer(bytes((0, 129, 0, 1)) + bytes(4), NONCE, PORT)


@pytest.mark.parametrize(
    "read",
    [
        lambda: read_pcp_answer(pcp_answer(result=2), NONCE, PORT),
        lambda: read_nat_pmp_answer(nat_pmp_answer(result=2), PORT, IPv4Address(HOST)),
        lambda: read_nat_pmp_address(nat_pmp_address(result=2)),
    ],
)
def test_a_refusal_says_why(read: Callable[[], object]) -> None:
    with pytest.raises(Unreachable, match="it may not"):
        read()


@pytest.mark.parametrize(
    "read",
    [
        lambda: read_pcp_answer(pcp_answer(nonce=b"o" * 12), NONCE, PORT),
        lambda: read_pcp_answer(pcp_answer(inside=1), NONCE, PORT),
        lambda: read_pcp_answer(pcp_answer(host=IPv6Address("2600::1").packed), NONCE, PORT),
        lambda: read_pcp_answer(pcp_answer()[:-1], NONCE, PORT),
        lambda: read_nat_pmp_answer(nat_pmp_answer(inside=1), PORT, IPv4Address(HOST)),
        lambda: read_nat_pmp_address(nat_pmp_answer()),
    ],
)
def test_what_is_anothers_or_cut_short_is_no_answer(read: Callable[[], object]) -> None:
    with pytest.raises(RemoteProtocolError):
        read()


@pytest.mark.parametrize("host", ["10.9.9.2", "100.64.1.2", "192.168.0.7"])
def test_a_router_behind_another_is_named_whatever_error_it_gives(host: str) -> None:
    """miniupnpd 2.3.1 says that it has no resources (8), and its true address."""
    refused = pcp_answer(result=8, host=IPv6Address(f"::ffff:{host}").packed)
    with pytest.raises(Unreachable, match=rf"another router is in between \(this one's own address is {host}"):
        read_pcp_answer(refused, NONCE, PORT)
    with pytest.raises(Unreachable, match="no ports left"):
        read_pcp_answer(pcp_answer(result=8), NONCE, PORT)


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    reads: list[Callable[[], object]] = [
        lambda: read_pcp_answer(data, NONCE, PORT),
        lambda: read_nat_pmp_answer(data, PORT, IPv4Address(HOST)),
        lambda: read_nat_pmp_address(data),
    ]
    for read in reads:
        try:
            read()
        except (RemoteProtocolError, Unreachable, WrongVersionError):
            continue


def test_the_router_is_that_of_the_best_default_route(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = "Iface Destination Gateway Flags RefCnt Use Metric Mask MTU Window IRTT\n"
    routes = tmp_path / "route"
    monkeypatch.setattr(port_control, "ROUTES", routes)
    with pytest.raises(Unreachable, match="does not say"):
        find_gateway()
    routes.write_text(head + "eth0 0001A8C0 00000000 0001 0 0 0 00FFFFFF 0 0 0\n")
    with pytest.raises(Unreachable, match="no router"):
        find_gateway()
    row = "eth0 00000000 {:08X} 0003 0 0 {} 00000000 0 0 0\n"
    worse, better = (int.from_bytes(IPv4Address(host).packed, sys.byteorder) for host in ("10.0.0.1", "192.168.1.1"))
    routes.write_text(head + row.format(worse, 600) + row.format(better, 100))
    assert str(find_gateway()) == "192.168.1.1"


@contextmanager
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[trio.socket.SocketType]:
    """A socket where the router is to listen."""
    with trio.socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening._sock.bind(("127.0.0.1", 0))  # type: ignore[attr-defined]
        monkeypatch.setattr(port_control, "CONTROL_PORT", listening.getsockname()[1])
        monkeypatch.setattr(port_control, "find_gateway", lambda: IPv4Address("127.0.0.1"))
        yield listening


@pytest.mark.parametrize(
    ("answers", "granted"),
    [
        ([[b"", b"nonsense", pcp_answer()]], PortGrant(HOST, OUTSIDE, "PCP", GRANTED_S)),
        ([[], [pcp_answer()]], PortGrant(HOST, OUTSIDE, "PCP", GRANTED_S)),
        (
            [[bytes((0, 129, 0, 1))], [nat_pmp_address()], [nat_pmp_answer()]],
            PortGrant(HOST, OUTSIDE, "NAT-PMP", GRANTED_S),
        ),
    ],
)
async def test_an_exchange(monkeypatch: pytest.MonkeyPatch, answers: list[list[bytes]], granted: PortGrant) -> None:
    """What is no answer is passed over, a datagram that is lost is sent again, an older router is understood."""
    asked: list[bytes] = []

    async def serve() -> None:
        for datagrams in answers:
            data, where = await listening.recvfrom(2000)
            asked.append(data)
            for datagram in datagrams:
                await listening.sendto(datagram, where)

    with router(monkeypatch) as listening:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            assert await map_port(PORT, NONCE, LEASE_S) == granted
    if granted.spoken == "NAT-PMP":
        assert asked[1:] == [NAT_PMP_ADDRESS, encode_nat_pmp_map(PORT, LEASE_S)]


async def test_a_router_that_does_not_speak_it_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    with router(monkeypatch), trio.fail_after(5), pytest.raises(Unreachable, match="no answer"):
        await map_port(PORT, NONCE, LEASE_S)
    with pytest.raises(Unreachable, match="refused"):
        await map_port(PORT, NONCE, LEASE_S)
