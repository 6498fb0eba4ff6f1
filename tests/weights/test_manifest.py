"""Manifests that peers send: each lie is refused with its reason, before anything is built from it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from swarmd.errors import ConfigError, IntegrityError
from swarmd.protocol.models import adapter
from swarmd.protocol.models import manifest as manifests
from swarmd.protocol.models.configuration import ADAPTER
from swarmd.protocol.models.manifest import Entry, Manifest
from swarmd.values import ModelId
from swarmd.weights.folder import ModelFolder
from tests.weights.conftest import make_model


def received(manifest: Manifest) -> Manifest:
    raw = manifests.encode(manifest)
    return manifests.read_untrusted(raw, ModelId(hashlib.sha256(raw).hexdigest()))


def config(**changes: Any) -> str:
    return manifests.canonical_json({"model_type": "toy", "num_hidden_layers": 4, **changes})


CHUNK = bytes(32)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 1}, "version"),
        ({"n_blocks": 5}, "another number of blocks"),
        ({"n_blocks": 2000}, "does not parse"),
        ({"config": "{}"}, "model_type"),
        ({"config": "[" * 100_000}, "not JSON"),
        ({"config": config(num_layers=10**12)}, "num_layers is"),
        ({"config": config(quantization_config={"quant_method": "x.py"})}, "quantised already"),
        ({"tensors": (Entry("../secret", "F32", (1,), (CHUNK,)),)}, "no name of a tensor"),
        ({"tensors": (Entry("a" + ".b" * 30, "F32", (1,), (CHUNK,)),)}, "no name of a tensor"),
        ({"tensors": (Entry("__metadata__", "F32", (1,), (CHUNK,)),)}, "no name of a tensor"),
        ({"tensors": (Entry("a", "F33", (1,), (CHUNK,)),)}, "unknown dtype"),
        ({"tensors": (Entry("a", "F32", (1,), ()),)}, "0 digests for 4 B"),
        ({"tensors": (Entry("a", "F32", (2**40, 2**40), (CHUNK,)),)}, "digests for"),
        ({"tensors": (Entry("a", "F32", (1,), (CHUNK,)),) * 2}, "twice"),
        ({"files": (Entry("run.py", "U8", (1,), (CHUNK,)),)}, "files that no model needs"),
        ({"files": (Entry("tokenizer.json", "F32", (1,), (CHUNK,)),)}, "file of more than|promises"),
        ({"config": manifests.canonical_json({"model_type": ADAPTER, "num_hidden_layers": 0}), "n_blocks": 0}, "PEFT"),
        (
            {"config": manifests.canonical_json({"model_type": ADAPTER, "num_hidden_layers": 7, "adapter": {}})},
            "no blocks",
        ),
    ],
)
def test_a_lying_manifest_is_refused(full_model: ModelFolder, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(IntegrityError, match=reason):
        received(msgspec.structs.replace(full_model.manifest, **changes))


def test_a_manifest_counts_only_under_its_own_hash_and_in_its_own_encoding(full_model: ModelFolder) -> None:
    assert received(full_model.manifest) == full_model.manifest
    raw = manifests.encode(full_model.manifest)
    with pytest.raises(IntegrityError, match="sha256 differs"):
        manifests.read_untrusted(raw, ModelId("0" * 64))
    other_model = msgspec.msgpack.encode(
        {**msgspec.to_builtins(full_model.manifest, builtin_types=(bytes,)), "more": 1}
    )
    with pytest.raises(IntegrityError, match="canonical"):
        manifests.read_untrusted(other_model, ModelId(hashlib.sha256(other_model).hexdigest()))


def test_a_link_out_of_a_checkpoint_is_not_followed(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    secret = tmp_path / "id_ed25519"
    secret.write_text("secret")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.json").symlink_to(secret)
    with pytest.raises(ConfigError, match=r"a link to .* outside the checkpoint"):
        manifests.read_folder(folder)


def test_links_into_the_blobs_of_the_hubs_cache_are_what_they_are(tmp_path: Path) -> None:
    plain = make_model(tmp_path / "plain")
    blobs = tmp_path / "hub" / "blobs"
    snapshot = tmp_path / "hub" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in plain.iterdir():
        path.rename(blobs / path.name)
        (snapshot / path.name).symlink_to(blobs / path.name)
    assert manifests.read_folder(snapshot).tensors


def test_a_shard_that_grows_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_model(tmp_path / "model")
    digest = manifests._digest_chunks

    def growing(file: Any, n_bytes: int, path: Path, *on_chunk: Any) -> tuple[bytes, ...]:
        with path.open("ab") as extra:
            extra.write(b"x")
        return digest(file, n_bytes, path, *on_chunk)

    monkeypatch.setattr(manifests, "_digest_chunks", growing)
    with pytest.raises(ConfigError, match="changed while it was read"):
        manifests.read_folder(folder)


def test_a_manifest_that_is_no_adapter_is_not_taken_for_one(full_model: ModelFolder) -> None:
    with pytest.raises(IntegrityError, match="no adapter"):
        adapter.lora_of(full_model.manifest)
    wrong = json.dumps({"model_type": ADAPTER, "base": "x", "adapter": {}})
    with pytest.raises(IntegrityError, match="no adapter"):
        adapter.base_of(msgspec.structs.replace(full_model.manifest, config=wrong))
