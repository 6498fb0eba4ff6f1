"""What cannot be served, or would be served as something else, is refused before it is published, by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from swarmd.compute.checkpoints.check import check_adapter, check_folder
from swarmd.compute.model import skeleton
from swarmd.errors import ConfigError
from swarmd.protocol.models import adapter, manifest
from swarmd.values import ModelId, Span
from tests import checkpoints, families

BASE = ModelId("b" * 64)
Tensors = dict[str, torch.Tensor]


def check(folder: Path) -> None:
    check_folder(folder, manifest.read_folder(folder))


def change(folder: Path, edit: Callable[[Tensors], Any]) -> Path:
    """Have a checkpoint hold other tensors."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})
    return folder


def configure(folder: Path, **changes: Any) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return folder


def scaled(kind: torch.dtype, suffix: str) -> Callable[[Tensors], None]:
    """Weights in 8 bits with scales beside them, as several programs write them."""

    def edit(tensors: Tensors) -> None:
        for name in [name for name in tensors if name.endswith("proj.weight")]:
            tensors[name] = (tensors[name] * 64).to(kind)
            tensors[name.removesuffix(".weight") + suffix] = torch.full((1, 1), 1 / 64)

    return edit


def packed(tensors: Tensors) -> None:
    """Weights of 4 bits, eight in one number, as MLX writes them."""
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        rows, columns = tensors[name].shape
        tensors[name] = torch.zeros(rows, columns // 8, dtype=torch.uint32)
        tensors[name.removesuffix("weight") + "scales"] = torch.ones(rows, 1)
        tensors[name.removesuffix("weight") + "biases"] = torch.ones(rows, 1)


@pytest.mark.parametrize(
    ("edit", "kind", "companions"),
    [
        (scaled(torch.float8_e4m3fn, ".weight_scale_inv"), "F8_E4M3", "weight_scale_inv"),
        (scaled(torch.float8_e4m3fn, ".input_scale"), "F8_E4M3", "input_scale"),
        (scaled(torch.int8, ".SCB"), "I8", "SCB"),
        (scaled(torch.uint8, ".weight_scale"), "U8", "weight_scale"),
        (packed, "U32", "biases"),
    ],
)
def test_weights_that_mean_something_only_with_scales_are_refused_by_name_and_kind(
    edit: Callable[[Tensors], None], kind: str, companions: str, tmp_path: Path
) -> None:
    folder = change(checkpoints.make("llama", tmp_path / "model", n_layers=2), edit)
    with pytest.raises(ConfigError, match=rf"layers\.0\.mlp\.down_proj\.weight is of kind {kind}, with .*{companions}"):
        check(folder)


def test_a_volunteer_refuses_such_weights_too_whatever_was_checked_when_they_were_added(tmp_path: Path) -> None:
    edit = scaled(torch.float8_e4m3fn, ".weight_scale_inv")
    folder = change(checkpoints.make("llama", tmp_path / "model", n_layers=2), edit)
    with pytest.raises(ConfigError, match="is of kind F8_E4M3"):
        skeleton.load(folder, Span(0, 1), torch.float32)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("llama", "model.layers.1.self_attn.q_proj.bias"),
        ("llama", "model.layers.2.mlp.up_proj.weight"),  # of a block that config.json does not count
        ("llama", "score.weight"),
        ("gpt2", "transformer.h.0.attn.c_extra.weight"),
        ("qwen3_moe", "model.layers.0.mlp.shared_expert.up_proj.weight"),
    ],
)
def test_a_tensor_that_no_part_of_the_model_takes_is_refused_by_name(family: str, name: str, tmp_path: Path) -> None:
    folder = checkpoints.make(family, tmp_path / "model", n_layers=2)
    change(folder, lambda tensors: tensors.update({name: torch.ones(8)}))
    with pytest.raises(ConfigError, match=f"takes {name}"):
        check(folder)


@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", (8,)),
        ("gpt2", "transformer.h.1.attn.bias", (1, 1, 8, 8)),
        ("gpt2", "transformer.h.1.attn.masked_bias", ()),
        ("llama", "model.position_ids", (1, 8)),
        ("llama", "mtp.layers.0.mlp.up_proj.weight", (8, 8)),
    ],
)
def test_known_leftovers_are_passed_over(family: str, name: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    folder = checkpoints.make(family, tmp_path / "model", n_layers=2)
    check(change(folder, lambda tensors: tensors.update({name: torch.ones(shape)})))


def test_blocks_that_predict_more_tokens_are_passed_over_as_many_as_the_configuration_counts(tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path / "model", n_layers=2)
    change(folder, lambda tensors: tensors.update({"model.layers.2.eh_proj.weight": torch.ones(8)}))
    check(configure(folder, num_nextn_predict_layers=1))
    with pytest.raises(ConfigError, match=r"layers\.2\.eh_proj"):
        check(configure(folder, num_nextn_predict_layers=0))


@pytest.mark.parametrize(
    ("family", "name", "message"),
    [
        ("llama", "lm_head.weight", r"lacks tensors: lm_head\.weight"),
        ("llama", "model.embed_tokens.weight", r"lacks tensors: model\.embed_tokens\.weight"),
        ("llama", "model.norm.weight", r"lacks tensors: model\.norm\.weight"),
        ("qwen3_moe", "model.layers.1.mlp.experts.2.up_proj.weight", r"lacks tensors: 3 of 4 .*experts\.\*\.up_proj"),
        ("qwen3_moe", "model.layers.1.mlp.gate.weight", r"lacks tensors: model\.layers\.1\.mlp\.gate\.weight"),
    ],
)
def test_what_is_around_the_blocks_and_each_expert_must_be_there(
    family: str, name: str, message: str, tmp_path: Path
) -> None:
    folder = checkpoints.make(family, tmp_path / "model", n_layers=2, tie_word_embeddings=False)
    change(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ConfigError, match=message):
        check(folder)


def test_weights_under_other_names_are_named_beside_those_that_lack(tmp_path: Path) -> None:
    """As transformers saves gpt-oss once it has unpacked it."""
    folder = checkpoints.make("llama", tmp_path / "model", n_layers=2)
    change(folder, lambda t: t.update({"model.norm.weight_blocks": t.pop("model.norm.weight")}))
    with pytest.raises(ConfigError, match=r"lacks .*norm\.weight; it holds model\.norm\.weight_blocks, which no part"):
        check(folder)


def test_a_tied_head_need_not_be_there_and_may(tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path / "model", n_layers=2, tie_word_embeddings=True)
    check(folder)
    check(change(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})))


@pytest.mark.parametrize("name", ["model.layers.1.mlp.up_proj.weight", "model.embed_tokens.weight"])
def test_a_shape_that_the_configuration_denies_is_refused_with_both(name: str, tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path / "model", n_layers=2)
    change(folder, lambda tensors: tensors.update({name: torch.ones(7, 64)}))
    with pytest.raises(ConfigError, match=rf"{name} is \(7, 64\), and by config\.json it is \("):
        check(folder)


def test_one_expert_of_another_shape_is_refused(tmp_path: Path) -> None:
    folder = checkpoints.make("qwen3_moe", tmp_path / "model", n_layers=2)
    change(folder, lambda tensors: tensors.update({"model.layers.0.mlp.experts.1.up_proj.weight": torch.ones(3, 64)}))
    with pytest.raises(ConfigError, match="belong together have different shapes"):
        check(folder)


@pytest.mark.parametrize("written", ["{", "[]", '{"eos_token_id": "2"}', '{"temperature": "0.7"}'])
def test_a_broken_generation_config_is_refused(written: str, tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path / "model", n_layers=2)
    (folder / "generation_config.json").write_text(written)
    with pytest.raises(ConfigError, match=r"generation_config\.json"):
        check(folder)


def in_parts(folder: Path) -> dict[str, str]:
    """Cut a checkpoint in two files; returns what their index says."""
    tensors = sorted(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    halves = {"model-1.safetensors": dict(tensors[:5]), "model-2.safetensors": dict(tensors[5:])}
    for name, half in halves.items():
        save_file(half, folder / name, {"format": "pt"})
    return {tensor: name for name, half in halves.items() for tensor in half}


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ({}, ""),
        ({"lm_head.weight": "model-2.safetensors"}, "it is in model-1"),
        ({"nothing.weight": "model-1.safetensors"}, "it is in none of them"),
        ({"lm_head.weight": None}, "is in no file, and it is in model-1"),
    ],
)
def test_an_index_that_says_other_than_its_parts_is_refused(lie: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path / "model", n_layers=2)
    index = {**in_parts(folder), **lie}
    index = {name: file for name, file in index.items() if file is not None}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    if not message:
        check(folder)
        return
    with pytest.raises(ConfigError, match=message):
        check(folder)


def test_a_kind_of_number_that_is_not_read_is_called_so(tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path / "model", n_layers=2)
    change(folder, lambda tensors: tensors.update({"scale": torch.zeros(4, dtype=torch.complex64)}))
    with pytest.raises(ConfigError, match="'scale' is of kind C64, which swarmd does not read"):
        check(folder)


@pytest.mark.parametrize(
    ("kind", "message"), [(torch.float32, "take quantization_config out"), (torch.int8, "torchao$")]
)
def test_a_model_that_was_unpacked_and_says_otherwise_is_told_what_to_take_out(
    kind: torch.dtype, message: str, tmp_path: Path
) -> None:
    folder = checkpoints.make("llama", tmp_path / "model", n_layers=2)
    change(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(kind)}))
    configure(folder, quantization_config={"quant_method": "hqq", "dequantize": True})
    with pytest.raises(ConfigError, match=message):
        check(folder)


# --- adapters ----------------------------------------------------------------------------------------------------


def make_adapter(folder: Path, edit: Callable[[Tensors], Any], family: str = "llama", **settings: Any) -> Path:
    """An adapter of two matrices in each of two blocks, with its tensors and settings changed; its base beside it."""
    base = checkpoints.make(family, folder / "base", n_layers=2)
    checkpoints.make_adapter(base, folder / "lora", ["q_proj", "v_proj"], 1)
    path = folder / "lora" / adapter.WEIGHTS_FILE
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, {"format": "pt"})
    written = json.loads((folder / "lora" / adapter.CONFIG_FILE).read_text())
    (folder / "lora" / adapter.CONFIG_FILE).write_text(json.dumps({**written, **settings}))
    return folder / "lora"


def check_lora(lora: Path) -> None:
    check_adapter(lora, adapter.read_folder(lora, BASE), lora.parent / "base")


Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.filterwarnings("ignore")  # of PEFT about targets
@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop(f"{Q_PROJ}.lora_B.weight"), "lacks its other half"),
        (lambda t: t.pop(f"{Q_PROJ}.lora_A.weight"), "lacks its other half"),
        (lambda t: t.clear(), "no tensors"),
        (lambda t: t.update({f"{Q_PROJ}.lora_A.weight": torch.ones(5, 32)}), "matrices for .* are"),
        (
            lambda t: t.update(
                {f"{Q_PROJ}.lora_A.weight": torch.ones(2, 64), f"{Q_PROJ}.lora_B.weight": torch.ones(64, 2)}
            ),
            "has rank 2, and adapter_config.json says 5",
        ),
        (lambda t: t.update({n.replace("rs.1", "rs.7"): t[n].clone() for n in list(t)}), "has 2 blocks"),
        (lambda t: t.update({n.replace("q_proj", "qq"): t[n].clone() for n in list(t)}), "does not have"),
        (
            lambda t: t.update({n.replace("model.layers", "decoder.layers"): t[n].clone() for n in list(t)}),
            "no part of a",
        ),
        (lambda t: t.update({n.removeprefix("base_model.model."): t[n].clone() for n in list(t)}), "as PEFT names it"),
        (lambda t: t.update({f"{Q_PROJ}.lora_A.weight": torch.full((5, 64), float("nan"))}), "not finite"),
    ],
)
def test_an_adapter_that_its_base_cannot_use_is_refused_when_it_is_added(
    edit: Callable[[Tensors], Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_lora(make_adapter(tmp_path, edit))


@pytest.mark.filterwarnings("ignore")
def test_an_adapter_of_single_experts_is_refused_with_the_reason(tmp_path: Path) -> None:
    expert = "base_model.model.model.layers.0.mlp.experts.0.gate_proj"
    single = {f"{expert}.lora_A.weight": torch.ones(5, 64), f"{expert}.lora_B.weight": torch.ones(32, 5)}
    with pytest.raises(ConfigError, match="its experts are one tensor, and adapters of single ones are not read"):
        check_lora(make_adapter(tmp_path, lambda tensors: tensors.update(single), "qwen3_moe"))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", ["pissa", "pissa_niter_4", "olora", "corda", "loftq", "something new"])
def test_an_adapter_that_changes_its_bases_own_weights_is_refused_by_name(start: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"init_lora_weights is '{start}': such an adapter changes its base's"):
        check_lora(make_adapter(tmp_path, lambda tensors: None, init_lora_weights=start))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("start", [True, False, "gaussian", "eva", "orthogonal"])
def test_an_adapter_that_began_beside_its_bases_weights_is_taken(start: Any, tmp_path: Path) -> None:
    check_lora(make_adapter(tmp_path, lambda tensors: None, init_lora_weights=start))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["use_qalora", "use_bdlora", "velora_config", "something_of_tomorrow"])
def test_a_setting_of_adapters_that_is_not_known_is_refused_by_name(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"the adapter uses {name}, which is not supported"):
        check_lora(make_adapter(tmp_path, lambda tensors: None, **{name: {"x": 1}}))


def test_an_adapter_of_mlx_is_called_so(tmp_path: Path) -> None:
    save_file({"layers.0.self_attn.q_proj.lora_a": torch.ones(4, 2)}, tmp_path / "adapters.safetensors")
    settings = {"fine_tune_type": "lora", "lora_parameters": {"rank": 8, "scale": 20.0}, "num_layers": 16}
    (tmp_path / adapter.CONFIG_FILE).write_text(json.dumps(settings))
    with pytest.raises(ConfigError, match=r"an adapter of MLX \(adapters\.safetensors\), and swarmd reads PEFT's"):
        adapter.read_folder(tmp_path, BASE)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["qwen3_vl", "llava_next"])  # the latter has a parameter beside its decoder
def test_of_a_composite_a_client_reads_and_fetches_the_text_part(family: str, tmp_path: Path) -> None:
    """What reads pictures stays where it was added, and refuses them by name."""
    folder = families.make(family, tmp_path, families.COMPOSITES[family])
    read = manifest.read_folder(folder)
    check_folder(folder, read)
    groups = dict(zip((entry.name for entry in read.entries), manifest.entry_groups(read), strict=True))
    names = {tensor.name for tensor in read.tensors}
    of_text = {name for name in names if "language_model" in name or name == "lm_head.weight"}
    fetched = {name for name in names if groups[name] is not None}
    assert fetched == of_text != names
    client: Any = skeleton.load(folder, None, torch.float32)
    around = {name for name in of_text if groups[name] == read.n_blocks}
    assert len([*client.parameters()]) == len(around)
    ids, sizes = torch.ones(1, 3, dtype=torch.long), torch.tensor([[8, 8]])
    with pytest.raises(ConfigError, match="only texts are served"):
        client(ids, pixel_values=torch.zeros(1, 3, 8, 8), image_sizes=sizes, image_grid_thw=torch.ones_like(ids))


@pytest.mark.filterwarnings("ignore")
def test_a_layers_matrix_of_as_many_rows_as_there_are_tokens_is_no_embedding(tmp_path: Path) -> None:
    text = {**families.SHARED_KEYS, "global_head_dim": families.VOCABULARY // 4}
    folder = families.make("gemma4", tmp_path, {"text_config": text})
    read = manifest.read_folder(folder)
    assert any(".layers." in tensor.name and tensor.shape[0] == families.VOCABULARY for tensor in read.tensors)
    check_folder(folder, read)
