"""SmolLM2 served by a team of two daemons and by an ordinary server: a member is killed in mid-answer, and the stall.

    python -m benchmarks.team_kills [--rounds 5]

Each process has one thread; the answer begins at the team, whose chain is given. Told are the longest step after the
kill of the follower's process, whether the text is that of the undisturbed run, and steps of both servers. Last the
same without another holder of the blocks: the answer waits for the worker and its team to be back.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

import swarmd
from benchmarks.long_context import Watch
from tests.real.harness import Volunteer, local_swarm
from tests.real.smollm2 import smollm2

N_NEW, KILLED_AFTER = 60, 20
OPTIONS = {"do_sample": False, "max_new_tokens": N_NEW, "min_new_tokens": N_NEW}


def kill_follower(volunteer: Volunteer) -> None:
    (row,) = volunteer.ask("status")["following"]
    os.kill(row["pid"], signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    ids = torch.randint(3, 40_000, (1, 12), generator=torch.Generator().manual_seed(3))
    with tempfile.TemporaryDirectory() as root, local_swarm(Path(root)) as swarm:
        founder = swarm.add("--no-serve", models={"model": smollm2()})
        leader = swarm.prepare("--serve", "model", "--blocks", "0:30")
        follower = swarm.add("--no-serve", SWARMD_FOLLOW=leader.peer)
        leader.environment |= {"SWARMD_TEAM": "1:1", "SWARMD_TEAM_PEERS": follower.peer}
        leader.start()
        swarm.wait(lambda: leader.is_listening, "the leader", leader)
        (alone,) = swarm.serving((0, 30), model="model")

        def generate(server: Volunteer, steps: Watch) -> torch.Tensor:
            with swarmd.connect(home=founder.home.folder) as client:
                model: Any = client.model("model", lookup=False, chain=swarm.hops((server, 0, 30)))
                tokens: torch.Tensor = model.generate(ids, streamer=steps, **OPTIONS)
            return tokens

        calm, together = Watch(), Watch()
        expected = generate(alone, calm)
        print(f"alone: {1000 * statistics.median(calm.steps_s):.1f} ms a step")
        assert torch.equal(generate(leader, together), expected)
        print(f"team:  {1000 * statistics.median(together.steps_s):.1f} ms a step", flush=True)
        stalls = []
        for _ in range(options.rounds):
            swarm.wait_online()
            struck = Watch(KILLED_AFTER - 1, lambda: kill_follower(follower))
            assert torch.equal(generate(leader, struck), expected)
            stalls.append(max(struck.steps_s))
            print(f"killed: {stalls[-1]:.2f} s, the text is the same", flush=True)
        print(f"killed, another holder: {statistics.median(stalls):.2f} s (at most {max(stalls):.2f})", flush=True)
        alone.stop()
        swarm.wait(lambda: leader.ask("status")["worker"]["state"] == "online", "the team")
        struck = Watch(KILLED_AFTER - 1, lambda: kill_follower(follower))
        assert torch.equal(generate(leader, struck), expected)
        print(f"killed, no other holder: {max(struck.steps_s):.1f} s, the text is the same")


if __name__ == "__main__":
    main()
