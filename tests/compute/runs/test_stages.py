"""A model trained stage by stage adds up the gradients of the whole one, family by family."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from swarmd.compute.runs.gradients import build
from swarmd.compute.runs.stages import TrainedStage, span_of_stage
from swarmd.errors import ConfigError, RemoteProtocolError
from swarmd.plan.trust.equality import bound_of_codec, is_equal
from swarmd.protocol.runs.recipe import Batch, Recipe
from swarmd.protocol.wire.worker import ComputeStage, StageErrors, StageInputs
from swarmd.values import Span
from swarmd.wire.activations import decode_untrusted, encode_activations, encode_gradient
from tests.families import make, make_named

T = 6
# What passes must be right for: scaled embeddings, tied heads, windows, experts, layers of tuples, a recurrence.
FAMILIES = ("llama", "gemma2", "qwen3", "mixtral", "gpt2", "bloom", "mamba")


@dataclass
class Staged:
    """The stages of a model, as their workers hold them."""

    recipe: Recipe
    stages: list[TrainedStage]
    folder: Path
    kept: list[bytes] = field(default_factory=list)

    @classmethod
    def load(cls, model: Path, folder: Path, **recipe: Any) -> Staged:
        settings = {"name": "r", "model": "m", "data": "d", "stages": (0, 1), "batch": Batch(tokens=T), **recipe}
        made = Recipe(**settings)
        stages = [TrainedStage(model, made, stage, "cpu") for stage in range(len(made.first_blocks) + 1)]
        for number, stage in enumerate(stages):
            n = sum(int(np.prod(shape)) for _, shape in stage.layout)
            shared = folder / f"vectors-{number}"
            shared.write_bytes(bytes(len(made.shared_vectors) * 4 * n))
            stage.map(shared, init=True)
        return cls(made, stages, folder)

    def train(self, ids: torch.Tensor, is_fresh: bool = True) -> float:
        """Send a micro-batch there and back; returns its summed loss."""
        rows, n = ids.numpy().tobytes(), len(ids)
        ends, *blocks = self.stages
        _, hidden = ends.compute(ComputeStage("embed", "b"), StageInputs(n, rows))
        entered = []
        for stage in blocks:
            entered.append(hidden)
            _, hidden = stage.compute(ComputeStage("forward", "b"), StageInputs(n, b"", hidden))
        loss, gradient = ends.compute(ComputeStage("head", "b"), StageInputs(n, rows, hidden))
        for stage, came in zip(reversed(blocks), reversed(entered), strict=True):
            _, gradient = stage.compute(ComputeStage("backward", "b", is_fresh), StageInputs(n, b"", came, gradient))
        again, _ = ends.compute(ComputeStage("add", "b", is_fresh), StageInputs(n, rows, hidden, gradient))
        assert again == loss
        return loss

    def sums(self) -> dict[str, torch.Tensor]:
        """What has been added up, by the name of the parameter."""
        return {
            name: piece
            for stage in self.stages
            for (name, _), piece in zip(stage.layout, stage._vectors.cut(stage._vectors.shared["sum0"]), strict=True)
        }


def random_ids(n: int, vocabulary: int) -> torch.Tensor:
    return torch.randint(0, vocabulary, (n, T + 1), dtype=torch.int32, generator=torch.Generator().manual_seed(n))


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(tmp_path_factory.mktemp(request.param))
    make_named(request.param, folder)
    return folder


def test_stages_add_up_the_gradients_of_the_whole_model(family: Path, tmp_path: Path) -> None:
    staged = Staged.load(family, tmp_path)
    whole = build(family, staged.recipe).eval()
    for stage in staged.stages:
        stage._part.model.eval()
    vocabulary = int(whole.get_input_embeddings().weight.shape[0])  # type: ignore[operator]
    total = 0.0
    for n, is_fresh in ((2, True), (1, False)):
        ids = random_ids(n, vocabulary)
        total += staged.train(ids, is_fresh)
        logits = whole(input_ids=ids[:, :-1].long(), use_cache=False).logits.flatten(0, 1).float()
        losses = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten().long(), reduction="none")
        losses.view(n, -1).mean(1).sum().backward()
    sums = staged.sums()
    expected = {name: p.grad for name, p in whole.named_parameters() if p.grad is not None}
    assert expected.keys() <= sums.keys()
    for name, gradient in expected.items():
        assert float((sums[name] - gradient).norm()) <= 1e-4 * float(gradient.norm()) + 1e-7, name


def test_what_entered_blocks_is_computed_again_where_it_is_gone(tmp_path: Path) -> None:
    make_named("llama", tmp_path / "model")
    staged = Staged.load(tmp_path / "model", tmp_path)
    ids = random_ids(2, 60)
    staged.train(ids)
    kept = {name: piece.clone() for name, piece in staged.sums().items()}
    for stage in staged.stages[1:]:
        forward = stage._part.forward  # type: ignore[union-attr]
        stage._part.forward = lambda batch, hidden, seed, forward=forward: forward("another", hidden, seed)  # type: ignore
    with pytest.raises(KeyError):
        staged.train(ids)
    for stage in staged.stages[1:]:
        del stage._part.forward  # type: ignore[union-attr]
        stage._part._kept.clear()  # type: ignore[union-attr]
    staged.train(ids)
    for name, piece in staged.sums().items():
        assert torch.equal(piece, kept[name])


def test_what_drops_out_of_a_block_does_so_in_both_passes(tmp_path: Path) -> None:
    """The gradient is that of what went forward: a step along it changes that by as much as it says."""
    make("gpt2", tmp_path / "model", {"resid_pdrop": 0.5, "attn_pdrop": 0.0})
    stage = Staged.load(tmp_path / "model", tmp_path, stages=(0,)).stages[1]
    shape = (2, T, stage._part.width)
    hidden, gradient, direction = (torch.randn(shape, generator=torch.Generator().manual_seed(k)) for k in range(3))

    def compute(act: Any, hidden: torch.Tensor) -> torch.Tensor:
        inputs = StageInputs(2, b"", encode_activations(hidden, "none"), encode_gradient(gradient, "none"))
        return decode_untrusted(stage.compute(ComputeStage(act, act, seed=7), inputs)[1], shape)

    step = 1e-2
    ahead, behind = (float((compute("forward", hidden + s * direction) * gradient).sum()) for s in (step, -step))
    expected = (ahead - behind) / (2 * step)
    assert float((compute("backward", hidden) * direction).sum()) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("activations", ["none", "float16", "int8", "int4"])
def test_what_another_holder_has_computed_is_compared(tmp_path: Path, activations: Any) -> None:
    make_named("llama", tmp_path / "model")
    settings: dict[str, Any] = {"stages": (0,), "audit": 32, "activations": activations}
    loaded = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        loaded.append(Staged.load(tmp_path / "model", tmp_path / name, **settings).stages)
    (ends, blocks), (ends_again, blocks_again) = loaded
    rows, n = random_ids(2, 60).numpy().tobytes(), 2
    _, entered = ends.compute(ComputeStage("embed", "b"), StageInputs(n, rows))
    _, left = blocks.compute(ComputeStage("forward", "b"), StageInputs(n, b"", entered))
    _, gradient = ends.compute(ComputeStage("head", "b"), StageInputs(n, rows, left))
    _, back = blocks.compute(ComputeStage("backward", "b", is_fresh=True), StageInputs(n, b"", entered, gradient))
    ends.compute(ComputeStage("add", "b", is_fresh=True), StageInputs(n, rows, left, back))
    for stage, again, inputs in (
        (blocks, blocks_again, StageInputs(n, b"", entered, gradient, left, back)),
        (ends, ends_again, StageInputs(n, rows, left, back, entered, gradient)),
    ):
        check = ComputeStage("check", "again", is_fresh=True)
        bound = bound_of_codec(activations)
        errors = _errors_of(again.compute(check, inputs)[1])
        assert is_equal(errors, bound).action, errors
        assert torch.equal(again._vectors.shared["checked"], stage._vectors.shared["sum0"])
        lies = ({"given_forward": inputs.forward}, {"given_backward": inputs.backward}, {"given_forward": b"no tensor"})
        for lie in lies:
            found = _errors_of(again.compute(check, replace(inputs, **lie))[1])
            assert not is_equal(found, bound).action, lie


def _errors_of(raw: bytes) -> NDArray[np.float32]:
    errors = msgspec.msgpack.decode(raw, type=StageErrors)
    return np.array([*errors.forward, *errors.backward], np.float32)


def test_stages_are_cut_where_the_recipe_says(tmp_path: Path) -> None:
    make_named("llama", tmp_path)
    recipe = Recipe(name="r", model="m", data="d", stages=(0, 1))
    n_blocks = span_of_stage(tmp_path, recipe, 2).end
    assert span_of_stage(tmp_path, recipe, 1) == Span(0, 1)
    beyond = Recipe(name="r", model="m", data="d", stages=(0, n_blocks))
    with pytest.raises(ConfigError, match=f"the model has {n_blocks}"):
        span_of_stage(tmp_path, beyond, 1)


@pytest.mark.parametrize("codec", ["none", "float16", "int8", "int4"])
def test_activations_travel_in_the_recipes_codec(codec: str) -> None:
    values = torch.randn(2, 3, 64, generator=torch.Generator().manual_seed(0))
    bound = {"none": 0.0, "float16": 1e-3, "int8": 0.02, "int4": 0.2}[codec]
    hidden = decode_untrusted(encode_activations(values, codec), (2, 3, 64))
    assert float((hidden - values).norm() / values.norm()) <= bound
    gradient = decode_untrusted(encode_gradient(values * 1e-9, codec), (2, 3, 64))
    assert float((gradient * 1e9 - values).norm() / values.norm()) <= max(1e-6, min(bound, 0.02))


@pytest.mark.parametrize(
    ("raw", "what"),
    [
        (b"", "does not parse"),
        (encode_activations(torch.zeros(1, 3, 8), "none"), "expected"),
        (encode_activations(torch.full((2, 3, 8), float("nan")), "none"), "not finite"),
        (encode_activations(torch.zeros(2, 3, 8), "none")[:-4], "does not parse"),
    ],
)
def test_activations_that_cannot_be_are_refused(raw: bytes, what: str) -> None:
    with pytest.raises(RemoteProtocolError, match=what):
        decode_untrusted(raw, (2, 3, 8))
