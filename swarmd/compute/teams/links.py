"""Links between members of a team on several machines: frames over TLS, sent and read by whoever computes.

A member that others dial makes a *seat*: a port, a certificate and a token, which daemons tell each other
(``node.teams``). Who dials shows the token and says which member it is; each may come once. There is no event loop:
between two parts of a sum nobody has anything else to do.
"""

from __future__ import annotations

import hmac
import os
import select
import socket
import ssl
import struct
import time
from collections.abc import Sequence
from enum import IntEnum

from swarmd.compute.teams.sums import PassGivenUp, TeamBroken
from swarmd.protocol.wire.teams import TeamSeat
from swarmd.protocol.wire.tickets import TOKEN_BYTES, DialTicket
from swarmd.wire.pinned_tls import check_shown, dialling_context, listening_context, tune_socket

HEAD = struct.Struct("<BQI")  # what it is, the number of the sum that a part is for, bytes that follow
MOST_FRAME_BYTES = 1 << 30  # of an order: a pass of 65,536 tokens of 4,096 numbers
HANDSHAKE_S = 5.0  # of machines of one site
WAIT_FOR_MEMBERS_S = 60.0  # for the others to dial: their daemons were told a moment ago
LOOK_EVERY_S = 1.0  # while one waits for members, whether that was long enough
BROKEN = (OSError, ValueError)  # ssl.SSLError is an OSError


class FrameKind(IntEnum):
    """What travels on a link."""

    ORDER = 1
    PART = 2
    READY = 3
    FAILURE = 4
    MEASURED = 5


class Link:
    """One connection to another member, which is called ``name`` when it is gone. What goes wrong is TeamBroken."""

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.name = name
        self._connection = connection
        self._head = bytearray(HEAD.size)

    def close(self) -> None:
        """End it: who waits on the other side is told."""
        self._connection.close()

    def __del__(self) -> None:
        self.close()

    def set_patience(self, seconds: float | None) -> None:
        """Wait for so long at most whenever something is sent or read; None: for as long as the connection lasts."""
        self._connection.settimeout(seconds)

    def has_frame(self, within_s: float) -> bool:
        """Is there something to receive, or will there be so soon?"""
        if isinstance(self._connection, ssl.SSLSocket) and self._connection.pending():
            return True
        readable, _, _ = select.select([self._connection], [], [], within_s)
        return bool(readable)

    def send(self, kind: FrameKind, number: int, data: bytes | memoryview) -> None:
        """Send one frame."""
        try:
            self._connection.sendall(b"".join((HEAD.pack(kind, number, len(data)), data)))
        except BROKEN as error:
            raise self._broken(error) from None

    def receive(self) -> tuple[FrameKind, int, bytearray]:
        """Wait for a frame: what it is, its number, and what it holds."""
        try:
            self._fill(self._head)
            kind, number, n_bytes = HEAD.unpack(self._head)
            if n_bytes > MOST_FRAME_BYTES:
                raise ValueError(f"a frame of {n_bytes} B, at most {MOST_FRAME_BYTES} are read")
            data = bytearray(n_bytes)
            self._fill(data)
            return FrameKind(kind), number, data
        except BROKEN as error:
            raise self._broken(error) from None

    def _fill(self, data: bytearray) -> None:
        """Read until ``data`` is full."""
        left = memoryview(data)
        while left:
            n = self._connection.recv_into(left)
            if not n:
                raise ConnectionResetError("it has ended")
            left = left[n:]

    def _broken(self, error: Exception) -> TeamBroken:
        if isinstance(error, TimeoutError):
            return TeamBroken(f"{self.name} of the team has given nothing for {self._connection.gettimeout():.0f} s")
        return TeamBroken(f"{self.name} of the team is gone ({error})")


def receive_part(link: Link, number: int, orders: list[bytearray]) -> bytearray:
    """What a member has for ``number``; parts of passes before it, which were given up, are read over.

    Raises TeamBroken, and PassGivenUp where it is the leader, who asks for something else: that goes to ``orders``.
    """
    while True:
        kind, theirs, data = link.receive()
        if kind is FrameKind.ORDER:
            orders.append(data)
            raise PassGivenUp(f"{link.name} has given this pass up")
        if kind is FrameKind.FAILURE:
            raise TeamBroken(f"{link.name} of the team: {data.decode(errors='replace')}")
        if theirs == number:
            return data
        if theirs > number:
            raise TeamBroken(f"{link.name} of the team gives a part of {theirs} where {number} is computed")


def member_name(member: int) -> str:
    """What a member is called when something is said of it."""
    return f"member {member}" if member else "the leader"


def dial(seat: TeamSeat, member: int, me: int) -> Link:
    """Connect to another member's seat, as member ``me``. Raises TeamBroken."""
    place = f"{member_name(member)} at {seat.host}:{seat.ticket.port}"
    connection: socket.socket | None = None
    try:
        connection = socket.create_connection((seat.host, seat.ticket.port), HANDSHAKE_S)
        tune_socket(connection)
        connection = dialling_context(seat.ticket.certificate).wrap_socket(connection)
        check_shown(connection.getpeercert(binary_form=True), seat.ticket.certificate)
        connection.sendall(seat.ticket.token + bytes([me]))
    except BROKEN as error:
        if connection is not None:
            connection.close()
        raise TeamBroken(f"{place} cannot be reached: {error}") from None
    return Link(connection, member_name(member))


class Seat:
    """Where other members dial this one: sockets that listen on ``hosts``, at one port.

    Raises OSError where none of them is an address of this machine.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        self._context, certificate = listening_context()
        self._listeners: list[socket.socket] = []
        port, error = 0, OSError("this machine listens nowhere")
        for host in hosts:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            try:
                listener = socket.create_server((host, port), family=family)
            except OSError as failure:
                error = failure
                continue
            self._listeners.append(listener)
            port = listener.getsockname()[1]
        if not self._listeners:
            raise error
        self.ticket = DialTicket(port, certificate, os.urandom(TOKEN_BYTES))

    def close(self) -> None:
        """Listen no more."""
        for listener in self._listeners:
            listener.close()

    def wait_for(self, members: Sequence[int]) -> dict[int, Link]:
        """Wait until these members have dialled. Raises TeamBroken when one does not."""
        links: dict[int, Link] = {}
        deadline = time.monotonic() + WAIT_FOR_MEMBERS_S
        while missing := [member for member in members if member not in links]:
            if time.monotonic() > deadline:
                names = ", ".join(map(member_name, missing))
                raise TeamBroken(f"{names} of the team did not connect within {WAIT_FOR_MEMBERS_S:.0f} s")
            readable, _, _ = select.select(self._listeners, [], [], LOOK_EVERY_S)
            for listener in readable:
                connection, _ = listener.accept()
                links |= self._admit(connection, missing)
        return links

    def _admit(self, connection: socket.socket, missing: Sequence[int]) -> dict[int, Link]:
        """The link of a member that is missing, and shows the token; nothing for anybody else."""
        try:
            connection.settimeout(HANDSHAKE_S)
            tune_socket(connection)
            connection = self._context.wrap_socket(connection, server_side=True)
            shown = b""
            while len(shown) <= TOKEN_BYTES:
                data = connection.recv(TOKEN_BYTES + 1 - len(shown))
                if not data:
                    raise ConnectionResetError("it has ended")
                shown += data
        except BROKEN:
            connection.close()
            return {}
        member = shown[-1]
        if not hmac.compare_digest(shown[:-1], self.ticket.token) or member not in missing:
            connection.close()
            return {}
        return {member: Link(connection, member_name(member))}
