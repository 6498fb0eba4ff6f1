"""What each codec of a round's numbers saves, takes, and costs in loss: the bundled model's architecture, from scratch.

    python benchmarks/codecs.py [--steps 800] [--only NAME ...]

Four peers in this process, without a network and so without chance: the worker's own gradients and inner steps, the
daemon's own coding, error feedback, averaging and optimizer. Every line trains on the same samples, ``--steps`` times
four of each peer; ``step`` averages after each of them, ``diloco`` after a hundred. Bytes are those of contributions,
and of what an average travels as.
"""

from __future__ import annotations

import argparse
import math
import runpy
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from swarmd.compute.runs.gradients import TrainedModel, build
from swarmd.home.models import bundled_folder
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.runs.commit import Commit
from swarmd.protocol.runs.recipe import LOCAL, Batch, Diloco, Optimizer, Parts, Recipe, start_run
from swarmd.train.vectors.codecs import codec_of
from swarmd.train.vectors.coded_sums import reduce_contributions
from swarmd.train.vectors.error_feedback import Feedback
from swarmd.train.vectors.inner_steps import InnerOptimizer
from swarmd.train.vectors.state import RunState, Vector, VectorLayout
from swarmd.train.vectors.work import UncountedWork

EXAMPLES = Path(__file__).parent.parent / "examples"
N_PEERS = 4
BATCH = 4  # samples of a peer in a step
TOKENS = 64
INNER_STEPS = 100
FRAGMENTS = 10
N_HELD_OUT = 256  # rows that nobody trains on
SEED = 7
ADAMW = Optimizer(learning_rate=1e-3, beta2=0.98, clip_norm=1.0)
LEAVING_OUT = ("topk", "powersgd", "significance")


@dataclass
class Peer:
    """What one peer has of its own."""

    work: UncountedWork
    feedback: Feedback
    vectors: dict[str, Vector]
    inner: InnerOptimizer | None
    rows: torch.Tensor
    first: int = 0


@dataclass
class Measured:
    """Bytes of one peer's contributions and of the averages, and seconds spent coding and reading."""

    given: int = 0
    reduced: int = 0
    code_s: float = 0.0
    read_s: float = 0.0
    losses: list[float] = field(default_factory=list)


class Swarm:
    """Peers that train one model by a recipe, in this process."""

    def __init__(self, recipe: Recipe, model: Path, rows: torch.Tensor, folder: Path) -> None:
        me = Identity(b"b" * 32)
        run = start_run(replace(recipe, anchors=(me.peer_id,)), me, 1)
        self.recipe, self.codec = recipe, codec_of(recipe)
        self.trained = TrainedModel(build(model, recipe), recipe, "cpu")
        self.layout = VectorLayout(tuple(self.trained.layout), recipe.precision)
        path = folder / "vectors"
        n, names = self.layout.n_elements, recipe.shared_vectors
        shared = np.memmap(path, np.float32, "w+", shape=(len(names), n))
        self.trained.map(path, init=True)
        self.shared: dict[str, Vector] = dict(zip(names, shared, strict=True))
        self.state = RunState(run, self.layout, self.shared["parameters"], 0)
        self.measured = Measured()
        self.peers = [self._peer(i, rows[i::N_PEERS]) for i in range(N_PEERS)]

    def _peer(self, i: int, rows: torch.Tensor) -> Peer:
        work = UncountedWork(f"p{i}", self.recipe.overlaps)
        own: dict[str, Vector] = {}
        if self.recipe.steps_inside:
            own = {name: np.zeros(self.layout.n_elements, np.float32) for name in self.recipe.shared_vectors[1:]}
        inner = InnerOptimizer(self.state, own) if own else None
        return Peer(work, Feedback(self.recipe, self.state), own, inner, rows)

    def update(self, n_steps: int) -> None:
        """Have every peer take ``n_steps`` steps, and average once."""
        for peer in self.peers:
            self._compute(peer, n_steps)
        given, n_samples = [], 0
        for peer in self.peers:
            begun = time.perf_counter()
            offered = peer.feedback.code(peer.work.offered, math.inf)
            assert offered.coded is not None
            payload = bytes(offered.coded.payload(0, self.state.n_averaged))
            self.measured.code_s += time.perf_counter() - begun
            self.measured.given += len(payload)
            begun = time.perf_counter()
            values = self.codec.read(payload, self.state.n_averaged)[0]
            self.measured.read_s += time.perf_counter() - begun
            given.append((values, payload))
            n_samples += offered.n
            peer.first = offered.end
            peer.feedback.settle(offered, is_counted=True)
        average: Vector = np.empty(self.state.n_averaged, np.float32)
        self.measured.reduced += len(reduce_contributions(self.codec, given, n_samples, average))
        self._apply(average)

    def _apply(self, average: Vector) -> None:
        norm, limit = float(np.linalg.norm(average)), self.recipe.clip_norm
        commit = Commit(
            run=b"",
            epoch=self.state.epoch + 1,
            parent=b"",
            generation=0,
            contributors=(),
            average=b"",
            state=b"",
            learning_rate=self.recipe.learning_rate(self.state.steps + 1),
            clip=min(1.0, limit / norm) if limit else 1.0,
        )
        self.state.apply(commit, bytes(32), average, self.state.steps + 1)

    def _compute(self, peer: Peer, n_steps: int) -> None:
        """What one peer computes of its own rows before a round, and offers to it."""
        peer.work = UncountedWork("", self.recipe.overlaps)
        if peer.inner is None:
            rows = peer.rows[peer.first : peer.first + BATCH * n_steps]
            loss = self.trained.compute(rows, 0, 0, is_fresh=True)
            peer.work.add(peer.first, len(rows), loss, self.shared["sum0"])
            peer.work.offer()
            self.measured.losses.append(loss / len(rows))
            return
        peer.inner.follow(peer.work, peer.first)
        self._exchange(peer.vectors, self.shared)
        at, total = peer.first, 0.0
        for _ in range(n_steps):
            peer.inner.steps += 1
            rate = self.recipe.learning_rate(self.state.steps + 1)
            total += self.trained.step(peer.rows[at : at + BATCH], at, peer.inner.steps, rate)
            at += BATCH
        self._exchange(self.shared, peer.vectors)
        peer.inner.is_anew = False
        peer.work.add(peer.first, at - peer.first, total, peer.vectors[LOCAL])
        peer.work.offer(peer.inner.contribution)
        self.measured.losses.append(total / (at - peer.first))

    def _exchange(self, source: dict[str, Vector], target: dict[str, Vector]) -> None:
        for name in self.recipe.shared_vectors[1:]:
            target[name][:] = source[name]

    def held_out(self, rows: torch.Tensor) -> float:
        """Mean loss in nats a token, of the parameters that all have."""
        if self.recipe.steps_inside:
            self.shared[LOCAL][:] = self.state.parameters
        with torch.inference_mode():
            logits = self.trained.model(input_ids=rows[:, :-1], use_cache=False).logits
            return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


def recipes() -> dict[str, Recipe]:
    """The lines of the table."""
    base = Recipe("bench", "0" * 64, "1" * 64, optimizer=ADAMW, batch=Batch(1, BATCH, TOKENS), seed=SEED)
    found = {}
    for codec in ("none", "float16", "int8", *LEAVING_OUT):
        parts = Parts(codec=codec)  # type: ignore[arg-type]
        found[f"step {codec}"] = replace(base, parts=parts)
        # the memory of what was left out takes the place of the outer momentum (SparseLoCo)
        outer = Diloco(BATCH, 1.0, 0.0) if codec in LEAVING_OUT else Diloco(BATCH)
        found[f"diloco {codec}"] = replace(base, parts=parts, synchronisation="diloco", diloco=outer)
    streamed = Diloco(BATCH, fragments=FRAGMENTS)
    found["diloco streamed"] = replace(base, synchronisation="diloco", diloco=streamed)
    return found


def read_rows() -> torch.Tensor:
    text = runpy.run_path(str(EXAMPLES / "train_bundled_model.py"))["corpus"]()
    ids = torch.tensor(AutoTokenizer.from_pretrained(bundled_folder())(text)["input_ids"])
    rows = ids[: len(ids) // (TOKENS + 1) * (TOKENS + 1)].view(-1, TOKENS + 1)
    return rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(SEED))]


def bare_model(folder: Path) -> Path:
    """The bundled model's configuration with first weights of its own."""
    torch.manual_seed(SEED)
    config = AutoConfig.from_pretrained(bundled_folder())
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    torch.set_num_threads(2)
    rows = read_rows()
    held_out, rows = rows[:N_HELD_OUT], rows[N_HELD_OUT:]
    needed = options.steps * BATCH * N_PEERS
    rows = rows.repeat(-(-needed // len(rows)), 1)[:needed]
    for name, recipe in recipes().items():
        if options.only and name not in options.only:
            continue
        with tempfile.TemporaryDirectory() as folder:
            begun = time.monotonic()
            swarm = Swarm(recipe, bare_model(Path(folder) / "model"), rows, Path(folder))
            n_steps = INNER_STEPS // recipe.fragments if recipe.steps_inside else 1
            n_updates = options.steps // n_steps
            for _ in range(n_updates):
                swarm.update(n_steps)
            said = line(name, swarm, options.steps, swarm.held_out(held_out))
            print(f"{said}  {time.monotonic() - begun:4.0f} s", flush=True)


def line(name: str, swarm: Swarm, steps: int, loss: float) -> str:
    seen, n_bytes = swarm.measured, swarm.layout.n_bytes
    n = swarm.state.epoch * N_PEERS
    per_element = 1e9 / (n * swarm.state.n_averaged)
    whole = steps * N_PEERS * n_bytes
    return (
        f"{name:20} loss {loss:.4f}  last {np.mean(seen.losses[-N_PEERS:]):.4f}"
        f"  contributions 1/{n * 4 * swarm.state.n_averaged / seen.given:.1f}"
        f"  of step in float32 1/{whole / seen.given:.0f}"
        f"  with averages 1/{(whole + steps * n_bytes) / (seen.given + seen.reduced):.0f}"
        f"  code {seen.code_s * per_element:.1f} ns  read {seen.read_s * per_element:.1f} ns an element"
    )


if __name__ == "__main__":
    main()
