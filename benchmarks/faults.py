"""What a user feels when a hop is killed, stopped or drained at 1,000 tokens of context.

    python benchmarks/faults.py [--trials 9]

serving.py's checkpoint; one server holds the first half, two the second. *Killed*: the longest step after a SIGKILL,
less what replaying the lost span takes (1,000 tokens at the prefill speed that the replacement measured). *Stopped*:
the time until a SIGSTOP of the daemon, or of its worker, is noticed and repaired. *Drained*: the stall that the
session saw, and that nothing was computed again.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

import swarmd

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.serving import make_checkpoint
from tests.real.harness import LocalSwarm, Volunteer, local_swarm

CONTEXT = 1_000
KINDS = ("killed", "stopped daemon", "stopped worker", "drained")


def hit(kind: str, victim: Volunteer) -> None:
    if kind == "killed":
        victim.signal(signal.SIGKILL)
    elif kind == "drained":
        victim.ask("drain", "POST")
    else:
        victim.signal(signal.SIGSTOP, kind.split(" ")[1])


def trial(swarm: LocalSwarm, client: Any, kind: str, first: Volunteer, victim: Volunteer) -> tuple[float, Any]:
    """Seconds of the longest step from the blow on, and the session's repair."""
    model = client.model("bench", lookup=False, chain=swarm.hops((first, 0, 4), (victim, 4, 8)))
    ids = torch.randint(3, 32_000, (1, CONTEXT))
    with torch.no_grad():
        cache = model.new_cache(CONTEXT + 200)
        out = model(ids, past_key_values=cache, logits_to_keep=1)
        steps = []
        for step in range(200):
            if step == 10:
                hit(kind, victim)
            begun = time.perf_counter()
            out = model(out.logits[:, -1:].argmax(-1), past_key_values=cache, logits_to_keep=1)
            steps.append(time.perf_counter() - begun)
            if cache.session.statistics.repairs and step > 20:
                break
        repairs = cache.session.statistics.repairs
        for more in repairs[1:]:
            print(f"  one more repair: {more}")
        repair = repairs[0]
        cache.close()
    return max(steps[10:]), repair


def revive(swarm: LocalSwarm, kind: str, victim: Volunteer) -> None:
    if kind == "killed":
        victim.stop()
        victim.start()
        swarm.wait(victim.home.socket.exists, "its control socket", victim)
    elif kind == "stopped daemon":
        victim.signal(signal.SIGCONT)
    elif kind == "drained":
        swarm.wait(lambda: victim.ask("status")["serving"] is None, "the server to be drained")
        victim.ask("resume", "POST")
    swarm.wait_online()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=9)
    parser.add_argument("--kinds", default=",".join(KINDS))
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm:
        checkpoint = make_checkpoint(Path(folder) / "llama", 512)
        first, *others = swarm.serving((0, 4), (4, 8), (4, 8), model="bench", models={"bench": checkpoint})
        with swarmd.connect(home=first.home.folder) as client:
            for kind in options.kinds.split(","):
                stalls = []
                for number in range(options.trials):
                    victim = others[number % 2]
                    stall, repair = trial(swarm, client, kind, first, victim)
                    speed = statistics.median(s.prefill_tokens_per_s or 1.0 for s in client.view().spans)
                    replay = CONTEXT / speed if repair.replayed_tokens else 0.0
                    stalls.append(stall - (replay if kind == "killed" else 0.0))
                    if kind == "drained" and not (repair.handed_over and not repair.replayed_tokens):
                        print(f"  not handed over: {repair}")
                    revive(swarm, kind, victim)
                listed = ", ".join(f"{s:.2f}" for s in sorted(stalls))
                print(
                    f"{kind}: median {statistics.median(stalls):.2f} s, largest {max(stalls):.2f} s ({listed})",
                    flush=True,
                )


if __name__ == "__main__":
    main()
