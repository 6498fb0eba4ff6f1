"""A run's data: rows of tokens in shards, named by a manifest as models are, and fetched shard by shard when needed.

A packed data set is a folder with config.json and model.safetensors, so that whatever hashes, keeps and serves models
does so for data as well; each shard is what a block is there.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import trio

from swarmd.errors import ConfigError, IntegrityError, Refused
from swarmd.plan.runs.samples import row_of, seed_of, shard_of
from swarmd.protocol.models import shards
from swarmd.protocol.models.manifest import DATA, Manifest, canonical_json
from swarmd.protocol.runs.recipe import Run
from swarmd.values import ModelId
from swarmd.weights.folder import ModelFolder, make_folder
from swarmd.weights.supply import Supply

SHARD_BYTES = 4 * 2**20  # what a peer fetches for the samples that it drew
MAX_SHARDS = 1_024  # 4 GiB of data in one run
KEPT_SHARDS = 4  # in memory; draws go from shard to shard
KINDS: dict[str, np.dtype[Any]] = {"U16": np.dtype("<u2"), "I32": np.dtype("<i4")}
Rows = npt.NDArray[np.int32]


class Data:
    """The rows of one run on this machine. Shards come from the swarm when they are needed first."""

    def __init__(self, supply: Supply, run: Run) -> None:
        self.shard_rows: tuple[int, ...] = ()
        self._supply = supply
        self._run = run
        self._manifest: Manifest
        self._kept: dict[int, Rows] = {}

    async def open(self) -> None:
        """Learn what there is. Raises SwarmError."""
        model = ModelId(self._run.recipe.data)
        self._manifest = await self._supply.manifest(model)
        self.shard_rows = rows_of_shards(self._manifest, self._run.recipe.batch.tokens)

    async def read(self, peer: str, first: int, n: int) -> Rows:
        """Read the rows of draws ``first`` to ``first + n`` of a peer, int32 [n, tokens + 1]. Raises SwarmError."""
        seed = self._run.recipe.seed
        draws = range(first, first + n)
        rows = [row_of(seed, peer, draw, self.shard_rows) for draw in draws]
        tokens = []
        for row in rows:
            shard, place = shard_of(row, self.shard_rows)
            tokens.append((await self._load_shard(shard))[place])
        return np.stack(tokens)

    def seed(self, peer: str, first: int) -> int:
        """Return the seed of a micro-batch's dropout, by its first draw."""
        return seed_of(self._run.recipe.seed, peer, first)

    async def _load_shard(self, shard: int) -> Rows:
        if shard not in self._kept:
            folder = await self._supply.ensure(ModelId(self._run.recipe.data), [shard])
            rows = await trio.to_thread.run_sync(read_shard, folder, shard)
            while len(self._kept) >= KEPT_SHARDS:
                del self._kept[next(iter(self._kept))]
            self._kept[shard] = rows
        return self._kept[shard]


def rows_of_shards(manifest: Manifest, tokens: int) -> tuple[int, ...]:
    """Count the rows of each shard. Raises IntegrityError when this is no data of such rows."""
    config = json.loads(manifest.config)
    expected = {f"shards.{i}.tokens" for i in range(manifest.n_blocks)}
    by_name = {t.name: t for t in manifest.tensors}
    if config.get("model_type") != DATA or set(by_name) != expected or not expected or manifest.files:
        raise IntegrityError("what the run names as its data is no packed data set")
    for tensor in by_name.values():
        is_matrix = tensor.dtype in KINDS and len(tensor.shape) == 2
        if not is_matrix or tensor.shape[1] != tokens + 1 or not tensor.shape[0]:
            raise IntegrityError(f"a shard of {tensor.dtype} {tensor.shape}; expected rows of {tokens + 1} tokens")
    return tuple(by_name[f"shards.{i}.tokens"].shape[0] for i in range(manifest.n_blocks))


def read_shard(folder: ModelFolder, shard: int) -> Rows:
    """Read and verify one shard. Raises IntegrityError when it is not what the manifest says."""
    ((index, entry),) = folder.entries_of(shard)
    try:
        n_chunks = len(entry.chunks)
        raw = b"".join(folder.read((index, chunk)) for chunk in range(n_chunks))
    except Refused as error:
        raise IntegrityError(f"shard {shard} of the data is damaged: {error}") from None
    stored = np.frombuffer(raw, KINDS[entry.dtype]).reshape(entry.shape)
    rows: Rows = stored.astype(np.int32)
    return rows


def highest_token(folder: Path, manifest: Manifest) -> int:
    """Find the highest token of packed data. Raises IntegrityError when it is not what the manifest says."""
    read = ModelFolder(folder, manifest)
    return max(int(read_shard(read, shard).max()) for shard in range(manifest.n_blocks))


def require_known_token(token: int, vocabulary: int) -> None:
    """Refuse data with a token that the model has no vector of. Raises ConfigError."""
    if not 0 <= token < vocabulary:
        raise ConfigError(
            f"the data has the token {token}, and the model knows those from 0 to {vocabulary - 1}: is the tokenizer "
            "that of another model?"
        )


def pack_texts(
    texts: Iterable[Sequence[int]],
    tokens: int,
    vocabulary: int,
    folder: Path,
    seed: int,
) -> int:
    """Cut tokenised texts, one after the other, into rows of ``tokens + 1``, shuffle them, and write their shards.

    Returns the number of rows. Raises ConfigError when there is not one.
    """
    flat = np.fromiter((t for text in texts for t in text), np.int32)
    n_rows = (len(flat) - 1) // tokens
    if n_rows < 1:
        raise ConfigError(f"the data has {len(flat)} tokens; a row takes {tokens + 1}")
    require_known_token(int(flat.min()), vocabulary)
    require_known_token(int(flat.max()), vocabulary)
    order = list(range(n_rows))
    random.Random(seed).shuffle(order)
    # Rows overlap by one token: the last target of a row is the first input of the next, so that each token but the
    # first is a target once.
    starts = np.array(order, np.int64)[:, None] * tokens
    rows = flat[starts + np.arange(tokens + 1)]
    kind = "U16" if vocabulary <= 65_536 else "I32"
    row_bytes = KINDS[kind].itemsize * (tokens + 1)
    per_shard = max(1, SHARD_BYTES // row_bytes, -(-n_rows // MAX_SHARDS))
    cut = []
    for first in range(0, n_rows, per_shard):
        cut.append(rows[first : first + per_shard].astype(KINDS[kind]))
    entries = [(f"shards.{i}.tokens", kind, part.shape) for i, part in enumerate(cut)]
    prefix, _ = shards.make_header(entries)
    make_folder(folder)
    config = {"model_type": DATA, "num_hidden_layers": len(cut), "tokens": tokens}
    try:
        (folder / "config.json").write_text(canonical_json(config), encoding="utf-8")
        with (folder / "model.safetensors").open("wb") as file:
            file.write(prefix)
            for part in cut:
                file.write(part.tobytes())
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror}") from None
    return n_rows
