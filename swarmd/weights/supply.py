"""Sees to it that what a machine needs of a model is on its disk: from its own folders, else from the swarm."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass

import trio

from swarmd.errors import ConfigError, SwarmUnavailable
from swarmd.net.pace import Pace
from swarmd.net.rpc import Rpc
from swarmd.plan.chains.view import SwarmView
from swarmd.protocol.models.manifest import Manifest
from swarmd.values import ModelId, PeerId
from swarmd.weights.donor import groups_held
from swarmd.weights.fetch import DownloadProgress, Fetch, fetch_manifest
from swarmd.weights.folder import ModelFolder, disk_bytes
from swarmd.weights.hub import HUB, Hub
from swarmd.weights.library import Library

logger = logging.getLogger(__name__)

NEWS_INTERVAL_S = 0.5  # between two announcements of what has come: each is gossip
HOLDER_PATIENCE_S = 30.0  # the manifest may be known before its holder's record


@dataclass(frozen=True, slots=True)
class SupplyRules:
    """``in_use`` tells which groups must not be deleted to make room; None: nothing is ever deleted."""

    in_use: Callable[[], Mapping[ModelId, frozenset[int]]] | None = None
    use_hub: bool = True


@dataclass(frozen=True, slots=True)
class SupplyListener:
    """``on_change`` hears of what is here, ``on_taken`` of bytes that others gave."""

    on_change: Callable[[], None] = lambda: None
    on_taken: Callable[[int], None] = lambda n_bytes: None


ASK_ALL_DELETE_NOTHING = SupplyRules()
NOBODY_LISTENS = SupplyListener()


# How a machine comes to what it needs of a model, one at a time for each model (``_locks``):
#
#     manifest: here? else asked of holders --> groups: here? else room is made --> Fetch from peers and the hub
#
# Invariant: what is promised to a download that goes on (``_reserved``) and what is used (``in_use``) is never deleted
# to make room for another one; bytes that are promised and not written yet count as used.
class Supply:
    """See the module."""

    def __init__(
        self,
        library: Library,
        rpc: Rpc,
        view: Callable[[], SwarmView],
        pace: Pace,
        rules: SupplyRules = ASK_ALL_DELETE_NOTHING,
        listener: SupplyListener = NOBODY_LISTENS,
    ) -> None:
        self.library = library
        self._rpc = rpc
        self._view = view
        self._pace = pace
        self._in_use = rules.in_use
        self._use_hub = rules.use_hub
        self._listener = listener
        self._locks: dict[ModelId, trio.Lock] = {}
        self._fetches: dict[ModelId, Fetch] = {}
        self._reserved: dict[ModelId, frozenset[int]] = {}

    def progress(self) -> list[DownloadProgress]:
        """Return the downloads under way."""
        return [fetch.progress() for fetch in self._fetches.values()]

    async def manifest(self, model: ModelId) -> Manifest:
        """Return what a model consists of. Raises SwarmUnavailable when nobody tells."""
        known = self.library.folders.get(model)
        if known is not None:
            return known.manifest
        with trio.move_on_after(HOLDER_PATIENCE_S):
            while not self._holders(model):
                await trio.sleep(NEWS_INTERVAL_S)
        holders = self._holders(model)
        for peer in holders:
            self._rpc.network.learn(peer, self._addresses(peer))
        return await fetch_manifest(self._rpc, model, holders)

    async def ensure(
        self,
        model: ModelId,
        groups: Iterable[int] | None = None,
    ) -> ModelFolder:
        """Have groups of a model (None: all of it) on this disk; returns the folder to load them from.

        Raises ConfigError when they do not fit, SwarmUnavailable when nobody gives them.
        """
        manifest = await self.manifest(model)
        n_groups = manifest.n_blocks + 1
        needed = frozenset(range(n_groups) if groups is None else groups)
        if unknown := sorted(needed - set(range(n_groups))):
            raise ConfigError(f"model {model[:12]} has {manifest.n_blocks} blocks: there is no block {unknown[0]}")
        async with self._locks.setdefault(model, trio.Lock()):
            known = self.library.folders.get(model)
            if known is not None and known.is_filled:
                await trio.to_thread.run_sync(known.look)  # another process may fill it, or make room there
            if known is None or not needed <= known.held:
                known = await self._fetch_groups(manifest, needed)
            self.library.touch(known, needed)
        if not needed <= known.held:
            raise SwarmUnavailable(f"groups of {model[:12]} are not there though they were fetched: try again")
        return known

    def discard(self, model: ModelId) -> None:
        """Delete what was fetched and turned out to be of no use; a folder of the user's stays."""
        with suppress(ConfigError):
            logger.info("deleted %d B of %s", self.library.remove(model), model[:12])

    async def _fetch_groups(self, manifest: Manifest, needed_groups: frozenset[int]) -> ModelFolder:
        """Make room for groups and download them. Raises as ``ensure`` does."""
        target = await trio.to_thread.run_sync(self.library.fill, manifest)
        missing = needed_groups - target.held
        self._reserved[target.model] = needed_groups
        try:
            needed_bytes = target.n_bytes(missing) - _begun_bytes(target, missing)
            needed_bytes += sum(p.total_bytes - p.done_bytes for p in self.progress())  # promised, not written yet
            for deleted in await trio.to_thread.run_sync(self.library.make_room, needed_bytes, self._undeletable()):
                logger.info("deleted to make room: %s", deleted)

            source = self._view().catalog.sources.get(target.model) if self._use_hub else None
            hub = Hub(source, manifest) if source else None
            of_hub = {HUB: frozenset(range(target.head + 1))} if hub else {}

            def donors() -> dict[PeerId, frozenset[int]]:
                return {**self._donors(target), **of_hub}

            fetch = Fetch(self._rpc, target, needed_groups, donors, self._pace, hub)
            self._fetches[target.model] = fetch
            await fetch.run()
            self._listener.on_taken(sum(fetch.progress().given_bytes.values()))
            logger.info("model %s: %s", target.model[:12], fetch.progress())
        finally:
            del self._reserved[target.model]
            self._fetches.pop(target.model, None)
            self._listener.on_change()
        return target

    def _undeletable(self) -> dict[ModelId, frozenset[int]]:
        """Return what must stay on disk."""
        if self._in_use is None:
            folders = self.library.folders
            return {model: frozenset(range(folders[model].head + 1)) for model in list(folders)}
        used = self._in_use()
        nothing = frozenset[int]()
        models = {*used, *self._reserved}
        undeletable = {}
        for model in models:
            undeletable[model] = used.get(model, nothing) | self._reserved.get(model, nothing)
        return undeletable

    def _holders(self, model: ModelId) -> list[PeerId]:
        """Return other peers that hold something of a model and are not shunned."""
        standing = self._rpc.standing
        records = self._view().peers
        holders = {peer for peer in records if model in records[peer].holds}
        holders.discard(self._rpc.network.peer_id)
        return sorted(peer for peer in holders if not standing.is_shunned(peer))

    def _donors(self, target: ModelFolder) -> dict[PeerId, frozenset[int]]:
        """Return who holds which groups of a model, and make their addresses known."""
        donors = {}
        for peer in self._holders(target.model):
            self._rpc.network.learn(peer, self._addresses(peer))
            group_ranges = self._view().peers[peer].holds[target.model]
            donors[peer] = groups_held(group_ranges, target.head + 1)
        return donors

    def _addresses(self, peer: PeerId) -> tuple[str, ...]:
        return self._view().peers[peer].addresses


def _begun_bytes(target: ModelFolder, groups: Iterable[int]) -> int:
    """Return what earlier attempts take on disk already."""
    return disk_bytes(slot.part for group in groups for slot in target.slots(group))
