"""This daemon's models: what it has, what it gives to others, what it fetches for itself or because it was told to."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import trio

from swarmd.config import Config
from swarmd.errors import ConfigError, SwarmError
from swarmd.net.api import TaskStatus
from swarmd.net.rpc import Channel, Rpc
from swarmd.plan.view import SwarmView
from swarmd.protocol.messages import WantChunks, WantManifest
from swarmd.values import ModelId, Span
from swarmd.weights.donor import Donor
from swarmd.weights.library import Library
from swarmd.weights.pace import Pace
from swarmd.weights.supply import Supply

logger = logging.getLogger(__name__)

SHARE_WHILE_DECODING = 0.8  # of the uplink: what is full makes every packet wait, decode steps' too
MBIT = 1e6 / 8


class Store:
    """See the module. ``uplink`` is the measured bytes/s or None; ``is_decoding``: are decode steps sent now?"""

    def __init__(
        self,
        rpc: Rpc,
        view: Callable[[], SwarmView],
        root: Path,
        own: Mapping[ModelId, Path],
        config: Config,
        in_use: Callable[[], Mapping[ModelId, frozenset[int]]],
        uplink: Callable[[], float | None],
        is_decoding: Callable[[], bool],
    ) -> None:
        self.library = Library(root, own, int(config.disk_limit_gib * 2**30))
        self.supply = Supply(
            self.library, rpc, view, Pace(lambda: config.down_limit_mbit * MBIT or None), in_use, config.hub
        )
        self.donor = Donor(self.library.folders, Pace(self._up_bytes_per_s))
        self._config = config
        self._in_use = in_use
        self._uplink = uplink
        self._is_decoding = is_decoding
        self._failures: dict[ModelId, SwarmError] = {}
        self._pulling: set[ModelId] = set()
        self._nursery: trio.Nursery

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the downloads that were asked for until cancelled."""
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            await trio.sleep_forever()

    async def handle(self, channel: Channel, message: object) -> bool:
        """Answer what asks for models; False for any other message. Raises Refused."""
        if not isinstance(message, WantManifest | WantChunks):
            return False
        await self.donor.answer(channel, message)
        return True

    def pull(self, model: ModelId, span: Span | None) -> None:
        """Begin to fetch a model, or the head and some of its blocks. Raises ConfigError if that is under way."""
        if model in self._pulling:
            raise ConfigError("it is being fetched already: swarmd status shows how far it is")
        self._pulling.add(model)
        self._failures.pop(model, None)
        self._nursery.start_soon(self._pull, model, span)

    async def _pull(self, model: ModelId, span: Span | None) -> None:
        try:
            n_blocks = (await self.supply.manifest(model)).n_blocks
            await self.supply.ensure(model, None if span is None else [*span.blocks(), n_blocks])
        except SwarmError as error:
            logger.warning("model %s was not fetched: %s", model[:12], error)
            self._failures[model] = error
        finally:
            self._pulling.discard(model)

    def remove(self, model: ModelId) -> int:
        """Delete what swarmd fetched of a model; returns the bytes. Raises ConfigError while it is served."""
        if self._in_use().get(model) or model in self._pulling:
            raise ConfigError("this daemon serves or fetches it: swarmd drain first, or serve another model")
        return self.library.remove(model)

    def here(self, model: ModelId) -> dict[str, Any]:
        """What this machine has of a model, and how the last attempt to fetch more ended, for people."""
        folder, failure = self.library.folders.get(model), self._failures.get(model)
        return {
            "here": folder is not None and folder.is_whole,
            "blocks_here": [[s.start, s.end] for s in folder.blocks_held] if folder else [],
            "folder": str(folder.folder) if folder else None,
            "pulling": model in self._pulling,
            "failure": str(failure) if failure else None,
            "exit_code": failure.exit_code if failure else 0,
        }

    def downloads(self) -> list[dict[str, Any]]:
        """Downloads under way, for people."""
        return [
            {
                "model": p.model,
                "groups": [[s.start, s.end] for s in p.groups],
                "total_bytes": p.total_bytes,
                "done_bytes": p.done_bytes,
                "resumed_bytes": p.resumed_bytes,
                "bytes_per_s": p.bytes_per_s,
                "left_s": p.left_s,
                "donors": dict(p.given_bytes),
                "waiting_for": p.waiting_for,
            }
            for p in self.supply.progress()
        ]

    def _up_bytes_per_s(self) -> float | None:
        limits = [self._config.up_limit_mbit * MBIT] if self._config.up_limit_mbit else []
        uplink = self._uplink()
        if uplink is not None and self._is_decoding():
            limits.append(SHARE_WHILE_DECODING * uplink)
        return min(limits, default=None)
