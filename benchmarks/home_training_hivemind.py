"""hivemind's peers for benchmarks/home_training.py: started here, and what each of them does.

As a program it is one peer, in an environment where hivemind is installed (1.1.12; nothing of swarmd is imported): a
torch transformer of the shape of Qwen3, with as many parameters as the model that swarmd trains; gradients of rows of
random tokens, and a rest after each micro-batch as swarmd takes it. ``hivemind.Optimizer`` with delayed averaging and
step, as its guide says for slow links. It prints a line for each update: when, which, how many samples of this peer
went into it, and with how many peers they were averaged (1: it is alone; 0: that failed, they count for itself only).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

VOCABULARY = 1024  # of the bundled tokenizer
TOKENS = 48  # of a row, as in tests.real.training
AVERAGING_S = 120.0  # about twice what averaging takes, as the guide says
CODECS = {
    "none": "NoCompression",
    "float16": "Float16Compression",
    "uniform8": "Uniform8BitQuantization",
    "quantile8": "Quantile8BitQuantization",
}
Events = list[dict[str, Any]]


class Peers:
    """Runs four peers for a while. ``command``: a Python, and its PYTHONPATH; ``told`` is what ``peer`` reads."""

    def __init__(
        self,
        command: tuple[str, str],
        insides: Sequence[tuple[str, ...]],
        addresses: Sequence[str],
        told: dict[str, Any],
    ) -> None:
        self._python, self._path = command
        self._insides, self._addresses, self._told = insides, addresses, told

    def run(self, target: int, codec: str, seconds: float, is_alone: bool) -> list[Events]:
        """What each peer printed."""
        with tempfile.TemporaryDirectory() as folder, _processes() as started:
            events: list[Events] = []
            for i, (inside, address) in enumerate(zip(self._insides, self._addresses, strict=True)):
                told = {**self._told, "target": target, "codec": codec, "is_alone": is_alone, "rank": i}
                told |= {"address": address, "meeting": f"{folder}/meeting"}
                command = [*inside, self._python, __file__, json.dumps(told)]
                environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": self._path}
                process = subprocess.Popen(
                    command, stdout=subprocess.PIPE, text=True, env=environment, start_new_session=True
                )
                started.append(process)
                events.append([])
                threading.Thread(target=_read, args=(process, events[-1]), daemon=True).start()
            end = time.monotonic() + seconds
            while time.monotonic() < end and all(process.poll() is None for process in started):
                time.sleep(0.2)
            ended = [process.poll() for process in started]
            if any(code is not None for code in ended):
                print(f"  a peer of hivemind ended before it should: exit codes {ended}", flush=True)
            return [list(each) for each in events]


@contextmanager
def _processes() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes, each with a session of its own, that are ended with all that they started."""
    started: list[subprocess.Popen[str]] = []
    try:
        yield started
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read(process: subprocess.Popen[str], events: Events) -> None:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            events.append(json.loads(line))


def rate_of(events: Sequence[Events], warm_up: int, least_group: int) -> tuple[float, str]:
    """Samples/s that went into averages of ``least_group`` peers or more, after the first updates; and how it went.

    From the first peer's update ``warm_up`` to its last one.
    """
    marks = [event["at"] for event in events[0] if "epoch" in event][warm_up:]
    if len(marks) < 2:
        return 0.0, f"the first peer took part in {len(marks)} updates after the first {warm_up}"
    begun, end = marks[0], marks[-1]
    within = [e for each in events for e in each if "epoch" in e and begun < e["at"] <= end]
    counted = sum(e["n"] for e in within if e["group"] >= least_group)
    computed = sum(e["n"] for each in events for e in each if "computed" in e and begun < e["at"] <= end)
    groups = {size: sum(e["group"] == size for e in within) for size in sorted({e["group"] for e in within})}
    n_updates, n_any = len(marks) - 1, sum(e["n"] for e in within)
    told = (
        f"{n_updates} updates of {(end - begun) / n_updates:.1f} s; {counted} samples counted in averages, "
        f"{n_any} in any update, {computed} computed; contributions by how many averaged: {groups}"
    )
    return counted / (end - begun), told


def rate_alone(events: Events) -> float:
    """Samples/s that a peer computed after its first update: nothing of them can be lost."""
    begun = next((event["at"] for event in events if "epoch" in event), None)
    after = [event for event in events if "computed" in event and begun is not None and event["at"] > begun]
    return sum(event["n"] for event in after) / (after[-1]["at"] - begun) if after and begun is not None else 0.0


# --- a peer, where hivemind is ------------------------------------------------------------------------------------


def _model(told: dict[str, Any]) -> Any:
    """Qwen3's layers in plain torch: grouped by nothing, tied embeddings, norms of queries and keys."""
    import torch
    from torch import nn
    from torch.nn import functional

    hidden, inner, n_heads = told["hidden"], told["inner"], told["heads"]
    size = hidden // n_heads

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.between = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
            self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
            self.query_norm, self.key_norm = nn.RMSNorm(size), nn.RMSNorm(size)
            self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
            self.down = nn.Linear(inner, hidden, bias=False)

        def forward(self, x: Any) -> Any:
            b, t, _ = x.shape
            y = self.before(x)
            q, k, v = (f(y).view(b, t, n_heads, size) for f in (self.query, self.key, self.value))
            q, k, v = self.query_norm(q).transpose(1, 2), self.key_norm(k).transpose(1, 2), v.transpose(1, 2)
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).reshape(b, t, hidden))
            y = self.between(x)
            return x + self.down(functional.silu(self.gate(y)) * self.up(y))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(VOCABULARY, hidden)
            nn.init.normal_(self.embedding.weight, std=0.02)
            self.layers = nn.ModuleList(Layer() for _ in range(told["layers"]))
            self.norm = nn.RMSNorm(hidden)

        def forward(self, tokens: Any) -> Any:
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            return self.norm(x) @ self.embedding.weight.T

    torch.manual_seed(0)
    return Model()


def _optimizer_class() -> Any:
    import hivemind

    class Told(hivemind.Optimizer):
        """hivemind's optimizer, which says what became of each update's samples."""

        n = 0
        has_failed = False

        def _begin_averaging_gradients(self, grad_scaler: Any) -> bool:
            self.n, self.has_failed = self.grad_averager.local_samples_accumulated, False
            self.began_at = self.local_epoch
            has_begun = bool(super()._begin_averaging_gradients(grad_scaler))
            if not has_begun:
                _say(epoch=self.began_at, n=self.n, group=0 if self.tracker.global_progress.num_peers > 1 else 1)
            return has_begun

        def _load_local_gradients_into_optimizer(self) -> None:
            self.has_failed = True
            super()._load_local_gradients_into_optimizer()

        def _average_gradients_and_load_into_optimizer(self, control: Any) -> None:
            super()._average_gradients_and_load_into_optimizer(control)
            group = 0 if self.has_failed else len(control.result(0))
            _say(epoch=self.began_at, n=self.n, group=group)

    return Told


def _say(**event: Any) -> None:
    print(json.dumps({"at": time.monotonic(), **event}), flush=True)


def _dht(told: dict[str, Any]) -> Any:
    import hivemind

    listen = [f"/ip4/{told['address']}/tcp/4118"]
    meeting = Path(told["meeting"])
    if told["is_alone"] or told["rank"] == 0:
        dht = hivemind.DHT(start=True, host_maddrs=listen)
        meeting.with_suffix(f".{told['rank']}").write_text(json.dumps([str(a) for a in dht.get_visible_maddrs()]))
        meeting.with_suffix(f".{told['rank']}").rename(f"{meeting}{told['rank']}")
        return dht
    first = Path(f"{meeting}0")
    while not first.exists():
        time.sleep(0.1)
    return hivemind.DHT(start=True, host_maddrs=listen, initial_peers=json.loads(first.read_text()))


def peer(told: dict[str, Any]) -> None:
    """Train until killed."""
    import hivemind
    import torch
    from hivemind import compression

    torch.set_num_threads(1)
    dht, model = _dht(told), _model(told)
    codec = getattr(compression, CODECS[told["codec"]])()
    run = f"alone{told['rank']}" if told["is_alone"] else "together"
    optimizer = _optimizer_class()(
        dht=dht,
        run_id=run,
        params=model.parameters(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=0.0005, weight_decay=0.1),
        target_batch_size=told["target"],
        batch_size_per_step=told["micro"],
        offload_optimizer=True,
        delay_grad_averaging=True,
        delay_optimizer_step=True,
        average_state_every=told["state_every"],
        grad_compression=codec,
        state_averaging_compression=compression.Float16Compression(),
        matchmaking_time=told["matchmaking_s"],
        averaging_timeout=AVERAGING_S,
        verbose=True,
    )
    n_parameters = sum(p.numel() for p in model.parameters())
    print(f"hivemind {hivemind.__version__}, {n_parameters} parameters", file=sys.stderr, flush=True)
    generator = torch.Generator().manual_seed(told["rank"])
    while True:
        rows = torch.randint(0, VOCABULARY, (told["micro"], TOKENS + 1), generator=generator)
        begun = time.perf_counter()
        optimizer.zero_grad()
        logits = model(rows[:, :-1])
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()).backward()
        took_s = time.perf_counter() - begun
        optimizer.step()
        _say(computed=True, n=told["micro"], step_s=time.perf_counter() - begun - took_s)
        pace_s = told["pace"] or took_s / told["share"]
        time.sleep(max(0.0, pace_s - took_s))


if __name__ == "__main__":
    peer(json.loads(sys.argv[1]))
