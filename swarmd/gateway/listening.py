"""The socket on which the gateway listens. It needs no torch: a wrong address is refused before that is imported.

hypercorn lacks two things, which are done here. The kernel cuts off a client that reads nothing for three seconds
(a write to it cannot be cancelled). A port that is taken is said plainly.
"""

from __future__ import annotations

import errno
import socket

from swarmd.errors import ConfigError

UNREAD_MS = 3_000  # a client that takes nothing for so long is gone: nothing else ends a write to it
BACKLOG = 256  # connections that the kernel holds until they are accepted


def open_listener(listen: str, has_keys: bool) -> socket.socket:
    """Open the socket. Raises ConfigError for an address that cannot be, or beyond this machine without keys."""
    host, _, port = listen.rpartition(":")
    host = host.strip("[]")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError(f"the gateway listens on HOST:PORT, for example 127.0.0.1:4180, not {listen!r}")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"the gateway cannot listen on {listen}: {error.strerror}") from None
    if not is_loopback(str(address[0])) and not has_keys:
        raise ConfigError(
            f"{host} can be reached from other machines, and there is no API key: make one first (swarmd gateway key "
            "add NAME), or listen on 127.0.0.1"
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    # Linux alone has this option; elsewhere a client that does not read is cut off by TCP's own, longer timeouts.
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD_MS)
    try:
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        is_taken = error.errno == errno.EADDRINUSE
        reason = "another program, perhaps another gateway, listens there" if is_taken else error.strerror
        raise ConfigError(f"the gateway cannot listen on {listen}: {reason}") from None
    listener.setblocking(False)
    return listener


def is_loopback(address: str) -> bool:
    """Can only programs of this machine reach the address?"""
    return address == "::1" or address.startswith("127.")


def url_of(listener: socket.socket) -> str:
    """Write the URL of a listening socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
