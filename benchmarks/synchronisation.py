"""Bytes a sample, and the most of them in any second, of each mode of synchronisation: three peers train one model.

    python benchmarks/synchronisation.py [--inner-steps 100] [--fragments 10] [--share 0.25] [--only NAME ...]

Real daemons on loopback, whose bytes the kernel counts (headers and gossip included; this program asks over Unix
sockets): nothing else may use loopback meanwhile. Peers compute for a ``share`` of the time only, so that averaging
one fragment ends well before the next one is due, as it does where links count. In ``step`` and ``delayed`` an update
takes as many samples as one inner step of every peer; a fragment is averaged once in as many inner steps as the whole
vector is without fragments.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.training import command, run_of, start_together, tiny_model, wait_update

SIZE: dict[str, Any] = {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4}
SIZE |= {"num_key_value_heads": 4, "head_dim": 48, "layer_types": ["full_attention"] * 4}
N_PEERS = 3
INNER_BATCH = 4
WINDOW_S = 1.0  # of the fullest second
LOOK_S = 0.05  # between two looks at the counter


class Loopback:
    """What goes over loopback while this is entered: ``n_bytes``, and ``most``, those of the fullest second."""

    def __enter__(self) -> Loopback:
        self._seen = [(time.monotonic(), self._count())]
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    @property
    def n_bytes(self) -> int:
        return self._seen[-1][1] - self._seen[0][1]

    @property
    def most(self) -> int:
        most = start = 0
        for at_s, count in self._seen:
            while at_s - self._seen[start][0] > WINDOW_S:
                start += 1
            most = max(most, count - self._seen[start][1])
        return most

    def _look(self) -> None:
        while not self._is_over.wait(LOOK_S):
            self._seen.append((time.monotonic(), self._count()))

    @staticmethod
    def _count() -> int:
        line = next(at for at in Path("/proc/net/dev").read_text().splitlines() if at.strip().startswith("lo:"))
        return int(line.split()[1])


def add(swarm: LocalSwarm, share: float) -> Volunteer:
    """A volunteer that computes for a share of the time."""
    volunteer = swarm.prepare("--no-serve")
    (volunteer.home.folder / "config.toml").write_text(f"[policy]\ncompute_share = {share}\n")
    volunteer.start()
    swarm.wait(volunteer.home.socket.exists, "its control socket", volunteer)
    return volunteer


def counted(volunteers: list[Volunteer], name: str) -> int:
    return sum(run_of(v, name)["samples_counted"] for v in volunteers)


def measure(
    swarm: LocalSwarm, volunteers: list[Volunteer], name: str, model: Path, more: str, target: int, updates: int
) -> float:
    """Print what one mode moves over ``updates`` updates, the first one left out; returns bytes a sample."""
    settings = {"optimizer": "adamw", "model": model, "more": more, "target": target, "every": 100_000}
    start_together(swarm, volunteers, name, **settings)
    wait_update(swarm, volunteers, 1, name)
    before = counted(volunteers, name)
    with Loopback() as moved:
        for update in range(2, 2 + updates):  # one at a time: each may take as long as the wait has patience
            wait_update(swarm, volunteers, update, name)
    n = counted(volunteers, name) - before
    command(volunteers[0], "train", "stop", name, "--all")
    print(
        f"{name:10} {n:6} samples, {n / updates:7.1f} an update  {moved.n_bytes / 1e6:8.2f} MB"
        f"  {moved.n_bytes / updates / 1e6:6.2f} MB an update  {moved.n_bytes / n:10.0f} bytes a sample"
        f"  {moved.most / 1e6:7.2f} MB in the fullest second",
        flush=True,
    )
    return moved.n_bytes / n


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inner-steps", type=int, default=100)
    parser.add_argument("--fragments", type=int, default=10)
    parser.add_argument("--share", type=float, default=0.25)
    parser.add_argument("--only", nargs="*", default=[])
    options = parser.parse_args()
    once = N_PEERS * INNER_BATCH
    turn = once * options.inner_steps
    diloco = 'synchronisation = "diloco"\n[diloco]\nbatch = ' + str(INNER_BATCH)
    modes = {
        "step": ("", once, 20),
        "delayed": ('synchronisation = "delayed"', once, 20),
        "diloco": (diloco, turn, 3),
        "streamed": (f"{diloco}\nfragments = {options.fragments}", turn // options.fragments, 3 * options.fragments),
    }
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm:
        model = tiny_model(Path(folder) / "model", **SIZE)
        volunteers = [add(swarm, options.share) for _ in range(N_PEERS)]
        found = {}
        for name, (more, target, updates) in modes.items():
            if options.only and name not in options.only:
                continue
            found[name] = measure(swarm, volunteers, name, model, more, target, updates)
            if "step" in found:
                print(f"  {found['step'] / found[name]:.1f} x fewer bytes a sample than step", flush=True)


if __name__ == "__main__":
    main()
