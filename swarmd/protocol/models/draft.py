"""A draft that learned from a model's hidden states: what its folder holds, and its manifest, which names the model.

Its tensors follow from five numbers (``tensor_shapes``): what has others is refused before anything is built from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from swarmd.errors import ConfigError, IntegrityError
from swarmd.names import is_model_hash
from swarmd.protocol.models import manifest as manifests
from swarmd.protocol.models.configuration import DRAFT
from swarmd.protocol.models.manifest import Manifest
from swarmd.values import ModelId

CONFIG_FILE = "draft.json"
WEIGHTS_FILE = "draft.safetensors"
HEAD_WIDTH = 64  # of its attention
TOKENS = "tokens"  # the tensor that says which tokens it proposes
DTYPES = {TOKENS: "I32"}  # of the others: BF16
Width = Annotated[int, msgspec.Meta(ge=HEAD_WIDTH, le=16_384, multiple_of=HEAD_WIDTH)]
Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class DraftSettings(msgspec.Struct, frozen=True):
    """What a draft is built from, and how good it was.

    ``hidden`` and ``embedding``: elements of the model's hidden states and embeddings; ``width`` and ``inner`` are its
    own; ``vocabulary``: tokens that it proposes. ``acceptance``: by place, the share of tokens that were right where
    those before were, on texts that it did not learn from; ``second``: of its second choices where the first was wrong.
    """

    hidden: Annotated[int, msgspec.Meta(ge=1, le=65_536)]
    embedding: Annotated[int, msgspec.Meta(ge=1, le=65_536)]
    width: Width
    inner: Width
    vocabulary: Annotated[int, msgspec.Meta(ge=2, le=1_000_000)]
    acceptance: Annotated[tuple[Share, ...], msgspec.Meta(max_length=64)] = ()
    second: Share = 0.0


class DraftFile(msgspec.Struct, frozen=True):
    """``draft.json``: for which model (its hash), and how it is built."""

    base: str
    draft: DraftSettings


def tensor_shapes(settings: DraftSettings) -> dict[str, tuple[int, ...]]:
    """The tensors of a draft, by name."""
    d, inner = settings.width, settings.inner
    return {
        TOKENS: (settings.vocabulary,),
        "enter_embedding.weight": (d, settings.embedding),
        "enter_hidden.weight": (d, settings.hidden),
        "enter_own.weight": (d, d),
        "unknown": (d,),
        "embedding_norm.weight": (settings.embedding,),
        "hidden_norm.weight": (settings.hidden,),
        "own_norm.weight": (d,),
        "attention_norm.weight": (d,),
        "attention_in.weight": (3 * d, d),
        "attention_out.weight": (d, d),
        "inner_norm.weight": (d,),
        "inner_in.weight": (2 * inner, d),
        "inner_out.weight": (d, inner),
        "head_norm.weight": (d,),
        "head.weight": (settings.vocabulary, d),
    }


def is_draft(folder: Path) -> bool:
    """Does a folder hold a draft as ``swarmd draft train`` writes it? Raises ConfigError where nobody may look."""
    try:
        return (folder / CONFIG_FILE).is_file()
    except OSError as error:
        raise ConfigError(f"{folder}: {error.strerror}") from None


def read_file(folder: Path) -> DraftFile:
    """Read what a folder says of its draft. Raises ConfigError."""
    path = folder / CONFIG_FILE
    try:
        file = msgspec.json.decode(path.read_bytes(), type=DraftFile)
    except FileNotFoundError:
        raise ConfigError(f"{path} is missing: swarmd draft train writes it") from None
    except (msgspec.DecodeError, OSError) as error:
        raise ConfigError(f"{path}: {error}") from None
    if not is_model_hash(file.base):
        raise ConfigError(f"{path}: base is {file.base[:40]!r}, expected the hash of a model")
    return file


def read_folder(folder: Path, base: ModelId) -> Manifest:
    """Hash and check a draft for ``base``. Raises ConfigError."""
    file = read_file(folder)
    if file.base != base:
        raise ConfigError(f"the draft in {folder} learned from {file.base[:12]}, not from {base[:12]}")
    try:
        tensors = manifests.digest_shard(folder / WEIGHTS_FILE)
    except FileNotFoundError:
        raise ConfigError(f"{folder / WEIGHTS_FILE} is missing: drafts are read from safetensors only") from None
    config = {"base": base, "draft": msgspec.to_builtins(file.draft), "model_type": DRAFT, "num_hidden_layers": 0}
    ordered = tuple(sorted(tensors, key=lambda t: t.name))
    manifest = Manifest(manifests.VERSION, 0, manifests.canonical_json(config), (), ordered)
    try:
        settings_of(manifest, base)
    except IntegrityError as error:
        raise ConfigError(f"{folder}: {error}") from None
    return manifest


def is_draft_manifest(manifest: Manifest) -> bool:
    """Is it that of a draft which learned, and no model of its own?"""
    return bool(json.loads(manifest.config)["model_type"] == DRAFT)


def settings_of(manifest: Manifest, base: ModelId) -> DraftSettings:
    """How the draft for ``base`` with this manifest is built; its tensors fit. Raises IntegrityError."""
    config: Mapping[str, Any] = json.loads(manifest.config)
    if config["model_type"] != DRAFT:
        raise IntegrityError("this is no draft that learned")
    if config.get("base") != base:
        raise IntegrityError(f"the draft learned from {str(config.get('base'))[:12]}, not from {base[:12]}")
    try:
        settings = msgspec.convert(config.get("draft"), DraftSettings)
    except msgspec.ValidationError as error:
        raise IntegrityError(f"the draft's configuration is wrong: {error}") from None
    found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in manifest.tensors}
    expected = {name: (DTYPES.get(name, "BF16"), shape) for name, shape in tensor_shapes(settings).items()}
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            there, wanted = _describe(found.get(name)), _describe(expected.get(name))
            raise IntegrityError(f"the draft's tensor {name[:60]} is {there}, expected {wanted}")
    return settings


def _describe(tensor: tuple[str, tuple[int, ...]] | None) -> str:
    return "missing" if tensor is None else f"{tensor[0]} {list(tensor[1])}"
