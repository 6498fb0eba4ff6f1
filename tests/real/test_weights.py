"""Weights come from other members, as real processes; donors and downloaders die half-way."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

import swarmd
from tests import checkpoints
from tests.real.harness import LocalSwarm, Volunteer, add_model, local_swarm

pytestmark = pytest.mark.slow
SLOW = {"SWARMD_UP_LIMIT_MBIT": "80"}
PIECE_BYTES = 4 * 2**20


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.set_num_threads(1)
    return checkpoints.make("llama", tmp_path / "llama", hidden_size=512, intermediate_size=1408)


def fetch_until(swarm: LocalSwarm, volunteer: Volunteer, share: float) -> dict[str, int]:
    """Wait until so much of its download is done; returns its row."""
    rows: list[dict[str, int]] = []

    def is_there() -> bool:
        with suppress(httpx.TransportError):  # just started: its socket is not there yet
            rows[:] = volunteer.ask("downloads")["downloads"]
        is_looking = not rows or "on disk" in str(rows[0]["waiting_for"])
        return not is_looking and rows[0]["done_bytes"] >= share * rows[0]["total_bytes"]

    swarm.wait(is_there, f"{share:.0%} of the download")
    return rows[0]


def serves(volunteer: Volunteer) -> bool:
    return (volunteer.ask("status")["worker"] or {}).get("state") == "online"


def generates_as_local(swarm: LocalSwarm, home: Path, name: str, checkpoint: Path) -> None:
    ids = torch.randint(3, 300, (1, 9), generator=torch.Generator().manual_seed(0))
    local = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    with swarmd.connect(home=home) as client:
        model = client.model(name, wait_s=60)
        assert torch.equal(model.generate(input_ids=ids, **options), local.generate(input_ids=ids, **options))


def test_with_nothing_but_an_invite_and_a_donor_that_is_killed(tmp_path: Path, checkpoint: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        first = swarm.add("--no-serve", models={"m": checkpoint}, **SLOW)
        second = swarm.add("--no-serve", models={"m": checkpoint}, **SLOW)
        fresh = swarm.add("--serve", "m")
        row = fetch_until(swarm, fresh, 0.25)
        assert set(row["donors"]) <= {first.peer, second.peer}  # type: ignore[arg-type]
        second.signal(signal.SIGKILL)
        second.stop()
        swarm.wait(lambda: serves(fresh), "the fresh volunteer to serve")
        guest = swarm.prepare()
        generates_as_local(swarm, guest.home.folder, "m", checkpoint)
        assert (guest.home.weights).is_dir(), "the client fetched the head"


def test_a_downloader_that_is_killed_fetches_only_what_was_missing(tmp_path: Path, checkpoint: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        swarm.add("--no-serve", models={"m": checkpoint}, **SLOW)
        fresh = swarm.add("--serve", "m")
        before = fetch_until(swarm, fresh, 0.4)
        fresh.signal(signal.SIGKILL)
        fresh.stop()
        fresh.start()
        after = fetch_until(swarm, fresh, 0.0)
        complete = before["total_bytes"] - after["total_bytes"]  # groups that are in place are not fetched at all
        assert complete + after["resumed_bytes"] >= before["done_bytes"] - PIECE_BYTES
        swarm.wait(lambda: serves(fresh), "it to serve")


def test_a_model_added_on_one_peer_is_used_by_name_and_by_hash_from_another(tmp_path: Path, checkpoint: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        founder = swarm.add("--no-serve")
        early = swarm.add("--serve", "late")  # waits for the name
        add_model(founder.home, "late", checkpoint)
        founder.ask("reload", "POST")
        swarm.wait(lambda: serves(early), "the model that was added meanwhile to be served")
        guest = swarm.prepare()
        generates_as_local(swarm, guest.home.folder, "late", checkpoint)
        model, _ = founder.home.catalog().models["late"]
        generates_as_local(swarm, swarm.prepare().home.folder, model, checkpoint)
