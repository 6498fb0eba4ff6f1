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
MAX_REMEMBERED = 64


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
        self._failed: dict[str, str] = {}
        self._coming: set[str] = set()

    def require(self, adapter: str) -> None:
        """Refuse a session until its adapter is ready; begins to get it. Raises Refused."""
        if adapter in self._ready:
            return
        if adapter in self._failed:
            raise Refused(Code.UNSUPPORTED, self._failed.pop(adapter))  # another attempt may go better
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
            folder = await self._supply.ensure(ModelId(adapter))
            if (base := adapters.base_of(folder.manifest)) != self._base:
                raise IntegrityError(f"the adapter {adapter[:12]} is made for {base[:12]}, not for {self._base[:12]}")
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
        self._failed[adapter] = reason[:500]
