"""Through a chain of three real processes, every family generates and learns as plain local transformers does."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, PrefixTuningConfig, PromptTuningConfig, TaskType, get_peft_model
from transformers import AutoModelForCausalLM

import swarmd
from swarmd.compute.model import skeleton
from swarmd.compute.model.ends import all_look_back
from swarmd.errors import ConfigError
from swarmd.home.models import bundled_folder
from tests import checkpoints, families
from tests.real.faults import MODES, Blow, disturbed, fly_far_away, generate, inputs_for
from tests.real.harness import Volunteer, local_swarm
from tests.scripted_source import ScriptedSource

pytestmark = pytest.mark.slow
N_TOKENS = 24
FAMILIES = ["llama", "qwen3_moe", "gemma3_text", "gpt2"]
FAMILIES += [pytest.param(family, marks=pytest.mark.prove) for family in ("bundled", "bloom")]


def cases(vocabulary: int) -> list[dict[str, Any]]:
    length = {"max_new_tokens": N_TOKENS, "min_new_tokens": N_TOKENS}
    found = []
    for mode, options in MODES.items():
        inputs = inputs_for(mode, vocabulary, seed=3)
        tensors = {name: tensor.tolist() for name, tensor in inputs.items()}
        found.append({"mode": mode, "seed": 11, "options": {**options, **length}, **tensors})
    return found


Cases = list[dict[str, Any]]
LocalResults = Callable[[Path, Cases], list[list[list[int]]]]


@pytest.fixture(scope="module")
def local_results() -> Iterator[LocalResults]:
    """One process for all families: most of its time is to import."""
    command = [sys.executable, str(Path(__file__).parent / "local_reference.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask(folder: Path, wanted: Cases) -> list[list[list[int]]]:
            print(json.dumps([str(folder), wanted]), file=process.stdin, flush=True)
            answer = process.stdout.readline()  # type: ignore[union-attr]  # it is a pipe
            assert answer, "the local reference ended"
            return list(json.loads(answer))

        yield ask


@dataclass
class Stage:
    """One family on a chain of three processes."""

    family: str
    folder: Path
    volunteers: list[Volunteer]
    client: Any


@pytest.fixture(scope="module", params=FAMILIES)
def stage(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    torch.set_num_threads(1)
    family, tmp_path = request.param, tmp_path_factory.mktemp(request.param)
    folder = bundled_folder() if family == "bundled" else checkpoints.make(family, tmp_path / family)
    with local_swarm(tmp_path) as swarm:
        volunteers = swarm.serving((0, 2), (2, 4), (4, 6), model="model", models={"model": folder})
        with swarmd.connect(home=volunteers[0].home.folder) as client:
            yield Stage(family, folder, volunteers, client)


def test_chain_of_three_equals_local(stage: Stage, local_results: LocalResults) -> None:
    wanted = cases(1024 if stage.family == "bundled" else 320)
    expected = local_results(stage.folder, wanted)
    model = stage.client.model("model")
    for case, tokens in zip(wanted, expected, strict=True):
        torch.manual_seed(case["seed"])
        ids, mask = torch.tensor(case["input_ids"]), torch.tensor(case["attention_mask"])
        out = model.generate(input_ids=ids, attention_mask=mask, **case["options"])
        assert out.tolist() == tokens, f"{stage.family}, {case['mode']}"
        statistics = model.last_session.statistics
        assert len(model.last_session.chain) == 3
        assert statistics.frames_sent == statistics.frames_received == statistics.steps
        assert not statistics.repairs
    assert {v.ask("status")["memory_mib"] < 150 for v in stage.volunteers} == {True}


KINDS = {  # of families, by what is unusual about them; those in CI first
    "its text part is served": "qwen3_vl mistral3 gemma3 qwen3_5 kimi_k25 minimax_m3_vl llama4 step3p7 exaone4_5",
    "computed together, its attention has other strides": "glm4v glm46v",
    "states instead of keys and values": "qwen3_5_text lfm2 jamba qwen3_next granitemoehybrid nemotron_h kimi_linear",
    "keys, values and states in the same block": "falcon_h1",
    "several streams of hidden states": "glm5_next qwen4_exp",
    "ids, or numbers for each layer, beside hidden states": "gemma4 deepseek_v4 gemma4_text zaya",
    "layers that stay together": "hy_v4",
    "two attentions in a layer": "longcat_flash",
    "another class than usual": "mistral4 modernbert-decoder",
    "an indexer's keys beside keys and values": "glm_moe_dsa",
}
IN_CI = {"qwen3_vl", "glm4v", "qwen3_5_text", "falcon_h1", "gemma4", *families.VARIANTS} - {
    "gemma4_text with experts",
    "gemma4_text with shared keys",
}
ALL = [*" ".join(KINDS.values()).split(), *families.VARIANTS]


@pytest.mark.filterwarnings("ignore")  # what a family warns of is its own affair
@pytest.mark.parametrize("family", [f if f in IN_CI else pytest.param(f, marks=pytest.mark.prove) for f in ALL])
def test_families_of_every_kind_are_served(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each way of decoding gives the local tokens, also when a server dies in mid-answer; and so does a LoRA's step."""
    folder = families.make_named(family, tmp_path / "made")
    layout = families.lay_out(folder)
    local: Any = skeleton.load_whole(folder, torch.float32)
    n = layout.n_blocks(skeleton.count_layers(local.config))
    cut = n - n // 2
    modes = ["greedy", "beams", "padded"]
    if all_look_back(skeleton.text_config(local.config)):
        modes.append("lookup")
    with local_swarm(tmp_path) as swarm:
        volunteers = swarm.serving((0, cut), (cut, n), (cut, n), model="model", models={"model": folder})
        with swarmd.connect(home=volunteers[0].home.folder) as client:
            model = client.model("model")
            for mode in modes:
                inputs = inputs_for(mode, families.VOCABULARY, seed=3)
                ours, theirs = (
                    generate(each, mode, inputs, N_TOKENS, 11, pad_token_id=0).sequences for each in (model, local)
                )
                assert torch.equal(ours, theirs), mode
            if "lookup" in modes:
                with monkeypatch.context() as far_away:
                    fly_far_away(far_away)
                    compare_in_flight(model, local)
            inputs = inputs_for("greedy", families.VOCABULARY, seed=4)
            expected = generate(local, "greedy", inputs, N_TOKENS, 11).sequences
            outcome = disturbed(client.model("model"), volunteers, "greedy", inputs, N_TOKENS, 11, (Blow(9, (-2,)),))
            assert torch.equal(outcome.out.sequences, expected)
            assert outcome.statistics.repairs
            compare_lora_step(
                model, local, 1e-3 if family == "hy_v4" else 1e-4
            )  # its streams are mixed again and again
            why = volunteers[0].ask("why", model="model")
        (hosting,) = volunteers[0].ask("status")["hosting"]
        assert hosting["server"]["total_cache_tokens"] > 1_000, "a session's states are not those of a token"
    assert why["chains"]["model"]["layout"] == layout.describe()


IN_FLIGHT: tuple[dict[str, Any], ...] = (  # by what is chosen, and what ends a text
    {"do_sample": False, "repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    {"do_sample": True, "temperature": 0.8, "top_k": 30, "top_p": 0.95, "repetition_penalty": 1.1},
    {"do_sample": True, "min_p": 0.01, "suppress_tokens": [7, 8], "eos_token_id": list(range(3, 40))},
)


def compare_in_flight(model: Any, local: Any) -> None:
    """Tokens that are tried ahead change none, with penalties and other processors, and with ends of a text."""
    inputs = inputs_for("greedy", families.VOCABULARY, seed=5)
    for options in IN_FLIGHT:
        options = {"max_new_tokens": 2 * N_TOKENS, "pad_token_id": 0, **options}
        torch.manual_seed(8)
        expected = local.generate(**inputs, **options)[0].tolist()
        model.speculation.sources = [lambda text=expected: ScriptedSource(text, 0.7, 0.002, 3, 0.4, time.sleep)]
        for _ in range(2):  # what passes take is known in the second
            torch.manual_seed(8)
            assert model.generate(**inputs, **options)[0].tolist() == expected, options
        tried, statistics = model.last_speculation, model.last_session.statistics
        if len(expected) - inputs["input_ids"].shape[1] > N_TOKENS:
            assert tried.n_taken, tried.reason
            assert statistics.n_void or not tried.plan.flies, "some were wrong"


def compare_lora_step(model: Any, local: Any, tolerance: float) -> None:
    """The loss, and its gradients by a LoRA, are those of the whole model. Changes both."""
    ids = torch.randint(3, families.VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(1))
    layers = skeleton.decoder_layers(local)
    place = next(name for name, module in local.named_modules() if module is layers)
    name, _ = families.first_matrix(local, layers[0], ids)
    config = LoraConfig(r=4, target_modules=rf"{re.escape(place)}\.\d+\..*{name.rpartition('.')[2]}")
    ours, theirs = (get_peft_model(m.eval().requires_grad_(False), config) for m in (model, local))
    for (name, parameter), (_, twin) in zip(trainable(theirs), trainable(ours), strict=True):
        torch.nn.init.normal_(parameter, std=0.1)
        twin.data.copy_(parameter.data)
        assert parameter.shape == twin.shape, name
    for each in (ours, theirs):
        each(input_ids=ids, labels=ids).loss.backward()
    for (name, parameter), (_, twin) in zip(trainable(theirs), trainable(ours), strict=True):
        assert twin.grad is not None
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad  # of what is not used
        assert relative(twin.grad, expected) <= tolerance, name


TARGETS = {"gpt2": ["c_attn", "c_fc"], "bloom": ["query_key_value", "dense"], "qwen3_moe": ["q_proj", "o_proj"]}
METHODS: dict[str, Any] = {
    "one block": lambda family: LoraConfig(
        r=4, target_modules=TARGETS.get(family, ["q_proj"])[:1], layers_to_transform=[3]
    ),
    "lora": lambda family: LoraConfig(
        r=4, lora_alpha=16, target_modules=TARGETS.get(family, ["q_proj", "v_proj", "down_proj"])
    ),
    "prompt": lambda _: PromptTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=40),
    "prefix": lambda _: PrefixTuningConfig(task_type=TaskType.CAUSAL_LM, num_virtual_tokens=5),
}


@pytest.mark.filterwarnings("ignore")  # PEFT's, about names and targets
@pytest.mark.parametrize("method", METHODS)
def test_gradients_equal_local_ones(stage: Stage, method: str, tmp_path: Path) -> None:
    """Of the input, and of what is tuned; then PEFT saves it, and it generates as it does locally."""
    remote, local = stage.client.model("model"), AutoModelForCausalLM.from_pretrained(stage.folder, dtype=torch.float32)
    torch.manual_seed(0)
    ids = torch.randint(3, 300, (8, 17))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    ours, theirs = (
        get_peft_model(m.eval().requires_grad_(False), METHODS[method](stage.family)) for m in (remote, local)
    )
    for (name, parameter), (_, twin) in zip(trainable(theirs), trainable(ours), strict=True):
        torch.nn.init.normal_(parameter, std=0.1)
        twin.data.copy_(parameter.data)
        assert parameter.shape == twin.shape, name
    losses = [model(input_ids=ids, attention_mask=mask, labels=ids).loss for model in (ours.eval(), theirs.eval())]
    for loss in losses:
        loss.backward()
    assert losses[0].item() == pytest.approx(losses[1].item(), rel=1e-6)
    for (name, parameter), (_, twin) in zip(trainable(theirs), trainable(ours), strict=True):
        assert parameter.grad is not None
        assert twin.grad is not None
        assert relative(twin.grad, parameter.grad) <= 1e-5, name
    if method == "lora":
        embeddings = torch.randn(3, 9, remote.config.hidden_size)
        assert relative(by_input(ours, embeddings), by_input(theirs, embeddings)) <= 1e-5
    assert remote.lanes.statistics.backwards >= 8
    assert not remote.lanes.statistics.retries

    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    prompt = {"input_ids": ids[:2], "attention_mask": torch.ones_like(ids[:2])}
    expected = theirs.generate(**prompt, **options)
    assert torch.equal(ours.generate(**prompt, **options), expected)
    ours.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(stage.folder, dtype=torch.float32), tmp_path)
    assert torch.equal(again.eval().generate(**prompt, **options), expected)


@pytest.mark.filterwarnings("ignore")
def test_what_servers_cannot_train_is_refused_and_what_is_local_is_trained(stage: Stage) -> None:
    if stage.family != "llama":
        pytest.skip("one family is enough")
    model, ids = stage.client.model("model").requires_grad_(False), torch.randint(3, 300, (2, 9))
    model.lm_head.weight.requires_grad_()  # a head trains here
    local = AutoModelForCausalLM.from_pretrained(stage.folder, dtype=torch.float32).requires_grad_(False)
    local.lm_head.weight.requires_grad_()
    for one in (model, local):
        one(input_ids=ids, labels=ids).loss.backward()
    assert relative(model.lm_head.weight.grad, local.lm_head.weight.grad) <= 1e-5
    for config in (
        LoraConfig(target_modules=["q_proj"], modules_to_save=["input_layernorm"]),
        LoraConfig(target_modules=["q_proj"], use_dora=True),
        LoraConfig(target_modules=["q_proj"], lora_dropout=0.1),
        IA3Config(target_modules=["k_proj"], feedforward_modules=[]),
    ):
        with pytest.raises(ConfigError):
            get_peft_model(stage.client.model("model"), config).train()(input_ids=ids, labels=ids)
    cached = get_peft_model(stage.client.model("model"), LoraConfig(target_modules=["q_proj"])).eval()
    with pytest.raises(ConfigError, match="no gradients flow through a session"):
        cached(input_ids=ids, past_key_values=cached.new_cache(20), use_cache=True)


def trainable(model: Any) -> list[tuple[str, torch.nn.Parameter]]:
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]


def by_input(model: Any, embeddings: torch.Tensor) -> torch.Tensor:
    entering = embeddings.clone().requires_grad_()
    model(inputs_embeds=entering, labels=torch.full(embeddings.shape[:2], 7)).loss.backward()
    assert entering.grad is not None
    return entering.grad


def relative(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-9))
