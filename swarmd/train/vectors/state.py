"""The state of a run on one peer: parameters, the optimizer's moments, and what others may fetch of them.

How an update changes it: train.vectors.optimizers. A *snapshot* stays as it is while updates go on: a chunk is copied
just before it changes, and nobody waits for anybody.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from swarmd.errors import Code, Refused
from swarmd.protocol.models import manifest as manifests
from swarmd.protocol.models.configuration import STATE
from swarmd.protocol.models.manifest import CHUNK_BYTES, Entry, Manifest
from swarmd.protocol.runs.commit import Commit
from swarmd.protocol.runs.recipe import Recipe, Run
from swarmd.train.vectors.optimizers import OuterOptimizer, centre_of, matrix_ranges, outer_moments
from swarmd.train.vectors.scratch import Scratch
from swarmd.values import RunId

Vector = npt.NDArray[np.floating]
DTYPES = {"float32": "F32", "float64": "F64"}
BLOCK_ELEMENTS = 1 << 16  # what fits a processor's cache together with its moments

# A snapshot while an update goes over the vectors, chunk by chunk (4 MiB):
#
#     vectors    [new][new][ being changed ][old][old]
#     snapshot   [copy][copy][copy]            |    |
#     a reader gets copies of what has changed,  and reads the rest from the vectors themselves
#
# ``keep`` copies a chunk before ``apply`` changes it. A reader reads the vectors first and looks for a copy after:
# if there is one, what it read may be half old and half new, and the copy is right. If there is none, the change
# had not begun when it read. So readers never wait, and an update waits for no reader. A copy of the whole state
# before each update would cost as much memory again, and time in which nothing is computed.


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """Which tensors lie where in the vector: names and shapes, one after the other."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: str

    @property
    def n_elements(self) -> int:
        """How many numbers all tensors hold together."""
        return sum(math.prod(shape) for _, shape in self.tensors)

    @property
    def n_bytes(self) -> int:
        """How many bytes the vector takes."""
        return self.n_elements * np.dtype(self.dtype).itemsize

    def tensor_ranges(self) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """Yield each tensor with its range [start, end)."""
        start = 0
        for name, shape in self.tensors:
            size = math.prod(shape)
            yield name, shape, start, start + size
            start += size


@dataclass(frozen=True, slots=True)
class Version:
    """Which state it is: the update and its commit, the optimizer's steps so far, and what names its bytes."""

    epoch: int
    head: bytes
    steps: int
    manifest: Manifest
    root: bytes


class RunState:
    """See the module. ``parameters`` may be shared with a worker: nobody reads it while ``apply`` runs.

    ``previous``: where the parameters before the last update are kept, those of ``previous_epoch``, if they are needed.
    Averages that others may have missed lie on the disk, in ``folder``, and in memory without one.

    Threads change it: a caller that needs several facts of one state takes ``version`` once.
    """

    def __init__(
        self,
        run: Run,
        layout: VectorLayout,
        parameters: Vector,
        average_limit_bytes: int,
        folder: Path | None = None,
    ) -> None:
        self.run = run
        self.layout = layout
        self.parameters = parameters
        self.moments = {name: np.zeros_like(parameters) for name in outer_moments(run.recipe)}
        self.version = Version(
            0,
            run.genesis,
            0,
            Manifest(manifests.VERSION, 0, "", (), ()),
            b"",
        )
        self.is_changing = False
        self.snapshots: dict[bytes, Snapshot] = {}
        self.averages: dict[int, Average] = {}
        self._held: list[Snapshot] = []
        self._average_limit_bytes = average_limit_bytes
        self.scratch = Scratch(folder)
        self.previous: Vector | None = None
        self.previous_epoch: int | None = None
        matrices = matrix_ranges(layout.tensor_ranges())
        self._optimizer = OuterOptimizer(run.recipe, parameters, self.moments, matrices)

    @property
    def vectors(self) -> dict[str, Vector]:
        """Everything that a snapshot holds, in its order."""
        return dict(sorted({**self.moments, "parameters": self.parameters}.items()))

    @property
    def n_bytes(self) -> int:
        """How many bytes a snapshot takes."""
        return sum(vector.nbytes for vector in self.vectors.values())

    @property
    def epoch(self) -> int:
        return self.version.epoch

    @property
    def head(self) -> bytes:
        return self.version.head

    @property
    def steps(self) -> int:
        return self.version.steps

    @property
    def root(self) -> bytes:
        return self.version.root

    @property
    def fragment(self) -> tuple[int, int]:
        """The range [start, end) of elements that the next update averages."""
        return fragment_of(self.run.recipe, self.steps + 1, self.layout.n_elements)

    @property
    def n_averaged(self) -> int:
        """How many elements the next update averages."""
        start, end = self.fragment
        return end - start

    @property
    def averaged_bytes(self) -> int:
        """How many bytes of the vector the next update averages."""
        return self.n_averaged * self.parameters.itemsize

    @property
    def centre(self) -> Vector:
        """What the next contributions are clipped round (train.vectors.clipping)."""
        return centre_of(self.run.recipe, self.moments, self.steps)

    def measure(self) -> None:
        """Hash the state as it is. Call it in a thread, and not while it changes."""
        self.move_to(self.epoch, self.head, self.steps)

    def freeze(self) -> Snapshot:
        """Keep the state as it is now for peers that fetch it. Raises Refused while it changes."""
        if self.is_changing:
            raise Refused(Code.NO_CAPACITY, "the state changes at the moment", 0.5)
        if self.root not in self.snapshots:
            vectors = dict(enumerate(self.vectors.values()))
            self.snapshots[self.root] = Snapshot(self.version.manifest, vectors, self.scratch)
        return self.snapshots[self.root]

    def hold(self) -> Snapshot:
        """Hold the state as it is, to be looked at once the next update is applied."""
        fetched = self.snapshots.get(self.root)
        if fetched is not None and fetched.is_live:
            return fetched
        snapshot = Snapshot(self.version.manifest, dict(enumerate(self.vectors.values())), self.scratch)
        self._held.append(snapshot)
        return snapshot

    def thaw(self, root: bytes) -> None:
        """Let go of a snapshot that nobody fetches any more."""
        self.snapshots.pop(root, None)

    def find(self, digest: bytes) -> Snapshot | Average | None:
        """Find what a hash names here."""
        snapshot = self.snapshots.get(digest)
        if snapshot is not None:
            return snapshot
        return next((a for a in self.averages.values() if a.digest == digest), None)

    def apply(
        self,
        commit: Commit,
        digest: bytes,
        average: Vector,
        steps: int,
    ) -> None:
        """Take one step of the recipe's (outer) optimizer, and hash the outcome. Call it in a thread."""
        self._keep_previous()
        snapshots = [*self.snapshots.values(), *self._held]
        live = [snapshot for snapshot in snapshots if snapshot.is_live]
        self._held = []
        low, high = fragment_of(self.run.recipe, steps, len(self.parameters))
        size = CHUNK_BYTES // self.parameters.itemsize
        clip = self.parameters.dtype.type(commit.clip)
        for chunk in range(-(-len(self.parameters) // size)):
            for snapshot in live:
                snapshot.keep(chunk)
            start = max(low, chunk * size)
            end = min(high, (chunk + 1) * size)
            for offset in range(start, end, BLOCK_ELEMENTS):
                block = slice(offset, min(offset + BLOCK_ELEMENTS, end))
                gradient = average[block.start - low : block.stop - low]
                if self.run.recipe.robust == "clip":
                    gradient = gradient + centre_of(self.run.recipe, self.moments, steps - 1, block)
                gradient = gradient * clip
                self._optimizer.step(block, gradient, commit.learning_rate, steps)
        self._optimizer.finish(lambda whole: average[whole] * clip, commit.learning_rate)
        for snapshot in live:
            snapshot.is_live = False
        self._keep_average(commit, average)
        self.move_to(commit.epoch, digest, steps)

    def stay(self, epoch: int, digest: bytes, steps: int) -> None:
        """Note that the vectors are those after commit ``digest`` as well. Call it in a thread."""
        self._keep_previous()
        self.move_to(epoch, digest, steps)

    def _keep_previous(self) -> None:
        if self.previous is not None:
            self.previous[:] = self.parameters
            self.previous_epoch = self.epoch

    def move_to(self, epoch: int, digest: bytes, steps: int) -> None:
        """Note that the vectors are now those after commit ``digest``."""
        self.version = self.describe(epoch, digest, steps, self.vectors)

    def describe(self, epoch: int, digest: bytes, steps: int, vectors: Mapping[str, Vector]) -> Version:
        """Say which state vectors are, if they are that after commit ``digest``. Call it in a thread."""
        settings = {"epoch": epoch, "head": digest.hex(), "run": self.run.id, "steps": steps}
        manifest = describe_vectors(settings, dict(sorted(vectors.items())))
        return Version(epoch, digest, steps, manifest, digest_of(manifest))

    def replace(self, vectors: Mapping[str, Vector]) -> None:
        """Take over other values; snapshots of the old ones end."""
        self.snapshots = {}
        self.averages = {}
        self._held = []
        self.previous_epoch = None
        for name, vector in self.vectors.items():
            vector[:] = vectors[name]

    def _keep_average(self, commit: Commit, average: Vector) -> None:
        n_kept = max(1, self._average_limit_bytes // max(1, average.nbytes))
        averages = {**self.averages, commit.epoch: Average(self.run.id, commit, self.scratch.write_out(average))}
        self.averages = {epoch: averages[epoch] for epoch in sorted(averages)[-n_kept:]}


class Average:
    """The average of one round, readable in chunks by peers that missed it."""

    def __init__(self, run: RunId, commit: Commit, values: Vector) -> None:
        self.digest = commit.average
        self.values = values
        self._run = run
        self._parent = commit.parent

    @functools.cached_property
    def manifest(self) -> Manifest:
        """Hash the average by chunks. Call it in a thread the first time."""
        return describe_average(self._run, self._parent, self.values)

    def read(self, ref: tuple[int, int]) -> bytes:
        """Read one chunk. Raises Refused when there is no such one."""
        index, chunk = ref
        size = CHUNK_BYTES // self.values.itemsize
        data = b""
        if index == 0:
            data = self.values[chunk * size : (chunk + 1) * size].tobytes()
        if not data:
            raise Refused(Code.MALFORMED, f"chunk {chunk} of entry {index}, which an average does not have")
        return data


class Snapshot:
    """The state at one update, readable in chunks for as long as somebody keeps it. Read from any thread."""

    def __init__(self, manifest: Manifest, vectors: dict[int, Vector], scratch: Scratch) -> None:
        self.manifest = manifest
        self.is_live = True  # the vectors still are what the manifest says, but for chunks that were kept
        self.n_reads = 0
        self._vectors = vectors
        self._scratch = scratch
        self._copies: dict[int, Vector] = {}
        self._kept: set[tuple[int, int]] = set()  # of the copies, the chunks that are there
        self._lock = threading.Lock()

    def keep(self, chunk: int) -> None:
        """Copy a chunk of every vector; the caller is about to change it."""
        for index, vector in self._vectors.items():
            if index not in self._copies:
                self._copies[index] = self._scratch.new(len(vector), str(vector.dtype))
            place = _place_of(chunk, vector)
            self._copies[index][place] = vector[place]
            with self._lock:
                self._kept.add((index, chunk))

    def read(self, ref: tuple[int, int]) -> bytes:
        """Read one chunk. Raises Refused when there is no such one."""
        index, chunk = ref
        self.n_reads += 1
        if index not in self._vectors or chunk >= len(self.manifest.tensors[index].chunks):
            raise Refused(Code.MALFORMED, f"chunk {chunk} of vector {index}, which the state does not have")
        place = _place_of(chunk, self._vectors[index])
        data = self._vectors[index][place].tobytes()
        with self._lock:  # what was copied before it changed is right; else what was read is
            return self._copies[index][place].tobytes() if (index, chunk) in self._kept else data

    def vector(self, name: str) -> Vector:
        """Put together one of its vectors. Call it in a thread."""
        named = ((i, tensor) for i, tensor in enumerate(self.manifest.tensors) if tensor.name == name)
        index, entry = next(named)
        n_chunks = len(entry.chunks)
        raw = b"".join(self.read((index, chunk)) for chunk in range(n_chunks))
        return np.frombuffer(raw, self._vectors[index].dtype)

    @property
    def kept_bytes(self) -> int:
        """How many bytes of chunks were copied before they changed."""
        return sum(self._vectors[index][_place_of(chunk, self._vectors[index])].nbytes for index, chunk in self._kept)


def _place_of(chunk: int, vector: Vector) -> slice:
    size = CHUNK_BYTES // vector.itemsize
    return slice(chunk * size, (chunk + 1) * size)


def describe_vectors(settings: Mapping[str, object], vectors: Mapping[str, Vector]) -> Manifest:
    """Make the manifest of vectors: its hash names them, settings included."""
    entries = []
    for name, vector in vectors.items():
        dtype = DTYPES[str(vector.dtype)]
        entries.append(Entry(name, dtype, (len(vector),), _hash_chunks(vector)))
    config = manifests.canonical_json({"model_type": STATE, "num_hidden_layers": 0, **settings})
    return Manifest(manifests.VERSION, 0, config, (), tuple(entries))


def describe_average(run: RunId, parent: bytes, average: Vector) -> Manifest:
    """Make the manifest of a round's average; a commit names its hash."""
    return describe_vectors({"parent": parent.hex(), "run": run}, {"average": average})


def average_digest(run: RunId, parent: bytes, average: Vector) -> bytes:
    """Compute what a commit names a round's average by. Call it in a thread."""
    return digest_of(describe_average(run, parent, average))


def digest_of(manifest: Manifest) -> bytes:
    """Compute the hash that names a manifest, as bytes."""
    return bytes.fromhex(manifests.model_id(manifest))


def fragment_of(recipe: Recipe, steps: int, n_elements: int) -> tuple[int, int]:
    """Return the elements [start, end) that update ``steps``, counted from 1, averages: parts take turns."""
    n = recipe.fragments
    turn = (steps - 1) % n
    return n_elements * turn // n, n_elements * (turn + 1) // n


def _hash_chunks(vector: Vector) -> tuple[bytes, ...]:
    data = vector.view(np.uint8).data
    starts = range(0, len(data), CHUNK_BYTES)
    return tuple(hashlib.sha256(data[start : start + CHUNK_BYTES]).digest() for start in starts)
