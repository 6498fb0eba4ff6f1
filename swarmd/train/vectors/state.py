"""The state of a run on one peer: parameters, the optimizer's moments, and what others may fetch of them.

Everything is plain IEEE arithmetic in numpy, elementwise and in one order, so that peers with different processors
and devices come to the same bits; whatever is not (a norm, a schedule) travels in the commit. A *snapshot* stays as
it is while updates go on: a chunk is copied just before it changes, and nobody waits for anybody.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmd.errors import Code, Refused
from swarmd.protocol.models import manifest as manifests
from swarmd.protocol.models.configuration import STATE
from swarmd.protocol.models.manifest import CHUNK_BYTES, Entry, Manifest
from swarmd.protocol.runs.commit import Commit
from swarmd.protocol.runs.recipe import Diloco, Optimizer, Recipe, Run
from swarmd.values import RunId

Vector = npt.NDArray[np.floating]
DTYPES = {"float32": "F32", "float64": "F64"}
BLOCK_ELEMENTS = 1 << 16  # what fits a processor's cache together with its moments


@dataclass(frozen=True, slots=True)
class VectorLayout:
    """Which tensors lie where in the vector: names and shapes, one after the other."""

    tensors: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: str

    @property
    def n_elements(self) -> int:
        return sum(math.prod(shape) for _, shape in self.tensors)

    @property
    def n_bytes(self) -> int:
        return self.n_elements * np.dtype(self.dtype).itemsize

    def places(self) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """Each tensor with its range [start, end)."""
        at = 0
        for name, shape in self.tensors:
            size = math.prod(shape)
            yield name, shape, at, at + size
            at += size


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

    Threads change it: whoever needs several facts of one state takes ``version`` once.
    """

    def __init__(self, run: Run, layout: VectorLayout, parameters: Vector, average_limit_bytes: int) -> None:
        self.run = run
        self.layout = layout
        self.parameters = parameters
        self.moments = {name: np.zeros_like(parameters) for name in _outer_moments(run.recipe)}
        self.version = Version(0, run.genesis, 0, Manifest(manifests.VERSION, 0, "", (), ()), b"")
        self.is_changing = False
        self.snapshots: dict[bytes, Snapshot] = {}
        self.averages: dict[int, Average] = {}
        self._held: list[Snapshot] = []
        self._average_limit_bytes = average_limit_bytes
        self._decayed = [(start, end) for _, shape, start, end in layout.places() if len(shape) > 1]

    @property
    def vectors(self) -> dict[str, Vector]:
        """Everything that a snapshot holds, in its order."""
        return dict(sorted({**self.moments, "parameters": self.parameters}.items()))

    @property
    def n_bytes(self) -> int:
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
        return self.n_averaged * self.parameters.itemsize

    @property
    def centre(self) -> Vector:
        """What the next contributions are clipped round (train.vectors.clipping)."""
        return centre_of(self.run.recipe, self.moments, self.steps)

    def measure(self) -> None:
        """Hash the state as it is. Call it in a thread, and not while it changes."""
        self.move_to(self.epoch, self.head, self.steps)

    def freeze(self) -> Snapshot:
        """Keep the state as it is now for whoever fetches it. Raises Refused while it changes."""
        if self.is_changing:
            raise Refused(Code.NO_CAPACITY, "the state changes at the moment", 0.5)
        if self.root not in self.snapshots:
            self.snapshots[self.root] = Snapshot(self.version.manifest, dict(enumerate(self.vectors.values())))
        return self.snapshots[self.root]

    def hold(self) -> Snapshot:
        """The state as it is, for who is to look at it once the next update is applied; for as long as it is kept."""
        if (kept := self.snapshots.get(self.root)) is not None and kept.is_live:
            return kept
        self._held.append(Snapshot(self.version.manifest, dict(enumerate(self.vectors.values()))))
        return self._held[-1]

    def thaw(self, root: bytes) -> None:
        """Nobody fetches that snapshot any more."""
        self.snapshots.pop(root, None)

    def find(self, wanted: bytes) -> Snapshot | Average | None:
        """What a hash names here."""
        return self.snapshots.get(wanted) or next((a for a in self.averages.values() if a.digest == wanted), None)

    def apply(self, commit: Commit, digest: bytes, average: Vector, steps: int) -> None:
        """Take one step of the recipe's (outer) optimizer, and hash the outcome. Call it in a thread."""
        live = [s for s in [*self.snapshots.values(), *self._held] if s.is_live]
        self._held = []
        low, high = fragment_of(self.run.recipe, steps, len(self.parameters))
        size = CHUNK_BYTES // self.parameters.itemsize
        for chunk in range(-(-len(self.parameters) // size)):
            for snapshot in live:
                snapshot.keep(chunk)
            start, end = max(low, chunk * size), min(high, (chunk + 1) * size)
            for at in range(start, end, BLOCK_ELEMENTS):
                block = slice(at, min(at + BLOCK_ELEMENTS, end))
                gradient = average[block.start - low : block.stop - low]
                if self.run.recipe.robust == "clip":
                    gradient = gradient + centre_of(self.run.recipe, self.moments, steps - 1, block)
                gradient = gradient * self.parameters.dtype.type(commit.clip)
                self._update(block, gradient, commit.learning_rate, steps)
        for snapshot in live:
            snapshot.is_live = False
        self._keep_average(commit, average)
        self.move_to(commit.epoch, digest, steps)

    def move_to(self, epoch: int, digest: bytes, steps: int) -> None:
        """The vectors are now those after commit ``digest``."""
        settings = {"epoch": epoch, "head": digest.hex(), "run": self.run.id, "steps": steps}
        manifest = describe(settings, self.vectors)
        self.version = Version(epoch, digest, steps, manifest, digest_of(manifest))

    def replace(self, vectors: Mapping[str, Vector]) -> None:
        """Take over other values; snapshots of the old ones end."""
        self.snapshots, self.averages, self._held = {}, {}, []
        for name, vector in self.vectors.items():
            vector[:] = vectors[name]

    def _update(self, block: slice, gradient: Vector, learning_rate: float, steps: int) -> None:
        recipe, parameters = self.run.recipe, self.parameters[block]
        moments = {name: vector[block] for name, vector in self.moments.items()}
        if recipe.steps_inside:
            _nesterov(recipe.diloco, parameters, gradient, moments)
            return
        self._decay(block, learning_rate)
        _UPDATES[recipe.optimizer.kind](recipe.optimizer, parameters, gradient, moments, learning_rate, steps)

    def _decay(self, block: slice, learning_rate: float) -> None:
        """Decoupled weight decay of matrices (Loshchilov & Hutter 2019, algorithm 2)."""
        weight_decay = self.run.recipe.optimizer.weight_decay
        if not weight_decay:
            return
        for start, end in self._decayed:
            low, high = max(start, block.start), min(end, block.stop)
            if low < high:
                self.parameters[low:high] *= 1 - learning_rate * weight_decay

    def _keep_average(self, commit: Commit, average: Vector) -> None:
        n_kept = max(1, self._average_limit_bytes // max(1, average.nbytes))
        kept = {**self.averages, commit.epoch: Average(self.run.id, commit, average)}
        self.averages = {epoch: kept[epoch] for epoch in sorted(kept)[-n_kept:]}


class Average:
    """The average of one round, readable in chunks by peers that missed it."""

    def __init__(self, run: RunId, commit: Commit, values: Vector) -> None:
        self.digest = commit.average
        self.values = values
        self._run = run
        self._parent = commit.parent

    @functools.cached_property
    def manifest(self) -> Manifest:
        return describe_average(self._run, self._parent, self.values)

    def read(self, ref: tuple[int, int]) -> bytes:
        """One chunk. Raises Refused when there is no such one."""
        index, chunk = ref
        size = CHUNK_BYTES // self.values.itemsize
        data = self.values[chunk * size : (chunk + 1) * size].tobytes() if index == 0 else b""
        if not data:
            raise Refused(Code.MALFORMED, f"chunk {chunk} of entry {index}, which an average does not have")
        return data


class Snapshot:
    """The state at one update, readable in chunks for as long as somebody keeps it. Read from any thread."""

    def __init__(self, manifest: Manifest, vectors: dict[int, Vector]) -> None:
        self.manifest = manifest
        self.is_live = True  # the vectors still are what the manifest says, but for chunks that were kept
        self.n_reads = 0
        self._vectors = vectors
        self._kept: dict[tuple[int, int], bytes] = {}
        self._lock = threading.Lock()

    def keep(self, chunk: int) -> None:
        """Copy a chunk of every vector; the caller is about to change it."""
        for index in self._vectors:
            data = self._live(index, chunk)
            with self._lock:
                self._kept[index, chunk] = data

    def read(self, ref: tuple[int, int]) -> bytes:
        """One chunk. Raises Refused when there is no such one."""
        index, chunk = ref
        self.n_reads += 1
        if index not in self._vectors or chunk >= len(self.manifest.tensors[index].chunks):
            raise Refused(Code.MALFORMED, f"chunk {chunk} of vector {index}, which the state does not have")
        data = self._live(index, chunk)
        with self._lock:  # what was copied before it changed is right; else what was read is
            return self._kept.get((index, chunk), data)

    def vector(self, name: str) -> Vector:
        """One of its vectors, put together. Call it in a thread."""
        index, entry = next((i, t) for i, t in enumerate(self.manifest.tensors) if t.name == name)
        raw = b"".join(self.read((index, chunk)) for chunk in range(len(entry.chunks)))
        return np.frombuffer(raw, self._vectors[index].dtype)

    @property
    def kept_bytes(self) -> int:
        return sum(len(data) for data in self._kept.values())

    def _live(self, index: int, chunk: int) -> bytes:
        vector = self._vectors[index]
        size = CHUNK_BYTES // vector.itemsize
        return vector[chunk * size : (chunk + 1) * size].tobytes()


def describe(settings: Mapping[str, object], vectors: Mapping[str, Vector]) -> Manifest:
    """The manifest of vectors: its hash names them, settings included."""
    entries = tuple(
        Entry(name, DTYPES[str(vector.dtype)], (len(vector),), _chunks(vector)) for name, vector in vectors.items()
    )
    config = manifests.canonical_json({"model_type": STATE, "num_hidden_layers": 0, **settings})
    return Manifest(manifests.VERSION, 0, config, (), entries)


def describe_average(run: RunId, parent: bytes, average: Vector) -> Manifest:
    """The manifest of a round's average; a commit names its hash."""
    return describe({"parent": parent.hex(), "run": run}, {"average": average})


def average_digest(run: RunId, parent: bytes, average: Vector) -> bytes:
    """What a commit names a round's average by. Call it in a thread."""
    return digest_of(describe_average(run, parent, average))


def digest_of(manifest: Manifest) -> bytes:
    return bytes.fromhex(manifests.model_id(manifest))


def fragment_of(recipe: Recipe, steps: int, n_elements: int) -> tuple[int, int]:
    """The range [start, end) of elements that update ``steps``, counted from 1, averages: parts take turns."""
    n, turn = recipe.fragments, (steps - 1) % recipe.fragments
    return n_elements * turn // n, n_elements * (turn + 1) // n


def _outer_moments(recipe: Recipe) -> tuple[str, ...]:
    """The vectors that all members keep beside the parameters."""
    if recipe.steps_inside:
        return ("momentum",) if recipe.diloco.momentum else ()
    return recipe.optimizer.moments


def centre_of(recipe: Recipe, moments: Mapping[str, Vector], steps: int, block: slice = slice(None)) -> Vector:
    """What the gradients of ``steps`` updates so far have been, lately: the same bits everywhere."""
    optimizer, is_adamw = recipe.optimizer, recipe.optimizer.kind == "adamw"
    name, decay = ("moment1", optimizer.beta1) if is_adamw else ("momentum", optimizer.momentum)
    if name not in moments or not steps:
        return np.zeros(1, recipe.precision)
    weight = 1.0 if is_adamw else 1 - decay  # of each gradient: torch's momentum adds them up as they are
    return moments[name][block] * (weight / (1 - power(decay, steps)))


def clip_factor(average: Vector, limit: float) -> float:
    """What brings the norm of an average to ``limit``; 1.0 where it is not above, or there is none."""
    norm = math.sqrt(float(np.dot(average, average))) if limit else 0.0
    return min(1.0, limit / norm) if norm else 1.0


def _chunks(vector: Vector) -> tuple[bytes, ...]:
    data = vector.view(np.uint8).data
    return tuple(hashlib.sha256(data[at : at + CHUNK_BYTES]).digest() for at in range(0, len(data), CHUNK_BYTES))


def _sgd(o: Optimizer, p: Vector, g: Vector, moments: dict[str, Vector], rate: float, steps: int) -> None:
    """As torch.optim.SGD without dampening."""
    if o.momentum:
        moments["momentum"] *= o.momentum
        moments["momentum"] += g
        g = moments["momentum"]
    p -= g * rate


def _nesterov(o: Diloco, p: Vector, g: Vector, moments: dict[str, Vector]) -> None:
    """As torch.optim.SGD with nesterov=True."""
    if o.momentum:
        momentum = moments["momentum"]
        momentum *= o.momentum
        momentum += g
        g += momentum * o.momentum
    g *= o.learning_rate
    p -= g


def _adamw(o: Optimizer, p: Vector, g: Vector, moments: dict[str, Vector], rate: float, steps: int) -> None:
    """Kingma & Ba 2015, algorithm 1, with both corrections; powers by squaring, the same on every machine."""
    first, second = moments["moment1"], moments["moment2"]
    first *= o.beta1
    first += g * (1 - o.beta1)
    second *= o.beta2
    g *= g
    g *= 1 - o.beta2
    second += g
    np.sqrt(second, out=g)
    g /= math.sqrt(1 - power(o.beta2, steps))
    g += o.epsilon
    np.divide(first, g, out=g)
    g *= rate / (1 - power(o.beta1, steps))
    p -= g


def power(base: float, exponent: int) -> float:
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


_Update = Callable[[Optimizer, Vector, Vector, dict[str, Vector], float, int], None]
_UPDATES: dict[str, _Update] = {"sgd": _sgd, "adamw": _adamw}
