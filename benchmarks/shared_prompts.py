"""A long prompt through three servers, alone and with a replica of each that shares it; and the replay after a death.

    python -m benchmarks.shared_prompts [--tokens 32000]

SmolLM2 with its longest context set higher, ten blocks a server, each process one thread. Told are *virtual cores*: the
seconds of CPU time of the busiest worker process, as each were on a core of its own; six or eight of them share the two
cores here, so seconds of a clock say nothing. First until the first token; then from the kill of the last server until
the next token, at another holder of its blocks. Logits of the last token are compared with those without replicas.
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

import swarmd
from benchmarks.long_context import SPANS, longer
from tests.real.harness import LocalSwarm, Volunteer, local_swarm

N_NEW = 6


def cpu_s(volunteers: list[Volunteer]) -> dict[int, float]:
    """CPU seconds of all processes that daemons have started, by their ids."""
    found = {}
    for volunteer in volunteers:
        if volunteer.process is None or not psutil.pid_exists(volunteer.process.pid):
            continue
        for child in psutil.Process(volunteer.process.pid).children(recursive=True):
            times = child.cpu_times()
            found[child.pid] = times.user + times.system
    return found


def spent(before: dict[int, float], after: dict[int, float]) -> list[float]:
    """What each process took between two looks, the busiest first."""
    return sorted((s - before.get(pid, 0.0) for pid, s in after.items()), reverse=True)


def start(swarm: LocalSwarm, folder: Path, room: str, has_replicas: bool) -> tuple[list[Volunteer], list[Volunteer]]:
    """Start servers of SPANS, and a replica of each; returns those that serve, and all."""
    swarm.add("--no-serve", models={"long": folder})
    serving, followers = [], []
    for a, b in SPANS:
        server = swarm.prepare("--serve", "long", "--blocks", f"{a}:{b}", SWARMD_CACHE_TOKENS=room)
        if has_replicas:
            follower = swarm.add("--no-serve", SWARMD_FOLLOW=server.peer)
            server.environment |= {"SWARMD_TEAM": "whole", "SWARMD_TEAM_PEERS": follower.peer}
            followers.append(follower)
        server.start()
        swarm.wait(lambda s=server: s.is_listening, "a server", server)
        serving.append(server)
    swarm.wait_online()
    for server in serving:
        print("  ", server.ask("status")["worker"]["team"], flush=True)
    return serving, [*serving, *followers]


def measure(folder: Path, ids: torch.Tensor, has_replicas: bool, place: Path) -> tuple[float, float, torch.Tensor]:
    """The busiest process's seconds until the first token and in the replay, and the logits of the last token."""
    with local_swarm(place) as swarm:
        serving, everybody = start(swarm, folder, str(4 * ids.shape[1]), has_replicas)
        chain = swarm.hops(*((v, *span) for v, span in zip(serving[:3], SPANS, strict=False)))
        looks: list[dict[int, float]] = []
        begun = time.perf_counter()

        def look() -> None:
            looks.append(cpu_s(everybody))
            print(f"   {time.perf_counter() - begun:.0f} s by the clock", flush=True)

        def kill() -> None:
            look()
            os.kill(serving[2].process.pid, signal.SIGKILL)  # type: ignore[union-attr]

        with swarmd.connect(home=swarm.volunteers[0].home.folder) as client, torch.no_grad():
            model: Any = client.model("long", lookup=False, chain=chain)
            look()
            acts: list[Callable[[], None]] = [lambda: None, look, lambda: None, kill, look]
            steps = Steps(acts)
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                streamer=steps,
                do_sample=False,
                max_new_tokens=N_NEW,
                min_new_tokens=N_NEW,
                output_logits=True,
                return_dict_in_generate=True,
            )
    prompt, replay = spent(looks[0], looks[1]), spent(looks[2], looks[3])
    print("   until the first token:", ", ".join(f"{s:.1f}" for s in prompt if s > 1), flush=True)
    print("   in the replay:", ", ".join(f"{s:.1f}" for s in replay if s > 1), flush=True)
    return prompt[0], replay[0], torch.stack(out.logits)


class Steps:
    """A streamer that acts as the prompt, and then each token, comes."""

    def __init__(self, acts: list[Callable[[], None]]) -> None:
        self._acts = acts

    def put(self, value: torch.Tensor) -> None:
        if self._acts:
            self._acts.pop(0)()

    def end(self) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=32_000)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(7)
    ids = torch.randint(3, 49_000, (1, options.tokens))
    found = {}
    with tempfile.TemporaryDirectory() as root:
        folder = longer(Path(root) / "long", options.tokens)
        for has_replicas in (False, True):
            print("with replicas" if has_replicas else "alone", flush=True)
            found[has_replicas] = measure(folder, ids, has_replicas, Path(root) / f"swarm{has_replicas:d}")
    (first_s, replay_s, logits), (shared_s, shared_replay_s, shared_logits) = found[False], found[True]
    error = float((shared_logits - logits).abs().max() / logits.abs().max())
    print(
        f"{options.tokens} tokens: first token {first_s:.1f} and {shared_s:.1f} s ({shared_s / first_s:.2f}); ", end=""
    )
    print(f"replay {replay_s:.1f} and {shared_replay_s:.1f} s ({shared_replay_s / replay_s:.2f}); ", end="")
    print(f"logits differ by {error:.1e} of the largest")


if __name__ == "__main__":
    main()
