"""The state of a run: the optimizers' arithmetic, snapshots that stay as they are, files that may lie."""

from __future__ import annotations

import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from swarmd.compute.runs.inner_steps import take_step
from swarmd.errors import ConfigError, Refused
from swarmd.plan.runs.ballot import Acceptor
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.models.manifest import model_id
from swarmd.protocol.runs.commit import Commit, CountedContribution
from swarmd.protocol.runs.recipe import Optimizer, Recipe, Run, start_run
from swarmd.train.store.disk import RunFolder, read_vectors
from swarmd.train.vectors import state as states
from swarmd.train.vectors.averages import clip_factor
from swarmd.train.vectors.scratch import Scratch
from swarmd.train.vectors.state import RunState, VectorLayout, average_digest
from swarmd.train.vectors.sums import squares_of
from tests.train.world import torch_optimizer

OWNER = Identity(b"o" * 32)
N = 3_000_000  # three chunks of 4 MiB


def run_with(optimizer: Optimizer) -> Run:
    recipe = Recipe("r", "0" * 64, "1" * 64, optimizer=optimizer, anchors=(OWNER.peer_id,))
    return start_run(recipe, OWNER, 1)


def state_of(optimizer: Optimizer, n: int = N, dtype: str = "float32") -> RunState:
    rng = np.random.default_rng(0)
    layout = VectorLayout((("w", (n // 2, 1)), ("b", (n - n // 2,))), dtype)
    state = RunState(run_with(optimizer), layout, rng.standard_normal(n).astype(dtype), 10**9)
    state.measure()
    return state


def commit_for(state: RunState, average: np.ndarray, learning_rate: float) -> Commit:
    digest = average_digest(state.run.id, state.head, average)
    counted = (CountedContribution("p", state.epoch, 1, 1.0, 1.0),)
    return Commit(state.run.genesis, state.epoch + 1, state.head, 0, counted, digest, state.root, learning_rate)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(
    "optimizer",
    [
        Optimizer(kind="sgd", learning_rate=0.1),
        Optimizer(kind="sgd", learning_rate=0.1, momentum=0.9, weight_decay=0.0),
        Optimizer(kind="adamw", learning_rate=0.01, weight_decay=0.1),
    ],
)
def test_optimizers_do_what_torch_does(optimizer: Optimizer, dtype: str) -> None:
    state = state_of(optimizer, 1000, dtype)
    w = torch.tensor(state.parameters[:500].reshape(500, 1), requires_grad=True)
    b = torch.tensor(state.parameters[500:].copy(), requires_grad=True)
    theirs = torch_optimizer(optimizer, {"w": w, "b": b})
    rng = np.random.default_rng(1)
    for step in range(1, 20):
        average = rng.standard_normal(1000).astype(dtype)
        state.apply(commit_for(state, average, optimizer.learning_rate), bytes([step] * 32), average, step)
        w.grad, b.grad = torch.tensor(average[:500].reshape(500, 1)), torch.tensor(average[500:].copy())
        theirs.step()
    expected = torch.cat([w.flatten(), b]).detach().numpy()
    bound = 1e-5 if dtype == "float32" else 1e-13
    assert np.linalg.norm(state.parameters - expected) <= bound * np.linalg.norm(expected)


def muon_state(dtype: str = "float32", kind: str = "muon", **settings: Any) -> RunState:
    """A matrix of a layer, three experts of one, a filter, an embedding and a norm."""
    tensors = (
        ("layers.0.w.weight", (12, 20)),
        ("layers.0.experts.weight", (3, 20, 8)),
        ("layers.0.conv.weight", (20, 1, 4)),
        ("embed.weight", (30, 4)),
        ("layers.0.norm.weight", (8,)),
    )
    layout = VectorLayout(tensors, dtype)
    rng = np.random.default_rng(0)
    parameters = rng.standard_normal(layout.n_elements).astype(dtype)
    state = RunState(run_with(Optimizer(kind=kind, momentum=0.95, **settings)), layout, parameters, 10**9)
    state.measure()
    return state


def cut(vector: np.ndarray, state: RunState) -> dict[str, torch.Tensor]:
    return {
        name: torch.tensor(vector[start:end].reshape(shape)) for name, shape, start, end in state.layout.tensor_ranges()
    }


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_muon_turns_matrices_of_layers_and_the_rest_has_adamw(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(states, "BLOCK_ELEMENTS", 100)  # borders of blocks lie within tensors
    state = muon_state(dtype, learning_rate=0.01, weight_decay=0.1, beta2=0.99)
    theirs = {name: torch.nn.Parameter(values) for name, values in cut(state.parameters, state).items()}
    moments = {name: list(cut(np.zeros_like(state.parameters), state).values()) for name in ("moment1", "moment2")}
    rng = np.random.default_rng(1)
    for step in range(1, 8):
        average = rng.standard_normal(len(state.parameters)).astype(dtype)
        state.apply(commit_for(state, average, 0.01), bytes([step] * 32), average, step)
        for parameter, gradient in zip(theirs.values(), cut(average, state).values(), strict=True):
            parameter.grad = gradient
        take_step(state.run.recipe.optimizer, list(theirs), list(theirs.values()), moments, 0.01, step)
    for name, ours in cut(state.parameters, state).items():
        assert torch.allclose(ours, theirs[name].detach(), atol=1e-5), name


def test_nesterov_looks_one_gradient_ahead() -> None:
    """Dozat 2016, algorithm 2, with constant momentum, and AdamW's decay."""
    optimizer = Optimizer(learning_rate=0.01, nesterov=True, beta1=0.8, beta2=0.9)
    state = state_of(optimizer, 100, "float64")
    expected, first, second = state.parameters.copy(), np.zeros(100), np.zeros(100)
    rng = np.random.default_rng(1)
    for step in range(1, 8):
        average = rng.standard_normal(100)
        state.apply(commit_for(state, average, 0.01), bytes([step] * 32), average, step)
        first = 0.8 * first + 0.2 * average
        second = 0.9 * second + 0.1 * average**2
        ahead = 0.8 * first / (1 - 0.8 ** (step + 1)) + 0.2 * average / (1 - 0.8**step)
        expected -= 0.01 * ahead / (np.sqrt(second / (1 - 0.9**step)) + 1e-8)
    assert np.allclose(state.parameters, expected, rtol=1e-12)


def test_a_step_of_muon_is_as_long_as_one_of_adamw_usually_is() -> None:
    state = muon_state(learning_rate=0.01)
    before = state.parameters[:240].copy()
    average = np.random.default_rng(1).standard_normal(len(state.parameters)).astype(np.float32)
    state.apply(commit_for(state, average, 0.01), bytes(32), average, 1)
    step = before - state.parameters[:240]
    assert 0.1 * 0.01 < np.sqrt(np.mean(step**2)) < 0.4 * 0.01
    values = np.linalg.svd(step.reshape(12, 20), compute_uv=False)
    assert values.max() / values.min() < 1.9, "every direction counts alike"


def test_snapshot_stays_as_it_is_while_training_goes_on() -> None:
    state = state_of(Optimizer(kind="adamw"))
    snapshot, root = state.freeze(), state.root
    before = {i: vector.tobytes() for i, vector in enumerate(state.vectors.values())}
    average = np.ones(N, np.float32)
    for step in (1, 2):
        state.apply(commit_for(state, average, 0.01), bytes([step] * 32), average, step)
    assert state.root != root
    for i, entry in enumerate(snapshot.manifest.tensors):
        chunks = [snapshot.read((i, c)) for c in range(len(entry.chunks))]
        assert all(entry.is_chunk(c, data) for c, data in enumerate(chunks))
        assert b"".join(chunks) == before[i]
    assert snapshot.kept_bytes == 3 * 4 * N
    with pytest.raises(Refused):
        snapshot.read((0, 99))
    with pytest.raises(Refused):
        snapshot.read((9, 0))
    state.is_changing = True
    with pytest.raises(Refused, match="changes"):
        state.freeze()


def test_averages_are_kept_for_those_who_missed_them() -> None:
    state = state_of(Optimizer(kind="sgd"), 1000)
    state._average_limit_bytes = 8_000
    for step in range(1, 5):
        average = np.full(1000, step, np.float32)
        state.apply(commit_for(state, average, 0.01), bytes([step] * 32), average, step)
    assert sorted(state.averages) == [3, 4]
    kept = state.averages[4]
    assert model_id(kept.manifest) == kept.digest.hex()
    assert kept.manifest.tensors[0].is_chunk(0, kept.read((0, 0)))
    with pytest.raises(Refused):
        kept.read((0, 1))


def test_averages_that_others_may_have_missed_take_no_memory(tmp_path: Path) -> None:
    layout = VectorLayout((("w", (N,)),), "float32")
    state = RunState(run_with(Optimizer(kind="sgd")), layout, np.zeros(N, np.float32), 10**9, tmp_path)
    state.measure()
    averages = {step: np.full(N, step, np.float32) for step in (1, 2, 3)}
    commits = {}
    tracemalloc.start()
    for step in averages:
        commits[step] = commit_for(state, averages[step], 0.01)
        state.apply(commits[step], bytes([step] * 32), averages[step].copy(), step)
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < state.parameters.nbytes // 4
    assert not [*tmp_path.iterdir()], "a kill leaves nothing behind"
    for step, values in averages.items():
        found = state.find(commits[step].average)
        assert found is not None
        assert found.read((0, 1)) == values[2**20 : 2**21].tobytes()


def test_an_average_that_no_disk_takes_stays_in_memory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = np.zeros(2**21)
    assert Scratch(tmp_path / "missing").write_out(values) is values
    assert "are kept in memory" in caplog.text


def test_the_norm_of_a_long_vector_is_not_short() -> None:
    """In float32 alone, this one's sum of squares is a hundredth of a percent off; longer ones' half a percent."""
    values = np.random.default_rng(0).standard_normal(10**7, dtype=np.float32) * np.float32(1e-4)
    expected = float(np.sum(np.square(values.astype(np.float64))))
    assert squares_of(values) == pytest.approx(expected, rel=1e-6)
    assert clip_factor(values, 0.1) == pytest.approx(0.1 / expected**0.5, rel=1e-6)


def test_clip_factor() -> None:
    assert clip_factor(np.array([3.0, 4.0]), 1.0) == pytest.approx(0.2)
    assert clip_factor(np.array([0.3, 0.4]), 1.0) == 1.0
    assert clip_factor(np.array([3.0, 4.0]), 0.0) == 1.0


def test_checkpoints_come_back_and_damage_is_named(tmp_path: Path) -> None:
    state, folder = state_of(Optimizer(kind="adamw"), 5000), RunFolder(tmp_path)
    for epoch in (1, 2, 3):
        state.move_to(epoch, bytes([epoch] * 32), epoch)
        folder.save(state.freeze(), 2)
    saved = folder.saved()
    assert [s.epoch for s in saved] == [3, 2]
    assert saved[0].root == state.root
    vectors = read_vectors(saved[0].path, "float32", 5000, tuple(state.vectors))
    assert all((vectors[name] == vector).all() for name, vector in state.vectors.items())
    with pytest.raises(ConfigError, match="float64"):
        read_vectors(saved[0].path, "float64", 5000, tuple(state.vectors))
    with saved[0].path.open("r+b") as file:
        file.truncate(100)
    with pytest.raises(ConfigError, match=saved[0].path.name):
        read_vectors(saved[0].path, "float32", 5000, tuple(state.vectors))


def test_ledger_file_that_was_cut_off_keeps_what_is_whole(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    for raw in (b"one", b"two", b"three"):
        folder.append_commit(raw)
    path = tmp_path / "ledger.bin"
    os.truncate(path, path.stat().st_size - 2)
    assert list(folder.commits()) == [b"one", b"two"]
    folder.append_commit(b"again")
    assert list(folder.commits()) == [b"one", b"two", b"again"]


def test_anchor_remembers_its_promise_or_refuses_to_start(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    assert folder.acceptor() is None
    promised = Acceptor(b"p" * 32, (3, "a/1"), (2, "b/1"), b"body")
    folder.keep_acceptor(promised)
    assert folder.acceptor() == promised
    (tmp_path / "anchor.bin").write_bytes(b"damaged")
    with pytest.raises(ConfigError, match="promised"):
        folder.acceptor()


def test_state_is_the_old_one_until_the_new_one_has_its_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others are told meanwhile is one update's number with that update's digest."""
    state = state_of(Optimizer(kind="sgd"), 1000)
    before, seen = state.version, []
    describe = states.describe_vectors

    def watched(*arguments: Any) -> Any:
        seen.append(state.version)
        return describe(*arguments)

    average = np.ones(1000, np.float32)
    commit = commit_for(state, average, 0.1)
    monkeypatch.setattr(states, "describe_vectors", watched)
    state.apply(commit, bytes(32), average, 1)
    assert seen == [before]
    assert (state.version.epoch, state.version.root) != (before.epoch, before.root)
