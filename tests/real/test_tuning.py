"""A LoRA is tuned through real servers that are killed and stopped; the loss goes as it goes locally."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

import swarmd
from swarmd.client.tuning import lane_audit
from swarmd.home.models import bundled_folder
from tests.real.faults import revive
from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.liars import TUNING_LIES
from tools.prove.trust import add_liar, probes_of

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
N_STEPS = 12
DATA = Path(__file__).parents[2] / "examples" / "caesar.jsonl"


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of Latin, which the bundled model has never seen: (ids, labels) of four rows each."""
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder())
    texts = [json.loads(line)["text"] for line in DATA.read_text().splitlines()]
    found = []
    for step in range(N_STEPS):
        rows = [torch.tensor(tokenizer(texts[(4 * step + i) % len(texts)]).input_ids[:48]) for i in range(4)]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        lengths = torch.tensor([len(row) for row in rows]).unsqueeze(1)
        found.append((ids, torch.where(torch.arange(ids.shape[1]) < lengths, ids, -100)))
    return found


def tuned(model: Any) -> Any:
    torch.manual_seed(3)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"])
    return get_peft_model(model.requires_grad_(False), config).eval()


def train(model: Any, before: Any = lambda step: None, n_steps: int = N_STEPS) -> list[float]:
    """AdamW with gradient accumulation left to autograd; returns the loss of each step."""
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=5e-3)
    losses = []
    for step, (ids, labels) in enumerate(batches()[:n_steps]):
        before(step)
        loss = model(input_ids=ids, attention_mask=(labels != -100).long(), labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@dataclass
class Stage:
    """Two chains of two servers, and the run that nothing disturbed, in one local process."""

    swarm: LocalSwarm
    volunteers: list[Volunteer]
    client: Any
    expected: list[float]
    parameters: dict[str, torch.Tensor]

    def model(self) -> Any:
        return tuned(self.client.model("demo"))

    def check(self, losses: list[float], model: Any) -> None:
        assert losses == pytest.approx(self.expected, rel=1e-4)
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                twin = self.parameters[name]
                assert (parameter - twin).norm() / twin.norm() < 1e-3, name


@pytest.mark.parametrize("lie", [pytest.param(TUNING_LIES[0], marks=pytest.mark.prove), TUNING_LIES[1]])
def test_a_server_that_lies_in_fine_tuning_is_found_and_its_numbers_are_not_used(
    lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lane_audit, "LEAST_WAIT_S", 30.0)  # training goes on without answers that come late
    torch.set_num_threads(1)
    local = train(tuned(AutoModelForCausalLM.from_pretrained(bundled_folder(), dtype=torch.float32)), n_steps=5)
    with local_swarm(tmp_path) as swarm:
        holders = swarm.serving((0, 3), (3, 6), (0, 3), (3, 6), (3, 6))
        liar = add_liar(swarm, lie, "bundled", 6)
        assert "wrong" not in probes_of(holders, liar), "it is honest with all but those who train"
        with swarmd.connect(swarm.invite()) as client:
            model = client.model("demo")
            model.micro_batch_rows = 1  # four at a time: all chains have some
            assert train(tuned(model), n_steps=5) == pytest.approx(local, rel=1e-4)
            standing, doubts = client.within.rpc.standing, model.lanes.statistics.doubts
            assert not standing.allows(liar.peer), client.within.checks.findings
            assert all(standing.allows(holder.peer) for holder in holders)
            assert any(liar.peer[-8:] in said and "computed wrongly in fine-tuning" in said for said in doubts)


@pytest.fixture(scope="module")
def whole_stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    torch.set_num_threads(1)
    local = tuned(AutoModelForCausalLM.from_pretrained(bundled_folder(), dtype=torch.float32))
    expected = train(local)
    parameters = {name: p.detach().clone() for name, p in local.named_parameters() if p.requires_grad}
    with local_swarm(tmp_path_factory.mktemp("tuning")) as swarm:
        volunteers = swarm.serving((0, 3), (3, 6), (0, 3), (3, 6))
        yield Stage(swarm, volunteers, None, expected, parameters)


@pytest.fixture
def stage(whole_stage: Stage) -> Iterator[Stage]:
    with swarmd.connect(whole_stage.swarm.invite()) as client:  # one that holds nothing against anybody yet
        yield replace(whole_stage, client=client)
    revive(whole_stage.swarm, whole_stage.volunteers)


def test_the_loss_goes_as_it_goes_locally(stage: Stage) -> None:
    model = stage.model()
    losses = train(model)
    stage.check(losses, model)
    assert losses[-1] < losses[0] - 1, "it learns"
    statistics = model.lanes.statistics
    assert statistics.backwards == 4 * N_STEPS
    assert not statistics.retries


def strike(victim: Volunteer, number: int, what: str) -> threading.Thread:
    """Stop the victim's worker, so that micro-batches wait there unanswered, and then strike."""
    victim.signal(signal.SIGSTOP, "worker")

    def blow() -> None:
        time.sleep(0.3)  # for a micro-batch to get there; a blow that comes too early is a weaker test, not a wrong one
        if (number, what) != (signal.SIGSTOP, "worker"):
            victim.signal(number, what)

    thread = threading.Thread(target=blow)
    thread.start()
    return thread


def test_killed_servers_change_nothing(stage: Stage) -> None:
    model, threads = stage.model(), []

    def before(step: int) -> None:
        if step and step % 3 == 0:
            for thread in threads:
                thread.join()  # the blow before has fallen
            for volunteer in stage.volunteers:  # whoever was killed before is back by now, or comes back
                if volunteer.process is not None and volunteer.process.poll() is not None:
                    volunteer.stop()
                    volunteer.start()
            stage.swarm.wait_online()
            threads.append(strike(stage.volunteers[step // 3 % 4], signal.SIGKILL, "both"))

    losses = train(model, before)
    for thread in threads:
        thread.join()
    stage.check(losses, model)
    assert len(threads) == 3
    assert model.lanes.statistics.retries, "micro-batches were lost"


@pytest.mark.parametrize(("what", "place"), [pytest.param("worker", -1, marks=pytest.mark.prove), ("daemon", 0)])
def test_stopped_servers_change_nothing(stage: Stage, what: str, place: int) -> None:
    model, struck = stage.model(), []

    def before(step: int) -> None:
        if step == 4:
            peer = model.lanes.open[0].hops[place].peer  # which of two servers a chain goes through is its own choice
            victim = next(volunteer for volunteer in stage.volunteers if volunteer.peer == peer)
            struck.append((victim, strike(victim, signal.SIGSTOP, what)))
        if step == 8 and what == "daemon":  # it wakes up, with answers for lanes that are no more
            struck[0][0].signal(signal.SIGCONT, "daemon")

    losses = train(model, before)
    struck[0][1].join()
    stage.check(losses, model)
    assert model.lanes.statistics.retries, "micro-batches were lost"


def test_a_server_that_stops_serving_hands_its_work_to_the_other_chain(stage: Stage) -> None:
    model, volunteer = stage.model(), stage.volunteers[1]

    def before(step: int) -> None:
        if step == 4:
            volunteer.ask("drain", "POST")

    losses = train(model, before)
    volunteer.ask("resume", "POST")
    stage.check(losses, model)
    assert len(model.lanes.statistics.retries) <= 4, "micro-batches that were under way may go again, no more"
