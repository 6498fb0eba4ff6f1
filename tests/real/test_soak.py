"""Half an hour of everything at once: what never dies grows by nothing, and keeps no handle and no session.

Part of ``make prove``; SOAK_MINUTES changes how long. Two members that stay serve, train together and take
fine-tuning; one has a gateway; a third serves and is killed and started again and again; a fourth fetches a model and
removes it. The curves go where SOAK_CSV says.
"""

from __future__ import annotations

import csv
import os
import signal
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
import torch

import swarmd
from swarmd.errors import SwarmError
from tests import checkpoints
from tests.real import forks, training
from tests.real.gateways import RealGateway, real_gateway
from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.test_tuning import batches, tuned

pytestmark = [pytest.mark.prove, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
MINUTES = float(os.environ.get("SOAK_MINUTES", "30"))
SAMPLE_S, CHURN_S = 5.0, 45.0
GROWTH = 0.05  # of memory, from the sixth after warm-up to the last sixth
SLACK_BYTES = 4 * 2**20  # allocators return whole arenas: less than this is not growth that could be seen
HANDLES = 6  # a connection more or less to whoever was just killed


@dataclass
class Curves:
    """Samples of everything that stays, by name: (seconds, resident bytes, handles)."""

    begun: float = field(default_factory=time.monotonic)
    samples: dict[str, list[tuple[float, int, int]]] = field(default_factory=lambda: defaultdict(list))

    def look(self, processes: dict[str, psutil.Process]) -> None:
        for name, process in processes.items():
            with suppress(psutil.Error):
                now = time.monotonic() - self.begun
                self.samples[name].append((now, process.memory_info().rss, process.num_fds()))

    def growth(self, name: str) -> tuple[float, float, float, float]:
        """(bytes then, bytes now, handles then, handles now): medians after a third of the time, and at its end."""
        rows = self.samples[name]
        sixth = max(1, len(rows) // 6)
        early, late = rows[2 * sixth : 3 * sixth], rows[-sixth:]
        middle = [statistics.median(row[column] for row in part) for column in (1, 2) for part in (early, late)]
        return middle[0], middle[1], middle[2], middle[3]

    def write(self, path: Path) -> None:
        with path.open("w", newline="") as file:
            out = csv.writer(file)
            out.writerow(["process", "seconds", "resident_bytes", "handles"])
            for name, rows in self.samples.items():
                out.writerows([name, f"{at:.0f}", size, handles] for at, size, handles in rows)


@dataclass
class Load:
    """Threads that ask until they are told to stop; what they could not have is counted, not raised."""

    done: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    failed: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    stopping: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)

    def keep(self, name: str, once: Callable[[], None]) -> None:
        def go_on() -> None:
            while not self.stopping.is_set():
                try:
                    once()
                    self.done[name] += 1
                except (SwarmError, httpx.HTTPError, AssertionError, RuntimeError):
                    self.failed[name] += 1
                    self.stopping.wait(1.0)

        self.threads.append(threading.Thread(target=go_on, name=name))
        self.threads[-1].start()

    def stop(self) -> None:
        self.stopping.set()
        for thread in self.threads:
            thread.join(timeout=120)
            assert not thread.is_alive(), f"{thread.name} hangs"


def chat(gateway: RealGateway) -> None:
    ask = {"model": "demo", "prompt": f"Of {time.time()}", "max_tokens": 24}
    with gateway.http() as http:
        assert http.post("/v1/completions", json=ask).status_code == 200


def generate(client: swarmd.Swarm) -> None:
    ids = torch.randint(3, 300, (1, 40))
    client.model("demo", wait_s=20).generate(ids, max_new_tokens=24, min_new_tokens=24, do_sample=False)


def tune(client: swarmd.Swarm) -> None:
    model = tuned(client.model("demo", wait_s=20))
    for ids, labels in batches()[:3]:
        model(input_ids=ids, attention_mask=(labels != -100).long(), labels=labels).loss.backward()


def fetch(volunteer: Volunteer) -> None:
    """Fetch a model and remove it again."""
    volunteer.ask("pull", "POST", model="m", blocks="")
    deadline = time.monotonic() + 60
    while not (here := volunteer.ask("here", model="m"))["here"] or here["pulling"]:
        assert time.monotonic() < deadline, here
        time.sleep(0.2)
    volunteer.ask("rm", "POST", model="m")


def churn(swarm: LocalSwarm, volunteer: Volunteer, load: Load) -> None:
    load.stopping.wait(CHURN_S)
    volunteer.signal(signal.SIGKILL)
    volunteer.stop()
    volunteer.start()
    swarm.wait(lambda: volunteer.is_listening, "its control socket", volunteer)


def everything(stay: list[Volunteer], gateway: RealGateway) -> dict[str, psutil.Process]:
    """The daemons that stay, their workers by the order in which they were started, and the gateway."""
    found = {"gateway": psutil.Process(gateway.process.pid)}
    for number, volunteer in enumerate(stay):
        assert volunteer.process is not None
        daemon = psutil.Process(volunteer.process.pid)
        found[f"daemon {number}"] = daemon
        for nth, worker in enumerate(sorted(daemon.children(), key=lambda child: child.pid)):
            found[f"worker {number}.{nth}"] = worker
    return found


def test_nothing_grows_in_half_an_hour_of_everything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "IS_ON", False)  # workers are to be children of their daemons, as users' are
    torch.set_num_threads(1)
    m = checkpoints.make("llama", tmp_path / "llama", hidden_size=256, intermediate_size=704)
    curves, load = Curves(), Load()
    with local_swarm(tmp_path) as swarm:
        stay = [swarm.add("--serve", "demo", "--blocks", "0:6", models={"m": m} if first else {}) for first in (1, 0)]
        victim = swarm.add("--serve", "demo", "--blocks", "0:6")
        fetcher = swarm.add("--no-serve")
        swarm.wait_online()
        training.start_run(stay[0], "run", steps=10**6, every=50)
        training.join(swarm, stay[1:])
        training.wait_update(swarm, stay, 1)
        client_home = swarm.prepare().home
        with real_gateway(stay[0].home.folder) as gateway, swarmd.connect(home=client_home.folder) as client:
            load.keep("chats", lambda: chat(gateway))
            load.keep("sessions", lambda: generate(client))
            load.keep("tuning", lambda: tune(client))
            load.keep("downloads", lambda: fetch(fetcher))
            load.keep("churn", lambda: churn(swarm, victim, load))
            ends_at = time.monotonic() + 60 * MINUTES
            while time.monotonic() < ends_at:
                curves.look(everything([*stay, fetcher], gateway))
                time.sleep(SAMPLE_S)
            load.stop()
            update = training.run_of(stay[0])["state_update"]
        print(f"done {dict(load.done)}, not had {dict(load.failed)}, update {update}")
        if path := os.environ.get("SOAK_CSV"):
            curves.write(Path(path))
        grown = []
        for name in curves.samples:
            then, now, handles_then, handles_now = curves.growth(name)
            print(
                f"{name}: {then / 2**20:.1f} -> {now / 2**20:.1f} MiB, {handles_then:.0f} -> {handles_now:.0f} handles"
            )
            if now > (1 + GROWTH) * then + SLACK_BYTES or handles_now > handles_then + HANDLES:
                grown.append(name)
        assert all(load.done[name] for name in ("chats", "sessions", "tuning", "downloads", "churn")), load
        assert not grown, grown
        swarm.wait(lambda: not any(v.ask("sessions")["sessions"] for v in stay), "all sessions to be closed")
        assert all("Traceback" not in v.log() for v in [*stay, fetcher])
