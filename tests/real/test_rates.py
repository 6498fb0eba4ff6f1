"""The owner's limits of the network, as a kernel counts them: bytes of IP on the wire of a machine with an address.

Part of ``make prove``: it makes network namespaces, which needs root. Virtual time is in tests/net/test_traffic.py.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.checkpoints import make
from tests.real import netlab
from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.netlab import Place
from tests.real.test_policy import answers, set_rule

pytestmark = [pytest.mark.prove, pytest.mark.slow, pytest.mark.skipif(bool(netlab.missing()), reason=netlab.missing())]

LISTEN = "/ip4/0.0.0.0/tcp/4117"
ETHERNET_BYTES = 14  # which no provider counts
MINUTE_S = 60.0
N_TOKENS = 200
SLOWEST_S = 1.5  # of a token beside a transfer: what is urgent waits for one slice at most, and this machine is busy
TALK = """
import sys, time, torch, swarmd
torch.set_num_threads(1)

class Told:
    longest, at = 0.0, None
    def put(self, value):
        now = time.perf_counter()
        self.longest = max(self.longest, now - (self.at or now))
        print(f"{self.longest:.3f}", flush=True)
        time.sleep(0.1)
        self.at = time.perf_counter()
    def end(self): pass

with swarmd.connect(sys.argv[1]) as swarm:
    model = swarm.model("m", lookup=False, wait_s=20)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=400, min_new_tokens=400, do_sample=False, streamer=Told())
"""


@dataclass
class Wire:
    """What has passed a machine's link: bytes of IP, out and in."""

    place: Place

    def counted(self) -> tuple[int, int]:
        out, packets_out, back, packets_in = map(
            int,
            self.place.do("cd /sys/class/net/l*b/statistics && cat tx_bytes tx_packets rx_bytes rx_packets").split(),
        )
        return out - ETHERNET_BYTES * packets_out, back - ETHERNET_BYTES * packets_in


@dataclass
class World:
    """A machine that gives a model of 200 MB, one that fetches it, and their links."""

    swarm: LocalSwarm
    places: tuple[Place, Place]
    giver: Volunteer
    fetcher: Volunteer

    def fetch(self) -> None:
        here = self.fetcher.ask("here", model="m")
        if not here["here"] and not here["pulling"]:
            self.fetcher.ask("pull", "POST", model="m", blocks="")

    def fetch_until(self, is_so: Callable[[], bool], what: str) -> None:
        """Fetch again and again: whoever gives may die, or be cut off."""

        def looked() -> bool:
            self.fetch()
            return is_so()

        self.swarm.wait(looked, what, self.fetcher)

    def rate(self, which: int, direction: int) -> float:
        """Bytes/s over a minute, once it flows."""
        wire = Wire(self.places[which])
        begun = wire.counted()[direction]
        self.swarm.wait(lambda: wire.counted()[direction] > begun + 5e6, "a transfer that flows")
        at, n = time.monotonic(), wire.counted()[direction]
        while (passed_s := time.monotonic() - at) < MINUTE_S:
            self.fetch()
            time.sleep(0.5)
        return (wire.counted()[direction] - n) / passed_s


@contextmanager
def world(folder: Path, *giver: str) -> Iterator[World]:
    shape = {"n_layers": 2, "intermediate_size": 2**17}
    model = make("llama", folder / "model", **shape)
    with netlab.laid() as lab, local_swarm(folder) as swarm:
        a, b = lab.public("giver"), lab.public("fetcher")
        for place in (a, b):  # else the kernel counts 64 KiB with one header
            place.do("for link in $(ls /sys/class/net | grep b$); do ip link set $link gso_max_segs 1; done")
        first = swarm.add(*giver or ("--no-serve",), models={"m": model}, listen=LISTEN, inside=a.inside)
        second = swarm.add("--no-serve", listen=LISTEN, inside=b.inside)
        swarm.wait(lambda: len(second.ask("peers")["peers"]) > 0, "a peer")
        yield World(swarm, (a, b), first, second)


@pytest.mark.parametrize(("rule", "which", "direction"), [("up_mbit", 0, 0), ("down_mbit", 1, 1)])
def test_a_minute_is_within_five_percent_of_the_rate(tmp_path: Path, rule: str, which: int, direction: int) -> None:
    with world(tmp_path) as w:
        set_rule((w.giver, w.fetcher)[which], rule, "16")
        w.fetch()
        share = w.rate(which, direction) / (16e6 / 8)
        print(f"{rule}: {share:.3f} of the rate over a minute")
        assert 0.95 < share < 1.05


def test_a_conversation_goes_on_while_weights_take_all_that_is_left(tmp_path: Path) -> None:
    with world(tmp_path, "--serve", "m", "--blocks", "0:2") as w:
        w.swarm.wait(lambda: w.giver.ask("status")["serving"] is not None, "blocks that are served")
        set_rule(w.giver, "up_mbit", "16")
        wire = Wire(w.places[0])
        talk = [*w.places[1].inside, sys.executable, "-c", TALK, w.swarm.invite()]
        with subprocess.Popen(talk, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                process.stdout.readline()
                w.fetch()
                before, begun = wire.counted()[0], time.monotonic()
                for _ in range(N_TOKENS):
                    longest = process.stdout.readline()
            finally:
                process.kill()
            share = (wire.counted()[0] - before) / (time.monotonic() - begun) / (16e6 / 8)
        print(f"of {N_TOKENS} tokens the slowest took {float(longest):.3f} s, beside weights; {share:.3f} of the rate")
        assert float(longest) < SLOWEST_S
        assert share > 0.9, "weights took what was left"


def test_the_cap_is_never_exceeded_whatever_dies(tmp_path: Path) -> None:
    cap_gib = 0.15
    with world(tmp_path) as w:
        wire = Wire(w.places[0])
        set_rule(w.giver, "month_gib", str(cap_gib))
        set_rule(w.giver, "up_mbit", "80")

        def used() -> float:
            return sum(wire.counted()) / 2**30

        for killed_at in (0.03, 0.06):
            w.fetch_until(lambda at=killed_at: used() > at, f"{killed_at} GiB")  # type: ignore[misc]
            w.giver.signal(signal.SIGKILL)
            w.giver.stop()
            w.giver.start()
            w.swarm.wait(lambda: answers(w.giver), "its control socket", w.giver)
        w.fetch_until(lambda: not w.giver.ask("status")["policy"]["may_work"], "the cap")
        assert "of 0.15 GiB of this month are used: again on" in w.giver.ask("status")["policy"]["why"]
        w.swarm.wait(lambda: not any(row["way"] for row in w.giver.ask("peers")["peers"]), "no connection", w.giver)
        print(f"used {used():.4f} of {cap_gib} GiB")
        assert 0.6 * cap_gib < used() < cap_gib
        at_the_end = used()
        time.sleep(10)
        assert used() < at_the_end + 1e-5, "knocks at most"
        set_rule(w.giver, "month_gib", "0")
        w.fetch_until(lambda: bool(w.fetcher.ask("here", model="m")["here"]), "the whole model")
