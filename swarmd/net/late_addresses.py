"""Addresses to listen on that this machine does not have yet: of a VPN, Wi-Fi or DHCP that comes after the daemon.

Each is tried again now and then until it is there. Nobody tells: a bind costs nothing, and is the same on each system.
"""

from __future__ import annotations

import errno
import logging
import socket
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import trio

from swarmd.errors import ConfigError

logger = logging.getLogger(__name__)

FoundT = TypeVar("FoundT")

AGAIN_S = 10.0  # between two looks for an address that is missing
LOOKUP_TIMEOUT_S = 5.0  # of a name; it may be the network that is missing
ABSENT_ERRORS = (errno.EADDRNOTAVAIL, errno.ENODEV, errno.ENETDOWN, errno.ENETUNREACH)


class NotThereError(ConfigError):
    """This machine does not have an address, and may have it later."""


@dataclass(slots=True)
class LateAddresses(Generic[FoundT]):
    """``missing``: what is not listened on yet, and why. ``find_address`` finds an address or raises ConfigError.

    ``what`` is to be there, for the log.
    """

    what: str
    find_address: Callable[[str], Awaitable[FoundT]]
    missing: dict[str, str] = field(default_factory=dict)

    async def find_all(self, addresses: Iterable[str]) -> list[FoundT]:
        """Find those that are there. Raises ConfigError for what can never be, and for a port that is taken."""
        found: list[FoundT] = []
        for address in addresses:
            try:
                found.append(await self.find_address(address))
            except NotThereError as error:
                self.missing[address] = str(error)
                logger.warning("no %s on %s yet: %s; tried again every %.0f s", self.what, address, error, AGAIN_S)
        return found

    async def run(self, listen: Callable[[FoundT], Awaitable[None]]) -> None:
        """Try again what is missing, and listen there, until nothing is missing."""
        while self.missing:
            await trio.sleep(AGAIN_S)
            for address in list(self.missing):
                try:
                    await listen(await self.find_address(address))
                except ConfigError as error:
                    self.missing[address] = str(error)
                else:
                    del self.missing[address]
                    logger.info("%s on %s now", self.what, address)


async def find_host(host: str, family: socket.AddressFamily) -> str:
    """The IP address that a host's name stands for. Raises NotThereError, and ConfigError for what is no name."""
    with trio.move_on_after(LOOKUP_TIMEOUT_S):
        try:
            found = await trio.socket.getaddrinfo(host, None, family=family, type=socket.SOCK_STREAM)
            return str(found[0][4][0])
        except socket.gaierror as error:
            raise NotThereError(f"{host} cannot be looked up: {error.strerror}") from None
        except UnicodeError:  # a part of it is empty or too long
            raise ConfigError(f"{host} is no name of a host: put another after --listen") from None
    raise NotThereError(f"{host} cannot be looked up: no answer within {LOOKUP_TIMEOUT_S:.0f} s")


def require_free(host: str, port: int) -> None:
    """Check that a TCP port can be bound. Raises NotThereError, and ConfigError where another address is needed."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        if port:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno in ABSENT_ERRORS:
                raise NotThereError(f"no interface of this machine has {host}") from None
            reason = f"port {port} is in use by another program" if error.errno == errno.EADDRINUSE else error.strerror
            raise ConfigError(f"cannot listen on {host}: {reason}; choose another with --listen") from None
