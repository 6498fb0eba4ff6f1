"""``kill -9`` at 50 moments of a daemon's life, drawn by a seed: it always starts again, and nothing is lost or left.

Part of ``make prove``. The daemon is the program that users run, not one forked from a process that has imported all.
"""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

import swarmd
from swarmd.config import load
from swarmd.errors import SwarmError
from swarmd.home.membership import MembershipFiles
from swarmd.home.paths import Home
from swarmd.plan.chains.routing import Hop
from swarmd.protocol.membership.identity import Identity
from swarmd.values import Span
from tests import checkpoints
from tests.real import forks
from tests.real.harness import LocalSwarm, Volunteer, local_swarm

pytestmark = [pytest.mark.prove, pytest.mark.slow]
N_KILLS = 50
SEED = 20261123
# how long each lasts here, or longer
STARTING_S, JOINING_S, WRITING_S, DRAINING_S, ANSWERING_S = 5.0, 2.0, 2.0, 0.6, 0.5
ORPHAN_S = 20.0  # a worker ends with its daemon's socket, at its next look: torch is imported before the first
N_TOKENS = 40
MARK = "SWARMD_KILLS"
IDS = torch.tensor([[5, 6, 7]])


def marked() -> list[psutil.Process]:
    """Whatever the victim started that still runs: its children inherit its environment."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(MARK) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


class Paced:
    """Reads an answer as slowly as people do, so that there is a middle of it."""

    def __init__(self) -> None:
        self.has_begun = threading.Event()
        self._n_put = 0

    def put(self, value: torch.Tensor) -> None:
        self._n_put += 1
        if self._n_put > 1:  # the first is the prompt, before anybody was asked
            self.has_begun.set()
        time.sleep(1.25 * ANSWERING_S / N_TOKENS)

    def end(self) -> None:
        pass


@dataclass
class Life:
    """The victim, and everything it is asked to do when it is killed."""

    swarm: LocalSwarm
    victim: Volunteer
    expected: list[int]
    invite: str
    folder: Path
    rng: random.Random = field(default_factory=lambda: random.Random(SEED))
    killed: Counter[str] = field(default_factory=Counter)

    def soon(self, most_s: float) -> None:
        """The moment is drawn: this is a delay on purpose."""
        time.sleep(self.rng.uniform(0.0, most_s))

    def kill(self) -> None:
        """End the daemon alone, and see that whatever it started ends by itself."""
        assert self.victim.process is not None
        self.victim.process.send_signal(signal.SIGKILL)
        self.victim.process.wait()
        self.victim.process = None
        deadline = time.monotonic() + ORPHAN_S
        while left := marked():
            assert time.monotonic() < deadline, [(p.pid, p.cmdline()) for p in left]
            time.sleep(0.05)

    def starts_again(self, identity: Identity) -> None:
        home = self.victim.home
        load(home.folder, {})
        assert MembershipFiles(home).identity().peer_id == identity.peer_id
        self.victim.start()
        self.swarm.wait(self.answers, "its control socket", self.victim)
        assert self.victim.ask("status")["peer"] == identity.peer_id

    def answers(self) -> bool:
        with suppress(httpx.TransportError):
            return bool(self.victim.ask("status"))
        return False

    def serves(self) -> bool:
        return self.answers() and (self.victim.ask("status")["worker"] or {}).get("state") == "online"

    def cli(self, *words: str, home: Path | None = None) -> subprocess.Popen[str]:
        folder = home or self.victim.home.folder
        command = [sys.executable, "-m", "swarmd_cli.main", "--home", str(folder), *words]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    # --- stages: each ends with the daemon killed ----------------------------------------------------------------

    def start(self) -> None:
        self.kill()
        self.victim.start()
        self.soon(STARTING_S)
        self.kill()

    def download(self) -> None:
        self.kill()
        shutil.rmtree(self.victim.home.weights)
        self.victim.start()
        share = self.rng.random()

        def has_come() -> bool:
            rows = self.victim.ask("downloads")["downloads"] if self.answers() else []
            return any(row["done_bytes"] >= share * row["total_bytes"] for row in rows) or self.serves()

        self.swarm.wait(has_come, f"{share:.0%} of its download", self.victim)
        self.kill()

    def serving(self) -> None:
        """In the middle of an answer: another server goes on, with the same text."""
        self.swarm.wait(self.serves, "it to serve", self.victim)
        first = (Hop(self.victim.peer, Span(0, 6)),)
        with swarmd.connect(home=self.swarm.volunteers[-1].home.folder) as client:
            model = client.model("m", wait_s=30, chain=first, lookup=False)
            got: list[int] = []
            paced = Paced()

            def answer() -> None:
                options = {"max_new_tokens": N_TOKENS, "min_new_tokens": N_TOKENS, "do_sample": False}
                got.extend(model.generate(IDS, **options, streamer=paced)[0].tolist())

            asking = threading.Thread(target=answer)
            asking.start()
            assert paced.has_begun.wait(timeout=60)
            self.soon(ANSWERING_S)
            self.kill()
            asking.join(timeout=60)
            assert got == self.expected

    def drain(self) -> None:
        self.swarm.wait(self.serves, "it to serve", self.victim)
        draining = self.cli("drain")
        self.soon(DRAINING_S)
        self.kill()
        draining.communicate(timeout=30)

    def writes(self) -> None:
        """Settings, a pause, the daemon's own files: the writer is killed with it."""
        hours = f"mon-sun {self.rng.randrange(24)}:00-{self.rng.randrange(24)}:30"
        words = self.rng.choice([("policy", "set", "hours", hours), ("pause",), ("pause", "--for", "1h"), ("resume",)])
        writing = self.cli(*words)
        self.soon(WRITING_S)
        writing.kill()
        self.kill()
        writing.communicate(timeout=30)
        for _ in range(2):  # a pause would hide what comes next
            self.victim.home.pause_file.unlink(missing_ok=True)
            load(self.victim.home.folder, {})
            (self.victim.home.folder / "config.toml").unlink(missing_ok=True)

    def join(self) -> None:
        """Another machine joins and is killed; joining again does what was left, or says that it is a member."""
        home = self.folder / f"joiner{self.killed['join']}"
        joining = self.cli("join", self.invite, home=home)
        self.soon(JOINING_S)
        joining.kill()
        joining.communicate(timeout=30)
        was_in, again = Home(home).has_joined, self.cli("join", self.invite, home=home)
        said, _ = again.communicate(timeout=60)
        assert ("is a member of" in said) if was_in else ("Joined the swarm" in said), said
        assert MembershipFiles(Home(home)).swarm().keys.name == "test"
        MembershipFiles(Home(home)).identity()
        self.kill()


def test_a_daemon_survives_kill_9_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    checkpoint = checkpoints.make("llama", tmp_path / "llama", hidden_size=512, intermediate_size=1408)
    local = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    options = {"max_new_tokens": N_TOKENS, "min_new_tokens": N_TOKENS, "do_sample": False}
    expected = local.generate(IDS, **options)[0].tolist()
    with local_swarm(tmp_path) as swarm:
        swarm.add("--serve", "m", models={"m": checkpoint}, SWARMD_UP_LIMIT_MBIT="80")
        monkeypatch.setattr(forks, "IS_ON", False)
        victim = swarm.add("--serve", "m", **{MARK: "1"})
        monkeypatch.setattr(forks, "IS_ON", True)
        swarm.prepare()  # the client's home
        life = Life(swarm, victim, expected, swarm.invite(), tmp_path)
        identity = MembershipFiles(victim.home).identity()
        stages: tuple[Callable[[], None], ...] = (
            life.start,
            life.serving,
            life.download,
            life.drain,
            life.writes,
            life.join,
        )
        monkeypatch.setattr(forks, "IS_ON", False)
        for number in range(N_KILLS):
            stage = stages[number % len(stages)]
            try:
                stage()
                life.starts_again(identity)
            except (AssertionError, SwarmError, httpx.HTTPError) as error:
                error.add_note(f"kill {number}, {stage.__name__}, seed {SEED}\n{victim.log()[-2000:]}")
                raise
            life.killed[stage.__name__] += 1
        print(f"killed: {dict(life.killed)}")
        swarm.wait(life.serves, "it to serve at last", victim)
        said, _ = life.cli("models", "verify", "m").communicate(timeout=60)
        assert "are what the manifest says" in said, said
        assert "Traceback" not in victim.log()
