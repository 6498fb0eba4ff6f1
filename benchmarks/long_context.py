"""32,000 tokens through three servers, one of which is killed at their end; and 100 sessions that begin alike.

    python -m benchmarks.long_context [--tokens 32000, or 0 for none] [--sessions 100] [--prefix 1000]

SmolLM2 with its longest context set higher: what it says there makes no sense, what it costs does. First: time to the
first token, tokens/s after it, memory of the workers (PSS), and what a SIGKILL of the last server costs then; another
one holds the same blocks. The answer has to be that of the same prompt with nobody killed. Second: sessions one after
the other that begin with the same tokens and differ by 16 at the end, and as many that have nothing in common: time to
first token (medians, without each member's first), and what all of them add to the workers' memory. They are those of
two members, in turns, for a server takes 64 of one; members share nothing with each other.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import torch

import swarmd
from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.smollm2 import smollm2

SPANS = ((0, 10), (10, 20), (20, 30), (20, 30))
N_NEW = 24
N_BEFORE = 12  # tokens, then the server is killed
N_MEMBERS = 2  # whose sessions they are
N_OWN = 16  # tokens of a session behind the common ones


class Watch:
    """A streamer that notes when tokens came, and acts when ``at`` of them have come."""

    def __init__(self, at: int = 0, act: Callable[[], None] = lambda: None) -> None:
        self.times: list[float] = []
        self._at, self._act = at, act

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        if len(self.times) == self._at + 1:  # the first is the prompt
            self._act()

    def end(self) -> None:
        pass

    @property
    def steps_s(self) -> list[float]:
        return [b - a for a, b in zip(self.times[1:], self.times[2:], strict=False)]


def longer(folder: Path, n_tokens: int) -> Path:
    """The real model with a longer context."""
    shutil.copytree(smollm2(), folder)
    config = json.loads((folder / "config.json").read_text())
    config["max_position_embeddings"] = max(n_tokens + 1_024, config["max_position_embeddings"])
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def pss_mib(volunteer: Volunteer) -> float:
    """Of a daemon's worker."""
    children = psutil.Process(volunteer.process.pid).children(recursive=True)  # type: ignore[union-attr]
    return float(sum(p.memory_full_info().pss for p in children)) / 2**20


def long_one(swarm: LocalSwarm, volunteers: list[Volunteer], ids: torch.Tensor) -> None:
    chain = swarm.hops(*((v, *span) for v, span in zip(volunteers[:3], SPANS, strict=False)))
    before = [pss_mib(v) for v in volunteers]
    with swarmd.connect(home=volunteers[0].home.folder) as client:
        model = client.model("long", lookup=False, chain=chain)

        def run(watch: Watch) -> torch.Tensor:
            options: dict[str, Any] = {"do_sample": False, "max_new_tokens": N_NEW, "min_new_tokens": N_NEW}
            return model.generate(ids, attention_mask=torch.ones_like(ids), streamer=watch, **options)  # type: ignore[no-any-return]

        held: list[float] = []
        calm = Watch(N_NEW - 1, lambda: held.extend(pss_mib(v) for v in volunteers))
        begun = time.perf_counter()
        expected = run(calm)
        first_s = calm.times[1] - begun
        print(f"{ids.shape[1]} tokens: first token after {first_s:.1f} s ({ids.shape[1] / first_s:.0f} tokens/s), then")
        print(f"  {1 / statistics.median(calm.steps_s):.1f} tokens/s; workers' PSS grew by", end=" ")
        print(", ".join(f"{b - a:.0f}" for a, b in zip(before, held, strict=True)), "MiB", flush=True)
        victim = volunteers[2].process
        assert victim is not None
        struck = Watch(N_BEFORE, lambda: os.kill(victim.pid, signal.SIGKILL))
        same = torch.equal(run(struck), expected)
        (repair,) = model.last_session.statistics.repairs
        print(f"  the last server killed after {N_BEFORE} tokens: longest step {max(struck.steps_s):.1f} s, ", end="")
        print(f"{repair.reason}; the text is {'the same' if same else 'another'}", flush=True)


def many(swarm: LocalSwarm, volunteers: list[Volunteer], n_sessions: int, n_prefix: int, is_shared: bool) -> None:
    live = [volunteers[0], volunteers[1], volunteers[3]]  # the third was killed
    chain = swarm.hops(*((v, *span) for v, span in zip(live, SPANS, strict=False)))
    torch.manual_seed(int(is_shared))
    common = torch.randint(3, 49_000, (1, n_prefix))
    before = sum(map(pss_mib, live))
    with ExitStack() as stack, torch.no_grad():
        members = [stack.enter_context(swarmd.connect(home=v.home.folder)) for v in volunteers[:N_MEMBERS]]
        models = [member.model("long", chain=chain) for member in members]
        caches, times = [], []
        for at in range(n_sessions):
            model = models[at % N_MEMBERS]
            own = torch.randint(3, 49_000, (1, N_OWN if is_shared else n_prefix + N_OWN))
            ids = torch.cat([common, own], 1) if is_shared else own
            caches.append(model.new_cache(n_prefix + 64))
            begun = time.perf_counter()
            model(ids, past_key_values=caches[-1], logits_to_keep=1)
            times.append(time.perf_counter() - begun)
        grown = sum(map(pss_mib, live)) - before
        for cache in caches:
            cache.close()
    name = "share" if is_shared else "do not share"
    first_s = statistics.median(times[N_MEMBERS:])
    print(f"{n_sessions} sessions that {name} {n_prefix} tokens: first token after {first_s:.2f} s", end="")
    print(f" (the first: {times[0]:.2f} s); together {grown:.0f} MiB on three servers", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_000)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--prefix", type=int, default=1_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root, local_swarm(Path(root) / "swarm") as swarm:
        models = {"long": longer(Path(root) / "long", options.tokens)}
        room = str(4 * options.sessions * (options.prefix + 64) + options.tokens)  # a member has half of it at most
        volunteers = swarm.serving(*SPANS, model="long", models=models, SWARMD_CACHE_TOKENS=room)
        torch.manual_seed(7)
        if options.tokens:
            long_one(swarm, volunteers, torch.randint(3, 49_000, (1, options.tokens - N_NEW)))
        for is_shared in (True, False):
            many(swarm, volunteers, options.sessions, options.prefix, is_shared)


if __name__ == "__main__":
    main()
