"""A model in stages with real daemons: what one big machine would have computed from the same ledgers."""

from __future__ import annotations

import os
import random
import signal
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.liars import VARIABLE
from tests.real.lying_trainers import OTHER_ROWS, STAGE_LIES
from tests.real.stages import (
    errors_of_replay,
    held_by,
    join_stage,
    ledgers_of,
    memory_limit,
    memory_of,
    rows_of,
    start_in_stages,
    update_of,
    wait_stages,
)
from tests.real.training import OPTIMIZERS, ROOT, command, is_back

pytestmark = pytest.mark.slow

CLIPPED = 'kind = "adamw"\nlearning_rate = 0.002\nclip_norm = 0.5'
BOUND = 1e-5  # relative L2: sums in float32, in another order
OF_360M: dict[str, Any] = {
    "hidden_size": 960,
    "intermediate_size": 2_560,
    "num_hidden_layers": 32,
    "layer_types": ["full_attention"] * 32,
    "num_attention_heads": 15,
    "num_key_value_heads": 5,
    "head_dim": 64,
    "vocab_size": 49_152,
}
LIMIT_BYTES = 4_000_000_000  # of a daemon with its worker: 360 M parameters take 5.8 GB with gradients and moments


def test_a_model_in_stages_is_one_big_machines(tmp_path: Path) -> None:
    """A holder is killed, a driver's worker is killed, and nothing is guessed; the model is taken home."""
    with local_swarm(tmp_path) as swarm:
        starter, one, two, again, ends = volunteers = [swarm.add("--no-serve") for _ in range(5)]
        start_in_stages(starter, 2, optimizer=CLIPPED, target=16, every=1)
        for volunteer, stage in ((one, 1), (two, 2), (again, 1), (ends, 0)):
            join_stage(swarm, volunteer, stage)
        wait_stages(swarm, volunteers, 1)
        swarm.wait(lambda: rows_of(again)[1]["samples_counted"] > 0, "a second holder to have what the first one has")

        one.stop()
        left = [v for v in volunteers if v is not one]
        wait_stages(swarm, left, update_of(starter) + 1)
        os.kill(rows_of(ends)[0]["worker"], signal.SIGKILL)
        wait_stages(swarm, left, update_of(starter) + 1)
        shown = command(starter, "train", "status", "run")
        assert "stage 2" in shown
        assert "blocks from 2 on" in shown
        assert "one more machine there would bring" in command(starter, "train", "plan", "run")
        planned = command(starter, "train", "plan", str(starter.home.folder / "run.toml"))
        assert "2 stages of blocks" in planned
        assert "it fits" in planned

        command(starter, "train", "stop", "run", "--all")
        command(starter, "train", "export", "run", "--out", str(tmp_path / "model"))
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
        errors = errors_of_replay(volunteers, starter, exported)
        assert {stage for stage, _ in errors} == {0, 1, 2}
        assert max(errors.values()) < BOUND
        losses = ledgers_of(volunteers)[0].losses()
        assert losses[-1] < losses[0]


@pytest.mark.prove
@pytest.mark.parametrize(
    ("optimizer", "synchronisation"),
    [("sgd", "step"), ("adamw", "step"), (CLIPPED, "step"), ("sgd", "delayed")],
    ids=["sgd", "adamw", "clipped", "delayed"],
)
def test_a_random_holder_is_killed_every_third_update(tmp_path: Path, optimizer: str, synchronisation: str) -> None:
    rng = random.Random(optimizer)
    with local_swarm(tmp_path) as swarm:
        starter, *others = volunteers = [swarm.add("--no-serve") for _ in range(6)]
        more = f'synchronisation = "{synchronisation}"'
        chosen = OPTIMIZERS.get(optimizer, optimizer)
        start_in_stages(starter, 2, optimizer=chosen, target=32, every=10, more=more)
        for number, volunteer in enumerate(others, 1):
            join_stage(swarm, volunteer, number % 3)
        wait_stages(swarm, volunteers, 1)
        down: Volunteer | None = None
        for update in range(4, 42, 3):
            if down is not None:
                _bring_back(swarm, down)
                wait_stages(swarm, volunteers, update - 3)
            down = rng.choice([v for v in others if v is not down])
            time.sleep(0.5 * rng.random())  # anywhere in a pass, a round, a fetch
            down.stop()
            left = [v for v in volunteers if v is not down]
            wait_stages(swarm, left, update, within_s=300)  # two minutes where the newest state is lost
        assert down is not None
        _bring_back(swarm, down)
        wait_stages(swarm, volunteers, 41)
        command(starter, "train", "stop", "run", "--all")
        errors = errors_of_replay(volunteers, starter)
        print({place: f"{error:.1e}" for place, error in errors.items()})
        assert max(errors.values()) < BOUND


@pytest.mark.prove
@pytest.mark.parametrize(("lie", "stage"), [*((lie, 1) for lie in STAGE_LIES), (OTHER_ROWS, 0)])
def test_a_holder_that_lies_is_left_out(tmp_path: Path, lie: str, stage: int) -> None:
    """Two others of its stage find it out, each for itself; no honest one is left out."""
    with local_swarm(tmp_path) as swarm:
        starter, one, two = honest = [swarm.add("--no-serve") for _ in range(3)]
        liar = swarm.prepare("--no-serve", **{VARIABLE: lie, "PYTHONPATH": str(ROOT)})
        liar.program = "tests.real.liars"
        liar.start()
        swarm.wait_online()
        start_in_stages(starter, 1, target=32, steps=400, audit=32)
        if stage == 0:
            join_stage(swarm, starter, 1)
        for volunteer in (one, two, liar):
            join_stage(swarm, volunteer, stage)
        swarm.wait(lambda: all(liar.peer in shunned_by(v) for v in honest), "all to have left the liar out")
        found_at = update_of(starter)
        print(f"{lie}: left out at update {found_at}, {rows_of(one)[stage]['audits']}")
        wait_stages(swarm, honest, found_at + 4)
        assert {peer for v in honest for peer in shunned_by(v)} == {liar.peer}


@pytest.mark.prove
def test_a_stopped_holder_is_done_without_and_comes_back(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        starter, one, _, _ = volunteers = [swarm.add("--no-serve") for _ in range(4)]
        start_in_stages(starter, 2, target=16, every=1)
        for volunteer, stage in zip(volunteers[1:], (1, 2, 1), strict=True):
            join_stage(swarm, volunteer, stage)
        wait_stages(swarm, volunteers, 2)
        one.signal(signal.SIGSTOP)
        left = [v for v in volunteers if v is not one]
        wait_stages(swarm, left, update_of(starter) + 3)
        one.signal(signal.SIGCONT)
        wait_stages(swarm, volunteers, update_of(starter) + 2)
        command(starter, "train", "stop", "run", "--all")
        assert max(errors_of_replay(volunteers, starter).values()) < BOUND


@pytest.mark.prove
def test_a_pipeline_becomes_shorter_and_longer_while_it_runs(tmp_path: Path) -> None:
    """Four holders of a block each, three, and four again: no update is lost, and none has fewer samples."""
    with local_swarm(tmp_path) as swarm:
        starter, *others = volunteers = [swarm.add("--no-serve") for _ in range(5)]
        start_in_stages(starter, 4, target=16, every=1)
        for stage, volunteer in enumerate(others, 1):
            join_stage(swarm, volunteer, stage)
        wait_stages(swarm, volunteers, 2)
        third, fourth = others[2:]
        for giver, taker in ((fourth, third), (third, fourth)):
            began_at, began = time.monotonic(), update_of(starter)
            join_stage(swarm, taker, 4)
            swarm.wait(lambda v=taker: rows_of(v)[4]["samples_counted"] > 0, "the taker to give something", taker)
            command(giver, "train", "stop", "run", "--stage", "4")
            swarm.wait(lambda v=giver: 4 not in held_by(v), "the giver to have left", giver)
            print(f"moved in {time.monotonic() - began_at:.1f} s, {update_of(starter) - began} updates")
            wait_stages(swarm, [v for v in volunteers if held_by(v)], update_of(starter) + 2)
        command(starter, "train", "stop", "run", "--all")
        commits = [sealed.commit for ledger in ledgers_of(volunteers).values() for sealed in ledger.sealed]
        assert not any(commit.restores for commit in commits)
        assert min(commit.n_samples for commit in commits) >= 14
        assert max(errors_of_replay(volunteers, starter).values()) < BOUND


@pytest.mark.prove
def test_a_model_that_fits_nobody(tmp_path: Path) -> None:
    """360 M parameters, four daemons none of which could hold them; one holder is killed, and one joins."""
    with ExitStack() as groups, local_swarm(tmp_path) as swarm:

        def add() -> Volunteer:
            limited = groups.enter_context(memory_limit(LIMIT_BYTES))
            return swarm.add("--no-serve", inside=limited.inside)

        volunteers = [add() for _ in range(4)]
        starter, one, two, again = volunteers
        start_in_stages(starter, 2, optimizer=CLIPPED, target=8, every=20, size=OF_360M)
        for volunteer, stage in ((one, 1), (two, 2), (again, 1)):
            join_stage(swarm, volunteer, stage)
        wait_stages(swarm, volunteers, 6, within_s=1_200)
        one.stop()
        wait_stages(swarm, [starter, two, again], update_of(starter) + 3, within_s=1_200)
        _bring_back(swarm, one)
        newcomer = add()
        join_stage(swarm, newcomer)
        wait_stages(swarm, [*volunteers, newcomer], 20, within_s=1_800)
        print("held:", {v.home.folder.name: held_by(v) for v in swarm.volunteers})
        for volunteer in swarm.volunteers:
            print("peak memory, MB:", volunteer.home.folder.name, held_by(volunteer), memory_of(volunteer))
        command(starter, "train", "stop", "run", "--all")
        losses = ledgers_of(swarm.volunteers)[0].losses()
        print("losses:", [round(loss, 3) for loss in losses])
        for volunteer in swarm.volunteers:
            volunteer.stop()
        errors = errors_of_replay(swarm.volunteers, starter)
        print({place: f"{error:.1e}" for place, error in errors.items()})
        assert max(errors.values()) < BOUND


def shunned_by(volunteer: Volunteer) -> list[str]:
    """Whom a volunteer leaves out."""
    return [peer for row in rows_of(volunteer).values() for peer in row["shunned"]]


def _bring_back(swarm: LocalSwarm, volunteer: Volunteer) -> None:
    volunteer.start()
    swarm.wait(lambda: is_back(volunteer), "it is back", volunteer)
