"""Weights that are quantised as they are published: added as they are, and read as the plain ones that they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from swarmd.compute.checkpoints.check import check_folder
from swarmd.compute.linear.layers import quantise_layer
from swarmd.compute.linear.quantize import relative_error
from swarmd.compute.model import skeleton
from swarmd.compute.model.checkpoint_tensors import CheckpointTensors
from swarmd.compute.model.unpacking import shaped, unpack
from swarmd.errors import ConfigError, IntegrityError
from swarmd.plan.chains.memory import group_bytes
from swarmd.protocol.models import manifest
from swarmd.protocol.models.quantised import Stored, plain_tensors
from swarmd.protocol.models.scheme import BITSANDBYTES, COMPRESSED, FP8, Scheme
from swarmd.values import Span
from tests import checkpoints, families, quantised_files
from tests.quantised_files import FORMATS, write_experts, write_quantised

FILE = "model.safetensors"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.make("llama", tmp_path_factory.mktemp("plain") / "llama", n_layers=2)


def assert_it_is_read(folder: Path, expected: Path) -> None:
    """It may be added, and each of its tensors, and what the model says, is that of the plain ones."""
    made = manifest.read_folder(folder)
    check_folder(folder, made)
    tensors = CheckpointTensors(folder)
    plain = load_file(expected / FILE)
    assert set(tensors.plain) == set(plain)
    for name, tensor in tensors.plain.items():
        read = unpack(tensor, tensors.read) if tensor.rule else tensors.read(name)
        assert torch.allclose(read.float(), plain[name].float(), rtol=1e-6, atol=1e-9), name
    ids = torch.randint(3, 150, (1, 9), generator=torch.Generator().manual_seed(2))
    ours, theirs = (skeleton.load_whole(each, torch.float32) for each in (folder, expected))
    with torch.no_grad():
        assert torch.allclose(ours(ids).logits, theirs(ids).logits, rtol=1e-4, atol=1e-5)
    sizes = group_bytes(made, "bfloat16"), group_bytes(manifest.read_folder(expected), "bfloat16")
    assert sizes[0] == sizes[1], "memory is planned for what is loaded"


@pytest.mark.parametrize("form", FORMATS)
def test_each_form_is_read_as_what_it_means(llama: Path, form: str, tmp_path: Path) -> None:
    expected = write_quantised(llama, tmp_path / "quantised", form)
    assert_it_is_read(tmp_path / "quantised", expected)


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen3_moe", "fp8"),
        ("deepseek_v3", "fp8"),
        ("minimax_m2", "fp8"),
        ("qwen3_moe", "packed"),
        ("qwen3_moe", "gptq"),
    ],
)
def test_experts_one_by_one_become_those_of_a_block(family: str, form: str, tmp_path: Path) -> None:
    plain = families.make_named(family, tmp_path / "plain")
    expected = write_quantised(plain, tmp_path / "quantised", form)
    assert_it_is_read(tmp_path / "quantised", expected)


@pytest.mark.parametrize(
    ("form", "other"), [("packed", "packed 8 bits"), ("gptq", "gptq of 8 bits"), ("packed", "int8")]
)
def test_matrices_of_several_bits(llama: Path, form: str, other: str, tmp_path: Path) -> None:
    expected = write_quantised(llama, tmp_path / "quantised", form, {"down_proj": other})
    assert_it_is_read(tmp_path / "quantised", expected)


OF_HEADS = ("awq", "packed with zero points", "bitsandbytes int8", "torchao int8")


def test_kinds_that_no_number_of_groups_tells_apart_are_refused(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "quantised"
    write_quantised(llama, folder, "packed")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_1"] = {"weights": {"num_bits": 8, "group_size": 8}}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"weight_packed has 8 groups in rows of 512 bits, which fits 2 of the kinds"):
        manifest.read_folder(folder)


@pytest.mark.parametrize("form", ["fp8", "gptq", *(pytest.param(f, marks=pytest.mark.prove) for f in OF_HEADS)])
def test_a_text_part_may_say_that_it_is_quantised_and_its_head_may_be(form: str, tmp_path: Path) -> None:
    plain = families.make_named("qwen3_vl", tmp_path / "plain")
    folder = tmp_path / "quantised"
    expected = write_quantised(plain, folder, form, leaves=("embed", "norm", "visual"))
    path = folder / "config.json"
    config = json.loads(path.read_text())
    moved = config.pop("quantization_config")
    path.write_text(json.dumps({**config, "text_config": {**config["text_config"], "quantization_config": moved}}))
    assert_it_is_read(folder, expected)
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ConfigError, match="stands there twice, and says two things"):
        manifest.read_folder(folder)


def changed_q(llama: Path, folder: Path, form: str, changes: dict[str, Any]) -> torch.Tensor:
    """What the first query matrix of a checkpoint reads as, with some of its stored tensors changed."""
    write_quantised(llama, folder, form)
    change(folder, changes)
    check_folder(folder, manifest.read_folder(folder))
    tensors = CheckpointTensors(folder)
    return unpack(tensors.plain[f"{Q}weight"], tensors.read)


def test_groups_that_nobody_filled_in_are_those_in_order(llama: Path, tmp_path: Path) -> None:
    expected = write_quantised(llama, tmp_path / "other", "gptq")
    zeros = {f"{Q}g_idx": torch.zeros(64, dtype=torch.int32)}
    assert torch.allclose(
        changed_q(llama, tmp_path / "quantised", "gptq", zeros), load_file(expected / FILE)[f"{Q}weight"]
    )


def test_a_block_of_zeros_may_have_a_scale_of_zero(llama: Path, tmp_path: Path) -> None:
    scale = torch.ones(3, 2)
    scale[0, 0] = 0
    weight = torch.ones(64, 64)
    weight[:24, :40] = 0
    changes = {f"{Q}weight": weight.to(torch.float8_e4m3fn), f"{Q}weight_scale_inv": scale}
    assert torch.equal(changed_q(llama, tmp_path / "quantised", "fp8", changes), weight)


def test_biases_of_zeros_that_a_tool_wrote_beside_all_matrices_are_left_out(llama: Path, tmp_path: Path) -> None:
    zeros = {f"{Q}bias": torch.zeros(64)}
    changed_q(llama, tmp_path / "quantised", "gptq", zeros)
    with pytest.raises(ConfigError, match=r"takes model\.layers\.0\.self_attn\.q_proj\.bias"):
        changed_q(llama, tmp_path / "other", "gptq", {f"{Q}bias": torch.ones(64)})


def test_sets_of_experts_of_gpt_oss(tmp_path: Path) -> None:
    plain = families.make_named("gpt_oss", tmp_path / "plain")
    expected = write_experts(plain, tmp_path / "quantised")
    assert_it_is_read(tmp_path / "quantised", expected)


def test_a_part_of_the_model_reads_no_more_than_it_needs(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "quantised"
    expected = write_quantised(llama, folder, "gptq")
    hidden = torch.randn(1, 3, 64)
    ours, theirs = (skeleton.load(each, Span(1, 2), torch.float32) for each in (folder, expected))
    position = {"position_ids": torch.arange(3)[None]}
    with torch.no_grad():
        first, second = (model(inputs_embeds=hidden, **position, use_cache=False)[0] for model in (ours, theirs))
    assert torch.equal(first, second)
    for kind in ("int8", "int4"):
        rounded = skeleton.load(folder, Span(0, 2), torch.bfloat16, kind)
        assert any(type(module).__name__ == "QuantisedLinear" for module in rounded.modules()), kind
    client = skeleton.load(folder, None, torch.float32)
    assert torch.equal(client.get_input_embeddings().weight, load_file(expected / FILE)["model.embed_tokens.weight"])


def change(folder: Path, changes: dict[str, Any]) -> None:
    """Replace tensors; one that is None is left out."""
    tensors = {**load_file(folder / FILE), **changes}
    save_file({name: t for name, t in tensors.items() if t is not None}, folder / FILE, {"format": "pt"})


@pytest.mark.parametrize(
    ("form", "kind", "most"),
    [
        ("gptq", "int4", 0.005),
        ("awq", "int4", 0.005),
        ("packed with zero points", "int4", 0.005),
        ("packed", "int4", 0.008),
        ("int8", "int8", 0.002),
    ],
)
def test_what_has_few_bits_gets_the_same_again(
    form: str, kind: str, most: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only scales are rounded, to bfloat16: rounding to new values of 4 bits would lose 0.08."""
    monkeypatch.setattr(quantised_files, "GROUP", 64)
    weight = 0.02 * torch.randn(64, 256, generator=torch.Generator().manual_seed(5))
    _, plain = FORMATS[form][1](weight)
    linear = torch.nn.Linear(256, 64, bias=False)
    linear.weight = torch.nn.Parameter(plain.bfloat16().float(), requires_grad=False)
    assert relative_error(quantise_layer(linear, kind).weight, plain) < most


Q = "model.layers.0.self_attn.q_proj."
LOST = r"what it scales is lost"
STATE = f"{Q}weight.quant_state.bitsandbytes__nf4"


def state_of(**changes: Any) -> torch.Tensor:
    written = json.dumps({"shape": [64, 64], "blocksize": 64, "quant_type": "nf4", **changes})
    return torch.tensor([*written.encode()], dtype=torch.uint8)


BROKEN = {
    "a scale of zero": ("fp8", {f"{Q}weight_scale_inv": torch.zeros(3, 2)}, LOST),
    "a scale that is no number": (
        "awq",
        {f"{Q}scales": torch.full((4, 64), torch.nan).half()},
        LOST,
    ),
    "an infinite scale": (
        "nvfp4",
        {f"{Q}weight_global_scale": torch.tensor([torch.inf])},
        LOST,
    ),
    "an exponent that is no number": (
        "mxfp4",
        {f"{Q}weight_scale": torch.full((64, 2), 255, dtype=torch.uint8)},
        LOST,
    ),
    "a matrix twice": ("awq", {f"{Q}weight": torch.ones(64, 64)}, "is stored twice, in two forms"),
    "no scale": ("gptq", {f"{Q}scales": None}, "lacks .*q_proj.scales"),
    "no zero points": ("gptq", {f"{Q}qzeros": None}, "lacks .*q_proj.qzeros"),
    "scales of another shape": ("fp8", {f"{Q}weight_scale_inv": torch.ones(2, 2)}, r"is F32 \[2, 2\]"),
    "scales of another kind": ("mxfp4", {f"{Q}weight_scale": torch.ones(64, 2)}, r"is F32 \[64, 2\]"),
    "groups that divide nothing": ("packed", {f"{Q}weight_scale": torch.ones(64, 3)}, "has 3 groups for 64 inputs"),
    "a group that there is not": ("gptq", {f"{Q}g_idx": torch.full((64,), 4, dtype=torch.int32)}, "beyond the 4"),
    "another shape than it says": ("packed", {f"{Q}weight_shape": torch.tensor([64, 60])}, r"says \[64, 60\]"),
    "a matrix that is too narrow": (
        "int8",
        {f"{Q}weight": torch.ones(64, 32, dtype=torch.int8)},
        r"is \(64, 32\), and by config.json it is \(64, 64\)",
    ),
    "a largest that is no number": (
        "nf4",
        {f"{Q}weight.absmax": torch.full((64,), torch.nan)},
        LOST,
    ),
    "an outer largest that is none": (
        "nf4, nested",
        {f"{Q}weight.nested_absmax": torch.full((3,), torch.inf)},
        LOST,
    ),
    "too few blocks": ("nf4", {f"{Q}weight.absmax": torch.ones(63)}, "has 63 blocks, and .* 64"),
    "another number of numbers": (
        "nf4",
        {f"{Q}weight": torch.zeros(2_000, 1, dtype=torch.uint8)},
        "holds 4000 numbers",
    ),
    "a state that is none": (
        "nf4",
        {f"{Q}weight.quant_state.bitsandbytes__nf4": torch.zeros(9, dtype=torch.uint8)},
        "q_proj.weight.quant_state.bitsandbytes__nf4: JSON is malformed",
    ),
    "no state": ("nf4", {f"{Q}weight.quant_state.bitsandbytes__nf4": None}, "lacks .*, which says its shape"),
    "columns of a card": (
        "bitsandbytes int8",
        {f"{Q}weight_format": torch.tensor(1, dtype=torch.uint8)},
        "weight_format says that rows are not one after the other",
    ),
    "torchao's 4 bits": ("torchao int8", {f"{Q}_weight_qdata": torch.zeros(64, 32, dtype=torch.uint8)}, "of 8 bits"),
    "blocks beyond memory": ("nf4", {STATE: state_of(nested_blocksize=2**40)}, "nested_blocksize"),
    "a block of nothing": ("nf4", {STATE: state_of(blocksize=0)}, "blocksize"),
    "a state without an end": (
        "nf4",
        {STATE: torch.tensor([*b'{"x":', *b"[" * 3_000, *b"}"], dtype=torch.uint8)},
        "quant_state",
    ),
    "a table of no numbers": ("nf4", {f"{Q}weight.quant_map": torch.full((16,), torch.nan)}, LOST),
    "two forms of one matrix": (
        "packed",
        {f"{Q}weight": torch.ones(64, 64, dtype=torch.int8)},
        "is stored twice, in two forms",
    ),
    "groups of another size": (
        "packed",
        {
            f"{Q}weight_packed": None,
            f"{Q}weight": torch.ones(64, 64, dtype=torch.int8),
            f"{Q}weight_scale": torch.ones(64, 2).half(),
        },
        r"weight_scale is F16 \[64, 2\]",
    ),
    "one group where there are four": ("awq", {f"{Q}scales": torch.ones(1, 64).half()}, "qzeros is I32"),
    "8 bits without a scale": ("int8", {f"{Q}weight_scale": None}, "is of kind I8"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_what_is_broken_is_refused_before_it_is_published(llama: Path, fault: str, tmp_path: Path) -> None:
    form, changes, message = BROKEN[fault]
    folder = tmp_path / "quantised"
    write_quantised(llama, folder, form)
    change(folder, changes)
    with pytest.raises(ConfigError, match=message):
        check_folder(folder, manifest.read_folder(folder))


def test_gpt_oss_with_groups_of_another_size_is_refused(tmp_path: Path) -> None:
    plain = families.make_named("gpt_oss", tmp_path / "plain")
    write_experts(plain, tmp_path / "quantised")
    name = "model.layers.0.mlp.experts.down_proj_blocks"
    blocks = load_file(tmp_path / "quantised" / FILE)[name]
    change(tmp_path / "quantised", {name: blocks.flatten(2).unflatten(2, (-1, 8)).contiguous()})
    with pytest.raises(ConfigError, match="groups of 8 bytes"):
        manifest.read_folder(tmp_path / "quantised")


def made(kind: Scheme, stored: dict[str, torch.Tensor]) -> torch.Tensor:
    """The one weight that stored tensors make."""
    names = {torch.int8: "I8", torch.float32: "F32", torch.uint8: "U8", torch.float8_e4m3fn: "F8_E4M3"}
    (plain,) = plain_tensors(kind, [Stored(n, names[t.dtype], tuple(t.shape)) for n, t in stored.items()])
    return unpack(shaped(plain, stored.__getitem__), stored.__getitem__)


def test_sets_of_experts_have_zero_points_of_their_own() -> None:
    weight = torch.randint(-9, 9, (4, 4, 4), dtype=torch.int8)
    zero = torch.arange(1, 5, dtype=torch.int8).view(4, 1, 1).expand(4, 4, 1).contiguous()
    stored = {"a.weight": weight, "a.weight_scale": torch.full((4, 4, 1), 2.0), "a.weight_zero_point": zero}
    assert torch.equal(made(Scheme(COMPRESSED), stored), (weight.float() - zero.float()) * 2)


def test_scales_are_of_as_many_experts_as_there_are() -> None:
    stored = {"a.weight": torch.ones(4, 4, 8, dtype=torch.int8), "a.weight_scale": torch.ones(2, 4, 2)}
    with pytest.raises(IntegrityError, match=r"a\.weight_scale is F32 \[2, 4, 2\]"):
        made(Scheme(COMPRESSED), stored)


def test_an_odd_number_of_4_bits_is_read_without_the_last_half() -> None:
    table = torch.linspace(-1, 1, 16)
    codes = torch.arange(15) % 16
    padded = torch.cat([codes, torch.zeros(1, dtype=torch.int64)])
    stored = {
        "a.weight": ((padded[0::2] << 4) | padded[1::2]).to(torch.uint8).view(-1, 1),
        "a.weight.absmax": torch.tensor([2.0]),
        "a.weight.quant_map": table,
        "a.weight.quant_state.bitsandbytes__nf4": state_of(shape=[3, 5]),
    }
    assert torch.equal(made(Scheme(BITSANDBYTES), stored), (table[codes] * 2).view(3, 5))


def test_a_scale_of_a_block_that_is_larger_than_its_matrix_takes_no_more_than_the_matrix() -> None:
    stored = {"a.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.full((1, 1), 3.0)}
    assert torch.equal(made(Scheme(FP8, block=(2**16, 2**16)), stored), torch.full((2, 2), 3.0))  # else 17 GB


METHODS: dict[str, tuple[Any, str]] = {
    "another": ({"quant_method": "hqq"}, "hqq.*fp8, mxfp4, gptq, awq"),
    "none": ({"bits": 4}, "None"),
    "no object": ("fp8", "no JSON object"),
    "planar": ({"quant_method": "gptq", "bits": 5, "checkpoint_format": "gptq_p"}, "checkpoint_format 'gptq_p'"),
    "gptq of 5 bits": ({"quant_method": "gptq", "bits": 5}, "bits '5'"),
    "marlin": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
    "awq for vectors": ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
    "blocks of nothing": ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "two whole numbers"),
    "packed 3 bits": (
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 3}}}},
        "num_bits '3'",
    ),
    "rotated": ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {}}}, "transform_config"),
    "sparse": ({"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24"}}, "sparsity_config"),
    "two methods": (
        {"quant_method": "gptq", "bits": 4},
        "stands there twice",
    ),
    "more kinds than any model has": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {str(n): {"weights": {"num_bits": 4, "group_size": n}} for n in range(1, 99)},
        },
        "with 98 kinds of weights",
    ),
    "blocks of two sizes": (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {
                str(n): {"weights": {"num_bits": 8, "type": "float", "block_structure": [n, n]}} for n in (64, 128)
            },
        },
        "blocks of 2 sizes",
    ),
    "no groups": ({"quant_method": "compressed-tensors"}, "without config_groups"),
    "an order of its own": (
        {"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"actorder": "group"}}}},
        "actorder",
    ),
}


@pytest.mark.parametrize("method", METHODS)
def test_what_is_not_read_is_refused_by_its_name(llama: Path, method: str, tmp_path: Path) -> None:
    settings, message = METHODS[method]
    folder = tmp_path / "quantised"
    write_quantised(llama, folder, "fp8")
    config = json.loads((folder / "config.json").read_text())
    also = {"compression_config": {"quant_method": "fp8"}} if method == "two methods" else {}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings, **also}))
    with pytest.raises(ConfigError, match=message):
        manifest.read_folder(folder)


def test_code_beside_a_family_that_is_known_is_not_looked_at(llama: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    (llama / "config.json").write_text(json.dumps({**config, "auto_map": {"AutoModel": "evil.Model"}}))
    try:
        check_folder(llama, manifest.read_folder(llama))
        model = skeleton.load_whole(llama, torch.float32)
    finally:
        (llama / "config.json").write_text(json.dumps(config))
    assert type(model) is type(AutoModelForCausalLM.from_pretrained(llama))
