"""What a daemon serves, as real processes: several models, one of them drained; one that nobody serves is rescued."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import swarmd
from swarmd.protocol.models import manifest
from swarmd.resources import can_use_cards
from swarmd.weights.library import Library
from tests import checkpoints
from tests.real.harness import LocalSwarm, Volunteer, add_model, local_swarm

pytestmark = pytest.mark.slow
GREEDY = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return checkpoints.make("llama", tmp_path / "llama", n_layers=4)


def hosting(volunteer: Volunteer, name: str) -> dict[str, Any]:
    """The row of what it serves, or is to serve, under a name."""
    rows = volunteer.ask("status")["hosting"]
    return next((r for r in rows if name in (r["wanted"], (r["serving"] or {}).get("name"))), {"state": "none"})


def is_online(volunteer: Volunteer, name: str) -> bool:
    return bool(hosting(volunteer, name)["state"] == "online")


def test_two_models_by_one_daemon_and_one_is_drained_while_the_other_goes_on(tmp_path: Path, checkpoint: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        both = swarm.add("--serve", "demo", "--serve", "m", models={"m": checkpoint})
        swarm.wait(lambda: is_online(both, "demo") and is_online(both, "m"), "both models online")
        with swarmd.connect(home=both.home.folder) as client:
            demo, other = client.model("demo"), client.model("m")
            ids = torch.arange(3, 12)[None]
            whole = demo.generate(ids, **{**GREEDY, "max_new_tokens": 200, "min_new_tokens": 200})
            before = other.generate(ids, **GREEDY)
            said: list[Any] = []
            long = threading.Thread(
                target=lambda: said.append(
                    demo.generate(ids, **{**GREEDY, "max_new_tokens": 200, "min_new_tokens": 200})
                )
            )
            long.start()
            swarm.wait(lambda: both.ask("status")["server"]["sessions"] > 0, "the long generation")
            both.ask("drain", "POST", model="m")
            swarm.wait(lambda: hosting(both, "m")["state"] == "paused", "one model drained")
            assert "drained by its owner" in hosting(both, "m")["why"]
            assert "drained by its owner" in both.ask("why")["hosting"][1]["why"]
            assert hosting(both, "demo")["state"] == "online"
            model, n_blocks = client.call(client.within.resolve, "m")
            swarm.wait(lambda: bool(client.view().missing(model, n_blocks)), "the client to hear of it")
            with pytest.raises(swarmd.NoRoute, match=r"\[0,4\)"):
                client.model("m", wait_s=1)
            long.join(timeout=60)
            assert torch.equal(said[0], whole), "the other model's session never noticed"
            both.ask("resume", "POST", model="m")
            swarm.wait(lambda: is_online(both, "m"), "the drained model again")
            assert torch.equal(client.model("m", wait_s=10).generate(ids, **GREEDY), before)


def test_a_card_that_torch_is_not_built_for_plans_nothing(tmp_path: Path) -> None:
    """By its memory it would be one block; the worker computes on the CPU, whose memory holds all of them."""
    (tmp_path / "bin").mkdir()
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU-1234, 512, NVIDIA Card'\n")
    tool.chmod(0o755)
    with local_swarm(tmp_path) as swarm:
        small = swarm.add("--serve", "demo", PATH=f"{tool.parent}:{os.environ['PATH']}")
        swarm.wait(lambda: is_online(small, "demo"), "it to be online")
        first, end = hosting(small, "demo")["serving"]["blocks"]
        assert end - first == (1 if can_use_cards() else 6)


def test_a_model_that_nobody_serves_is_taken_by_one_who_can_be_spared(tmp_path: Path, checkpoint: Path) -> None:
    """Before, volunteers never looked at another model than the one that they had chosen."""
    with local_swarm(tmp_path) as swarm:
        quick = {"SWARMD_BALANCE_INTERVAL_S": "1"}
        volunteers = [swarm.add(**quick) for _ in range(3)]
        for volunteer in volunteers:
            swarm.wait(lambda v=volunteer: is_online(v, "demo"), "all serve the first model")
        publish(swarm, checkpoint)

        def rows() -> list[dict[str, Any]]:
            return [m for m in volunteers[1].ask("models")["models"] if m["name"] == "new"]

        swarm.wait(lambda: bool(rows()), "the second model's name")
        swarm.wait(lambda: not rows()[0]["missing"], "somebody to serve the second model")
        assert not rows()[0]["help"]
        demo = next(m for m in volunteers[1].ask("models")["models"] if m["name"] == "demo")
        assert not demo["missing"], "nobody left a gap behind"
        moved = [v for v in volunteers if is_online(v, "new")]
        assert moved
        assert "of new are held by nobody" in moved[0].ask("status")["balance"]["last_move"]
        with swarmd.connect(home=volunteers[0].home.folder) as client:
            for name in ("new", "demo"):
                assert client.model(name, wait_s=20).generate(torch.arange(3, 12)[None], **GREEDY).shape == (1, 33)


def test_a_model_that_is_not_listed_is_waited_for_aloud(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        waiting = swarm.add("--serve", "nope")
        swarm.wait(lambda: "nope" in hosting(waiting, "nope").get("why", ""), "the reason")
        row = hosting(waiting, "nope")
        assert row["state"] == "choosing"
        assert "'nope'; it lists: demo" in row["why"]
        assert "'nope'; it lists: demo" in waiting.log()


def publish(swarm: LocalSwarm, checkpoint: Path) -> None:
    """What ``swarmd models add`` does on the founder's machine while its daemon runs."""
    founder = swarm.volunteers[0]
    Library(founder.home.weights, {}).keep_manifest(manifest.read_folder(checkpoint), checkpoint)
    add_model(founder.home, "new", checkpoint)
    founder.ask("reload", "POST")
