"""Files and batches on disk, each of one key: a restart goes on where a kill came.

Every file has its content beside a note in JSON; a batch is a note. What is answered is added to its files line by
line, so nothing but the last line can be cut.
"""

from __future__ import annotations

import fcntl
import logging
import os
import secrets
from pathlib import Path
from typing import IO, TypeVar

import msgspec

from swarmd.errors import ConfigError
from swarmd.folders import write_file
from swarmd.gateway.apis.refusals import ApiError
from swarmd.gateway.batches.batch import StoredBatch
from swarmd.protocol.untrusted import read_json

logger = logging.getLogger(__name__)

FOLDER = "gateway-batches"
MOST_KEY_BYTES = 256 * 2**20  # of one key's files together, uploaded and answered
MOST_KEY_FILES = 256  # of one key, uploaded and answered
MOST_KEY_BATCHES = 256  # of one key that have ended: of older ones the files stay
LOCK = "lock"
N = TypeVar("N", bound=msgspec.Struct)


class StoredFile(msgspec.Struct, frozen=True):
    """A file of a key's (``Guard.owner``); ``purpose`` is OpenAI's: batch, or batch_output."""

    id: str
    owner: str
    filename: str
    purpose: str
    created_at: int


class BatchStore:
    """What one home's gateway keeps of files and batches."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / FOLDER
        self._lock = self._take_lock()
        self._files: dict[str, StoredFile] = {}
        self._batches: dict[str, StoredBatch] = {}
        if self._lock is not None:
            self._files = {file.id: file for file in self._read_notes("file-*.json", StoredFile)}
            self._batches = {batch.id: batch for batch in self._read_notes("batch_*.json", StoredBatch)}

    def require_own(self) -> None:
        """Refuse what another gateway of this home does. Raises ApiError."""
        if self._lock is None:
            message = "another gateway of this home has its files and batches: ask that one"
            raise ApiError(503, "server_error", message)

    def close(self) -> None:
        """Let another gateway of this home have them."""
        if self._lock is not None:
            self._lock.close()

    # --- files ---------------------------------------------------------------------------------------------------

    def files_of(self, owner: str) -> list[StoredFile]:
        """List a key's files, the newest first."""
        return sorted((f for f in self._files.values() if f.owner == owner), key=lambda f: (-f.created_at, f.id))

    def file(self, owner: str, name: str) -> StoredFile:
        """Find a key's file. Raises ApiError: others' are unknown, too."""
        found = self._files.get(name)
        if found is None or found.owner != owner:
            raise ApiError(404, "invalid_request_error", f"there is no file {name[:100]!r}", "file_id")
        return found

    def add_file(self, owner: str, filename: str, data: bytes, now: float, purpose: str = "batch") -> StoredFile:
        """Keep a file. Raises ApiError where its key has too many, or the disk is full."""
        self.require_room(owner, 1, len(data))
        file = StoredFile(f"file-{secrets.token_hex(12)}", owner, filename, purpose, int(now))
        self._write_note(file)
        self._files[file.id] = file
        self._write(self._path_of(file.id), data)
        return file

    def require_room(self, owner: str, n_files: int, n_bytes: int = 0) -> None:
        """Refuse more files than a key may have. Raises ApiError."""
        owned = self.files_of(owner)
        n_kept = sum(self.size_of(file.id) for file in owned)
        if len(owned) + n_files > MOST_KEY_FILES or n_kept + n_bytes > MOST_KEY_BYTES:
            limits = f"{MOST_KEY_FILES} files and {MOST_KEY_BYTES >> 20} MiB"
            raise ApiError(413, "invalid_request_error", f"a key keeps at most {limits}: delete files first")

    def remove_file(self, file: StoredFile) -> None:
        """Delete a file. Raises ApiError for one of a batch that has not ended."""
        for batch in self.open_batches():
            if file.id in (batch.input_file_id, batch.output_file_id, batch.error_file_id):
                raise ApiError(409, "invalid_request_error", f"{batch.id} is not answered yet: cancel it first")
        del self._files[file.id]
        for path in (self._path_of(file.id), self._note_of(file.id)):
            path.unlink(missing_ok=True)

    def read(self, file_id: str) -> bytes:
        """Read what a file has now; nothing of one that is gone. Raises OSError."""
        try:
            return self._path_of(file_id).read_bytes()
        except FileNotFoundError:
            return b""

    def append(self, file_id: str, lines: bytes) -> bool:
        """Add lines to a file, all or none; say whether they are there. Raises FileNotFoundError."""
        with self._path_of(file_id).open("r+b", buffering=0) as file:
            end = file.seek(0, os.SEEK_END)
            try:
                if file.write(lines) == len(lines):
                    return True
            except OSError as error:
                logger.warning("%s: %s", self._path_of(file_id), error)
            file.truncate(end)
            return False

    def cut(self, file_id: str, n_bytes: int) -> None:
        """Keep the first bytes of a file."""
        if n_bytes < self.size_of(file_id):
            os.truncate(self._path_of(file_id), n_bytes)

    def _path_of(self, file_id: str) -> Path:
        return self._folder / f"{file_id}.jsonl"

    def size_of(self, file_id: str) -> int:
        """How many bytes a file has now; 0 of one that is gone."""
        try:
            return self._path_of(file_id).stat().st_size
        except OSError:
            return 0

    # --- batches -------------------------------------------------------------------------------------------------

    def batches_of(self, owner: str) -> list[StoredBatch]:
        """List a key's batches, the newest first."""
        return sorted((b for b in self._batches.values() if b.owner == owner), key=lambda b: (-b.created_at, b.id))

    def open_batches(self) -> list[StoredBatch]:
        """List all keys' batches that have not ended."""
        return [batch for batch in self._batches.values() if batch.state == "in_progress"]

    def batch(self, owner: str, name: str) -> StoredBatch:
        """Find a key's batch. Raises ApiError: others' are unknown, too."""
        found = self._batches.get(name)
        if found is None or found.owner != owner:
            raise ApiError(404, "invalid_request_error", f"there is no batch {name[:100]!r}", "batch_id")
        return found

    def keep_batch(self, batch: StoredBatch) -> None:
        """Keep a batch as it is now, and of a key's that have ended the last ones. Raises ApiError."""
        self._write_note(batch)
        self._batches[batch.id] = batch
        ended = [other for other in self.batches_of(batch.owner) if other.state != "in_progress"]
        for old in ended[MOST_KEY_BATCHES:]:
            del self._batches[old.id]
            self._note_of(old.id).unlink(missing_ok=True)

    # --- the disk ------------------------------------------------------------------------------------------------

    def _take_lock(self) -> IO[bytes] | None:
        """Hold the folder for one gateway; None where another has it, or it cannot be made."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = (self._folder / LOCK).open("wb")
        except OSError as error:
            logger.warning("no files and batches are kept: %s", error)
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            lock.close()
            return None
        return lock

    def _read_notes(self, pattern: str, kind: type[N]) -> list[N]:
        notes = []
        for path in sorted(self._folder.glob(pattern)):
            try:
                notes.append(read_json(path, kind, "remove it"))
            except ConfigError as error:
                logger.warning("left out: %s", error)
        return notes

    def _note_of(self, name: str) -> Path:
        return self._folder / f"{name}.json"

    def _write_note(self, note: StoredFile | StoredBatch) -> None:
        self._write(self._note_of(note.id), msgspec.json.encode(note))

    def _write(self, path: Path, data: bytes) -> None:
        try:
            write_file(path, data, secret=True)
        except ConfigError as error:
            logger.error("%s", error)
            raise ApiError(507, "server_error", "the gateway's disk takes nothing more") from None
