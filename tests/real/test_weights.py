"""Weights come from other members, as real processes; donors and downloaders die half-way."""

from __future__ import annotations

import signal
import threading
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

import swarmd
from swarmd.home.membership import MembershipFiles
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
        model, _ = MembershipFiles(founder.home).catalog().models["late"]
        generates_as_local(swarm, swarm.prepare().home.folder, model, checkpoint)


@pytest.mark.filterwarnings("ignore")  # of PEFT about targets
def test_adapters_of_the_catalog_answer_as_peft_does(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    base = checkpoints.make("llama", tmp_path / "base")
    tuned = {
        name: checkpoints.make_adapter(base, tmp_path / name, ["q_proj", "v_proj", "down_proj"], seed)
        for seed, name in enumerate(("one", "two"))
    }
    local = {"": AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32), **tuned}
    ids = torch.randint(3, 300, (1, 9), generator=torch.Generator().manual_seed(0))
    options = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    with local_swarm(tmp_path) as swarm:
        founder = swarm.add("--no-serve", models={"m": base, **{name: tmp_path / name for name in tuned}})
        swarm.serving((0, 3), (3, 6), model="m")
        with swarmd.connect(home=founder.home.folder) as client:
            models = {name: client.model("m", adapter=name, wait_s=60) for name in local}
            got: dict[str, torch.Tensor] = {}

            def generate(name: str) -> None:
                got[name] = models[name].generate(input_ids=ids, **options)

            threads = [threading.Thread(target=generate, args=(name,)) for name in local]  # at the same time
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            for name, model in local.items():
                assert torch.equal(got[name], model.generate(input_ids=ids, **options)), name
            assert not torch.equal(got["one"], got[""])
            with pytest.raises(swarmd.ConfigError, match="no adapter 'three' for this model; it has: one, two"):
                client.model("m", adapter="three")
