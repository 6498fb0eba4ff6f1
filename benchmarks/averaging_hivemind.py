"""One of four hivemind peers for benchmarks/averaging.py; runs in an environment where hivemind is installed."""

import json
import os
import sys
import time
from pathlib import Path

import hivemind
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.utils import get_dht_time

GROUP = {"prefix": "bench", "target_group_size": 4, "min_group_size": 4, "min_matchmaking_time": 2.0}

if __name__ == "__main__":
    rank, n, rounds = map(int, sys.argv[1:])
    meeting = Path(os.environ["MEETING"])
    local = ["/ip4/127.0.0.1/tcp/0"]
    if rank == 0:
        dht = hivemind.DHT(start=True, host_maddrs=local)
        meeting.write_text(json.dumps([str(a) for a in dht.get_visible_maddrs()]))
    else:
        while not (meeting.exists() and meeting.read_text()):
            time.sleep(0.1)
        time.sleep(1)
        dht = hivemind.DHT(start=True, host_maddrs=local, initial_peers=json.loads(meeting.read_text()))
    averager = DecentralizedAverager([torch.randn(n)], dht, start=True, **GROUP)
    for turn in range(rounds + 1):
        control = averager.step(wait=False, scheduled_time=get_dht_time() + 3, require_trigger=True, timeout=60)
        while control.stage.name not in ("AWAITING_TRIGGER", "RUNNING_ALLREDUCE", "FINISHED"):
            time.sleep(0.002)
        begun = time.perf_counter()
        control.allow_allreduce()
        control.result(60)
        if turn:
            print(time.perf_counter() - begun, flush=True)
    time.sleep(3)
    averager.shutdown()
    dht.shutdown()
