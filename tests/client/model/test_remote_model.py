"""The client's model: its layers are all there, and whoever goes through them meets layer 0 only; heads in 8 bits."""

from __future__ import annotations

import copy
import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from swarmd.client.links.ops import StepInput
from swarmd.client.model.remote_model import remote_model
from swarmd.client.model.traced_pass import TracedPass, trace_model
from swarmd.compute.linear.quantize import relative_error
from swarmd.compute.model import skeleton
from swarmd.compute.model.ends import Ends
from swarmd.compute.model.skeleton import RemoteLayer, Stub
from swarmd.compute.passes.span import LoadedSpan
from swarmd.compute.runs.expert_balance import leave_out
from swarmd.errors import ConfigError
from swarmd.values import Span
from tests import checkpoints, families
from tests.families import LocalSession


def test_a_pass_of_the_client_meets_layer_0_only(tmp_path: Path) -> None:
    model = skeleton.load(checkpoints.make("llama", tmp_path, n_layers=4), None, torch.float32)
    layers = skeleton.decoder_layers(model)
    assert [type(layer) for layer in layers] == [type(layer) for layer in layers[:4]] == [RemoteLayer]
    assert [type(layer) for layer in layers.children()] == [RemoteLayer, Stub, Stub, Stub]
    assert len(layers) == 4
    assert type(layers[3]) is Stub


def test_a_gateways_head_in_8_bits_is_half_a_percent_off(tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path / "model", n_layers=2, hidden_size=256, head_dim=64)
    hidden = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    exact, rounded = (Ends(folder, torch.float32, compiled_in).logits(hidden, 0) for compiled_in in (None, tmp_path))
    assert 0 < relative_error(rounded, exact) < 0.02


def test_a_head_that_is_not_plain_stays_in_its_bits(tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path, n_layers=2, vocab_size=321)
    with pytest.raises(ConfigError, match="of an even size: say head = own"):
        Ends(folder, torch.float32, tmp_path)


class HalvingChain:
    """A chain whose blocks halve what they are given."""

    layer_arity = 0
    can_fly = False
    is_closed = False

    def step(self, step: StepInput) -> torch.Tensor:
        assert step.hidden is not None
        return step.hidden / 2

    def finish(self) -> None: ...

    def close(self) -> None:
        self.is_closed = True


def client(folder: Path) -> Any:
    return remote_model(folder, lambda *options: HalvingChain(), lanes=None)  # type: ignore[arg-type, return-value]


def test_dropped_caches_are_freed_at_once(tmp_path: Path) -> None:
    """Not when Python next looks for cycles: a server keeps room for them until then."""
    chains: list[HalvingChain] = []

    def open_session(*options: Any) -> HalvingChain:
        chains.append(HalvingChain())
        return chains[-1]

    folder = checkpoints.make("llama", tmp_path, n_layers=2)
    model = remote_model(folder, open_session, lanes=None)  # type: ignore[arg-type]
    gc.disable()
    try:
        logits = model(torch.arange(3, 9).unsqueeze(0)).logits
    finally:
        gc.enable()
    assert logits.shape[1] == 6
    assert [chain.is_closed for chain in chains] == [True]


def test_a_remote_cache_is_not_copied(tmp_path: Path) -> None:
    cache = client(checkpoints.make("llama", tmp_path, n_layers=2)).new_cache()
    with pytest.raises(TypeError, match="is not copied"):
        copy.deepcopy(cache)


class TestSteps:
    """Prompts and steps are a straight line, where that gives what the family's forward gives."""

    @pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gpt2", "gemma3_text"])
    def test_they_give_what_the_familys_forward_gives(
        self, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = client(checkpoints.make(family, tmp_path, n_layers=2))
        ids = torch.arange(3, 40).unsqueeze(0)
        pass_sizes: list[int] = []
        compute = TracedPass.compute

        def noted(self: TracedPass, ids: torch.Tensor, *options: Any) -> torch.Tensor:
            pass_sizes.append(ids.shape[1])
            return compute(self, ids, *options)

        monkeypatch.setattr(TracedPass, "compute", noted)
        text = model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)
        has_line = family in ("llama", "qwen3_moe")  # gpt2 looks at values, gemma3's windows move on
        assert pass_sizes == ([1] * 8 if has_line else []), "of the prompt the last token, too"
        monkeypatch.setattr(TracedPass, "is_current", False)
        assert torch.equal(text, model.generate(ids, max_new_tokens=8, min_new_tokens=8, do_sample=False))
        assert len(pass_sizes) == (8 if has_line else 0)

    @pytest.mark.parametrize("change", ["weight", "head", "hook", "training", "moved"])
    def test_a_model_that_was_changed_goes_its_own_way(self, change: str, tmp_path: Path) -> None:
        model = client(checkpoints.make("llama", tmp_path, n_layers=2))
        stubs = list(skeleton.decoder_layers(model).children())
        traced = trace_model(model, stubs, "past_key_values", model.get_output_embeddings())
        assert traced is not None
        assert traced.is_current
        with torch.no_grad():
            if change == "weight":
                model.model.norm.weight.mul_(2)
            elif change == "head":
                model.set_output_embeddings(torch.nn.Linear(64, 320, bias=False))
            elif change == "hook":
                model.model.norm.register_forward_hook(lambda *hook_args: None)
            elif change == "training":
                model.train()
            else:
                model.model.norm.weight.data = model.model.norm.weight.data.clone()
        assert not traced.is_current


def test_a_loss_that_needs_the_routers_of_remote_experts_is_refused(tmp_path: Path) -> None:
    model = client(checkpoints.make("qwen3_moe", tmp_path, n_layers=2, output_router_logits=True))
    ids = torch.arange(3, 9).unsqueeze(0)
    with pytest.raises(ConfigError, match="output_router_logits = False"):
        model(input_ids=ids, labels=ids)
    model(input_ids=ids)
    model.generate(ids, max_new_tokens=2)
    leave_out(model)
    assert torch.isfinite(model(input_ids=ids, labels=ids).loss)
    with pytest.raises(ConfigError, match="stay on servers"):
        model(input_ids=ids, output_router_logits=True)


class LocalChain(LocalSession):
    """Two spans in this process, with what ``generate`` asks of a session; refuses another dtype, as servers do."""

    n_open = 0
    served_logits = None

    def step(self, step: StepInput) -> torch.Tensor | None:
        assert step.hidden is not None
        assert step.hidden.dtype == torch.float32
        return super().step(step)

    def finish(self) -> None: ...

    def close(self) -> None:
        LocalChain.n_open -= 1


class TestAgainstTheWholeModel:
    """What callers of transformers ask for beside plain generation is right, or refused in a sentence."""

    @pytest.fixture
    def models(self, tmp_path: Path) -> tuple[Any, Any]:
        """One through two spans, and the same as it is."""
        folder = checkpoints.make("llama", tmp_path, n_layers=4)
        spans = [LoadedSpan(folder, Span(*ends), torch.float32) for ends in ((0, 2), (2, 4))]

        def open_session(batch: int, max_tokens: int, tuned: Any) -> Any:
            LocalChain.n_open += 1
            return LocalChain(spans, max_tokens)

        LocalChain.n_open = 0
        remote = remote_model(folder, open_session, lanes=None)  # type: ignore[arg-type]
        return remote, AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    @pytest.mark.parametrize(
        "settings",
        [
            {"guidance_scale": 1.5},
            {"guidance_scale": 3.0, "negative_prompt_ids": torch.tensor([[7, 8, 9]])},
            {"guidance_scale": 1.5, "use_cache": False},
            {"use_cache": False},
            {"guidance_scale": 0.5, "do_sample": True, "top_k": 50},
        ],
    )
    def test_guidance_and_no_cache_give_the_same_text(
        self,
        settings: dict[str, Any],
        models: tuple[Any, Any],
    ) -> None:
        texts = []
        for model in models:
            torch.manual_seed(0)
            options = {"do_sample": False, **settings, "max_new_tokens": 8, "min_new_tokens": 8}
            texts.append(model.generate(torch.arange(3, 9).unsqueeze(0), **options).tolist())
        assert texts[0] == texts[1]
        assert LocalChain.n_open == 0, "each session is closed"

    def test_a_text_after_guidance_is_the_models_own_again(self, models: tuple[Any, Any]) -> None:
        remote, local = models
        ids = torch.arange(3, 9).unsqueeze(0)
        remote.generate(ids, guidance_scale=2.0, max_new_tokens=4, do_sample=False)
        plain = [model.generate(ids, max_new_tokens=8, do_sample=False).tolist() for model in (remote, local)]
        assert plain[0] == plain[1]

    @pytest.mark.parametrize("name", ["output_hidden_states", "output_attentions"])
    def test_what_stays_on_servers_is_refused_in_a_sentence(self, name: str, models: tuple[Any, Any]) -> None:
        remote, _ = models
        ids = torch.arange(3, 9).unsqueeze(0)
        for ask in (
            lambda: remote(ids, **{name: True}),
            lambda: remote.generate(ids, max_new_tokens=2, return_dict_in_generate=True, **{name: True}),
        ):
            with pytest.raises(ConfigError, match=f"{name}: .* stay on the servers"):
                ask()
        assert LocalChain.n_open == 0
        assert remote(ids).logits.shape == (1, 6, 320)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_the_clients_part_in_another_dtype_asks_the_swarm_in_its_own(
        self, dtype: torch.dtype, models: tuple[Any, Any]
    ) -> None:
        remote, local = models
        ids = torch.arange(3, 9).unsqueeze(0)
        with torch.no_grad():
            expected = local(ids).logits
            got = remote.to(dtype)(ids).logits
        assert got.dtype == dtype
        torch.testing.assert_close(got.float(), expected, rtol=0, atol=0.02 * float(expected.abs().max()))
        assert remote.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False).shape == (1, 10)


@pytest.mark.filterwarnings("ignore")  # what a family warns of is its own affair
def test_the_logits_that_are_wanted_come_as_from_the_whole(tmp_path: Path) -> None:
    """Also where a family's decoder would leave out the other tokens before its last layers (Gemma 4)."""
    torch.set_num_threads(1)
    folder = families.make_named("gemma4_text with shared keys", tmp_path)
    families.lay_out(folder)
    whole: Any = skeleton.load_whole(folder, torch.float32)
    spans = [LoadedSpan(folder, Span(0, 3), torch.float32)]
    lanes: Any = None  # nothing is trained
    model = remote_model(folder, lambda batch, tokens, own: LocalSession(spans, tokens), lanes, torch.float32)
    ids = torch.randint(3, families.VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        asked = {"input_ids": ids, "labels": ids[:, -3:], "logits_to_keep": 3, "use_cache": False}
        ours, theirs = model(**asked), whole(**asked)
        logits = model(ids, logits_to_keep=1, use_cache=False, return_dict=False)[0]
    assert torch.allclose(ours.logits, theirs.logits, atol=1e-5)
    assert torch.allclose(ours.loss, theirs.loss)
    assert torch.allclose(logits, theirs.logits[:, -1:], atol=1e-5)
