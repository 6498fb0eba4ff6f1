"""Tokens tried ahead on real servers: fewer passes, the same text, whatever source proposes and whoever dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
import torch
import trio
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import swarmd
from swarmd.client.draft_training import DraftTask, train_draft
from swarmd.client.drafting.block_draft import BlockDraft
from swarmd.client.drafting.source import DraftSource
from swarmd.client.drafting.speculation import Costs, PassCost
from swarmd.client.drafting.whole_model import Draft, DraftModel
from swarmd.client.drafting.writing import cut_rows
from swarmd.client.drafts import find_draft
from swarmd.client.entry import membership
from swarmd.client.sessions.session import ChainSession
from swarmd.client.swarm import join_swarm
from swarmd.config import GatewayConfig
from swarmd.gateway.generation.answer import AnswerDelta, AnswerOptions
from swarmd.gateway.generation.row import RowReport
from swarmd.gateway.generation.sampling import Sampling
from swarmd.gateway.generation.turns import Turns
from swarmd.gateway.models import ServedModels
from swarmd.home.membership import MembershipFiles
from swarmd.home.models import bundled_folder
from swarmd.values import ModelId
from tests import checkpoints
from tests.real.harness import LocalSwarm, Volunteer, add_model, local_swarm

pytestmark = pytest.mark.slow
N_TOKENS = 60
CODE = "def add(a, b):\n    return a + b\n\n\ndef add(a, b):\n    return a + b\n\n\ndef add(a"


class Collector:
    """A streamer that keeps what it is given, and acts when ``at`` tokens have come."""

    def __init__(self, at: int = -1, act: Any = None) -> None:
        self.tokens: list[int] = []
        self.at, self.act, self.has_ended = at, act, False

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()
        if self.act is not None and len(self.tokens) >= self.at:
            self.act, act = None, self.act
            act()

    def end(self) -> None:
        self.has_ended = True


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalSwarm, list[Volunteer]]]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("speculation")
    models = {"other": checkpoints.make("llama", folder / "other", n_layers=2)}
    bare = AutoTokenizer.from_pretrained(bundled_folder())
    bare.add_tokens(["<another>"])
    bare.save_pretrained(folder / "other")
    with local_swarm(folder / "swarm") as swarm:
        yield swarm, swarm.serving((0, 3), (3, 6), (3, 6), models=models)


@pytest.fixture(autouse=True)
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second a pass, and little for each token more: what is tried must not depend on this machine's speed."""

    measure = Costs.measured

    def measured(costs: Costs, cost: PassCost) -> None:
        measure(costs, PassCost(cost.n_tokens, 1.0 + 0.05 * (cost.n_tokens - 1), hops_s=(0.001,)))

    monkeypatch.setattr(Costs, "measured", measured)


def inputs() -> Any:
    return AutoTokenizer.from_pretrained(bundled_folder())(CODE, return_tensors="pt")


def local(**how: Any) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(bundled_folder(), dtype=torch.float32)
    torch.manual_seed(3)
    return model.generate(**inputs(), max_new_tokens=N_TOKENS, **how)


@pytest.mark.parametrize(
    "how", [{"do_sample": False}, {"do_sample": True, "temperature": 0.3}], ids=["greedy", "sampled"]
)
@pytest.mark.parametrize("source", ["lookup", "draft", "none"])
@pytest.mark.parametrize("flies", [True, False], ids=["in flight", "one window"])
def test_the_text_is_that_of_transformers(
    stage: tuple[LocalSwarm, list[Volunteer]],
    source: str,
    how: dict[str, Any],
    flies: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not flies:  # as where a hop is of an older version
        monkeypatch.setattr(ChainSession, "can_fly", False)
    with swarmd.connect(home=stage[1][0].home.folder) as client:
        model = client.model("demo", lookup=source == "lookup", draft="demo" if source == "draft" else "")
        for _ in range(2):  # what passes take is known in the second
            torch.manual_seed(3)
            streamer = Collector()
            out = model.generate(**inputs(), max_new_tokens=N_TOKENS, streamer=streamer, **how)
            assert torch.equal(out, local(**how))
            assert streamer.tokens == out[0].tolist()
            assert streamer.has_ended
        tried, counted = model.last_speculation, model.last_session.statistics
        n_new = out.shape[1] - inputs()["input_ids"].shape[1]
        if not flies:
            assert n_new - tried.n_taken in (counted.steps, counted.steps - 1), "the last one may have been tried, too"
            assert not counted.n_void
        assert (tried.n_taken > 0) == (source != "none"), tried.reason


def test_a_server_killed_while_tokens_are_tried_changes_nothing(stage: tuple[LocalSwarm, list[Volunteer]]) -> None:
    swarm, (first, second, _) = stage
    with swarmd.connect(home=first.home.folder) as client:
        model = client.model("demo", draft="demo", chain=swarm.hops((first, 0, 3), (second, 3, 6)))
        model.generate(**inputs(), max_new_tokens=10)
        struck = Collector(inputs()["input_ids"].shape[1] + 20, lambda: os.kill(second.process.pid, signal.SIGKILL))
        out = model.generate(**inputs(), max_new_tokens=N_TOKENS, streamer=struck, do_sample=False)
        assert torch.equal(out, local(do_sample=False))
        assert model.last_session.statistics.repairs
        assert model.last_speculation.n_taken > 0


def test_a_draft_that_learned_proposes_unasked_here_and_for_others(
    stage: tuple[LocalSwarm, list[Volunteer]], tmp_path: Path
) -> None:
    swarm, (first, _, third) = stage
    with swarmd.connect(home=first.home.folder) as client:
        model = client.model("demo", lookup=False, draft="")
        base, _ = client.call(client.within.resolve, "demo")
        text = AutoTokenizer.from_pretrained(bundled_folder())(topics["with"] + topics["class"]).input_ids
        own = first.home.drafts / base
        task = DraftTask(base, own, 10.0, cut_rows([text[:2_048]]))
        said: list[str] = []
        made = train_draft(model, task, said.append)
        assert made.draft.acceptance[0] > 0.03, "of 1,024 words"
        assert said[0] == "read 2,048 tokens"
        assert_it_proposes(client)
    trio.run(assert_a_gateway_uses_it, first.home.folder)
    own.rename(tmp_path / "draft")
    add_model(first.home, "guesses", tmp_path / "draft")
    first.ask("reload", "POST")
    swarm.wait(lambda: "guesses" in MembershipFiles(third.home).catalog().drafts, "another member to hear of it", third)
    with swarmd.connect(home=third.home.folder) as client:
        assert_it_proposes(client)
        with pytest.raises(swarmd.ConfigError, match="'guesses' is made for"):
            client.call(find_draft, client.within, "guesses", ModelId("b" * 64))


def assert_it_proposes(client: swarmd.Swarm) -> None:
    """Tokens are tried, and the text is the same."""
    model = client.model("demo", lookup=False)
    for _ in range(2):  # what passes take is known in the second
        out = model.generate(**inputs(), max_new_tokens=N_TOKENS, do_sample=False)
        assert torch.equal(out, local(do_sample=False))
    assert model.last_speculation.n_taken > 0


async def assert_a_gateway_uses_it(home: Path) -> None:
    """Its engine tries tokens of the draft that learned, unasked, and the text is the same."""
    prompt = tuple(inputs()["input_ids"][0].tolist())
    expected = local(do_sample=False)[0, len(prompt) :].tolist()
    async with join_swarm(membership(None, home)) as swarm, trio.open_nursery() as nursery:
        engine = await ServedModels(swarm, Turns(1, 1, 1), nursery, GatewayConfig()).load_engine("demo")
        with trio.fail_after(30):
            while engine.make_draft is None:
                await trio.sleep(0.02)
        options = AnswerOptions(prompt, N_TOKENS, Sampling(temperature=0), eos=engine.eos)
        made: list[BlockDraft] = []
        make_draft = engine.make_draft

        def make() -> DraftSource:
            draft = make_draft()
            assert isinstance(draft, BlockDraft)
            made.append(draft)
            return draft

        engine.make_draft = make
        for _ in range(2):  # what passes take is known in the second
            report = RowReport(len(prompt))
            tokens: list[int] = []

            async def keep(delta: AnswerDelta, tokens: list[int] = tokens) -> None:
                tokens.extend(choice.token for choice in delta.choices)

            await engine.write(options, keep, report)
            assert tokens == [token for token in expected if token not in engine.eos]
        assert report.n_accepted > 0
        assert made[1].each_s > 0, "it was asked"
        nursery.cancel_scope.cancel()


def test_a_draft_with_another_tokenizer_is_refused(stage: tuple[LocalSwarm, list[Volunteer]]) -> None:
    with (
        swarmd.connect(home=stage[1][0].home.folder) as client,
        pytest.raises(swarmd.ConfigError, match="/other cannot be a draft: it was made with another tokenizer"),
    ):
        client.model("demo", draft="other")


def test_drafts_that_cannot_work_are_refused(tmp_path: Path) -> None:
    windows = checkpoints.make("gemma3_text", tmp_path / "windows", n_layers=2)
    with pytest.raises(swarmd.ConfigError, match="the gemma3_text family cannot be a draft: its caches forget"):
        DraftModel(windows, torch.float32, 320)
    short = checkpoints.make("gpt2", tmp_path / "short", n_layers=2, n_positions=64)
    assert Draft(DraftModel(short, torch.float32, 320)).propose(list(range(3, 65)), [], 4, 0.0) == []


def test_a_draft_in_the_exact_grade_is_refused(stage: tuple[LocalSwarm, list[Volunteer]]) -> None:
    with (
        swarmd.connect(home=stage[1][0].home.folder) as client,
        pytest.raises(swarmd.ConfigError, match="no draft in the exact grade"),
    ):
        client.model("demo", exact=True, draft="demo")


def test_what_a_model_is_set_to_counts_as_in_transformers(stage: tuple[LocalSwarm, list[Volunteer]]) -> None:
    """Beams and output objects of its own configuration, beside one that is given; padding that nobody told of."""
    reference = AutoModelForCausalLM.from_pretrained(bundled_folder(), dtype=torch.float32)
    given = GenerationConfig(max_new_tokens=10, do_sample=False)
    with swarmd.connect(home=stage[1][0].home.folder) as client:
        model = client.model("demo")
        padded = torch.cat([torch.full((1, 5), 1), inputs()["input_ids"]], 1)
        for one in (model, reference):
            one.generation_config.pad_token_id = 1
        out = model.generate(padded, generation_config=given)
        assert torch.equal(out, reference.generate(padded, generation_config=given))
        for one in (model, reference):
            one.generation_config.num_beams, one.generation_config.return_dict_in_generate = 3, True
        out = model.generate(**inputs(), generation_config=given)
        assert torch.equal(out.sequences, reference.generate(**inputs(), generation_config=given).sequences)


def test_batches_beams_and_scores_stay_the_librarys(stage: tuple[LocalSwarm, list[Volunteer]]) -> None:
    given = inputs()
    twice = {name: tensor.repeat(2, 1) for name, tensor in given.items()}
    reference = AutoModelForCausalLM.from_pretrained(bundled_folder(), dtype=torch.float32)
    with swarmd.connect(home=stage[1][0].home.folder) as client:
        model = client.model("demo", draft="demo")
        for given_, how in ((twice, {}), (given, {"num_beams": 3}), (given, {"prompt_lookup_num_tokens": 4})):
            out = model.generate(**given_, max_new_tokens=12, do_sample=False, **how)
            assert torch.equal(out, reference.generate(**given_, max_new_tokens=12, do_sample=False, **how))
            assert model.last_speculation.n_sent == 0
