"""A run on this machine's disk: its recipe, orders, ledger, an anchor's promises, and checkpoints of the state.

What was promised or committed is on the disk, synced, before anybody hears of it. Call all of it from a thread.
"""

from __future__ import annotations

import json
import logging
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from swarmd.errors import ConfigError, IntegrityError
from swarmd.folders import read_file, remove_file
from swarmd.plan.runs.ballot import Acceptor
from swarmd.protocol.models import shards
from swarmd.protocol.models.manifest import model_id
from swarmd.protocol.runs.commit import Ballot
from swarmd.protocol.runs.recipe import Run, read_run_untrusted
from swarmd.protocol.untrusted import decode
from swarmd.train.vectors.state import DTYPES, Snapshot, Vector
from swarmd.values import RunId
from swarmd.weights.folder import make_folder, write_file

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct(">I")


class _AcceptorFile(msgspec.Struct, frozen=True, array_like=True):
    """What an anchor has promised, as it lies on the disk."""

    parent: bytes
    promised: Ballot
    accepted: Ballot
    body: bytes


@dataclass(frozen=True, slots=True)
class SavedRun:
    """One checkpoint: where it is, and what it says of itself."""

    path: Path
    epoch: int
    steps: int
    head: bytes
    root: bytes


@dataclass(frozen=True, slots=True)
class RunFolder:
    """See the module."""

    folder: Path

    def keep_run(self, run: Run, role: str) -> None:
        """Remember a run, or one stage of it, and this machine's part in it. Raises ConfigError."""
        write_file(self.folder / "run.bin", run.raw)
        if run.stage is not None:
            write_file(self.folder / "stage", str(run.stage).encode())
        write_file(self.folder / "role", role.encode())

    def run(self) -> Run:
        """Raises ConfigError."""
        try:
            run = read_run_untrusted((self.folder / "run.bin").read_bytes())
            stage = read_file(self.folder / "stage")
            return run if stage is None else run.in_stage(int(stage))
        except (OSError, ValueError, IntegrityError) as error:
            raise ConfigError(f"{self.folder} holds no run: {error}") from None

    @property
    def role(self) -> str:
        """This machine's part in the run; "" when it left."""
        return (read_file(self.folder / "role") or b"").decode(errors="replace")

    def leave(self) -> None:
        """Forget this machine's part in the run; what the run wrote stays."""
        remove_file(self.folder / "role")

    def order(self) -> bytes:
        """Read the owner's latest order as it was signed; b"" without any."""
        return read_file(self.folder / "order.bin") or b""

    def keep_order(self, raw: bytes) -> None:
        """Write the owner's latest order. Raises ConfigError."""
        write_file(self.folder / "order.bin", raw)

    # --- the ledger -------------------------------------------------------------------------------------------
    #
    # ledger.bin:  | length u32 | commit 1 | length u32 | commit 2 | ...    appended and synced, never rewritten
    #
    # A crash can only cut off the last one. Peers have it as well, so that dropping half a commit loses nothing.

    def commits(self) -> Iterator[bytes]:
        """Read every commit that was written whole, in order; what a crash cut off is dropped."""
        path = self.folder / "ledger.bin"
        if not path.is_file():
            return
        data = path.read_bytes()
        offset = 0
        while offset + _LENGTH.size <= len(data):
            (size,) = _LENGTH.unpack_from(data, offset)
            start = offset + _LENGTH.size
            if start + size > len(data):
                break
            yield data[start : start + size]
            offset = start + size
        if offset < len(data):
            logger.warning("%s ends in the middle of a commit: the rest comes from peers", path)
            with path.open("r+b") as file:
                file.truncate(offset)

    def append_commit(self, raw: bytes) -> None:
        """Write one commit behind the others, synced. Raises ConfigError, and leaves the file as it was."""
        make_folder(self.folder)
        path = self.folder / "ledger.bin"
        size = path.stat().st_size if path.is_file() else 0
        try:
            with path.open("ab") as file:
                file.write(_LENGTH.pack(len(raw)) + raw)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if path.is_file():
                os.truncate(path, size)  # half a commit would hide what follows
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None

    # --- an anchor's promises ---------------------------------------------------------------------------------

    def acceptor(self) -> Acceptor | None:
        """Read what this anchor promised. Raises ConfigError when it cannot: then it must not promise again."""
        path = self.folder / "anchor.bin"
        if not path.is_file():
            return None
        saved = decode(path.read_bytes(), _AcceptorFile, f"{path}, which says what this anchor promised,", ConfigError)
        return Acceptor(saved.parent, saved.promised, saved.accepted, saved.body)

    def keep_acceptor(self, acceptor: Acceptor) -> None:
        """Write what this anchor has promised, synced with its folder. Raises ConfigError."""
        encodable = _AcceptorFile(acceptor.parent, acceptor.promised, acceptor.accepted, acceptor.body)
        path = self.folder / "anchor.bin"
        write_file(path, msgspec.msgpack.encode(encodable))
        for synced in (path, self.folder):
            handle = os.open(synced, os.O_RDONLY)
            os.fsync(handle)
            os.close(handle)

    # --- checkpoints ------------------------------------------------------------------------------------------

    def save(self, snapshot: Snapshot, n_kept: int) -> Path:
        """Write a snapshot as safetensors, and drop all but the newest ``n_kept``. Raises ConfigError."""
        settings = json.loads(snapshot.manifest.config)
        entries = snapshot.manifest.tensors
        prefix, _ = shards.make_header((e.name, e.dtype, e.shape) for e in entries)
        path = self.folder / f"state-{settings['epoch']:08d}.safetensors"
        new = path.with_suffix(".new")
        make_folder(self.folder)
        try:
            with new.open("wb") as file:
                file.write(prefix)
                for index, entry in enumerate(entries):
                    for chunk in range(len(entry.chunks)):
                        file.write(snapshot.read((index, chunk)))
                file.flush()
                os.fsync(file.fileno())
            described = {**settings, "root": model_id(snapshot.manifest)}
            write_file(path.with_suffix(".json"), json.dumps(described).encode())
            new.replace(path)
        except OSError as error:
            new.unlink(missing_ok=True)
            raise ConfigError(f"cannot write {path}: {error.strerror}") from None
        for old in sorted(self.folder.glob("state-*.safetensors"))[:-n_kept]:
            old.unlink(missing_ok=True)
            old.with_suffix(".json").unlink(missing_ok=True)
        return path

    def saved(self) -> list[SavedRun]:
        """Find the checkpoints here, the newest first."""
        checkpoints = []
        for path in sorted(self.folder.glob("state-*.safetensors"), reverse=True):
            try:
                settings: dict[str, Any] = json.loads(path.with_suffix(".json").read_bytes())
                head = bytes.fromhex(settings["head"])
                root = bytes.fromhex(settings["root"])
                checkpoints.append(
                    SavedRun(
                        path,
                        int(settings["epoch"]),
                        int(settings["steps"]),
                        head,
                        root,
                    )
                )
            except (OSError, ValueError, KeyError, TypeError) as error:
                logger.warning("leaving out the checkpoint %s: %s", path, error)
        return checkpoints


def read_vectors(
    path: Path,
    dtype: str,
    n_elements: int,
    names: tuple[str, ...],
) -> dict[str, Vector]:
    """Read the vectors of a state or an average from safetensors. Raises ConfigError."""
    vectors = read_all_vectors(path, dtype, n_elements)
    if set(vectors) != set(names):
        present = ", ".join(sorted(vectors)) or "nothing"
        raise ConfigError(f"{path} holds {present}; expected {', '.join(sorted(names))}")
    return vectors


def read_all_vectors(path: Path, dtype: str, n_elements: int) -> dict[str, Vector]:
    """Map vectors of one length, by their names: what is not looked at takes no memory. Raises ConfigError."""
    vectors: dict[str, Vector] = {}
    try:
        with path.open("rb") as file:
            for place in shards.read_header(file, path, os.fstat(file.fileno()).st_size):
                if place.dtype != DTYPES[dtype] or place.shape != (n_elements,):
                    raise ConfigError(f"{path}: {place.name} is {place.dtype} {place.shape}, not {dtype} {n_elements}")
                vectors[place.name] = np.memmap(file, dtype, "r", offset=place.start, shape=(n_elements,))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    return vectors


def known_runs(root: Path) -> dict[RunId, RunFolder]:
    """Find the runs that this machine takes, or took, part in."""
    return {RunId(path.parent.name): RunFolder(path.parent) for path in root.glob("*/run.bin")}
