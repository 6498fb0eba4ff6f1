"""What a checkpoint consists of, and the checks a folder or a manifest must pass before anything is built from it.

A manifest lists the configuration and every tensor and tokenizer file with the sha256 of each 4 MiB chunk of its
bytes, in a canonical encoding; its own sha256 is the model's identity, the same wherever the same bytes are. Only
``json`` and struct reading happen here: no transformers, no torch, no pickle.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import msgspec

from swarmd.errors import ConfigError, IntegrityError
from swarmd.protocol.models import configuration, quantised, shards
from swarmd.protocol.models.model_layout import EACH_LAYER, ModelLayout, write_layout
from swarmd.protocol.models.quantised import PlainTensor, Stored
from swarmd.protocol.models.scheme import read_scheme
from swarmd.protocol.models.shards import Readable
from swarmd.protocol.untrusted import decode
from swarmd.text_files import decode_text
from swarmd.values import ModelId

SINGLE_FILE = "model.safetensors"  # a checkpoint in one file, as the hub has it
INDEX_FILE = "model.safetensors.index.json"  # of one in several: which tensor is in which
VERSION = 2  # of the manifest's layout
DATA = "swarmd-data"  # of a training run's data, one block for each shard (train.store.data)
CHUNK_BYTES = 4 * 2**20  # what is verified and fetched at once
MAX_MANIFEST_BYTES = 15 * 2**20  # must fit into one frame
MAX_ENTRIES = 200_000  # tensors and files: the largest mixture-of-experts models have some 100,000
MAX_MODEL_BYTES = 16 * 2**40  # 16 TiB: a sum that cannot overflow anything
MAX_JSON_BYTES = 32 * 2**20  # of a configuration or tokenizer
MAX_FILE_BYTES = 256 * 2**20  # of one file beside the tensors
FILES = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "vocab.json",
    "vocab.txt",
)
MAX_DEPTH = 24  # parts of a tensor's name
_NAME = re.compile(r"[A-Za-z0-9_][\w.\-]{0,255}", re.ASCII)
OnChunk = Callable[[shards.Place, bytes], None]
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]
Extent = Annotated[int, msgspec.Meta(ge=0, le=2**48)]


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A tensor: name, safetensors dtype, shape, and digests of its chunks. A file is a U8 tensor of its bytes."""

    name: str
    dtype: str
    shape: Annotated[tuple[Extent, ...], msgspec.Meta(max_length=16)]
    chunks: tuple[Digest, ...]

    @property
    def n_bytes(self) -> int:
        """Its size. Raises KeyError for an unknown dtype."""
        return shards.tensor_bytes(self.dtype, self.shape)

    def chunk_bytes(self, chunk: int) -> int:
        """The size of one chunk: all but the last are of CHUNK_BYTES."""
        return min(CHUNK_BYTES, self.n_bytes - chunk * CHUNK_BYTES)

    @property
    def is_zero(self) -> bool:
        """Are all of its bytes zero?"""
        return all(self.is_chunk(chunk, bytes(self.chunk_bytes(chunk))) for chunk in range(len(self.chunks)))

    def is_chunk(self, chunk: int, data: bytes | memoryview) -> bool:
        """Are these the bytes that the manifest promises?"""
        return hashlib.sha256(data).digest() == self.chunks[chunk]


class Manifest(msgspec.Struct, frozen=True):
    """Everything that makes a model what it is. ``config`` is canonical JSON; bytes are named by their digests."""

    version: int
    n_blocks: Annotated[int, msgspec.Meta(ge=0, le=1_024)]
    config: str
    files: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=len(FILES))]
    tensors: Annotated[tuple[Entry, ...], msgspec.Meta(max_length=MAX_ENTRIES)]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """Files, then tensors: what an index in a request counts."""
        return (*self.files, *self.tensors)


def lay_out(manifest: Manifest, layout: ModelLayout) -> Manifest:
    """Return the manifest of the same bytes, with a configuration that says this layout. Raises IntegrityError."""
    config = write_layout(json.loads(manifest.config), layout)
    n_blocks = configuration.count_blocks(config)
    return msgspec.structs.replace(manifest, config=canonical_json(config), n_blocks=n_blocks)


def layout_of(manifest: Manifest) -> ModelLayout:
    """How the layers of a checked manifest's model become blocks."""
    return configuration.layout_of(json.loads(manifest.config)) if manifest.n_blocks else EACH_LAYER


def plain_tensors(manifest: Manifest) -> list[PlainTensor]:
    """The tensors as the model takes them, where they are quantised in the files, too. Raises IntegrityError."""
    stored = (Stored(tensor.name, tensor.dtype, tensor.shape) for tensor in manifest.tensors)
    return quantised.plain_tensors(read_scheme(json.loads(manifest.config)), stored)


def encode(manifest: Manifest) -> bytes:
    """The canonical encoding, whose hash is the model's identity."""
    return msgspec.msgpack.Encoder(order="deterministic").encode(manifest)


def model_id(manifest: Manifest) -> ModelId:
    """The model's identity: the same wherever the same bytes are."""
    return ModelId(hashlib.sha256(encode(manifest)).hexdigest())


# --- from a folder -----------------------------------------------------------------------------------------------


def read_folder(folder: Path) -> Manifest:
    """Hash and check a checkpoint folder. Raises ConfigError naming the file and the reason."""
    config = read_config(folder)
    _check_index(folder)
    return make_manifest(folder, config, [entry for shard in shard_files(folder) for entry in digest_shard(shard)])


def make_manifest(folder: Path, config: dict[str, Any], tensors: list[Entry]) -> Manifest:
    """Make the manifest of hashed tensors and of a folder's files. Raises ConfigError naming what is wrong."""
    counts = Counter(tensor.name for tensor in tensors)
    twice = [name for name, n in counts.items() if n > 1]
    if twice:
        raise ConfigError(f"{folder}: the tensor {twice[0]!r} appears in more than one shard")
    present = [name for name in FILES if (folder / name).is_file()]
    for name in present:
        check_inside(folder, folder / name)
    files = tuple(_digest_file(folder / name) for name in present)
    ordered = tuple(sorted(tensors, key=lambda t: t.name))
    manifest = Manifest(VERSION, configuration.count_blocks(config), canonical_json(config), files, ordered)
    try:
        check(manifest)
    except IntegrityError as error:
        raise ConfigError(f"{folder}: {error}") from None
    return manifest


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json and bound its integers. Raises ConfigError."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing: a checkpoint folder holds config.json and *.safetensors")
    try:
        return configuration.check(read_json(path))
    except IntegrityError as error:
        raise ConfigError(f"{path}: {error}{_hint_of_kinds(folder, str(error))}") from None


def _hint_of_kinds(folder: Path, error: str) -> str:
    """What to add to a refusal of quantised weights where no weight is: it was unpacked, and says otherwise still."""
    package = next((name for name in configuration.PACKAGES if f"({name}" in error), "")
    if not package:
        return ""
    try:
        kinds = {place.dtype for _, place in _tensor_places(folder)}
    except ConfigError:
        return ""
    if not kinds <= set(shards.PLAIN_KINDS):
        return ""
    return f"; but every tensor here is plain ({', '.join(sorted(kinds))}): take {package} out of config.json"


def check_inside(folder: Path, path: Path) -> None:
    """Refuse a link that leads out of a checkpoint; the hub's cache, whose blobs lie beside, excepted. ConfigError."""
    target = path.resolve()
    home = folder.resolve()
    if target.parent != home and target.parent != home.parent.parent / "blobs":
        raise ConfigError(f"{path} is a link to {target}, outside the checkpoint: what it holds would be given away")


def shard_names(folder: Path) -> list[str]:
    """List the safetensors files that a checkpoint consists of, there or not. Raises ConfigError.

    Others may lie beside them: the same weights in another layout (``consolidated.safetensors``), or an older model's.
    """
    index = folder / INDEX_FILE
    if not index.is_file():
        return [SINGLE_FILE]
    listed = read_json(index)
    weight_map = listed.get("weight_map") if isinstance(listed, dict) else None
    files: list[Any] = list(weight_map.values()) if isinstance(weight_map, dict) else [None]
    if not all(isinstance(name, str) for name in files):
        raise ConfigError(f"{index}: weight_map must map tensor names to file names")
    names = sorted(set(files))
    for name in names:
        if Path(name).name != name or name == ".." or not name.isprintable():
            raise ConfigError(f"{index}: the shard {name!r} lies outside the folder")
    return names


def shard_files(folder: Path) -> list[Path]:
    """List the safetensors files of a checkpoint, all present. Raises ConfigError."""
    names = shard_names(folder)
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        is_named = (folder / INDEX_FILE).is_file()
        count = f" ({INDEX_FILE} names {len(names)}, {len(missing)} of them are not there)" if is_named else ""
        pickle_files = [path.name for pattern in ("*.bin", "*.pt*") for path in folder.glob(pattern)]
        hint = (
            f"; {pickle_files[0]} holds pickle, which swarmd never opens: convert it to safetensors"
            if pickle_files
            else ""
        )
        raise ConfigError(f"{folder / missing[0]} is missing, or no plain file{count}{hint}")
    for name in names:
        check_inside(folder, folder / name)
    return [folder / name for name in names]


def _tensor_places(folder: Path) -> Iterator[tuple[Path, shards.Place]]:
    """Where each tensor of a checkpoint lies, by the headers of its shards. Raises ConfigError."""
    for shard in shard_files(folder):
        with shard.open("rb") as file:
            places = shards.read_header(file, shard, shard.stat().st_size)
        yield from ((shard, place) for place in places)


def _check_index(folder: Path) -> None:
    """Refuse an index that says other than the shards: it is what readers go by. Raises ConfigError."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return
    check_index(folder, {place.name: shard.name for shard, place in _tensor_places(folder)})


def check_index(folder: Path, shard_of: dict[str, str]) -> None:
    """Refuse an index that says other than ``shard_of``, where tensors are. Raises ConfigError."""
    index = folder / INDEX_FILE
    listed_shard_of: dict[str, str] = read_json(index)["weight_map"]
    for name in sorted(listed_shard_of.keys() | shard_of.keys()):
        if listed_shard_of.get(name) != shard_of.get(name):
            raise ConfigError(
                f"{index}: it says that {name} is in {listed_shard_of.get(name, 'no file')}, and it is in "
                f"{shard_of.get(name, 'none of them')}: take the index that belongs to these files"
            )


# --- from a peer -------------------------------------------------------------------------------------------------


def read_untrusted(raw: bytes, model: ModelId) -> Manifest:
    """Read a manifest that a peer sent for ``model``. Raises IntegrityError for a lie, whatever it is."""
    # The hash is checked before anything is parsed: only bytes that the swarm's catalog names, by their sha256, ever
    # reach the decoder. What follows guards against a catalog that lists what cannot be a model.
    if len(raw) > MAX_MANIFEST_BYTES:
        raise IntegrityError(f"a manifest of {len(raw)} B; at most {MAX_MANIFEST_BYTES} are read")
    if hashlib.sha256(raw).hexdigest() != model:
        raise IntegrityError(f"a manifest that is not {model[:12]}'s: its sha256 differs")
    manifest = decode(raw, Manifest, "a manifest", IntegrityError)
    if encode(manifest) != raw:
        raise IntegrityError("a manifest in another encoding than the canonical one")
    check(manifest)
    return manifest


def check(manifest: Manifest) -> None:
    """Refuse what cannot be a model, however it came. Raises IntegrityError."""
    if manifest.version != VERSION:
        raise IntegrityError(f"expected a manifest of version {VERSION}, got {manifest.version}")
    try:
        config = json.loads(manifest.config)
        canonical = canonical_json(config)
    except (ValueError, RecursionError):
        raise IntegrityError("the manifest's config is not JSON") from None
    n_blocks = configuration.count_blocks(configuration.check(config))
    if (canonical, n_blocks) != (manifest.config, manifest.n_blocks):
        raise IntegrityError("the manifest's config is not canonical, or has another number of blocks than it says")
    names = [entry.name for entry in manifest.entries]
    file_names = [file.name for file in manifest.files]
    known_names = [name for name in FILES if name in names]
    if len(set(names)) != len(names) or file_names != known_names:
        raise IntegrityError("the manifest names an entry twice, or files that no model needs")
    if list(manifest.tensors) != sorted(manifest.tensors, key=lambda t: t.name):
        raise IntegrityError("the manifest's tensors are not in order")
    for entry in manifest.entries:
        _check_entry(entry)
    plain_tensors(manifest)
    total = sum(entry.n_bytes for entry in manifest.entries)
    are_files_small = all(file.dtype == "U8" and file.n_bytes <= MAX_FILE_BYTES for file in manifest.files)
    if total > MAX_MODEL_BYTES or not are_files_small:
        raise IntegrityError(f"the manifest promises {total} B, or a file of more than {MAX_FILE_BYTES} B")


# --- which tensors belong together -------------------------------------------------------------------------------


def entry_groups(manifest: Manifest) -> tuple[int | None, ...]:
    """The group of each entry: its block, or ``n_blocks`` for the *head*: files and what is around the blocks.

    The layers are the numbered list of names (``model.layers.7.…``) that counts up to their number and holds the most
    bytes, and the layout says which are one block; ``compute.checkpoints.check`` asks the library whether that is so.
    None: nobody needs them. Such are numbered beyond the blocks, as layers that predict several tokens are, or read
    pictures or sound. Raises IntegrityError when there is no such list.
    """
    numbers_by_prefix: defaultdict[str, set[int]] = defaultdict(set)
    n_bytes: Counter[str] = Counter()
    for tensor in manifest.tensors:
        parts = tensor.name.split(".")
        for position, part in enumerate(parts):
            if part.isdecimal():
                prefix = ".".join((*parts[:position], ""))
                numbers_by_prefix[prefix].add(int(part))
                n_bytes[prefix] += tensor.n_bytes
    if not manifest.n_blocks:
        return (0,) * len(manifest.entries)
    config = msgspec.json.decode(manifest.config)
    layout = configuration.layout_of(config)
    n_layers = configuration.count_layers(config)
    block_numbers = set(range(n_layers))
    lists = [prefix for prefix, numbers in numbers_by_prefix.items() if block_numbers <= numbers]
    if not lists:
        raise IntegrityError(f"no names of tensors count the {n_layers} layers")
    best = max(lists, key=lambda prefix: (n_bytes[prefix], -len(prefix)))

    # In a composite (``model.language_model.layers.7.…``, ``model.visual.…``, ``lm_head.weight``) what has a row for
    # each token is the decoder's, and so is all that stands where both an embedding and the blocks do.
    vocabulary = configuration.read_vocabulary(config)
    plain = plain_tensors(manifest) if vocabulary else []
    owners = {part: tensor.name for tensor in plain for part in tensor.parts.values()}
    rows = {_module(tensor.name) for tensor in plain if tensor.shape[:1] == (vocabulary,)}
    rows -= {_module(tensor.name) for tensor in manifest.tensors if tensor.name.startswith(best)}
    places = [best[: at + 1] for at in range(len(best)) if best[at] == "."]
    decoder = max((place for place in places if any(name.startswith(place) for name in rows)), key=len, default="")

    def group(name: str) -> int | None:
        number = name[len(best) :].split(".")[0] if name.startswith(best) else ""
        if number.isdecimal():
            return layout.block_of(int(number)) if int(number) < n_layers else None
        has_rows = _module(owners.get(name, name)) in rows
        return manifest.n_blocks if has_rows or name.startswith(decoder) else None

    of_files = [manifest.n_blocks] * len(manifest.files)
    of_tensors = [group(tensor.name) for tensor in manifest.tensors]
    return (*of_files, *of_tensors)


# --- small things ------------------------------------------------------------------------------------------------


def _module(name: str) -> str:
    """Whose tensor it is: scales and zero points lie beside what they scale."""
    return name.rpartition(".")[0]


def _check_entry(entry: Entry) -> None:
    is_deep = entry.name.count(".") >= MAX_DEPTH
    if not _NAME.fullmatch(entry.name) or is_deep or entry.name == "__metadata__":
        raise IntegrityError(f"the manifest names an entry {entry.name[:80]!r}, which is no name of a tensor")
    if entry.dtype not in shards.ITEM_BITS:
        raise IntegrityError(f"{entry.name}: unknown dtype {entry.dtype!r}")
    if entry.n_bytes > MAX_MODEL_BYTES or len(entry.chunks) != -(-entry.n_bytes // CHUNK_BYTES):
        raise IntegrityError(f"{entry.name}: {len(entry.chunks)} digests for {entry.n_bytes} B")


def digest_shard(path: Path) -> list[Entry]:
    """Hash every tensor of a shard, chunk by chunk. Raises ConfigError, also when the file changes meanwhile."""
    status = path.stat()
    with path.open("rb") as file:
        entries = digest_stream(file, path, status.st_size)
    _check_unchanged(path, status)
    return entries


def digest_stream(
    file: Readable, path: Path, n_bytes: int, on_chunk: OnChunk = lambda place, chunk: None
) -> list[Entry]:
    """Hash every tensor of a shard of ``n_bytes`` that is read once, from its beginning on. Raises ConfigError.

    ``on_chunk`` sees all of it.
    """
    entries = []
    for place in sorted(shards.read_header(file, path, n_bytes), key=lambda place: place.start):
        chunks = _digest_chunks(file, place.n_bytes, path, partial(on_chunk, place))
        entries.append(Entry(place.name, place.dtype, place.shape, chunks))
    return entries


def _digest_file(path: Path) -> Entry:
    status = path.stat()
    if status.st_size > MAX_FILE_BYTES:
        raise ConfigError(f"{path}: {status.st_size} B, at most {MAX_FILE_BYTES} are read")
    with path.open("rb") as file:
        chunks = _digest_chunks(file, status.st_size, path)
    _check_unchanged(path, status)
    return Entry(path.name, "U8", (status.st_size,), chunks)


def _digest_chunks(
    file: Readable, n_bytes: int, path: Path, on_chunk: Callable[[bytes], None] = lambda chunk: None
) -> tuple[bytes, ...]:
    digests = []
    while n_bytes > 0:
        chunk = file.read(min(CHUNK_BYTES, n_bytes))
        if not chunk:
            raise ConfigError(f"{path}: cut short while it was read")
        on_chunk(chunk)
        digests.append(hashlib.sha256(chunk).digest())
        n_bytes -= len(chunk)
    return tuple(digests)


def _check_unchanged(path: Path, old_status: Any) -> None:
    new_status = path.stat()
    if (new_status.st_size, new_status.st_mtime_ns) != (old_status.st_size, old_status.st_mtime_ns):
        raise ConfigError(f"{path} changed while it was read: wait until it is complete, then try again")


def canonical_json(config: dict[str, Any]) -> str:
    """A configuration as it is written in a manifest: sorted keys, no spaces."""
    return json.dumps(config, sort_keys=True, separators=(",", ":"))


def read_json(path: Path) -> Any:
    """Read a JSON file of at most MAX_JSON_BYTES. Raises ConfigError."""
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ConfigError(f"{path}: {path.stat().st_size} B, at most {MAX_JSON_BYTES} are read")
    raw = path.read_bytes()
    if raw.startswith(codecs.BOM_UTF8):
        raise ConfigError(
            f"{path}: begins with a byte order mark, which transformers refuses: save it as UTF-8 without one"
        )
    try:
        return json.loads(decode_text(raw, str(path)))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
