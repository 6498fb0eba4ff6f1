"""A server whose blocks are computed by a team of processes: the tokens are the same, also when a member is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import psutil
import pytest
import torch

import swarmd
from swarmd.compute.model import skeleton
from tests import families
from tests.real.harness import Volunteer, local_swarm

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # what a family warns of is its own affair
N_TOKENS = 30
WAIT_S = 10.0
KILLED_AFTER = 8  # tokens of an answer
OPTIONS = {"do_sample": False, "max_new_tokens": N_TOKENS, "pad_token_id": 0}


def followers_of(volunteer: Volunteer) -> list[int]:
    """The processes that follow a server's worker."""
    worker = psutil.Process(volunteer.ask("status")["worker"]["pid"])
    return [child.pid for child in worker.children() if "swarmd.compute.teams.follower" in child.cmdline()]


class KillOnce:
    """Kills a member of a team while an answer is given."""

    def __init__(self, volunteer: Volunteer) -> None:
        self._volunteer = volunteer
        self._n_tokens = 0
        self.killed = 0

    def put(self, tokens: torch.Tensor) -> None:
        self._n_tokens += 1
        if self._n_tokens == KILLED_AFTER:
            self.killed = followers_of(self._volunteer)[0]
            os.kill(self.killed, signal.SIGKILL)

    def end(self) -> None: ...


@pytest.mark.parametrize(
    ("family", "team"), [("llama", "1:2"), pytest.param("qwen3_moe", "1:2:6", marks=pytest.mark.prove)]
)
def test_a_team_beside_an_ordinary_server_and_a_member_that_is_killed(family: str, team: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = families.make_named(family, tmp_path / "model")
    local = skeleton.load_whole(folder, torch.float32)
    n = skeleton.count_layers(local.config)
    ids = torch.randint(3, families.VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(3))
    expected = local.generate(ids, **OPTIONS)  # type: ignore[operator]
    with local_swarm(tmp_path / "swarm") as swarm:
        swarm.add("--no-serve", models={"model": folder})
        (together,) = swarm.serving((0, n // 2), model="model", SWARMD_TEAM=team)
        (alone,) = swarm.serving((n // 2, n), model="model")
        assert len(followers_of(together)) == team.count(":")
        assert not followers_of(alone)
        assert f"a team of {team.count(':') + 1}" in together.ask("status")["worker"]["kernels"]
        with swarmd.connect(home=alone.home.folder) as client:
            model = client.model("model")
            assert torch.equal(model.generate(ids, **OPTIONS), expected)
            blow = KillOnce(together)
            assert torch.equal(model.generate(ids, **OPTIONS, streamer=blow), expected)
        swarm.wait(lambda: blow.killed not in followers_of(together), "new followers")
        assert len(followers_of(together)) == team.count(":")
        pids = followers_of(together)
    assert pids, "they were there"
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if is_running(pid)], timeout=WAIT_S)
    assert not [process for process in alive if is_running(process.pid)], "followers end with their worker"


def is_running(pid: int) -> bool:
    """Is it there, and not only because nobody has asked how it ended?"""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
