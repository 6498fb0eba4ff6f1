"""The owner comes first, on real processes: a pause and rules end a server's work, and sessions go on elsewhere."""

from __future__ import annotations

import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import httpx
import psutil
import pytest
import torch

import swarmd
from swarmd.errors import SwarmError
from tests.cli.test_commands import swarmd as command
from tests.real.faults import generate, inputs_for
from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.test_drain import N_TOKENS, generate_while

pytestmark = pytest.mark.slow


def answers(volunteer: Volunteer) -> bool:
    try:
        return bool(volunteer.ask("status"))
    except httpx.TransportError:
        return False


def set_rule(volunteer: Volunteer, name: str, value: str) -> str:
    """What a person types; returns what it answers."""
    done = command("policy", "set", name, value, home=volunteer.home.folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rests(swarm: LocalSwarm, volunteer: Volunteer, why: str) -> None:
    """Wait until nothing of a server is left but its daemon, which says why."""
    swarm.wait(lambda: volunteer.ask("status")["serving"] is None, f"rest: {why}")
    status = volunteer.ask("status")
    assert why in status["policy"]["why"]
    assert why in status["hosting"][0]["why"]
    assert status["worker"] is None


def test_a_pause_in_mid_sentence_loses_nothing_and_lasts_until_its_owner_says_otherwise(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with local_swarm(tmp_path) as swarm:
        a, b, heir = swarm.serving((0, 3), (3, 6), (2, 6))
        worker = b.worker_pid
        with swarmd.connect(home=a.home.folder) as client:
            model = client.model("demo", chain=swarm.hops((a, 0, 3), (b, 3, 6)))
            expected = generate(model, "greedy", inputs_for("greedy", 1024, 3), N_TOKENS, 3)
            out = generate_while(
                model, "greedy", 10, lambda: b.ask("pause", "POST", seconds="7200")
            )  # which takes no longer than that
            (repair,) = model.last_session.statistics.repairs
            blamed = model.last_session.statistics.blamed
        assert torch.equal(out.sequences, expected.sequences)
        assert repair.handed_over or repair.replayed_ops
        assert not blamed
        assert heir.ask("status")["policy"]["may_work"]
        rests(swarm, b, "paused by its owner until")
        assert not psutil.pid_exists(worker), "its memory is free"
        b.stop()
        b.start()
        swarm.wait(lambda: answers(b), "its control socket", b)
        rests(swarm, b, "paused by its owner until")
        assert command("resume", home=b.home.folder).stdout == "serving again: swarmd status\n"
        swarm.wait_online()


def test_rules_are_followed_while_it_runs(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        (volunteer,) = swarm.serving((0, 6))
        home = volunteer.home.folder

        rule = partial(set_rule, volunteer)
        game = shutil.copy(shutil.which("sleep") or "/bin/sleep", tmp_path / "swarmd-game")
        rule("not_while", "swarmd-game")
        with subprocess.Popen([game, "600"]) as running:
            try:
                rests(swarm, volunteer, "not while swarmd-game runs")
                assert "not yet: not while" in command("resume", home=home).stdout
            finally:
                running.kill()
        swarm.wait_online()
        rule("hours", "mon 0:00-0:01" if psutil.time.localtime().tm_wday else "wed 0:00-0:01")
        rests(swarm, volunteer, "outside its hours")
        rule("hours", "")
        swarm.wait_online()
        if "no temperature" in rule("hottest_c", "85"):
            rests(swarm, volunteer, "no temperature can be read here")


def works_for(volunteer: Volunteer, seconds: float) -> float:
    """The part of some time that a server's worker computes for."""
    worker = psutil.Process(volunteer.worker_pid)
    begun, before = time.monotonic(), worker.cpu_times()
    time.sleep(seconds)
    with suppress(psutil.NoSuchProcess):
        after = worker.cpu_times()
        return (after.user + after.system - before.user - before.system) / (time.monotonic() - begun)
    return 0.0


@contextmanager
def asked_all_the_time(swarm: LocalSwarm) -> Iterator[list[int]]:
    """A client that generates in a thread; how many answers came whole."""
    is_over, answers = threading.Event(), [0]

    def ask() -> None:
        with swarmd.connect(swarm.invite()) as client, suppress(SwarmError):
            model = client.model("demo")
            while not is_over.is_set():
                model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=20, min_new_tokens=20, do_sample=False)
                answers[0] += 1

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        is_over.set()
        thread.join()


def test_a_share_of_the_time_is_kept_and_may_change_and_memory_is_left(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with local_swarm(tmp_path) as swarm:
        (volunteer,) = swarm.serving((0, 6))
        with asked_all_the_time(swarm) as answers:
            swarm.wait(lambda: answers[0] > 1, "answers")
            alone = works_for(volunteer, 3)
            set_rule(volunteer, "compute_share", "0.1")
            n = answers[0]
            most = min(alone, 0.125)  # the share, and what reading and sending frames takes beside passes
            swarm.wait(lambda: works_for(volunteer, 5) < most, "less work than before, and no more than the share")
            swarm.wait(lambda: answers[0] > n, "more answers")
        for kept_gib, said in (("100000", "(100000.00 GiB are left to its owner)"), ("0", "serving on cpu")):
            set_rule(volunteer, "leave_free_gib", kept_gib)
            volunteer.ask("drain", "POST")
            swarm.wait(lambda: volunteer.ask("status")["serving"] is None, "the end of serving")
            volunteer.ask("resume", "POST")
            swarm.wait(lambda said=said: said in volunteer.ask("status")["hosting"][0]["why"], said)  # type: ignore[misc]


@pytest.mark.prove  # its client waits for as long as a repair waits for somebody to come
def test_a_pause_ends_computing_whoever_asks_on(tmp_path: Path) -> None:
    """Nobody else serves: the sessions have nowhere to go, and the worker stays for its grace, but rests."""
    torch.set_num_threads(1)
    with local_swarm(tmp_path) as swarm:
        (volunteer,) = swarm.serving((0, 6))
        with asked_all_the_time(swarm) as answers:
            swarm.wait(lambda: answers[0] > 1, "answers")
            worker = volunteer.worker_pid
            volunteer.ask("pause", "POST", seconds="600")
            time.sleep(1.0)  # the promise
            if psutil.pid_exists(worker):
                assert works_for(volunteer, 0.5) < 0.1
            rests(swarm, volunteer, "paused by its owner")
            assert not psutil.pid_exists(worker)
