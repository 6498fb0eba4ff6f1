"""The bytes of one model on this machine: a folder of safetensors that may hold a part of the model only.

Entries belong to *groups*: one for each block, and the *head* (files, and tensors around the blocks). A group that is
on its way is a ``.part`` file of its final size; what is in it is found out by hashing, so nothing that was written
before a crash is lost, and nothing unverified is ever believed. No event loop: call it from a thread where it hashes.
"""

from __future__ import annotations

import errno
import itertools
import logging
import os
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from swarmd.errors import Code, ConfigError, IntegrityError, Refused
from swarmd.plan.links.download import Ref
from swarmd.protocol.models import adapter, draft, shards
from swarmd.protocol.models import manifest as manifests
from swarmd.protocol.models.manifest import CHUNK_BYTES, Entry, Manifest
from swarmd.values import Span, ranges

logger = logging.getLogger(__name__)

MANIFEST = "manifest.bin"
PART = ".part"
_numbers = itertools.count()


# How the bytes of a model are named, from the whole to what travels:
#
#     group: one block, or the head     entry: a tensor or a plain file     chunk: 4 MiB of an entry, with a sha256
#
# A group is given away, deleted and counted as a whole. While it comes it is one file of its final size with holes:
#
#     block-0003.safetensors.part   | header | chunk | chunk | (hole) | chunk | ...      written in any order
#     block-0003.safetensors        the same file, renamed once every chunk is verified
#
# There is no table of what is done: after a crash the file is hashed, so that the disk alone is believed.
class ModelFolder:
    """One model in one folder: a checkpoint of the user's, or one that swarmd fills."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.model = manifests.model_id(manifest)
        self.groups = manifests.entry_groups(manifest)
        self.is_filled = (folder / MANIFEST).is_file()
        self.held: frozenset[int] = frozenset()
        self._entries = manifest.entries
        self._numbers = {entry.name: i for i, entry in enumerate(self._entries)}
        self._by_group: dict[int | None, list[int]] = {}
        for i, group in enumerate(self.groups):
            self._by_group.setdefault(group, []).append(i)
        self._places: dict[int, tuple[Path, int]] = {}
        self._lock = threading.Lock()  # groups are put in place from several threads
        self.look()

    @property
    def head(self) -> int:
        """The number of the group around the blocks."""
        return self.manifest.n_blocks

    @property
    def is_whole(self) -> bool:
        """Is all of the model here?"""
        return len(self.held) == self.head + 1

    @property
    def blocks_held(self) -> list[Span]:
        """The blocks that are here, as spans."""
        return ranges(self.held - {self.head})

    def look(self) -> None:
        """See which groups are complete. What does not fit the manifest is not there. Raises ConfigError."""
        with self._lock:
            places: dict[int, tuple[Path, int]] = {}
            for shard in self.shards():
                try:
                    places |= self._find_tensors(shard)
                except (ConfigError, OSError) as error:
                    if not self.is_filled:
                        raise
                    logger.warning("leaving out %s: %s", shard, error)
            for i, entry in enumerate(self.manifest.files):
                path = self.folder / entry.name
                if path.is_file() and path.stat().st_size == entry.n_bytes:
                    places[i] = (path, 0)
            self._places = places
            incomplete = {group for i, group in enumerate(self.groups) if i not in places}
            self.held = frozenset(group for group in range(self.head + 1) if group not in incomplete)

    def _find_tensors(self, shard: Path) -> dict[int, tuple[Path, int]]:
        """Return where the manifest's tensors are in one file."""
        places = {}
        with shard.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            for place in shards.read_header(file, shard, size):
                i = self._numbers.get(place.name, -1)
                if i < 0:
                    continue
                entry = self._entries[i]
                if place.dtype == entry.dtype and place.shape == entry.shape:
                    places[i] = (shard, place.start)
        return places

    def entries_of(self, group: int) -> list[tuple[int, Entry]]:
        """Return a group's entries with their numbers in the manifest."""
        indices = self._by_group.get(group, ())
        return [(i, self._entries[i]) for i in indices]

    def n_bytes(self, groups: Iterable[int]) -> int:
        """Return the bytes of groups, here or not."""
        return sum(entry.n_bytes for group in groups for _, entry in self.entries_of(group))

    def read(self, ref: Ref) -> bytes:
        """Return one verified chunk of a complete group. Raises Refused when it is not here (any more)."""
        index, chunk = ref
        if index >= len(self._entries) or chunk >= len(self._entries[index].chunks):
            raise Refused(Code.MALFORMED, f"chunk {chunk} of entry {index}, which {self.model[:12]} does not have")
        place = self._places.get(index)
        entry = self._entries[index]
        if place is None or self.groups[index] not in self.held:
            raise Refused(Code.NOT_HELD, f"{entry.name} of {self.model[:12]} is not here")
        path, start = place
        try:
            with path.open("rb") as file:
                file.seek(start + chunk * CHUNK_BYTES)
                data = file.read(entry.chunk_bytes(chunk))
        except OSError as error:
            raise Refused(Code.NOT_HELD, f"{entry.name} cannot be read: {error.strerror}") from None
        if not entry.is_chunk(chunk, data):
            raise Refused(Code.NOT_HELD, f"{entry.name} on this disk is no longer what it was")
        return data

    def damaged(self) -> list[str]:
        """Hash everything that is here; returns names of entries that are not what the manifest says."""
        names = []
        for index, entry in enumerate(self._entries):
            if index in self._places and self.groups[index] in self.held:
                try:
                    for chunk in range(len(entry.chunks)):
                        self.read((index, chunk))
                except Refused:
                    names.append(entry.name)
        return names

    def drop(self, groups: Iterable[int]) -> None:
        """Delete groups; only for a folder that swarmd fills."""
        for group in groups:
            for slot in self.slots(group):
                with _Disk(slot.path):
                    slot.path.unlink(missing_ok=True)
                    slot.part.unlink(missing_ok=True)
        self.look()

    def slots(self, group: int) -> list[GroupSlot]:
        """Return the files that a group becomes: one of safetensors, and the head's plain ones."""
        n_files = len(self.manifest.files)
        members = self.entries_of(group)
        plain = [(i, entry) for i, entry in members if i < n_files]
        tensors = [(i, entry) for i, entry in members if i >= n_files]
        slots = []
        for i, entry in plain:
            path = self.folder / entry.name
            slots.append(GroupSlot(path, prefix=b"", starts=((i, 0),)))
        if tensors:
            headings = [(entry.name, entry.dtype, entry.shape) for _, entry in tensors]
            prefix, places = shards.make_header(headings)
            indices = [i for i, _ in tensors]
            starts = tuple(zip(indices, [place.start for place in places], strict=True))
            name = "head" if group == self.head else f"block-{group:04d}"
            slots.append(GroupSlot(self.folder / f"{name}.safetensors", prefix, starts))
        return slots

    def shards(self) -> list[Path]:
        """Return the safetensors files of what is complete. Raises ConfigError."""
        if self.is_filled:
            return sorted(self.folder.glob("*.safetensors"))
        if adapter.is_adapter(self.folder):
            return [self.folder / adapter.WEIGHTS_FILE]
        if draft.is_draft(self.folder):
            return [self.folder / draft.WEIGHTS_FILE]
        return manifests.shard_files(self.folder)


@dataclass(frozen=True, slots=True)
class GroupSlot:
    """One file of a group: its path when complete, the bytes before its data, where each entry starts."""

    path: Path
    prefix: bytes
    starts: tuple[tuple[int, int], ...]

    @property
    def part(self) -> Path:
        """The file's path while it is not complete."""
        return self.path.with_name(self.path.name + PART)


class GroupDownload:
    """One group on its way into a folder. ``missing`` holds the chunks that are not there yet."""

    def __init__(self, target: ModelFolder, group: int) -> None:
        self.group = group
        self.missing: dict[Ref, int] = {}
        self.n_bytes = target.n_bytes((group,))
        self._target = target
        self._entries = dict(target.entries_of(group))
        self._places: dict[int, tuple[Path, int]] = {}
        self._slots: list[GroupSlot] = []

    def begin(self) -> None:
        """Make room, or find out what an earlier attempt left. Raises ConfigError when the disk says no."""
        for slot in self._target.slots(self.group):
            if slot.path.is_file() and self._is_complete(slot):
                continue  # it stays where it is
            is_new = self._prepare_part(slot)
            self._slots.append(slot)
            for ref, start in self._chunks_of(slot):
                self._places[ref[0]] = (slot.part, start)
                if is_new or not self._is_there(slot.part, ref, start):
                    self.missing[ref] = self.chunk_bytes(ref)

    def chunk_bytes(self, ref: Ref) -> int:
        """Return how long a chunk is."""
        index, chunk = ref
        return self._entries[index].chunk_bytes(chunk)

    def put(self, ref: Ref, data: bytes | memoryview) -> None:
        """Write one chunk. Raises IntegrityError for other bytes than the manifest's, ConfigError from the disk."""
        index, chunk = ref
        entry = self._entries[index]
        if not entry.is_chunk(chunk, data):
            raise IntegrityError(f"chunk {chunk} of {entry.name} has another sha256 than the manifest says")
        path, start = self._places[index]
        with _Disk(path):
            try:
                with _open_file(path) as file:
                    file.seek(start + chunk * CHUNK_BYTES)
                    file.write(data)
            except FileNotFoundError:
                if not path.with_suffix("").is_file():  # else another process has put it in place
                    raise
        self.missing.pop(ref, None)

    def finish(self) -> None:
        """Put the complete group in place. Raises ConfigError from the disk."""
        assert not self.missing
        for slot in self._slots:
            with _Disk(slot.part):
                if not slot.part.exists() and slot.path.is_file():
                    continue  # another process was sooner
                with slot.part.open("rb") as file:
                    os.fsync(file.fileno())
                slot.part.replace(slot.path)
        self._target.look()

    def _chunks_of(self, slot: GroupSlot) -> Iterator[tuple[Ref, int]]:
        """Yield each chunk of a file, with where its entry starts."""
        for index, start in slot.starts:
            for chunk in range(len(self._entries[index].chunks)):
                yield (index, chunk), start

    def _prepare_part(self, slot: GroupSlot) -> bool:
        """Make the part file; is it new?"""
        data_bytes = sum(self._entries[i].n_bytes for i, _ in slot.starts)
        size = len(slot.prefix) + data_bytes
        with _Disk(slot.part):
            is_new = not slot.part.exists()
            with _open_file(slot.part, os.O_CREAT) as file:
                has_prefix = not is_new and file.read(len(slot.prefix)) == slot.prefix
                if not has_prefix or os.fstat(file.fileno()).st_size != size:
                    is_new = True
                    file.truncate(0)
                    file.seek(0)
                    file.write(slot.prefix)
                    file.truncate(size)
        return is_new

    def _is_complete(self, slot: GroupSlot) -> bool:
        """Does a group's file hold all its chunks as the manifest has them?"""
        return all(self._is_there(slot.path, ref, start) for ref, start in self._chunks_of(slot))

    def _is_there(self, path: Path, ref: Ref, start: int) -> bool:
        """Does a file hold this chunk as the manifest has it?"""
        index, chunk = ref
        entry = self._entries[index]
        with _Disk(path), _open_file(path) as file:
            file.seek(start + chunk * CHUNK_BYTES)
            return entry.is_chunk(chunk, file.read(entry.chunk_bytes(chunk)))


def create(root: Path, manifest: Manifest) -> ModelFolder:
    """Make (or open) the folder that swarmd fills with a model, under ``root``. Raises ConfigError."""
    folder = root / manifests.model_id(manifest)
    write_file(folder / "config.json", manifest.config.encode())
    write_file(folder / MANIFEST, manifests.encode(manifest))
    return ModelFolder(folder, manifest)


def write_file(path: Path, *data: bytes | memoryview) -> None:
    """Write a file whole, by a new name, so that a crash leaves the old one. Raises ConfigError."""
    make_folder(path.parent)
    new = path.with_name(f".{path.name}.{os.getpid()}.{next(_numbers)}.new")
    try:
        with _Disk(path):
            with new.open("wb") as file:
                file.writelines(data)
            new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def disk_bytes(paths: Iterable[Path]) -> int:
    """Return what plain files take on disk; holes in them take nothing."""
    plain = (path for path in paths if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_blocks * 512 for path in plain)


def make_folder(path: Path) -> None:
    """Make a folder if it is not there. Raises ConfigError."""
    with _Disk(path):
        path.mkdir(parents=True, exist_ok=True)


class _Disk:
    """Turns what the disk says into a ConfigError that names the file and what to do."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __enter__(self) -> None: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: object,
    ) -> None:
        if not isinstance(error, OSError):
            return
        hint = ""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            hint = "; what was verified is kept: make room (swarmd models rm NAME) and try again"
        elif error.errno == errno.ELOOP:
            hint = "; a symbolic link is in the way: remove it"
        raise ConfigError(f"cannot write {self._path}: {error.strerror}{hint}") from None


def _open_file(path: Path, flags: int = 0) -> BinaryIO:
    """Open for reading and writing, never through a symbolic link."""
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | flags, 0o644)
    return os.fdopen(descriptor, "r+b")
