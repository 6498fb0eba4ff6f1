"""``swarmd models add ORG/NAME --no-copy``: a model of the hub is judged by its headers, then hashed as it comes."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable
from pathlib import Path

from swarmd.errors import ConfigError
from swarmd.protocol.models import manifest
from swarmd.protocol.models.adapter import is_adapter
from swarmd.protocol.models.manifest import CHUNK_BYTES, INDEX_FILE, Entry, Manifest
from swarmd.protocol.models.quantised import SMALL_PARTS, PlainTensor
from swarmd.protocol.models.shards import Place
from swarmd.weights.digests import KeptDigests
from swarmd_cli.source import HUB_ID, asking_hub, download_settings

Report = Callable[[str], None]
Judge = Callable[[Path, Manifest], object]
NO_DIGEST = bytes(32)


# Of a model that nobody here could hold:
#
#     settings        are fetched, and judged by themselves
#     headers         some kilobytes of each shard: names, kinds and shapes are judged as those of a folder are
#     everything      once, hashed as it comes; scales and what else lies beside quantised weights are looked at
#
# What takes two of a matrix's parts to see is left to servers: they have both when they load their blocks.
def read_on_hub(source: str, report: Report, kept: KeptDigests, judge: Judge) -> tuple[Path, Manifest]:
    """Hash a checkpoint of the hub as it comes, and keep nothing but its settings. Raises ConfigError, Unreachable.

    ``judge`` is given the settings' folder and what headers say, with digests of zeros. Files whose digests are
    ``kept`` are not asked for. Returns the folder, whose name is the commit, and the manifest.
    """
    if not HUB_ID.fullmatch(source) or Path(source).exists():
        raise ConfigError(f"--no-copy is for models of the hub (ORG/NAME), and {source} is none")
    from swarmd.weights.hub import HubFile, open_client

    with open_client() as client:
        with asking_hub(f"the hub does not give {source}"):
            folder = download_settings(source)
        if is_adapter(folder):
            raise ConfigError(f"{source} is an adapter, which is small: add it without --no-copy")
        config = manifest.read_config(folder)
        files = {name: HubFile(f"{source}@{folder.name}", name, client) for name in manifest.shard_names(folder)}
        report(f"reading the headers of {len(files)} files")
        places = {name: file.read_places() for name, file in files.items()}
        if (folder / INDEX_FILE).is_file():
            manifest.check_index(folder, {place.name: name for name, held in places.items() for place in held})
        every = [place for held in places.values() for place in held]
        sketch = manifest.make_manifest(folder, config, [_sketch(place) for place in every])
        judge(folder, sketch)
        look = _looker(manifest.plain_tensors(sketch))
        how = hashlib.sha256(manifest.canonical_json(config).encode()).hexdigest()[:16]
        tensors: list[Entry] = []
        for number, (name, file) in enumerate(files.items(), 1):
            found = kept.find(file.sha256, how) if file.sha256 else None
            size = f"{name} ({file.n_bytes / 2**30:.2f} GiB), {number} of {len(files)}"
            report(f"hashing {size}" if found is None else f"{size}: hashed before")
            if found is None:
                found = manifest.digest_stream(file, folder / name, file.n_bytes, look)
                if file.sha256:
                    kept.keep(file.sha256, how, found)
            tensors += found
    return folder, manifest.make_manifest(folder, config, tensors)


def _sketch(place: Place) -> Entry:
    """A tensor as its header says it, small ones with the digest of zeros."""
    n_chunks = -(-place.n_bytes // CHUNK_BYTES)
    digests = (_digest_of_zeros(place.n_bytes),) if n_chunks == 1 else (NO_DIGEST,) * n_chunks
    return Entry(place.name, place.dtype, place.shape, digests)


@functools.cache
def _digest_of_zeros(n_bytes: int) -> bytes:
    return hashlib.sha256(bytes(n_bytes)).digest()


def _looker(plain: list[PlainTensor]) -> Callable[[Place, bytes], None]:
    """What looks at pieces of stored tensors as they come, and raises ConfigError for what is lost by them."""
    import torch

    from swarmd.compute.model.unpacking import DTYPES, check_part

    looked_at = {part: (tensor, role) for tensor in plain for role, part in tensor.parts.items() if role != "weight"}

    def look(place: Place, chunk: bytes) -> None:
        if place.name not in looked_at:
            return
        tensor, role = looked_at[place.name]
        if role in SMALL_PARTS and len(chunk) < place.n_bytes:
            raise ConfigError(f"{place.name} has {place.n_bytes} B, which is more than any tool writes")
        check_part(tensor, role, torch.frombuffer(bytearray(chunk), dtype=DTYPES[place.dtype]))

    return look
