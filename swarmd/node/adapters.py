"""The adapters that a server's sessions ask for: fetched like weights, handed to the worker, ready or refused."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable

import msgspec
import trio

from swarmd.errors import Code, IntegrityError, Refused, SwarmError
from swarmd.protocol import adapter as adapters
from swarmd.protocol.messages import AdapterLoaded, LoadAdapter, framed
from swarmd.values import ModelId
from swarmd.weights.supply import Supply

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 0.5
FAILED_FOR_S = 10.0
MAX_REMEMBERED = 64
MAX_BYTES = 1 << 30
MAX_FETCHES = 2


class Adapters:
    """The adapters of one server. ``send`` reaches its worker."""

    def __init__(
        self, supply: Supply, base: ModelId, nursery: trio.Nursery, send: Callable[[bytes], Awaitable[None]]
    ) -> None:
        self._supply = supply
        self._base = base
        self._nursery = nursery
        self._send = send
        self._ready: set[str] = set()
        self._failed: dict[str, tuple[str, float]] = {}
        self._coming: set[str] = set()
        self._fetches = trio.CapacityLimiter(MAX_FETCHES)

    def require(self, adapter: str) -> None:
        """Refuse a session until its adapter is ready; begins to get it. Raises Refused."""
        if adapter in self._ready:
            return
        reason, until = self._failed.get(adapter, ("", 0.0))
        if trio.current_time() < until:
            raise Refused(Code.UNSUPPORTED, reason)
        if len(self._coming) >= MAX_REMEMBERED:
            raise Refused(Code.NO_CAPACITY, "too many adapters are on their way to this server", RETRY_AFTER_S)
        if adapter not in self._coming:
            self._coming.add(adapter)
            self._nursery.start_soon(self._get, adapter)
        raise Refused(Code.NOT_HELD, f"the adapter {adapter[:12]} is on its way to this server", RETRY_AFTER_S)

    def on_loaded(self, message: AdapterLoaded) -> None:
        """The worker has an adapter, or cannot use it."""
        self._coming.discard(message.adapter)
        if message.failure:
            self._fail(message.adapter, message.failure)
        else:
            self._ready.add(message.adapter)

    def forget(self) -> None:
        """The worker was replaced: it has none."""
        self._ready.clear()
        self._coming.clear()

    async def _get(self, adapter: str) -> None:
        try:
            async with self._fetches:
                manifest = await self._supply.manifest(ModelId(adapter))
                if (base := adapters.base_of(manifest)) != self._base:
                    raise IntegrityError(f"{adapter[:12]} is made for {base[:12]}, not for {self._base[:12]}")
                if (n_bytes := sum(entry.n_bytes for entry in manifest.entries)) > MAX_BYTES:
                    raise IntegrityError(f"an adapter of {n_bytes} B; at most {MAX_BYTES} are loaded")
                folder = await self._supply.ensure(ModelId(adapter))
            config = msgspec.json.encode(adapters.lora_of(folder.manifest))
            shards = tuple(str(path) for path in folder.shards())
            await self._send(framed(LoadAdapter(adapter=adapter, shards=shards), config))
        except SwarmError as error:
            self._coming.discard(adapter)
            self._fail(adapter, str(error))

    def _fail(self, adapter: str, reason: str) -> None:
        logger.warning("no adapter %s: %s", adapter[:12], reason)
        if len(self._failed) >= MAX_REMEMBERED:
            del self._failed[next(iter(self._failed))]
        self._failed[adapter] = reason[:500], trio.current_time() + FAILED_FOR_S
