"""A swarm of daemons that trains, for tests and benchmarks: start a run, slow a worker down, replay the ledger."""

from __future__ import annotations

import copy
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from swarmd.compute.runs.inner_steps import take_step
from swarmd.home.models import bundled_folder
from swarmd.plan.runs.ledger import Ledger
from swarmd.plan.runs.samples import row_of, shard_of
from swarmd.protocol.models import manifest
from swarmd.protocol.runs import commit as commits
from swarmd.protocol.runs.recipe import Recipe
from swarmd.train.gradients.source import InnerStep
from swarmd.train.store.data import read_shard, rows_of_shards
from swarmd.train.store.disk import RunFolder, known_runs
from swarmd.values import PeerId
from swarmd.weights.folder import ModelFolder
from tests.real import forks
from tests.real.harness import LocalSwarm, Volunteer
from tests.train.replaying import counted_of, replay_diloco
from tests.train.world import check_chains, torch_optimizer

ROOT = Path(__file__).parent.parent.parent
RECIPE = """
name = "{name}"
model = "{model}"
data = "{root}/examples/caesar.jsonl"
precision = "{precision}"
anchors = [{anchors}]
audit = {audit}
{more}
[optimizer]
{optimizer}
[batch]
target = {target}
micro = 2
tokens = 48
[stop]
steps = {steps}
[checkpoints]
every = {every}
"""
TINY = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "layer_types": ["full_attention"] * 2,
    "dtype": "float32",
}
# how peers are synchronised, and by which way numbers come together: keys of a recipe, for ``more``
MODES = {
    "step": "",
    "grid": 'topology = "grid"',
    "ring": 'topology = "ring"',
    "delayed": 'synchronisation = "delayed"',
    "diloco": 'synchronisation = "diloco"\ndiloco = {batch = 4}',
    "streamed": 'synchronisation = "diloco"\ndiloco = {batch = 4, fragments = 3}',
    "thinned": 'synchronisation = "diloco"\ndiloco = {batch = 4, fragments = 2}\nparts = {codec = "topk"}',
}
OPTIMIZERS = {
    "sgd": 'kind = "sgd"\nlearning_rate = 0.02\nmomentum = 0.9',
    "muon": 'kind = "muon"\nlearning_rate = 0.001\nweight_decay = 0.1',
    "adamw": 'kind = "adamw"\nlearning_rate = 0.0005\nweight_decay = 0.1',
}


def command(volunteer: Volunteer, *arguments: str, code: int = 0) -> str:
    """Run ``swarmd`` as a user of that machine would; returns what it printed."""
    done = forks.Command("--home", str(volunteer.home.folder), *arguments).finish()
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def tiny_model(folder: Path, **size: Any) -> Path:
    """A configuration without weights, and the bundled model's tokenizer: a run makes its own first weights."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {**json.loads((bundled_folder() / "config.json").read_text()), **TINY, **size}
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(bundled_folder() / name, folder / name)
    return folder


def start_run(
    volunteer: Volunteer, name: str, anchors: list[Volunteer] | None = None, role: str = "train", **settings: Any
) -> None:
    """Write a recipe and start it. ``optimizer``: one of ``OPTIMIZERS``, or its table; ``more``: other keys.

    Nothing is computed again unless ``audit`` says so: tests count what is computed.
    """
    chosen = {
        "audit": 0,
        "optimizer": "sgd",
        "precision": "float32",
        "target": 32,
        "steps": 1000,
        "every": 1000,
        **settings,
    }
    chosen.setdefault("more", "")
    chosen["optimizer"] = OPTIMIZERS.get(chosen["optimizer"], chosen["optimizer"])
    chosen.setdefault("model", tiny_model(volunteer.home.folder / "tiny"))
    listed = ", ".join(f'"{a.peer}"' for a in anchors or [])
    path = volunteer.home.folder / f"{name}.toml"
    path.write_text(RECIPE.format(name=name, root=ROOT, anchors=listed, **chosen))
    command(volunteer, "train", "start", str(path), "--role", role)


def run_of(volunteer: Volunteer, name: str = "run") -> dict[str, Any]:
    """What a daemon says of one run."""
    return next(r for r in volunteer.ask("train")["runs"] if r["name"] == name)


def wait_update(swarm: LocalSwarm, volunteers: list[Volunteer], update: int, name: str = "run") -> None:
    """Wait until all of them have the state of an update, or a later one; ten at a time may take a while."""

    def least() -> int:
        return min(run_of(v, name)["state_update"] or 0 for v in volunteers)

    while (now := least()) < update:
        swarm.wait(lambda n=now: least() >= min(update, n + 10), f"update {min(update, now + 10)} of {name} everywhere")  # type: ignore[misc]


def wait_know(swarm: LocalSwarm, volunteer: Volunteer, name: str) -> None:
    """Wait until a run of another peer is known."""

    def there() -> bool:
        said = volunteer.ask("train")
        return any(o["name"] == name for o in [*said["others"], *said["runs"]])

    swarm.wait(there, f"{name} known")


def join(swarm: LocalSwarm, volunteers: list[Volunteer], name: str = "run", role: str = "train") -> None:
    """Have volunteers take part in a run of another peer, as soon as they know it."""
    for volunteer in volunteers:
        wait_know(swarm, volunteer, name)
        volunteer.ask("train/join", "POST", name=name, role=role)


def start_together(swarm: LocalSwarm, volunteers: list[Volunteer], name: str, **settings: Any) -> None:
    """Have the first volunteer start a run, and nobody compute before all have loaded the model."""
    first = volunteers[0]
    start_run(first, name, role="anchor" if "anchors" not in settings else "reduce", **settings)
    command(first, "train", "stop", name, "--all")
    for volunteer in volunteers[1:]:  # of a run that nobody takes part in nobody hears
        wait_know(swarm, volunteer, name)
    first.ask("train/leave", "POST", name=name)
    join(swarm, volunteers, name)
    swarm.wait(lambda: all(run_of(v, name)["state_update"] is not None for v in volunteers), f"{name} loaded by all")
    for volunteer in volunteers:  # else who hears of it first is updates ahead before the others begin
        volunteer.ask("train/pause", "POST", name=name)
    command(first, "train", "resume", name, "--all")
    swarm.wait(lambda: all(run_of(v, name)["state"] == "paused here" for v in volunteers), f"{name} to be resumed")
    for volunteer in volunteers:
        volunteer.ask("train/unpause", "POST", name=name)


def is_back(volunteer: Volunteer) -> bool:
    """Has a daemon that was started again found its runs?"""
    try:
        return bool(volunteer.ask("train")["runs"])
    except httpx.TransportError:
        return False


@contextmanager
def slowed(volunteer: Volunteer, name: str = "run", share: float = 0.25) -> Iterator[None]:
    """Let a training worker run for a share of the time only."""
    done = threading.Event()

    def drive() -> None:
        while not done.is_set():
            try:
                pid = run_of(volunteer, name)["worker"]
            except (AssertionError, StopIteration, OSError):
                return
            end = time.monotonic() + 2
            while pid and time.monotonic() < end and not done.is_set():
                try:
                    os.kill(pid, signal.SIGSTOP)
                    done.wait(0.08 * (1 - share))
                    os.kill(pid, signal.SIGCONT)
                    done.wait(0.08 * share)
                except ProcessLookupError:
                    break

    thread = threading.Thread(target=drive)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def folder_of(volunteer: Volunteer, name: str = "run") -> RunFolder:
    return next(f for f in known_runs(volunteer.home.runs).values() if f.run().recipe.name == name)


def ledger_of(volunteer: Volunteer, name: str = "run") -> Ledger:
    """Read and verify the ledger on a volunteer's disk."""
    folder = folder_of(volunteer, name)
    ledger = Ledger(folder.run())
    anchors = {0: tuple(PeerId(a) for a in ledger.run.recipe.anchors)}
    for raw in folder.commits():
        ledger.add(commits.read_untrusted(raw, anchors))
    return ledger


def check_ledgers(volunteers: list[Volunteer], name: str = "run") -> Ledger:
    """All tell one story, no sample is in it twice; returns the longest."""
    return check_chains([ledger_of(v, name) for v in volunteers])


def check_states(volunteers: list[Volunteer], name: str = "run") -> None:
    """Who holds the state of the same update holds the same bits."""
    seen: dict[int, str] = {}
    for volunteer in volunteers:
        said = run_of(volunteer, name)
        assert seen.setdefault(said["state_update"], said["state_digest"]) == said["state_digest"]


def parameters_of(volunteer: Volunteer, name: str = "run") -> np.ndarray:
    """The parameters in the newest checkpoint on a volunteer's disk."""
    with safe_open(str(folder_of(volunteer, name).saved()[0].path), "np") as file:
        return np.asarray(file.get_tensor("parameters"))


def error_of_replay(volunteer: Volunteer, name: str = "run") -> tuple[float, int]:
    """Relative L2 between a volunteer's newest checkpoint and its ledger replayed up to there, and its update."""
    epoch, ledger = folder_of(volunteer, name).saved()[0].epoch, ledger_of(volunteer, name)
    home = volunteer.home.folder
    again = replay_steps if ledger.run.recipe.synchronisation == "diloco" else replay
    expected = again(ledger, home / "models" / f"{name}-0", next((home / "data").glob(f"{name}-*")), epoch)
    found = parameters_of(volunteer, name)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected)), epoch


def replay(ledger: Ledger, model_folder: Path, data: Path, epoch: int) -> np.ndarray:
    """What one machine comes to that computes every sample of the first updates, with torch's own optimizers."""
    recipe = ledger.run.recipe
    rows = _rows(recipe, data)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=getattr(torch, recipe.precision)).train()
    parameters = [p for _, p in model.named_parameters()]
    optimizer = torch_optimizer(recipe.optimizer, dict(model.named_parameters()))
    before = copy.deepcopy(model)
    for sealed in ledger.sealed[:epoch]:
        optimizer.zero_grad()
        before.zero_grad()
        for c, late, _ in counted_of(sealed.commit):
            for on, first, end in ((before, 0, late), (model, late, c.n)):
                if first < end:
                    _backward(on, rows, c.peer, range(c.first + first, c.first + end), sealed.commit.n_samples)
        earlier = list(before.parameters())
        for p, old in zip(parameters, earlier, strict=True):
            if old.grad is not None:
                p.grad = old.grad.clone() if p.grad is None else p.grad + old.grad
            old.data.copy_(p.data)
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in parameters]).numpy()


def replay_steps(ledger: Ledger, model_folder: Path, data: Path, epoch: int) -> np.ndarray:
    """The same for a DiLoCo run: every step that a peer took by itself, and the outer ones."""
    recipe = ledger.run.recipe
    rows = _rows(recipe, data)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=getattr(torch, recipe.precision)).train()
    parameters = [p for _, p in model.named_parameters()]
    sizes = [p.numel() for p in parameters]

    def pieces(vector: np.ndarray) -> list[torch.Tensor]:
        split = torch.split(torch.from_numpy(vector), sizes)
        return [v.view(p.shape) for v, p in zip(split, parameters, strict=True)]

    def take(inner: dict[str, np.ndarray], peer: str, draws: range, step: InnerStep) -> None:
        for parameter, values in zip(parameters, pieces(inner["local"]), strict=True):
            parameter.data = values
        for at in range(0, len(draws), recipe.batch.micro):
            _backward(model, rows, peer, draws[at : at + recipe.batch.micro], len(draws))
        moments = {name: pieces(inner[name]) for name in recipe.optimizer.moments}
        names = [name for name, _ in model.named_parameters()]
        take_step(recipe.optimizer, names, parameters, moments, step.learning_rate, step.number)

    first = torch.cat([p.detach().flatten() for p in parameters]).numpy()
    return replay_diloco(ledger, first, take, epoch)


def _backward(model: torch.nn.Module, rows: Any, peer: str, draws: range, n_samples: int) -> None:
    """Add the gradients of some draws, each a share of ``n_samples``."""
    tokens = torch.as_tensor(np.stack([rows(peer, draw) for draw in draws])).long()
    logits = model(tokens[:, :-1], use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="none")
    (losses.view(len(tokens), -1).mean(1).sum() / n_samples).backward()


def _rows(recipe: Recipe, data: Path) -> Any:
    """The row of each draw."""
    folder = ModelFolder(data, manifest.read_folder(data))
    shard_rows = rows_of_shards(folder.manifest, recipe.batch.tokens)
    shards = [read_shard(folder, i) for i in range(len(shard_rows))]

    def row(peer: str, draw: int) -> np.ndarray:
        shard, place = shard_of(row_of(recipe.seed, peer, draw, shard_rows), shard_rows)
        return shards[shard][place]

    return row
