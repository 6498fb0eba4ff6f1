"""From ``swarmd up`` to the first served token, and what a serving peer weighs.

    python benchmarks/startup.py [--trials 3]

serving.py's checkpoint lies on the disk; a founder and a client are running. Time runs from starting the volunteer's
process to the client having one token from it. Memory is the proportional set size of daemon and worker, less the
weights and the caches of what was served.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path

import psutil
import torch

import swarmd

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.serving import make_checkpoint
from tests.real.harness import Volunteer, local_swarm


def memory_mib(server: Volunteer) -> tuple[float, int]:
    """PSS of a daemon and all its children in MiB, and how many processes that is."""
    assert server.process is not None
    family = [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]
    return sum(p.memory_full_info().pss for p in family) / 2**20, len(family)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    times, memory, n_processes = [], [], 0
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_checkpoint(Path(folder) / "llama", 512)
        layers_mib = (
            sum(p.stat().st_size for p in checkpoint.glob("*.safetensors")) / 2**20 - 2 * 32_000 * 512 * 4 / 2**20
        )
        for number in range(options.trials):
            with local_swarm(Path(folder) / str(number)) as swarm:
                founder = swarm.add("--no-serve", models={"bench": checkpoint})
                with swarmd.connect(home=founder.home.folder) as client:
                    ids = torch.arange(3, 19).unsqueeze(0)
                    server = swarm.prepare("--serve", "bench", "--blocks", "0:8", models={"bench": checkpoint})
                    begun = time.perf_counter()
                    server.start()
                    model = client.model("bench", lookup=False, wait_s=60)
                    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1)
                    times.append(time.perf_counter() - begun)
                    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=100, min_new_tokens=100)
                    total, n_processes = memory_mib(server)
                    caches = 116 * 8 * 2 * 512 * 4 / 2**20
                    memory.append(total - layers_mib - caches)
    print(
        f"swarmd up to first served token: median {statistics.median(times):.1f} s ({min(times):.1f}-{max(times):.1f})"
    )
    print(f"memory beyond weights and caches: median {statistics.median(memory):.0f} MiB PSS, {n_processes} processes")


if __name__ == "__main__":
    main()
