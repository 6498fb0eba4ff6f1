"""The port that this home's router is asked to open, and keeps open: ``plan.links.router_port`` says when it is asked.

That a port was opened is written down. So a daemon that was killed asks for it again at its next start, and gives it
back when it is told to end.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import trio

from swarmd.errors import ConfigError, PeerError
from swarmd.folders import write_file
from swarmd.net.port_control import BehindAnotherError
from swarmd.net.port_mapping import Mapping, map_port, unmap_port
from swarmd.plan.links.router_port import PortLease

logger = logging.getLogger(__name__)

GOODBYE_S = 2.0  # for the router to take a mapping back


@dataclass(slots=True)
class RouterPort:
    """See the module. ``trouble``: why no port leads here; None where one does, or nobody has asked."""

    nonce: bytes  # what shows the router that it is asked by the same machine
    memory_file: Path | None = None
    map_port: Callable[[int, bytes], Awaitable[Mapping]] = map_port
    unmap_port: Callable[[Mapping, bytes], Awaitable[None]] = unmap_port
    mapping: Mapping | None = None
    trouble: PeerError | None = None
    _lease: PortLease = field(default_factory=PortLease)
    _ask_at: float = 0.0
    _was_mapped: bool = False
    _is_asking: bool = False

    def __post_init__(self) -> None:
        self._was_mapped = self.memory_file is not None and self.memory_file.exists()

    def is_due(self, is_needed: bool, now: float) -> bool:
        """Is the router to be asked now? What is open is kept open, whether it is needed or not."""
        is_wanted = is_needed or self.mapping is not None or self._was_mapped
        return is_wanted and not self._is_asking and now >= self._ask_at

    def ask_soon(self) -> None:
        """Nobody gets through: the router may have forgotten."""
        self._ask_at = 0.0

    async def ask(self, port: int) -> bool:
        """Ask for the port, or for it again. True where another port than before leads here now."""
        previous_mapping = self.mapping
        self._is_asking = True
        try:
            self.mapping = await self.map_port(port, self.nonce)
        except PeerError as error:
            self._take_refusal(error)
            return False
        finally:
            self._is_asking = False
        now = trio.current_time()
        self._lease = self._lease.granted(now, self.mapping.lease_s)
        self._ask_at = self._lease.ask_at()
        self.trouble = self.mapping.obstacle
        if previous_mapping is not None and previous_mapping.endpoint == self.mapping.endpoint:
            return False
        mapping = self.mapping
        logger.info("the router forwards its port %d to this machine's %d (%s)", mapping.port, port, mapping.spoken)
        if self.trouble:
            logger.warning("nobody outside can use that: %s", self.trouble)
        self._remember()
        return True

    def _take_refusal(self, reason: PeerError) -> None:
        now = trio.current_time()
        self._lease = self._lease.refused(now)
        self._ask_at = self._lease.ask_at()
        self._was_mapped = False  # asked once, at the start; from here on it is asked where it is needed
        if str(self.trouble) != str(reason):
            logger.info("%s", reason)
        self.trouble = reason
        if not self._lease.holds(now):
            self.mapping = None

    def _remember(self) -> None:
        assert self.mapping is not None
        if self.memory_file is not None:
            told = {"port": self.mapping.port, "inside": self.mapping.inside, "by": self.mapping.spoken}
            with suppress(ConfigError):  # a full disk costs the next start a question, no more
                write_file(self.memory_file, json.dumps(told))

    @property
    def is_behind_another(self) -> bool:
        """Is there a router between this home's and the world? Then no port of this one helps."""
        return isinstance(self.trouble, BehindAnotherError)

    async def give_back(self) -> None:
        """Have the router close the port again: this machine ends."""
        if self.mapping is None:
            return
        with trio.CancelScope(shield=True), trio.move_on_after(GOODBYE_S), suppress(PeerError):
            await self.unmap_port(self.mapping, self.nonce)
            if self.memory_file is not None:
                with suppress(OSError):
                    self.memory_file.unlink(missing_ok=True)
