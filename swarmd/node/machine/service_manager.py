"""Tell a service manager how the daemon is: sd_notify(3), datagrams to the socket that the environment names.

Spec: https://www.freedesktop.org/software/systemd/man/latest/sd_notify.html. Without such a socket nothing is said.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import MutableMapping

import trio

from swarmd.printable import clean_line

logger = logging.getLogger(__name__)

SHARE_OF_WATCHDOG = 0.5  # of the time that the manager waits, as sd_watchdog_enabled(3) recommends


class ServiceManager:
    """The program that started this process, if it wants to be told how it fares.

    The watchdog's messages come from the daemon's own loop, so a loop that hangs falls silent, and is restarted.
    """

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        self._address = environment.pop("NOTIFY_SOCKET", "")  # workers inherit the rest: they are not to speak for us
        timeout_us = environment.pop("WATCHDOG_USEC", "")
        pid = environment.pop("WATCHDOG_PID", "")
        is_ours = pid in ("", str(os.getpid()))
        self.watchdog_s = int(timeout_us) / 1e6 if timeout_us.isdecimal() and is_ours else 0.0

    def ready(self, text: str) -> None:
        """Say that the daemon is up, with a line for people."""
        self._tell(f"READY=1\nSTATUS={clean_line(text)}")  # each further line would be an order to the manager

    def stopping(self) -> None:
        """Say that the daemon is about to end."""
        self._tell("STOPPING=1\nSTATUS=handing sessions over")

    async def run(self) -> None:
        """Say that the loop turns, as often as the manager wants to hear it."""
        while self.watchdog_s:
            self._tell("WATCHDOG=1")
            await trio.sleep(self.watchdog_s * SHARE_OF_WATCHDOG)

    def _tell(self, text: str) -> None:
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address  # abstract
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as speaker:
                speaker.sendto(text.encode(), address)
        except OSError as error:
            logger.debug("the service manager at %s does not listen: %s", self._address, error.strerror)
