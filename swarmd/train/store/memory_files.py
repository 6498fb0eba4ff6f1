"""What a peer's next contribution builds on, as it lies on its disk: what was left out, its own optimizer's moments.

Call all of it from a thread.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from swarmd.errors import ConfigError
from swarmd.protocol.models import shards
from swarmd.train.store.disk import read_all_vectors
from swarmd.train.vectors.inner_steps import Memory
from swarmd.train.vectors.state import DTYPES, Vector
from swarmd.weights.folder import write_file

_MOMENT = re.compile(r"(\d{1,18}) (\d{1,18}) (\w+)")


@dataclass(frozen=True, slots=True)
class MemoryFiles:
    """See the module. ``folder``: that of the run."""

    folder: Path

    def keep_feedback(self, upto: int, residual: Vector) -> None:
        """Write what contributions have left out until draw ``upto``. Raises ConfigError."""
        entry = (f"{upto}", DTYPES[str(residual.dtype)], residual.shape)
        header, _ = shards.make_header([entry])
        write_file(self.folder / "feedback.safetensors", header, residual.view(np.uint8).data)

    def feedback(self, dtype: str, n_elements: int) -> tuple[int, Vector] | None:
        """Read what ``keep_feedback`` wrote, if anything. Raises ConfigError."""
        path = self.folder / "feedback.safetensors"
        if not path.is_file():
            return None
        vectors = read_all_vectors(path, dtype, n_elements)
        if len(vectors) != 1 or not all(name.isdecimal() for name in vectors):
            raise ConfigError(f"{path} holds {', '.join(sorted(vectors)) or 'nothing'}; expected the number of a draw")
        ((upto, residual),) = vectors.items()
        return int(upto), residual

    def keep_inner(self, memory: Memory) -> None:
        """Write a peer's own optimizer after the draws that were counted last. Raises ConfigError."""
        names = sorted(memory.moments)
        vectors = [memory.moments[name] for name in names]
        entries = [
            (f"{memory.upto} {memory.steps} {name}", DTYPES[str(v.dtype)], v.shape)
            for name, v in zip(names, vectors, strict=True)
        ]
        header, _ = shards.make_header(entries)
        payloads = [v.view(np.uint8).data for v in vectors]
        write_file(self.folder / "inner.safetensors", header, *payloads)

    def inner(self, dtype: str, n_elements: int) -> Memory | None:
        """Read what ``keep_inner`` wrote, if anything. Raises ConfigError."""
        path = self.folder / "inner.safetensors"
        if not path.is_file():
            return None
        positions = set[tuple[int, int]]()
        moments = dict[str, Vector]()
        for name, vector in read_all_vectors(path, dtype, n_elements).items():
            match = _MOMENT.fullmatch(name)
            if match is None:
                raise ConfigError(f"{path} holds {name!r}; expected the numbers of a draw and a step, and a moment")
            positions.add((int(match[1]), int(match[2])))
            moments[match[3]] = vector
        if len(positions) != 1:
            raise ConfigError(f"{path} holds the moments of {len(positions)} optimizers")
        ((upto, steps),) = positions
        return Memory(upto, steps, moments)
