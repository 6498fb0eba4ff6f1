"""What a checkpoint consists of, and the checks a folder must pass before anything is built from it.

A manifest lists the configuration, tokenizer files and every tensor with dtype, shape and the sha256 of each
4 MiB chunk of its bytes, in a canonical encoding; its own sha256 is the model's identity. Only ``json`` and
struct reading happen here: no transformers, no torch, no pickle.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Annotated, Any

import msgspec

from swarmd.errors import ConfigError
from swarmd.values import ModelId

CHUNK_BYTES = 4 * 2**20
MAX_JSON_BYTES = 32 * 2**20
MAX_SAFETENSORS_HEADER_BYTES = 100 * 2**20
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
ITEM_BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U8": 8, "BOOL": 8}
ITEM_BITS |= {"F8_E4M3": 8, "F8_E5M2": 8, "U16": 16, "U32": 32, "U64": 64}
CONFIG_LIMITS = {
    "num_hidden_layers": 1_024,
    "hidden_size": 65_536,
    "n_embd": 65_536,
    "n_layer": 1_024,
    "vocab_size": 4_000_000,
    "num_attention_heads": 1_024,
    "num_key_value_heads": 1_024,
    "intermediate_size": 1_048_576,
    "head_dim": 4_096,
    "max_position_embeddings": 100_000_000,
    "num_experts": 4_096,
}
Digest = Annotated[str, msgspec.Meta(min_length=64, max_length=64)]


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor: its name, safetensors dtype, shape, and the digests of its bytes in chunks of 4 MiB."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Digest, ...]


class Manifest(msgspec.Struct, frozen=True):
    """Everything that makes a model what it is. ``config`` and ``files`` hold text; tensors only digests."""

    version: int
    n_blocks: int
    config: str
    files: dict[str, str]
    tensors: tuple[TensorEntry, ...]


def encode(manifest: Manifest) -> bytes:
    return msgspec.msgpack.Encoder(order="deterministic").encode(manifest)


def model_id(manifest: Manifest) -> ModelId:
    return ModelId(hashlib.sha256(encode(manifest)).hexdigest())


def read_folder(folder: Path) -> Manifest:
    """Hash and check a checkpoint folder. Raises ConfigError naming the file and the reason."""
    config = read_config(folder)
    tensors = [entry for shard in shards(folder) for entry in _read_shard(shard)]
    names = [t.name for t in tensors]
    if len(set(names)) != len(names):
        raise ConfigError(f"{folder}: a tensor appears in more than one shard")
    files = {n: _read_text(folder / n) for n in TOKENIZER_FILES if (folder / n).is_file()}
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return Manifest(1, count_blocks(config), canonical, files, tuple(sorted(tensors, key=lambda t: t.name)))


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json and bound its integers. Raises ConfigError."""
    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(f"{path} is missing: a checkpoint folder holds config.json and *.safetensors")
    config = _read_json(path)
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ConfigError(f"{path}: expected a JSON object with a model_type")
    if config.get("auto_map"):
        raise ConfigError(f"{path}: the model brings code of its own (auto_map), which swarmd never runs")
    for section in (config, config.get("text_config")):
        if isinstance(section, dict):
            _check_limits(path, section)
    count_blocks(config)
    return config


def count_blocks(config: dict[str, Any]) -> int:
    section = config.get("text_config") if isinstance(config.get("text_config"), dict) else config
    assert isinstance(section, dict)
    for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
        if isinstance(section.get(key), int):
            return int(section[key])
    raise ConfigError("config.json names no number of layers (num_hidden_layers)")


def shards(folder: Path) -> list[Path]:
    """List the safetensors files of a checkpoint, all present. Raises ConfigError."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _read_json(index).get("weight_map", {})
        if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
            raise ConfigError(f"{index}: weight_map must map tensor names to file names")
        names = sorted(set(weight_map.values()))
    else:
        names = ["model.safetensors"]
    for name in names:
        if Path(name).name != name:
            raise ConfigError(f"{index}: the shard {name!r} lies outside the folder")
        if not (folder / name).is_file():
            others = [p.name for p in folder.glob("*.bin")] + [p.name for p in folder.glob("*.pt*")]
            hint = f"; {others[0]} holds pickle, which swarmd never opens: convert it to safetensors" if others else ""
            raise ConfigError(f"{folder / name} is missing{hint}")
    return [folder / name for name in names]


def _read_shard(path: Path) -> list[TensorEntry]:
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else -1
        if not 2 <= header_bytes <= min(MAX_SAFETENSORS_HEADER_BYTES, size - 8):
            raise ConfigError(f"{path}: not a safetensors file, or cut short ({size} B)")
        try:
            header = json.loads(file.read(header_bytes))
        except (ValueError, RecursionError):
            raise ConfigError(f"{path}: the safetensors header is not JSON") from None
        data_start = 8 + header_bytes
        entries, end = [], 0
        for name, info in header.items():
            if name == "__metadata__":
                continue
            begin, stop, dtype, shape = _entry_fields(path, name, info)
            end = max(end, stop)
            if data_start + stop > size:
                raise ConfigError(f"{path}: cut short: {name} ends at byte {data_start + stop}, the file has {size}")
            file.seek(data_start + begin)
            entries.append(TensorEntry(name, dtype, shape, _digest_chunks(file, stop - begin)))
    if data_start + end != size:
        raise ConfigError(f"{path}: {size - data_start - end} B at its end belong to no tensor")
    return entries


def _entry_fields(path: Path, name: str, info: Any) -> tuple[int, int, str, tuple[int, ...]]:
    try:
        begin, stop = info["data_offsets"]
        dtype, shape = info["dtype"], tuple(info["shape"])
        n_items = 1
        for extent in shape:
            if not isinstance(extent, int) or extent < 0:
                raise ValueError
            n_items *= extent
        consistent = 0 <= begin <= stop and (stop - begin) * 8 == n_items * ITEM_BITS[dtype]
    except (KeyError, TypeError, ValueError):
        consistent = False
    if not consistent:
        raise ConfigError(f"{path}: the entry of tensor {name!r} contradicts itself: {info}")
    return begin, stop, dtype, shape


def _digest_chunks(file: Any, n_bytes: int) -> tuple[str, ...]:
    digests = []
    while n_bytes > 0:
        chunk = file.read(min(CHUNK_BYTES, n_bytes))
        digests.append(hashlib.sha256(chunk).hexdigest())
        n_bytes -= len(chunk)
    return tuple(digests)


def _check_limits(path: Path, section: dict[str, Any]) -> None:
    for key, limit in CONFIG_LIMITS.items():
        value = section.get(key)
        if isinstance(value, int) and not 0 < value <= limit:
            raise ConfigError(f"{path}: {key} is {value}, expected 1 to {limit}")


def _read_text(path: Path) -> str:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise ConfigError(f"{path}: {path.stat().st_size} B, at most {MAX_JSON_BYTES} are read")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not UTF-8 text") from None


def _read_json(path: Path) -> Any:
    try:
        return json.loads(_read_text(path))
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from None
