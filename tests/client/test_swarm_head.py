"""Logits that the last hop gives: used where they are enough, checked, and never where they could be others."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from swarmd.client.model import remote_model
from swarmd.client.swarm_head import Checks, is_enough
from swarmd.compute.ends import Ends
from swarmd.compute.head import Head
from swarmd.protocol.fields import MOST_LOGITS
from swarmd.values import Decision, PeerId
from swarmd.wire import top
from swarmd.wire.top import Top
from tests import checkpoints

COOLER, FEW, NUCLEUS, LIKELY = (
    TemperatureLogitsWarper(0.7),
    TopKLogitsWarper(50),
    TopPLogitsWarper(0.9),
    MinPLogitsWarper(0.1),
)
LONG = MinNewTokensLengthLogitsProcessor(1, 8, 2)


@pytest.mark.parametrize(
    ("processors", "samples", "enough"),
    [
        ([], False, True),
        ([LONG], False, True),
        ([RepetitionPenaltyLogitsProcessor(1.1)], False, False),
        ([], True, False),
        ([COOLER, FEW], True, True),
        ([LONG, COOLER, FEW, NUCLEUS, LIKELY], True, True),
        ([COOLER, NUCLEUS], True, False),
        ([RepetitionPenaltyLogitsProcessor(1.1), FEW], True, False),
        ([TopKLogitsWarper(MOST_LOGITS)], True, True),
        ([TopKLogitsWarper(MOST_LOGITS + 1)], True, False),
        ([LONG, TopKLogitsWarper(MOST_LOGITS)], True, False),
        ([lambda ids, scores: scores], False, False),
    ],
)
def test_some_are_enough_where_no_other_can_be_chosen(processors: list[Any], samples: bool, enough: bool) -> None:
    assert is_enough(LogitsProcessorList(processors), samples) is enough


class Chain:
    """Blocks that halve what they are given, and behind them a head, if there is one; ``lie`` changes its logits."""

    layer_arity = 0
    last_peer = PeerId("last")
    codec = Decision("raw", "of a test")

    def __init__(self, head: Head | None, lie: float = 0.0) -> None:
        self.head, self.lie = head, lie
        self.top: Top | None = None
        self.refuted: list[str] = []
        self.n_tops = 0

    def step(self, edits: Any, hidden: torch.Tensor, *about: Any) -> torch.Tensor:
        *_, want, vocabulary = about
        self.top, out = None, hidden / 2
        if self.head is not None and vocabulary:
            (raw,) = self.head.largest([out[0, -want:]], 0, MOST_LOGITS)
            given = top.unpack_untrusted(raw, want, vocabulary)
            self.top = Top(given.values, given.ids.roll(1, 1), given.log_sum) if self.lie else given
            self.n_tops += 1
        return out

    def refute_head(self, reason: str) -> None:
        self.refuted.append(reason)
        self.head = None

    def finish(self) -> None: ...

    def close(self) -> None: ...


def client(folder: Path, chain: Chain) -> tuple[Any, Checks]:
    checks = Checks(rng=random.Random(0))
    return remote_model(folder, lambda *about: chain, None, head=checks), checks  # type: ignore[arg-type, return-value]


IDS = torch.arange(3, 60).unsqueeze(0)
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}


def generate(model: Any, **how: Any) -> list[int]:
    torch.manual_seed(0)
    ids: list[int] = model.generate(IDS, **{**GREEDY, **how})[0].tolist()
    return ids


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.make("llama", tmp_path, n_layers=2)


class TestGenerating:
    @pytest.mark.parametrize("how", [{}, {"do_sample": True, "top_k": 40, "top_p": 0.9, "temperature": 0.8}])
    def test_it_gives_what_ones_own_head_gives(self, how: dict[str, Any], folder: Path) -> None:
        chain = Chain(Head(folder, torch.float32, torch.device("cpu")))
        model, checks = client(folder, chain)
        own, _ = client(folder, Chain(None))
        assert generate(model, **how) == generate(own, **how)
        assert chain.n_tops == checks.n_taken == 24
        assert 1 <= checks.n_checked < 6, "the first one, and few others"

    @pytest.mark.parametrize("how", [{"do_sample": True, "top_k": 0}, {"repetition_penalty": 1.2}, {"num_beams": 2}])
    def test_where_others_may_count_it_is_not_asked(self, how: dict[str, Any], folder: Path) -> None:
        chain = Chain(Head(folder, torch.float32, torch.device("cpu")))
        model, own = client(folder, chain)[0], client(folder, Chain(None))[0]
        assert generate(model, **how) == generate(own, **how)
        assert not chain.n_tops

    def test_a_head_that_lies_is_found_at_its_first_token_and_done_without(self, folder: Path) -> None:
        chain = Chain(Head(folder, torch.float32, torch.device("cpu")), lie=1.0)
        model, checks = client(folder, chain)
        assert generate(model) == generate(client(folder, Chain(None))[0])
        assert len(chain.refuted) == 1
        assert "logits that are off by" in chain.refuted[0]
        assert checks.n_checked == 1

    @pytest.mark.parametrize("is_new", [False, True])
    def test_a_head_that_was_trained_here_is_ones_own(
        self, is_new: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chain = Chain(Head(folder, torch.float32, torch.device("cpu")))
        monkeypatch.setattr("swarmd.client.model.map_vocabulary", lambda *about: None)  # as where it is not plain
        model, _ = client(folder, chain)
        with torch.no_grad():
            if is_new:
                model.set_output_embeddings(torch.nn.Linear(64, 320, bias=False))
            else:
                model.get_output_embeddings().weight.mul_(-1)
        generate(model)
        assert not chain.n_tops
        assert not chain.refuted


def test_all_are_checked_where_that_is_asked_for() -> None:
    checks = Checks(1.0)
    assert all(checks.is_due("one") for _ in range(99))


def test_one_in_a_while_is_checked_of_every_server() -> None:
    checks = Checks(rng=random.Random(1))
    due = {peer: [checks.is_due(peer) for _ in range(640)] for peer in ("one", "other")}
    assert all(first for first, *_ in due.values())
    assert all(2 < sum(rest) < 30 for _, *rest in due.values())


@pytest.mark.parametrize("what", ["right", "an id", "a value", "the sum", "one left out"])
def test_wrong_logits_differ_by_more_than_kernels_do(what: str) -> None:
    own = 4 * torch.randn(2, 1_000, generator=torch.Generator().manual_seed(0))
    of = top.largest(own + 1e-4 * torch.randn(own.shape), MOST_LOGITS)
    if what == "an id":
        of.ids[0, 0] = int(own[0].argmin())
    elif what == "a value":
        of.values[1, 200] -= 0.1
    elif what == "the sum":
        of.log_sum[1] += 0.1
    elif what == "one left out":
        without = own.clone()
        without[1, own[1].argmax()] = -100.0
        of = top.largest(without, MOST_LOGITS)
    assert bool(Checks.is_wrong(of, own, torch.float32, "raw")) == (what != "right")


def test_the_ends_of_a_model_come_from_its_checkpoint(folder: Path) -> None:
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    own = Ends(folder, torch.float32).logits(hidden, 0)
    parts = Head(folder, torch.float32, torch.device("cpu")).largest([hidden[:1], hidden[1:]], 0, MOST_LOGITS)
    found = [top.unpack_untrusted(raw, n, own.shape[1]) for raw, n in zip(parts, (1, 2), strict=True)]
    assert torch.equal(torch.cat([of.ids[:, 0] for of in found]), own.argmax(1))
    assert not Checks.is_wrong(found[1], own[1:], torch.float32, "raw")
