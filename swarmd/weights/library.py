"""All models of which this machine has bytes: checkpoint folders of the user's, and folders that swarmd fills.

Only the latter are ever changed or deleted. When they exceed the disk limit, what was not used for longest goes first.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from swarmd.errors import ConfigError, IntegrityError
from swarmd.protocol.models import adapter, draft
from swarmd.protocol.models import manifest as manifests
from swarmd.protocol.models.manifest import Manifest
from swarmd.values import ModelId
from swarmd.weights import folder as files
from swarmd.weights.folder import ModelFolder

logger = logging.getLogger(__name__)

RESERVE_BYTES = 1 << 30  # what is left free on the disk, whatever the limit says


@dataclass(frozen=True, slots=True)
class UnusedModel:
    """A group that could be deleted: of a folder that swarmd fills, and not in use."""

    used_at: float
    folder: ModelFolder
    group: int


class Library:
    """See the module. ``user_folders`` maps models to checkpoint folders of the user's; ``root`` is swarmd's own."""

    def __init__(
        self,
        root: Path,
        user_folders: Mapping[ModelId, Path],
        limit_bytes: int = 0,
    ) -> None:
        self.root = root
        self.limit_bytes = limit_bytes
        self.folders: dict[ModelId, ModelFolder] = {}
        self.look(user_folders)

    def look(self, user_folders: Mapping[ModelId, Path]) -> None:
        """See what is there. A folder that cannot be used is left out, and the log says why."""
        filled = {}
        for path in self.root.glob(f"*/{files.MANIFEST}"):
            filled[ModelId(path.parent.name)] = path.parent
        folders = {**filled, **user_folders}
        for model, known in list(self.folders.items()):
            if folders.get(model) != known.folder:
                del self.folders[model]
        for model, path in folders.items():
            if model in self.folders:
                continue
            try:
                self.folders[model] = ModelFolder(path, self._read_manifest(model, path))
            except (ConfigError, IntegrityError, OSError) as error:
                logger.warning("leaving out model %s in %s: %s", model[:12], path, error)

    def keep_manifest(self, manifest: Manifest, folder: Path) -> None:
        """Remember what hashing a folder of the user's gave, and how its files looked then. Raises ConfigError."""
        path = self._manifest_path(manifests.model_id(manifest))
        files.write_file(path.with_suffix(".files"), _fingerprint(folder))
        files.write_file(path, manifests.encode(manifest))

    def fill(self, manifest: Manifest) -> ModelFolder:
        """Return the folder that gets what this machine lacks of a model. Raises ConfigError."""
        model = manifests.model_id(manifest)
        known = self.folders.get(model)
        if known is None or not self.is_filled(known):
            known = self.folders[model] = files.create(self.root, manifest)
        return known

    def is_filled(self, folder: ModelFolder) -> bool:
        """Is this a folder that swarmd fills, and may delete?"""
        return folder.folder.parent == self.root

    def touch(self, folder: ModelFolder, groups: frozenset[int]) -> None:
        """Note that groups are used now."""
        if not self.is_filled(folder):
            return
        for group in groups:
            for slot in folder.slots(group):
                with suppress(OSError):
                    os.utime(slot.path)

    def used_bytes(self) -> int:
        """Return what the folders that swarmd fills take on disk."""
        return files.disk_bytes(self.root.glob("*/*"))

    def make_room(
        self,
        n_bytes: int,
        in_use: Mapping[ModelId, frozenset[int]],
    ) -> list[str]:
        """Delete what was not used for longest until ``n_bytes`` more fit; returns what went. Raises ConfigError."""
        if n_bytes <= 0:
            return []
        files.make_folder(self.root)
        deleted = []
        unused = sorted(self._unused_groups(in_use), key=lambda u: u.used_at, reverse=True)
        while (lacking := n_bytes - self.free_bytes()) > 0:
            if not unused:
                limit = f"the disk limit of {self.limit_bytes / 2**30:.1f} GiB" if self.limit_bytes else "the free disk"
                raise ConfigError(
                    f"{n_bytes / 2**30:.2f} GiB of weights exceed {limit} by {lacking / 2**30:.2f} GiB: "
                    "make room, raise disk_limit_gib, or serve fewer blocks"
                )
            oldest = unused.pop()
            oldest.folder.drop([oldest.group])
            deleted.append(f"group {oldest.group} of {oldest.folder.model[:12]}")
        return deleted

    def free_bytes(self) -> int:
        """Return what may still be written."""
        free = shutil.disk_usage(self.root).free - RESERVE_BYTES
        if not self.limit_bytes:
            return free
        return min(free, self.limit_bytes - self.used_bytes())

    def remove(self, model: ModelId) -> int:
        """Delete a folder that swarmd fills; returns the bytes that it took. Raises ConfigError."""
        folder = self.folders.get(model)
        if folder is None:
            raise ConfigError(f"nothing of model {model[:12]} is on this machine")
        if not self.is_filled(folder):
            raise ConfigError(f"{folder.folder} is a folder of yours: swarmd does not delete it")
        n_bytes = files.disk_bytes(folder.folder.iterdir())
        shutil.rmtree(folder.folder, ignore_errors=True)
        del self.folders[model]
        return n_bytes

    def _manifest_path(self, model: ModelId) -> Path:
        return self.root / "manifests" / f"{model}.bin"

    def _read_manifest(self, model: ModelId, path: Path) -> Manifest:
        """Read or make the manifest of a folder; one of the user's is hashed only if its files have changed."""
        if path.parent == self.root:
            return manifests.read_untrusted((path / files.MANIFEST).read_bytes(), model)
        saved = self._manifest_path(model)
        if saved.is_file() and saved.with_suffix(".files").read_bytes() == _fingerprint(path):
            return manifests.read_untrusted(saved.read_bytes(), model)
        if adapter.is_adapter(path) or draft.is_draft(path):
            raise ConfigError("its files are not known, or no longer what they were: add it again")
        manifest = manifests.read_folder(path)
        if manifests.model_id(manifest) != model:
            raise ConfigError("its files are no longer those that were added: add it again")
        return manifest

    def _unused_groups(self, in_use: Mapping[ModelId, frozenset[int]]) -> list[UnusedModel]:
        """Return what could be deleted, with when it was used last."""
        unused: list[UnusedModel] = []
        for model, folder in list(self.folders.items()):
            if not self.is_filled(folder):
                continue
            groups = set(range(folder.head + 1))
            for group in groups - in_use.get(model, frozenset()):
                slots = folder.slots(group)
                paths = [*(slot.path for slot in slots), *(slot.part for slot in slots)]
                times = [path.stat().st_mtime for path in paths if path.is_file()]
                if times:
                    unused.append(UnusedModel(max(times), folder, group))
        return unused


def _fingerprint(folder: Path) -> bytes:
    """Return size and time of each file of a checkpoint: where these are as they were, so are the bytes."""
    paths = sorted(path for path in folder.iterdir() if path.is_file())
    looks = []
    for path in paths:
        stat = path.stat()
        looks.append((path.name, stat.st_size, stat.st_mtime_ns))
    return json.dumps(looks).encode()
