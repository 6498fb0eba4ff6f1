"""One of four hivemind peers for benchmarks/averaging.py; runs in an environment where hivemind is installed."""

import json
import sys
import tempfile
import time
from pathlib import Path

import hivemind
import torch

if __name__ == "__main__":
    rank, n, rounds = map(int, sys.argv[1:])
    meeting = Path(tempfile.gettempdir()) / "swarmd-bench-hivemind.json"
    if rank == 0:
        meeting.unlink(missing_ok=True)
        dht = hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"])
        meeting.write_text(json.dumps([str(a) for a in dht.get_visible_maddrs()]))
    else:
        time.sleep(1)
        while not meeting.exists() or not meeting.read_text():
            time.sleep(0.1)
        time.sleep(1)
        peers = json.loads(meeting.read_text())
        dht = hivemind.DHT(start=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"], initial_peers=peers)
    averager = hivemind.averaging.DecentralizedAverager(
        [torch.randn(n)],
        dht,
        start=True,
        prefix="bench",
        target_group_size=4,
        min_group_size=4,
        min_matchmaking_time=2.0,
    )
    for _ in range(rounds + 1):
        control = averager.step(
            wait=False, scheduled_time=hivemind.get_dht_time() + 3, require_trigger=True, timeout=60
        )
        while not control.triggered and control.stage.name != "AWAITING_TRIGGER":
            time.sleep(0.005)
        begun = time.perf_counter()
        control.allow_allreduce()
        control.result(60)
        if _:
            print(time.perf_counter() - begun, flush=True)
    time.sleep(3)
    averager.shutdown()
    dht.shutdown()
