"""A server whose blocks are computed by a team: the tokens are the same, also when a member is killed in mid-answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import PreTrainedModel

import swarmd
from swarmd.compute.model import skeleton
from tests import checkpoints, families
from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.stages import memory_limit

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # what a family warns of is its own affair
N_TOKENS = 30
WAIT_S = 10.0
KILLED_AFTER = 8  # tokens of an answer
MEMORY_BYTES = 960 << 20  # of a daemon and its worker, in which 388 MB of weights leave no room to work
OPTIONS = {"do_sample": False, "max_new_tokens": N_TOKENS, "pad_token_id": 0}
LORA = ["q_proj", "v_proj", "o_proj"]
FAMILIES = [("llama", "1:2"), pytest.param("qwen3_moe", "1:2:6", marks=pytest.mark.prove)]


def followers_of(volunteer: Volunteer) -> list[int]:
    """The processes that follow a server's worker on its own machine."""
    worker = psutil.Process(volunteer.ask("status")["worker"]["pid"])
    return [child.pid for child in worker.children() if "swarmd.compute.teams.follower" in child.cmdline()]


def memberships_of(volunteer: Volunteer) -> list[int]:
    """The processes in which a machine follows others."""
    rows = volunteer.ask("status")["following"]
    return [row["pid"] for row in rows if row["state"].startswith("member ")]


class BlowOnce:
    """Does something once, while an answer is given."""

    def __init__(self, blow: Callable[[], None]) -> None:
        self._blow = blow
        self._n_tokens = 0

    def put(self, tokens: torch.Tensor) -> None:
        self._n_tokens += 1
        if self._n_tokens == KILLED_AFTER:
            self._blow()

    def end(self) -> None: ...


class Expected:
    """A model, a prompt, and the tokens that it gives in one process."""

    def __init__(self, family: str, folder: Path) -> None:
        torch.set_num_threads(1)
        self.folder = families.make_named(family, folder)
        local = skeleton.load_whole(self.folder, torch.float32)
        self.n_blocks = skeleton.count_layers(local.config)
        self._ids = torch.randint(3, families.VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(3))
        self._tokens = self._generate(local)
        self._embedded = local.get_input_embeddings()(self._ids).detach()
        self._gradients = self._differentiate(local)

    def _generate(self, model: PreTrainedModel, **more: object) -> torch.Tensor:
        tokens: torch.Tensor = model.generate(self._ids, **OPTIONS, **more)  # type: ignore[operator]
        return tokens

    def _differentiate(self, model: PreTrainedModel) -> list[torch.Tensor]:
        """Gradients of the loss by what enters the first block, as prompt tuning needs it, and by LoRA matrices."""
        torch.manual_seed(5)
        tuned = get_peft_model(
            model.requires_grad_(False), LoraConfig(r=4, target_modules=LORA, init_lora_weights=False)
        )
        embedded = self._embedded.clone().requires_grad_()
        loss = tuned.eval()(inputs_embeds=embedded, labels=self._ids).loss
        return [*torch.autograd.grad(loss, [embedded, *(p for p in tuned.parameters() if p.requires_grad)])]

    def check_gradients(self, model: PreTrainedModel) -> None:
        """The model is one with a LoRA then."""
        for gradient, expected in zip(self._differentiate(model), self._gradients, strict=True):
            assert (gradient - expected).norm() / expected.norm() < 1e-5

    def check(self, model: PreTrainedModel, blow: Callable[[], None] = lambda: None) -> None:
        assert torch.equal(self._generate(model, streamer=BlowOnce(blow)), self._tokens)


@contextmanager
def founded(folder: Path, expected: Expected) -> Iterator[LocalSwarm]:
    with local_swarm(folder) as swarm:
        swarm.add("--no-serve", models={"model": expected.folder})
        yield swarm


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize(("family", "team"), FAMILIES)
def test_a_team_beside_an_ordinary_server_and_a_member_that_is_killed(family: str, team: str, tmp_path: Path) -> None:
    expected = Expected(family, tmp_path / "model")
    n = expected.n_blocks
    with founded(tmp_path / "swarm", expected) as swarm:
        (together,) = swarm.serving((0, n // 2), model="model", SWARMD_TEAM=team)
        (alone,) = swarm.serving((n // 2, n), model="model")
        before = followers_of(together)
        assert len(before) == team.count(":")
        assert not followers_of(alone)
        assert f"a team of {team.count(':') + 1}" in together.ask("status")["worker"]["kernels"]
        with swarmd.connect(home=alone.home.folder) as client:
            model = client.model("model")
            expected.check(model)
            expected.check(model, lambda: kill(before[0]))
        swarm.wait(lambda: before[0] not in followers_of(together), "new followers")
        assert len(followers_of(together)) == team.count(":")
        pids = followers_of(together)
    assert pids, "they were there"
    _, alive = psutil.wait_procs([psutil.Process(pid) for pid in pids if is_running(pid)], timeout=WAIT_S)
    assert not [process for process in alive if is_running(process.pid)], "followers end with their worker"


@pytest.mark.parametrize(("family", "team"), FAMILIES)
def test_a_team_of_machines_goes_on_with_and_without_a_member(family: str, team: str, tmp_path: Path) -> None:
    expected = Expected(family, tmp_path / "model")
    n = expected.n_blocks
    with founded(tmp_path / "swarm", expected) as swarm:
        leader = swarm.prepare("--serve", "model", "--blocks", f"0:{n // 2}")
        others = [swarm.add("--no-serve", SWARMD_FOLLOW=leader.peer) for _ in range(team.count(":"))]
        leader.environment |= {"SWARMD_TEAM": team, "SWARMD_TEAM_PEERS": ",".join(other.peer for other in others)}
        leader.start()
        swarm.wait(lambda: leader.is_listening, "the leader")
        (alone,) = swarm.serving((n // 2, n), model="model")
        (pid,) = memberships_of(others[0])
        readers = alone.ask("why", model="model")["chains"]["model"]["readers"]
        assert {*readers} == {v.peer for v in (leader, *others, alone)}, "members see what passes through the team"
        with swarmd.connect(home=alone.home.folder) as client:
            model = client.model("model")
            expected.check(model)
            with pytest.raises(swarmd.SwarmError, match="blocks"):
                expected.check(client.model("model", only=[leader.peer, alone.peer]))
            expected.check_gradients(client.model("model"))
            expected.check(model, lambda: kill(pid))
            assert memberships_of(others[0]) not in ([], [pid]), "the leader has asked it again"
            assert f"a team of {len(others) + 1}" in leader.ask("status")["worker"]["kernels"]
            expected.check(model, lambda: others[-1].stop())
            worker = leader.ask("status")["worker"]
            assert f"without {others[-1].peer} in its team" in worker["why"]
            assert ("a team of" in worker["kernels"]) == (len(others) > 1)


@pytest.mark.prove
def test_a_block_that_fits_no_member(tmp_path: Path) -> None:
    """128 experts of 388 MB, where a machine has room for a third: alone it is refused, a team of three serves it."""
    torch.set_num_threads(1)
    heads = {"hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    experts = {"moe_intermediate_size": 512, "num_experts": 128, "num_experts_per_tok": 4}
    folder = checkpoints.make("qwen3_moe", tmp_path / "model", n_layers=1, **heads, **experts)
    ids = torch.arange(3, 15).unsqueeze(0)
    expected = skeleton.load_whole(folder, torch.float32).generate(ids, **OPTIONS)  # type: ignore[operator]
    with ExitStack() as groups, local_swarm(tmp_path / "swarm") as swarm:

        def prepare(*arguments: str, **environment: str) -> Volunteer:
            volunteer = swarm.prepare(*arguments, models={"model": folder}, **environment)
            volunteer.inside = groups.enter_context(memory_limit(MEMORY_BYTES)).inside
            return volunteer

        def start(volunteer: Volunteer) -> None:
            volunteer.start()
            swarm.wait(lambda: volunteer.is_listening, "a daemon", volunteer)

        founder = swarm.add("--no-serve", models={"model": folder})
        leader = prepare("--serve", "model", "--blocks", "0:1")
        start(leader)
        swarm.wait(lambda: leader.ask("status")["hosting"][0]["state"] == "failed", "what does not fit to be refused")
        assert "do not fit" in leader.ask("status")["hosting"][0]["why"]
        leader.stop()
        others = [prepare("--no-serve", SWARMD_FOLLOW=leader.peer) for _ in range(2)]
        for other in others:
            start(other)
        leader.environment |= {"SWARMD_TEAM": "auto", "SWARMD_TEAM_PEERS": ",".join(other.peer for other in others)}
        start(leader)
        swarm.wait_online()
        assert "these blocks take 0.4 GiB" in leader.ask("status")["worker"]["team"]
        with swarmd.connect(home=founder.home.folder) as client:
            answer = client.model("model").generate(ids, **OPTIONS)
        assert torch.equal(answer, expected)


def test_a_machine_follows_only_whom_its_owner_names(tmp_path: Path) -> None:
    expected = Expected("llama", tmp_path / "model")
    with founded(tmp_path / "swarm", expected) as swarm:
        stranger = swarm.add("--no-serve")
        (leader,) = swarm.serving(
            (0, expected.n_blocks), model="model", SWARMD_TEAM="1:2", SWARMD_TEAM_PEERS=stranger.peer
        )
        worker = leader.ask("status")["worker"]
        assert f"without {stranger.peer} in its team: its owner has not said follow" in worker["why"]
        assert "a team of" not in worker["kernels"]
        with swarmd.connect(home=leader.home.folder) as client:
            expected.check(client.model("model"))


def is_running(pid: int) -> bool:
    """Is it there, and not only because nobody has asked how it ended?"""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
