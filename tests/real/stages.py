"""Runs in stages with real daemons: start one, watch it, and compute again on one machine what its ledgers say."""

from __future__ import annotations

import copy
import itertools
import os
import re
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from swarmd.plan.runs.ledger import Ledger
from swarmd.protocol.runs import commit as commits
from swarmd.protocol.runs.commit import Commit
from swarmd.train.store.disk import RunFolder, known_runs
from swarmd.values import PeerId
from tests.real.harness import LocalSwarm, Volunteer
from tests.real.training import _backward, _rows, start_run, tiny_model, wait_know
from tests.train.world import torch_optimizer

Draw = tuple[str, int, bool]
_NUMBERS = itertools.count()


def start_in_stages(volunteer: Volunteer, n_stages: int, size: dict[str, Any] | None = None, **settings: Any) -> None:
    """Start a run in stages of blocks, of a small model of four blocks unless ``size`` says otherwise."""
    layers = {"num_hidden_layers": 4, "layer_types": ["full_attention"] * 4}
    model = tiny_model(volunteer.home.folder / "in-stages", **(size or layers))
    more = f"stages = {n_stages}\n{settings.pop('more', '')}"
    start_run(volunteer, settings.pop("name", "run"), model=model, more=more, **settings)


@dataclass(frozen=True)
class MemoryLimit:
    """A control group; ``inside`` starts a program in it."""

    folder: Path

    @property
    def inside(self) -> tuple[str, ...]:
        return ("sh", "-c", f'echo $$ > {self.folder}/cgroup.procs; exec "$@"', "sh")


@contextmanager
def memory_limit(n_bytes: int) -> Iterator[MemoryLimit]:
    """A control group whose processes have so much memory together, pages of files among it."""
    v1 = Path("/sys/fs/cgroup/memory")
    root, name = (v1, "memory.limit_in_bytes") if v1.is_dir() else (Path("/sys/fs/cgroup"), "memory.max")
    folder = root / f"swarmd-test-{os.getpid()}-{next(_NUMBERS)}"
    try:
        folder.mkdir()
        (folder / name).write_text(str(n_bytes))
    except OSError as error:
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield MemoryLimit(folder)
    finally:
        for _ in range(100):
            try:
                folder.rmdir()
                break
            except OSError:  # its processes are on their way out
                time.sleep(0.1)


def memory_of(volunteer: Volunteer) -> dict[str, int]:
    """The peak memory of a daemon and of its workers, in MB, shared vectors included in both."""
    assert volunteer.process is not None
    workers = {f"worker {stage}": row["worker"] for stage, row in rows_of(volunteer).items() if row["worker"]}
    peaks = {}
    for name, pid in {"daemon": volunteer.process.pid, **workers}.items():
        status = Path(f"/proc/{pid}/status").read_text()
        peaks[name] = int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) // 1_000
    return peaks


def rows_of(volunteer: Volunteer, name: str = "run") -> dict[int, dict[str, Any]]:
    """What a daemon says of each stage that it keeps anything of."""
    return {r["stage"]: r for r in volunteer.ask("train")["runs"] if r["name"] == name}


def held_by(volunteer: Volunteer, name: str = "run") -> list[int]:
    """The stages that a volunteer holds."""
    return [stage for stage, row in rows_of(volunteer, name).items() if row["role"] == "train"]


def join_stage(swarm: LocalSwarm, volunteer: Volunteer, stage: int | None = None, name: str = "run") -> None:
    """Have a volunteer hold a stage of another peer's run, as soon as it knows it."""
    wait_know(swarm, volunteer, name)
    chosen = {} if stage is None else {"stage": str(stage)}
    volunteer.ask("train/join", "POST", name=name, role="train", **chosen)


def update_of(volunteer: Volunteer, name: str = "run") -> int:
    """The update whose state all stages that a volunteer holds have."""
    held = [row for row in rows_of(volunteer, name).values() if row["role"] == "train"]
    return min((row["state_update"] or 0 for row in held), default=0)


def wait_stages(swarm: LocalSwarm, volunteers: list[Volunteer], update: int, within_s: float = 120.0) -> None:
    """Wait until all that these hold is at an update, or past it."""
    swarm.wait(lambda: min(map(update_of, volunteers)) >= update, f"update {update} of all stages", within_s=within_s)


def folders_of(volunteers: list[Volunteer], name: str = "run") -> dict[int, list[RunFolder]]:
    """The folders of each stage, of all volunteers that keep anything of it."""
    found = defaultdict(list)
    for volunteer in volunteers:
        for folder in known_runs(volunteer.home.runs).values():
            run = folder.run()
            if run.recipe.name == name and run.stage is not None:
                found[run.stage].append(folder)
    return found


def ledger_in(folder: RunFolder) -> Ledger:
    """Read and verify the ledger of one stage."""
    ledger = Ledger(folder.run())
    anchors = {0: tuple(PeerId(a) for a in ledger.run.recipe.anchors)}
    for raw in folder.commits():
        ledger.add(commits.read_untrusted(raw, anchors))
    return ledger


def ledgers_of(volunteers: list[Volunteer], name: str = "run") -> dict[int, Ledger]:
    """The longest ledger of each stage; all tell one story."""
    longest = {}
    for stage, folders in folders_of(volunteers, name).items():
        ledgers = sorted(map(ledger_in, folders), key=lambda ledger: ledger.epoch)
        for ledger in ledgers:
            digests = [sealed.digest for sealed in ledger.sealed]
            assert digests == [sealed.digest for sealed in ledgers[-1].sealed[: ledger.epoch]]
        longest[stage] = ledgers[-1]
    return longest


def draws_of(commit: Commit) -> Counter[Draw]:
    """Whose draws a commit has counted, which of them late, and how often each."""
    counted: Counter[Draw] = Counter()
    for draws in commit.draws:
        for drawn in draws:
            counted.update((drawn.driver, drawn.first + k, drawn.is_late) for k in range(drawn.n))
    return counted


class Replay:
    """One machine that computes what the ledgers of all stages say, with torch's own optimizers."""

    def __init__(self, ledgers: dict[int, Ledger], model_folder: Path, data: Path) -> None:
        self.clips: list[float] = []
        self._ledgers = ledgers
        recipe = ledgers[0].run.recipe
        self._rows = _rows(recipe, data)
        self.model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).train()
        named = dict(self.model.named_parameters())
        n_blocks = self.model.config.num_hidden_layers
        borders = (*recipe.first_blocks, n_blocks)
        self.names: dict[int, list[str]] = {stage: [] for stage in ledgers}
        for name in named:
            block = re.search(r"layers\.(\d+)\.", name)
            inside = [s for s in range(1, len(borders)) if block and borders[s - 1] <= int(block[1]) < borders[s]]
            self.names[inside[0] if inside else 0].append(name)
        self._named = named
        self._before = copy.deepcopy(self.model)
        self._before_named = dict(self._before.named_parameters())
        self._optimizers = {s: torch_optimizer(recipe.optimizer, {n: named[n] for n in self.names[s]}) for s in ledgers}
        self.update = 0
        self._kept: dict[tuple[int, int], tuple[dict[str, torch.Tensor], dict[str, Any]]] = {}
        self._keep()

    def advance(self) -> None:
        """Take one update of all stages."""
        by_stage = {s: ledger.sealed[self.update].commit for s, ledger in self._ledgers.items()}
        draws = {s: draws_of(commit) for s, commit in by_stage.items()}
        groups: dict[tuple[int, ...], list[Draw]] = defaultdict(list)
        for draw in sorted(set().union(*draws.values())):
            groups[tuple(draws[s][draw] for s in sorted(draws))].append(draw)
        total = {name: torch.zeros_like(p) for name, p in self._named.items()}
        for times, group in groups.items():
            self.model.zero_grad()
            self._before.zero_grad()
            for peer, draw, is_late in group:
                model = self._before if is_late else self.model
                _backward(model, self._rows, peer, range(draw, draw + 1), 1)
            for s, n in zip(sorted(draws), times, strict=True):
                for name in self.names[s]:
                    for named in (self._named, self._before_named):
                        if named[name].grad is not None:
                            total[name] += named[name].grad * n
        with torch.no_grad():
            for name, parameter in self._named.items():
                self._before_named[name].copy_(parameter)
        limit = self._ledgers[0].run.recipe.clip_norm
        means = {
            name: total[name] / max(1, commit.n_samples) for s, commit in by_stage.items() for name in self.names[s]
        }
        norm = float(torch.stack([mean.double().square().sum() for mean in means.values()]).sum().sqrt())
        clip = min(1.0, limit / norm) if limit and norm else 1.0  # no norm: no stage had samples
        self.clips.append(clip)
        for s, commit in by_stage.items():
            restored = self._ledgers[s].restored_epoch(commit)
            if restored is not None:
                if restored != self.update:
                    self._restore(s, restored)
                continue
            for name in self.names[s]:
                self._named[name].grad = means[name] * clip
            self._optimizers[s].step()
        self.update += 1
        self._keep()

    def _keep(self) -> None:
        """Keep the state of stages that go on from it later."""
        for s, ledger in self._ledgers.items():
            if any(ledger.restored_epoch(sealed.commit) == self.update for sealed in ledger.sealed[self.update + 1 :]):
                parameters = {name: self._named[name].detach().clone() for name in self.names[s]}
                self._kept[s, self.update] = parameters, copy.deepcopy(self._optimizers[s].state_dict())

    def _restore(self, stage: int, update: int) -> None:
        parameters, moments = self._kept[stage, update]
        with torch.no_grad():
            for name, values in parameters.items():
                self._named[name].copy_(values)
        self._optimizers[stage].load_state_dict(moments)

    def vector(self, stage: int) -> np.ndarray:
        """The parameters of a stage, as its state has them."""
        return torch.cat([self._named[name].detach().flatten() for name in self.names[stage]]).numpy()


def errors_of_replay(
    volunteers: list[Volunteer], starter: Volunteer, exported: torch.nn.Module | None = None, name: str = "run"
) -> dict[tuple[int, int], float]:
    """Relative L2 between each checkpoint of each stage and the ledgers replayed up to there, by stage and update.

    ``exported``: the model that was taken home at the end; its stages are those of the newest update or one before.
    """
    ledgers = ledgers_of(volunteers, name)
    saved = {}
    for stage, folders in folders_of(volunteers, name).items():
        for folder in folders:
            for checkpoint in folder.saved():
                with safe_open(str(checkpoint.path), "np") as file:
                    saved[stage, checkpoint.epoch] = np.asarray(file.get_tensor("parameters"))
    home = starter.home.folder
    replay = Replay(ledgers, home / "models" / f"{name}-0", next((home / "data").glob(f"{name}-*")))
    named = dict(exported.named_parameters()) if exported is not None else {}
    errors = {}
    last = min(ledger.epoch for ledger in ledgers.values())
    while replay.update < last:
        replay.advance()
        for stage, names in replay.names.items():
            expected = replay.vector(stage)
            if (stage, replay.update) in saved:
                errors[stage, replay.update] = _relative(saved[stage, replay.update], expected)
            if named and last - replay.update < 2:
                found = torch.cat([named[name].detach().flatten() for name in names]).numpy()
                errors[stage, -1] = min(errors.get((stage, -1), 1.0), _relative(found, expected))
    return errors


def _relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))
