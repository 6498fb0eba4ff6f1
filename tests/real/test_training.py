"""Training together with real daemons on loopback: one big machine's result, whoever vanishes meanwhile."""

from __future__ import annotations

import os
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from peft import PeftModel
from transformers import AutoModelForCausalLM

from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.liars import VARIABLE
from tests.real.training import (
    MODES,
    ROOT,
    check_ledgers,
    check_states,
    command,
    error_of_replay,
    folder_of,
    is_back,
    join,
    ledger_of,
    run_of,
    slowed,
    start_run,
    start_together,
    wait_know,
    wait_update,
)
from tests.train.replaying import counted_of

pytestmark = pytest.mark.slow

N_SAMPLES = 128  # an update: so many that all peers hear of it before one has computed them alone
TOPK = '[parts]\ncodec = "topk"\n'
EXACT = {"sgd": "float32", "adamw": "float64"}  # precision by optimizer
WAYS = {"sgd": "grid", "adamw": "ring", "muon": "ring"}  # by which numbers come together
LORA = 'train = "lora"\nlora = {rank = 4, alpha = 8, targets = ["q_proj", "v_proj"]}'


def trainers(swarm: LocalSwarm, n: int) -> list[Volunteer]:
    return [swarm.add("--no-serve") for _ in range(n)]


@pytest.mark.parametrize(
    ("steps", "runs", "bound"),
    [
        (5, EXACT, 1e-5),
        pytest.param(50, EXACT, 1e-5, marks=pytest.mark.prove),
        pytest.param(50, {"adamw": "float32"}, 1e-4, marks=pytest.mark.prove),  # other order of sums: it is reported
        pytest.param(50, {"muon": "float32"}, 1e-4, marks=pytest.mark.prove),
    ],
)
def test_four_peers_are_one_big_machine(tmp_path: Path, steps: int, runs: dict[str, str], bound: float) -> None:
    """One peer four times slower, two runs at once: the parameters are those of a replay of the ledger."""
    with local_swarm(tmp_path) as swarm:
        volunteers = trainers(swarm, 4)
        for name, precision in runs.items():
            options = {"optimizer": name, "precision": precision, "steps": steps, "more": MODES[WAYS[name]]}
            start_together(swarm, volunteers, name, target=N_SAMPLES, **options)
        for name in runs:
            wait_update(swarm, volunteers, 3, name)
        with ExitStack() as slow:
            for name in runs:
                slow.enter_context(slowed(volunteers[3], name))
            for name in runs:
                wait_update(swarm, volunteers, steps, name)
        for name in runs:
            check_states(volunteers, name)
            ledger = check_ledgers(volunteers, name)
            assert ledger.epoch == steps
            assert len({c.peer for s in ledger.sealed for c in s.commit.contributors}) == 4
            swarm.wait(lambda n=name: saved_update(volunteers[0], n) == steps, "the last checkpoint")
            error, _ = error_of_replay(volunteers[0], name)
            print(f"{name} {runs[name]}: relative L2 {error:.2e} after {steps} updates")
            assert error <= bound


HIDDEN = ("delayed", "streamed", "thinned")


def test_whoever_computes_on_meanwhile_is_one_big_machine(tmp_path: Path) -> None:
    """Delayed updates and steps inside, a daemon and a worker killed among them: the replayed ledger says the same."""
    with local_swarm(tmp_path) as swarm:
        volunteers = trainers(swarm, 3)
        for name in HIDDEN:
            optimizer = "muon" if name == "delayed" else "adamw"
            settings = {"optimizer": optimizer, "more": MODES[name], "target": N_SAMPLES, "steps": 7, "every": 7}
            start_together(swarm, volunteers, name, **settings)
        for name in HIDDEN:
            wait_update(swarm, volunteers, 3, name)
        volunteers[2].stop()
        os.kill(run_of(volunteers[1], "streamed")["worker"], signal.SIGKILL)
        left = volunteers[:2]
        for name in HIDDEN:
            wait_update(swarm, left, 7, name)
        for name in HIDDEN:
            check_states(left, name)
            ledger = check_ledgers(volunteers, name)
            swarm.wait(lambda n=name: saved_update(volunteers[0], n) == 7, "the last checkpoint")
            error, _ = error_of_replay(volunteers[0], name)
            n_late = sum(sum(s.commit.late) for s in ledger.sealed)
            print(f"{name}: relative L2 {error:.2e} after {ledger.epoch} updates, {n_late} draws late")
            assert error <= 1e-4
            assert n_late > 0


@pytest.mark.prove
def test_what_was_left_out_outlives_a_kill(tmp_path: Path) -> None:
    """Error feedback on the disk: whoever was killed goes on with what its contributions had not said yet."""
    with local_swarm(tmp_path) as swarm:
        a, b, c = volunteers = trainers(swarm, 3)
        start_together(swarm, volunteers, "run", optimizer="adamw", more=TOPK, target=N_SAMPLES)
        wait_update(swarm, volunteers, 5)
        b.ask("train/pause", "POST", name="run")
        wait_update(swarm, volunteers, run_of(a)["update"] + 2)  # its last contribution is counted, and long written
        b.stop()
        away = run_of(a)["update"]
        wait_update(swarm, [a, c], away + 5)
        b.start()

        def counts_again() -> bool:
            late = ledger_of(a).sealed[away:]
            return any(b.peer in {e.peer for e in sealed.commit.contributors} for sealed in late)

        swarm.wait(counts_again, "a contribution of the one that was killed")
        wait_update(swarm, volunteers, run_of(a)["update"] + 2)
        check_states(volunteers)
        ledger = check_ledgers(volunteers)
        assert not [c for s in ledger.sealed for c, _, is_anew in counted_of(s.commit) if is_anew]


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # of PEFT about transformers
def test_adapter_is_trained_with_a_peer_that_only_reduces(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        a, b, helper = volunteers = trainers(swarm, 3)
        start_run(a, "run", optimizer="adamw", more=LORA)
        join(swarm, [b])
        join(swarm, [helper], role="reduce")
        led = [v for v in volunteers if v is not helper]
        swarm.wait(lambda: any(n_reducers(v) == 3 for v in led), "a round in which all three reduce")
        wait_update(swarm, led, 6)
        assert run_of(helper)["state_update"] is None
        check_states(led)
        check_ledgers(volunteers)
        command(a, "train", "export", "run", "--out", str(tmp_path / "adapter"))
    base = AutoModelForCausalLM.from_pretrained(a.home.folder / "models" / "run-0")
    adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")
    assert any(p.abs().sum() > 0 for name, p in adapted.named_parameters() if "lora_B" in name), "it has learned"


def n_reducers(volunteer: Volunteer) -> int:
    return int((run_of(volunteer)["last_round"] or {"n_reducers": 0})["n_reducers"])


def saved_update(volunteer: Volunteer, name: str) -> int:
    saved = folder_of(volunteer, name).saved()
    return saved[0].epoch if saved else 0


@pytest.mark.prove
def test_run_survives_its_peers(tmp_path: Path) -> None:
    """A member killed, one stopped, an anchor killed, one late, one back after five missed updates."""
    with local_swarm(tmp_path) as swarm:
        volunteers = trainers(swarm, 5)
        a, b, c, d, late = volunteers
        start_run(a, "run", anchors=[a, b, d])
        join(swarm, [b, c, d])
        wait_update(swarm, [a, b, c, d], 3)

        c.stop()  # SIGKILL, wherever it is in a round
        update = run_of(a)["update"]
        wait_update(swarm, [a, b, d], update + 2)

        d.signal(signal.SIGSTOP, "daemon")  # an anchor, too
        update = run_of(a)["update"]
        wait_update(swarm, [a, b], update + 6)
        wait_know(swarm, late, "run")
        command(late, "train", "join", "run")
        wait_update(swarm, [late], update + 6)
        d.signal(signal.SIGCONT, "daemon")
        wait_update(swarm, [a, b, d, late], run_of(a)["update"] + 2)

        swarm.wait(lambda: run_of(late)["samples_counted"] > 0, "the late one counts", late)

        b.stop()  # an anchor and, now and then, the leader
        update = run_of(a)["update"]
        wait_update(swarm, [a, d, late], update + 2)
        c.start()
        swarm.wait(lambda: is_back(c), "the first one back", c)
        wait_update(swarm, [a, c, d, late], update + 4)

        live = [a, c, d, late]
        check_states(live)
        ledger = check_ledgers(live)
        losses = ledger.losses()
        assert np.mean(losses[-5:]) < np.mean(losses[:5])
        counted = {entry.peer for sealed in ledger.sealed for entry in sealed.commit.contributors}
        assert counted >= {a.peer, b.peer, d.peer, late.peer}


@pytest.mark.prove
def test_run_pauses_without_its_anchors_and_goes_on_with_them(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        a, b, c = trainers(swarm, 3)
        start_run(a, "run", anchors=[a, b, c], target=16)
        join(swarm, [b])
        join(swarm, [c], role="anchor")  # signs only: no model, no worker
        wait_update(swarm, [a, b], 2)
        b.signal(signal.SIGSTOP, "daemon")
        c.signal(signal.SIGSTOP, "daemon")
        swarm.wait(lambda: "majority of the anchors" in run_of(a)["why"], "the run says why it pauses", a)
        update = run_of(a)["update"]
        time.sleep(2)
        assert run_of(a)["update"] == update
        b.signal(signal.SIGCONT, "daemon")
        wait_update(swarm, [a, b], update + 2)
        c.signal(signal.SIGCONT, "daemon")
        wait_update(swarm, [a, b], update + 4)
        check_ledgers([a, b, c])

        assert "majority" not in command(a, "train", "status", "run")
        command(b, "train", "stop", "run", "--all", code=2)  # only the owner
        command(a, "train", "stop", "run", "--all")
        swarm.wait(lambda: "stopped" in run_of(c)["state"], "all hear that it is stopped", c)
        command(a, "train", "resume", "run", "--all")
        wait_update(swarm, [a, b], run_of(a)["update"] + 2)


def test_wrong_gradients_are_found_and_everybody_sees_for_themselves(tmp_path: Path) -> None:
    """One of four gives other gradients than its draws': the first to look tells all, who compute it themselves."""
    with local_swarm(tmp_path) as swarm:
        honest = trainers(swarm, 3)
        liar = swarm.prepare("--no-serve", **{VARIABLE: "gradients: sign flipped", "PYTHONPATH": str(ROOT)})
        liar.program = "tests.real.liars"
        liar.start()
        swarm.wait_online()
        start_together(swarm, [*honest, liar], "run", target=N_SAMPLES, steps=400, audit=32)

        def believers() -> list[Volunteer]:
            return [v for v in honest if liar.peer in run_of(v)["shunned"]]

        swarm.wait(lambda: len(believers()) == 3, "everybody to have found the liar")
        found_at = run_of(honest[0])["update"]
        print(f"found by all at update {found_at}")
        wait_update(swarm, honest, found_at + 5)
        for volunteer in honest:
            said = run_of(volunteer)
            assert said["shunned"] == [liar.peer]
            assert said["audits"]["wrong"] >= 1
        assert "contributions of others" in command(honest[0], "train", "status", "run")
        last = ledger_of(honest[0]).sealed[-2:]
        assert all(c.peer != liar.peer for s in last for c in s.commit.contributors)
        check_ledgers(honest)
