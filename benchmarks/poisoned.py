"""Training with two of eight peers attacking: loss, and after how many updates they are found, by defence and attack.

python -m benchmarks.poisoned [--updates 80] [--from 0] [--attack NAME ...] [--defence NAME ...] [--seeds 1 2 3]

The trainers are the real ones, on a simulated network in virtual time; gradients are those of a small Qwen3 (51,424
parameters, hidden 32) on Python's own help (pydoc_data.topics), 64 samples of 48 tokens an update. Attackers behave
until update ``--from``. What is counted: the loss of the swarm's parameters on 256 rows that no update counts, at the
end, beside that of a run that nobody disturbs; how many updates after the attack's begin every honest peer does without
both; and which share of what was computed was computed again.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import torch
import trio
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from trio.testing import MockClock

from swarmd.home.models import bundled_folder
from swarmd.plan.runs.samples import row_of
from swarmd.protocol.runs.recipe import Batch, Optimizer
from swarmd.train.gradients.source import ComputedGradients, InnerStep, RecheckRequest
from swarmd.train.rounds.parts import ReducedPart
from swarmd.train.vectors.state import Vector, VectorLayout
from swarmd.values import PeerId
from tests.real.training import tiny_model
from tests.train.world import Member, TrainingWorld

TOKENS, N_PEERS, N_ATTACKERS, HELD_OUT = 48, 8, 2, 256
Z = 1.5  # standard deviations of honest means: "a little is enough" (Baruch et al. 2019, 1902.06156)
DEFENCES: dict[str, dict[str, Any]] = {
    "none": {},
    "checks": {"audit": 32},
    "clip": {"robust": "clip"},
    "both": {"audit": 32, "robust": "clip"},
}
Attack = Callable[[torch.Tensor, Callable[[], torch.Tensor]], torch.Tensor]
"""Takes the sum of the gradients of some samples, and what gives their standard deviation times their number."""

ATTACKS: dict[str, Attack] = {
    "sign flipped": lambda total, spread: -total,
    "scaled by 7": lambda total, spread: 7 * total,
    "scaled by -7": lambda total, spread: -7 * total,
    "constant": lambda total, spread: torch.full_like(total, float(total.abs().mean())),
    "a little is enough": lambda total, spread: total - Z * spread() / 8**0.5,
    "wrong sums": lambda total, spread: total,
}


class Model:
    """One model for all peers: it is asked for gradients on any parameters."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        with tempfile.TemporaryDirectory() as folder:
            config = AutoConfig.from_pretrained(tiny_model(Path(folder) / "tiny"))
        self.model = AutoModelForCausalLM.from_config(config).float()
        self.parameters = [p for _, p in self.model.named_parameters()]
        tokens = Tokenizer.from_file(str(bundled_folder() / "tokenizer.json"))
        ids = tokens.encode("\n".join(topics[name] for name in sorted(topics))).ids
        n = len(ids) // (TOKENS + 1)
        rows = torch.tensor(ids[: n * (TOKENS + 1)]).view(n, TOKENS + 1)
        order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
        self.held_out, self.rows = rows[order[:HELD_OUT]], rows[order[HELD_OUT:]]
        self.first = torch.cat([p.detach().flatten() for p in self.parameters]).numpy().copy()

    @property
    def layout(self) -> VectorLayout:
        named = [(name, tuple(p.shape)) for name, p in self.model.named_parameters()]
        return VectorLayout(tuple(named), "float32")

    def use(self, vector: Vector) -> None:
        pieces = torch.split(torch.from_numpy(vector), [p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            parameter.data = piece.view(parameter.shape)

    def losses(self, rows: torch.Tensor) -> torch.Tensor:
        logits = self.model(rows[:, :-1], use_cache=False).logits
        flat = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        return flat.view(len(rows), -1).mean(1)

    def gradient(self, rows: torch.Tensor) -> tuple[float, torch.Tensor]:
        self.model.zero_grad()
        loss = self.losses(rows).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return float(loss.detach()), torch.cat([p.grad.flatten() for p in self.parameters if p.grad is not None])

    def evaluate(self, vector: Vector) -> float:
        self.use(vector)
        with torch.no_grad():
            return float(self.losses(self.held_out).mean())


class RealSource:
    """A peer's rows of real text (train.gradients.source.Source). ``attack``: what it gives for single gradients."""

    def __init__(self, model: Model, seed: int, peer: str, sample_s: float) -> None:
        self.model, self.sample_s, self._peer, self._seed = model, sample_s, peer, seed
        self.attack: Attack | None = None
        self._sum: Vector = np.zeros_like(model.first)

    async def open(self) -> tuple[VectorLayout, Vector]:
        await trio.sleep(0.5)
        self.parameters = self.model.first.copy()
        return self.model.layout, self.parameters

    def inner_vectors(self) -> dict[str, Vector]:
        return {}

    async def compute(self, first: int, n: int, is_fresh: bool, step: InnerStep | None) -> ComputedGradients:
        frozen = self.parameters.copy()
        await trio.sleep(n * self.sample_s)
        self.model.use(frozen)
        rows = self._rows(self._peer, first, n)
        loss, total = self.model.gradient(rows)
        if self.attack is not None:
            total = self.attack(total, lambda: self._spread(rows))
        self._sum = total.numpy().copy() if is_fresh else self._sum + total.numpy()
        return ComputedGradients(n, loss, self._sum)

    @property
    def why_not_again(self) -> str:
        return ""

    def prepare_recheck(self, parameters: Vector) -> RecheckRequest:
        return RecheckRequest(parameters.copy(), np.zeros_like(parameters))

    async def compute_again(self, again: RecheckRequest, peer: str, first: int, n: int) -> float:
        await trio.sleep(n * self.sample_s)
        self.model.use(again.parameters)
        loss, total = self.model.gradient(self._rows(peer, first, n))
        again.total += total.numpy()
        return loss

    def _rows(self, peer: str, first: int, n: int) -> torch.Tensor:
        return self.model.rows[
            [row_of(self._seed, peer, draw, (len(self.model.rows),)) for draw in range(first, first + n)]
        ]

    def _spread(self, rows: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.model.gradient(row[None])[1] for row in rows]).std(0) * len(rows)

    async def close(self) -> None: ...


class World(TrainingWorld):
    """Members whose gradients are those of a real model."""

    def __init__(self, nursery: trio.Nursery, seed: int, model: Model, **recipe: Any) -> None:
        self.model = model
        super().__init__(nursery, seed, 1, len(model.first), **recipe)

    def make_source(self, peer: PeerId, sample_s: float) -> Any:
        return RealSource(self.model, self.recipe.seed, peer, sample_s)


@dataclass
class Outcome:
    """``found_after``: updates; None: not by all. ``again``: samples computed again, of all that were counted."""

    loss: float
    found_after: int | None
    again: float
    n_accused: int
    seconds: float


def spoil_sums(member: Member) -> None:
    """What this member adds up for others is off by as much as it is large."""
    live = member.trainer.joining.round
    for part in live._parts.values() if live is not None else ():
        part.__class__ = SpoiltPart


class SpoiltPart(ReducedPart):
    """A reducer's part whose averages are not what was given."""

    __slots__ = ()

    def reduce(self, inputs: Any, n_samples: int | None, start: int, end: int, total: Vector) -> Any:
        scale = np.sqrt(np.mean([np.mean(one.values**2) for one in inputs])) if inputs else 0.0
        off = [replace(one, values=one.values + total.dtype.type(scale)) for one in inputs[:1]]
        inputs = [*off, *inputs[1:]]
        return super().reduce(inputs, n_samples, start, end, total)


async def run(model: Model, seed: int, attack: str, defence: str, updates: int, since: int) -> Outcome:
    """One run to ``updates``, with ``attack`` from update ``since`` on ("": none)."""
    recipe = {
        "optimizer": Optimizer(kind="adamw", learning_rate=3e-3),
        "batch": Batch(target=64, micro=8, tokens=TOKENS),
        **DEFENCES[defence],
    }
    async with trio.open_nursery() as nursery:
        world = World(nursery, seed, model, **recipe)
        world.add_anchors()
        members = [world.add() for _ in range(N_PEERS)]
        attackers, honest = members[:N_ATTACKERS] if attack else [], members[N_ATTACKERS:]
        found, begun_at = None, trio.current_time()

        def shunned() -> bool:
            return all({a.peer for a in attackers} <= set(m.trainer.members.shunned()) for m in honest)

        while world.epoch < since:
            await trio.sleep(0.1)
        for attacker in attackers:
            if attack != "wrong sums":
                attacker.source.attack = ATTACKS[attack]  # type: ignore[union-attr]
        begun = world.epoch
        while min(m.trainer.state.epoch if m.trainer.state else 0 for m in honest) < updates:
            for attacker in attackers if attack == "wrong sums" else ():
                spoil_sums(attacker)
            if attackers and found is None and shunned():
                found = world.epoch - begun
            await trio.sleep(0.02 if attack == "wrong sums" else 0.1)
        state = honest[0].trainer.state
        assert state is not None
        again = sum(m.trainer.audits.counts.samples for m in honest) / max(1, world.ledger.n_samples)
        accused = {p for m in honest for p in m.trainer.members.shunned()} - {a.peer for a in attackers}
        took = trio.current_time() - begun_at
        outcome = Outcome(model.evaluate(state.parameters), found, again, len(accused), took)
        nursery.cancel_scope.cancel()
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=80)
    parser.add_argument("--from", dest="since", type=int, default=0)
    parser.add_argument("--attack", nargs="*", choices=list(ATTACKS), default=list(ATTACKS))
    parser.add_argument("--defence", nargs="*", choices=list(DEFENCES), default=list(DEFENCES))
    parser.add_argument("--seeds", nargs="*", type=int, default=[1, 2, 3])
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()  # every liar is told of
    model = Model()
    print(f"{len(model.first):,} parameters; {model.evaluate(model.first):.3f} nats at the beginning")
    print("| attack | defence | loss (median) | found after | computed again | honest ones accused | virtual s |")
    print("|---|---|---|---|---|---|---|")
    for attack in ["", *given.attack]:
        for defence in given.defence:
            outcomes = [
                trio.run(
                    run, model, seed, attack, defence, given.updates, given.since, clock=MockClock(autojump_threshold=0)
                )
                for seed in given.seeds
            ]
            after = ", ".join("not" if o.found_after is None else str(o.found_after) for o in outcomes)
            print(
                f"| {attack or 'nobody'} | {defence} | {statistics.median(o.loss for o in outcomes):.3f} "
                f"| {after if attack else ''} | {statistics.median(o.again for o in outcomes):.1%} "
                f"| {sum(o.n_accused for o in outcomes)} | {statistics.median(o.seconds for o in outcomes):.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
