"""Does anybody suspect a healthy peer while everything is busy? Generates for a while and counts.

    python benchmarks/alarms.py [--minutes 60] [--clients 3]

The bundled model on three hops with a replacement that holds everything; that many clients generate without a pause,
each from its own thread, on a machine with fewer cores than busy processes. A false alarm is a repair, or a peer that
was blamed: nothing is ever stopped or killed here.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
import torch

import swarmd

sys.path.insert(0, str(Path(__file__).parent.parent))
from tests.real.harness import local_swarm

N_TOKENS = 200


def generate(invite: str, ends_at: float, found: Counter[str], seed: int) -> None:
    ids = torch.randint(3, 1024, (1, 32), generator=torch.Generator().manual_seed(seed))
    with swarmd.connect(invite) as client:
        model: Any = client.model("demo", lookup=False)
        while time.monotonic() < ends_at:
            model.generate(input_ids=ids, max_new_tokens=N_TOKENS, min_new_tokens=N_TOKENS, do_sample=False)
            statistics = model.last_session.statistics
            found["generations"] += 1
            found["repairs"] += len(statistics.repairs)
            for peer, reason in statistics.blamed:
                found["blamed"] += 1
                print(f"false alarm: {peer[-8:]}: {reason}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm:
        swarm.serving((0, 2), (2, 4), (4, 6), (0, 6))
        ends_at = time.monotonic() + 60 * options.minutes
        psutil.cpu_percent()
        threads = [
            threading.Thread(target=generate, args=(swarm.invite(), ends_at, found, seed))
            for seed in range(options.clients)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        busy = psutil.cpu_percent()
    print(
        f"{options.minutes:g} minutes, {options.clients} clients, CPU {busy:.0f} % busy: "
        f"{found['generations']} generations of {N_TOKENS} tokens, {found['repairs']} repairs, "
        f"{found['blamed']} peers blamed"
    )


if __name__ == "__main__":
    main()
