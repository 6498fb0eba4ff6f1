"""This daemon's models: what it has, what it gives to others, what it fetches for itself or because it was told to."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import trio

from swarmd.config import Config
from swarmd.errors import ConfigError, SwarmError
from swarmd.net.api import TaskStatus
from swarmd.net.pace import Pace
from swarmd.net.rpc import Channel, Rpc
from swarmd.net.tasks import Tasks
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.links.traffic import MBIT
from swarmd.protocol.models.manifest import layout_of
from swarmd.protocol.wire.messages import WantChunks, WantManifest
from swarmd.status import DownloadRow, HereStatus
from swarmd.usage_ledger import Count, UsageKind
from swarmd.values import ModelId, Span
from swarmd.weights.donor import Donor, Find
from swarmd.weights.library import Library
from swarmd.weights.supply import Supply, SupplyListener, SupplyRules

logger = logging.getLogger(__name__)

Uplink = Callable[[], tuple[float | None, bool]]
"""This peer's measured bytes/s (None: not measured), and whether decode steps are sent now."""
SHARE_WHILE_DECODING = 0.8  # of the uplink: what is full makes every packet wait, decode steps' too


# Three users of one disk: workers that serve, downloads that a person asked for, and peers that fetch from here. What a
# worker serves or is about to serve (``hold``) is never deleted to make room; anything else may be. Each worker holds
# for itself by its slot, so two workers of one model hold what either needs.
class Store:
    """See the module. ``changed`` hears that what is here is other than announced, ``count`` of bytes."""

    def __init__(
        self,
        rpc: Rpc,
        view: Callable[[], SwarmView],
        library: Library,
        config: Config,
        changed: Callable[[], None],
        count: Count = lambda kind, n: None,
    ) -> None:
        self.library = library
        download_pace = Pace(lambda: config.down_limit_mbit * MBIT or None)
        count_taken = partial(count, UsageKind.WEIGHTS_TAKEN)
        count_given = partial(count, UsageKind.WEIGHTS_GIVEN)
        rules = SupplyRules(self._in_use, config.hub)
        listener = SupplyListener(changed, count_taken)
        self.supply = Supply(library, rpc, view, download_pace, rules, listener)
        self.donor = Donor(library.folders, Pace(self._up_bytes_per_s), count_given)
        self._config = config
        self._held: dict[int, tuple[ModelId, frozenset[int]]] = {}
        self._uplink: Uplink = lambda: (None, False)
        self._failures: dict[ModelId, SwarmError] = {}
        self._pulling: set[ModelId] = set()
        self._tasks = Tasks()

    def hold(self, slot: int, model: ModelId, groups: frozenset[int]) -> None:
        """The worker ``slot`` serves these groups, or will: they stay on the disk."""
        self._held[slot] = (model, groups)

    def release(self, slot: int) -> None:
        """The worker serves nothing any more."""
        self._held.pop(slot, None)

    def _in_use(self) -> dict[ModelId, frozenset[int]]:
        used: dict[ModelId, frozenset[int]] = {}
        for model, blocks in self._held.values():
            used[model] = used.get(model, frozenset()) | blocks
        return used

    async def run(
        self,
        uplink: Uplink,
        find: Find,
        task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Own the downloads that were asked for until cancelled.

        ``uplink`` tells how much may leave at a time, ``find`` knows what else than a model a hash may name.
        """
        self._uplink = uplink
        self.donor.lend(find)
        async with self._tasks.open():
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
        self._tasks.start_soon(self._pull, model, span)

    async def _pull(self, model: ModelId, span: Span | None) -> None:
        try:
            n_blocks = (await self.supply.manifest(model)).n_blocks
            groups = None if span is None else [*span.blocks(), n_blocks]
            await self.supply.ensure(model, groups)
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

    def describe_layout(self, model: ModelId) -> str:
        """Say what is unusual about a model's blocks; empty where nothing is, or its manifest is not here."""
        folder = self.library.folders.get(model)
        return layout_of(folder.manifest).describe() if folder else ""

    def here(self, model: ModelId) -> HereStatus:
        """What this machine has of a model, and how the last attempt to fetch more ended."""
        folder = self.library.folders.get(model)
        spans = folder.blocks_held if folder else ()
        failure = self._failures.get(model)
        return HereStatus(
            here=folder is not None and folder.is_whole,
            blocks_here=tuple((span.start, span.end) for span in spans),
            folder=str(folder.folder) if folder else None,
            pulling=model in self._pulling,
            failure=str(failure) if failure else None,
            exit_code=failure.exit_code if failure else 0,
        )

    def downloads(self) -> tuple[DownloadRow, ...]:
        """Downloads under way, for people."""
        return tuple(
            DownloadRow(
                model=p.model,
                groups=tuple((s.start, s.end) for s in p.groups),
                total_bytes=p.total_bytes,
                done_bytes=p.done_bytes,
                resumed_bytes=p.resumed_bytes,
                bytes_per_s=p.bytes_per_s,
                left_s=p.left_s,
                donors={str(peer): n for peer, n in p.given_bytes.items()},
                waiting_for=p.waiting_for,
            )
            for p in self.supply.progress()
        )

    def _up_bytes_per_s(self) -> float | None:
        limits = [self._config.up_limit_mbit * MBIT] if self._config.up_limit_mbit else []
        uplink, is_decoding = self._uplink()
        if uplink is not None and is_decoding:
            limits.append(SHARE_WHILE_DECODING * uplink)
        return min(limits, default=None)
