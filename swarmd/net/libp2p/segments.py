"""Connections whose packets fit through every link: no larger than IPv6 asks all of them to take.

Where a link on the way (a tunnel, a VPN, a bridge) takes smaller packets than this machine's card, a router says so,
and the kernel sends smaller ones. Often that message is lost (RFC 2923, 2.1): then what is small passes, and nothing
else ever does. The kernel's own remedy (tcp_mtu_probing) is off by default, for root to set, and took more than 15 s.
"""

from __future__ import annotations

import ipaddress
import socket

import trio
from libp2p.custom_types import THandler
from libp2p.transport.tcp.tcp import TCP, TCPListener
from multiaddr import Multiaddr

SEGMENT_BYTES = 1_220  # of a packet of 1,280 (RFC 8200, 5), which has 60 of headers: 1 % of Ethernet's rate


class CappedTcp(TCP):
    """The library's TCP, whose listeners ask both sides of each connection for small segments."""

    def create_listener(self, handler_function: THandler) -> TCPListener:
        """As the library's."""
        return _CappedListener(handler_function)


class _CappedListener(TCPListener):
    async def listen(self, maddr: Multiaddr) -> None:
        await super().listen(maddr)
        for listener in self.listeners:
            cap_segments(listener.socket)


def cap_segments(tcp: trio.socket.SocketType) -> None:
    """Have a socket that listens, or is about to dial, agree with the other side on small segments, both ways.

    What stays on this machine is not cut up.
    """
    option = getattr(socket, "TCP_MAXSEG", None)
    host = ipaddress.ip_address(str(tcp.getsockname()[0]).partition("%")[0])
    if option is not None and not host.is_loopback:
        tcp.setsockopt(socket.IPPROTO_TCP, option, SEGMENT_BYTES)
