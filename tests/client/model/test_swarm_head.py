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

from swarmd.client.links.link import HopLink, ServedLogits
from swarmd.client.links.ops import StepInput
from swarmd.client.model import head_choice
from swarmd.client.model.head_choice import AGAIN, HeadChoice
from swarmd.client.model.remote_model import remote_model
from swarmd.client.model.swarm_head import HeadChecks, is_enough
from swarmd.compute.model.ends import Ends
from swarmd.compute.model.head import LogitsHead
from swarmd.plan.chains.routing import Hop
from swarmd.protocol.fields import MOST_LOGITS
from swarmd.protocol.wire.tensors import CODECS
from swarmd.values import Decision, PeerId, Span
from swarmd.wire import top
from swarmd.wire.tensors import pack, unpack_untrusted
from swarmd.wire.top import Top
from tests import checkpoints

COOLER = TemperatureLogitsWarper(0.7)
FEW = TopKLogitsWarper(50)
NUCLEUS = TopPLogitsWarper(0.9)
LIKELY = MinPLogitsWarper(0.1)
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


def served(logits: Top, peer: str = "last", codec: str = "raw") -> ServedLogits:
    return ServedLogits(logits, HopLink(Hop(PeerId(peer), Span(0, 2))), codec)


class ChainWithHead:
    """Blocks that halve what they are given, and behind them a head, if there is one; ``lie`` changes its logits."""

    layer_arity = 0
    can_fly = False
    chain = ("first [0,1)", "last [1,2)")
    hops_s = (0.001, 0.001)

    def __init__(self, head: LogitsHead | None, lie: float = 0.0) -> None:
        self.head = head
        self.lie = lie
        self.served_logits: ServedLogits | None = None
        self.refuted: list[str] = []
        self.n_tops = 0

    def step(self, step: StepInput) -> torch.Tensor:
        self.served_logits = None
        assert step.hidden is not None
        out = step.hidden / 2
        want = step.want or 0
        if self.head is not None and step.vocabulary:
            (raw,) = self.head.largest([out[0, -want:]])
            logits = top.unpack_untrusted(raw, want, step.vocabulary)
            if self.lie:
                logits = Top(logits.values, logits.ids.roll(1, 1), logits.log_sum)
            self.served_logits = served(logits)
            self.n_tops += 1
        return out

    def reject_logits(self, logits: ServedLogits, reason: str) -> None:
        assert logits is self.served_logits
        self.refuted.append(reason)
        self.head = None

    def finish(self) -> None: ...

    def close(self) -> None: ...


def client(folder: Path, chain: ChainWithHead) -> tuple[Any, HeadChecks]:
    checks = HeadChecks(rng=random.Random(0))
    return remote_model(folder, lambda *options: chain, None, head=checks), checks  # type: ignore[arg-type, return-value]


IDS = torch.arange(3, 60).unsqueeze(0)
GREEDY: dict[str, Any] = {"max_new_tokens": 24, "min_new_tokens": 24, "do_sample": False}


def generate(model: Any, **settings: Any) -> list[int]:
    torch.manual_seed(0)
    ids: list[int] = model.generate(IDS, **{**GREEDY, **settings})[0].tolist()
    return ids


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return checkpoints.make("llama", tmp_path, n_layers=2)


class TestQuicker:
    """A program that leaves the choice to what is measured."""

    @pytest.fixture(autouse=True)
    def any_time_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(head_choice, "SHORT_S", 0.0)

    @pytest.mark.parametrize("is_quicker", [False, True])
    def test_the_servers_head_is_used_where_it_takes_less_time(
        self, is_quicker: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chain = ChainWithHead(LogitsHead(folder, torch.float32, torch.device("cpu"), 0))
        chain.hops_s = (0.001, 0.001)
        checks = HeadChecks(rng=random.Random(0), is_needed=False)
        model = remote_model(folder, lambda *options: chain, None, head=checks)  # type: ignore[arg-type, return-value]
        reference, _ = client(folder, ChainWithHead(None))
        if not is_quicker:
            monkeypatch.setattr(head_choice, "WORTH", 0.0)
        assert generate(model) == generate(reference)
        assert chain.n_tops == (24 - 1 - head_choice.FEW if is_quicker else head_choice.FEW)
        assert model.last_head.action == ("swarm" if is_quicker else "own")
        assert "the last server's 0.0" in model.last_head.reason
        model.get_output_embeddings().weight.requires_grad_()  # it is not a vocabulary on the disk

    def test_a_chain_without_one_is_asked_a_few_times(self, folder: Path) -> None:
        chain = ChainWithHead(None)
        checks = HeadChecks(is_needed=False)
        model = remote_model(folder, lambda *options: chain, None, head=checks)  # type: ignore[arg-type, return-value]
        generate(model, min_new_tokens=60, max_new_tokens=60)
        assert model.last_head == Decision("own", "the last server has no head")


def test_a_quick_head_asks_nobody_and_others_are_measured_anew_after_a_while() -> None:
    choice = HeadChoice()
    for _ in range(2 * head_choice.FEW):
        choice.note(0.02, 0.001, is_given=False)
    assert not choice.asks
    assert choice.reason == "one's own takes 1.0 ms"

    def hear(hop_without_s: float, hop_with_s: float, n: int) -> None:
        for _ in range(n):
            given = choice.asks
            choice.note(hop_with_s if given else hop_without_s, None if given else 0.03, is_given=given)

    choice = HeadChoice()
    hear(0.010, 0.012, 2 * head_choice.FEW)
    assert choice.asks
    assert choice.reason == "one's own takes 30.0 ms, the last server's 2.0"
    assert not choice.rests(), "it is asked"
    hear(0.010, 0.060, AGAIN)
    assert not choice.asks, "it is looked at anew"
    hear(0.010, 0.060, 2 * head_choice.FEW)
    assert not choice.asks
    assert choice.reason == "one's own takes 30.0 ms, the last server's 50.0"
    assert [choice.rests() for _ in range(AGAIN + 1)] == [True] * AGAIN + [False]


class TestGenerating:
    @pytest.mark.parametrize("settings", [{}, {"do_sample": True, "top_k": 40, "top_p": 0.9, "temperature": 0.8}])
    def test_it_gives_what_ones_own_head_gives(self, settings: dict[str, Any], folder: Path) -> None:
        chain = ChainWithHead(LogitsHead(folder, torch.float32, torch.device("cpu"), 0))
        model, checks = client(folder, chain)
        reference, _ = client(folder, ChainWithHead(None))
        assert generate(model, **settings) == generate(reference, **settings)
        assert chain.n_tops == checks.n_taken == 24
        assert 1 <= checks.n_checked < 6, "the first one, and few others"

    @pytest.mark.parametrize(
        "settings", [{"do_sample": True, "top_k": 0}, {"repetition_penalty": 1.2}, {"num_beams": 2}]
    )
    def test_where_others_may_count_it_is_not_asked(self, settings: dict[str, Any], folder: Path) -> None:
        chain = ChainWithHead(LogitsHead(folder, torch.float32, torch.device("cpu"), 0))
        model, _ = client(folder, chain)
        reference, _ = client(folder, ChainWithHead(None))
        assert generate(model, **settings) == generate(reference, **settings)
        assert not chain.n_tops

    def test_a_head_that_lies_is_found_at_its_first_token_and_done_without(self, folder: Path) -> None:
        chain = ChainWithHead(LogitsHead(folder, torch.float32, torch.device("cpu"), 0), lie=1.0)
        model, checks = client(folder, chain)
        assert generate(model) == generate(client(folder, ChainWithHead(None))[0])
        assert len(chain.refuted) == 1
        assert "logits that are off by" in chain.refuted[0]
        assert checks.n_checked == 1

    @pytest.mark.parametrize("is_new", [False, True])
    def test_a_head_that_was_trained_here_is_ones_own(
        self, is_new: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        chain = ChainWithHead(LogitsHead(folder, torch.float32, torch.device("cpu"), 0))
        mapping = "swarmd.client.model.remote_model.map_vocabulary"
        monkeypatch.setattr(mapping, lambda *args: None)  # as where it is not plain
        model, _ = client(folder, chain)
        with torch.no_grad():
            if is_new:
                model.set_output_embeddings(torch.nn.Linear(64, 320, bias=False))
            else:
                model.get_output_embeddings().weight.mul_(-1)
        generate(model)
        assert not chain.n_tops
        assert not chain.refuted


OWN = 4 * torch.randn(2, 1_000, generator=torch.Generator().manual_seed(0))


def test_all_are_checked_where_that_is_asked_for() -> None:
    checks = HeadChecks(1.0)
    right = served(top.largest(OWN, MOST_LOGITS))
    assert not checks.find_error(right, OWN, torch.float32)
    assert all(checks.draw_check(right) for _ in range(99))


def test_every_server_is_checked_until_it_was_right_and_then_now_and_then() -> None:
    checks = HeadChecks(rng=random.Random(1))
    for peer in ("one", "other"):
        right = served(top.largest(OWN, MOST_LOGITS), peer)
        assert all(checks.draw_check(right) for _ in range(9)), "nobody has looked yet"
        assert not checks.find_error(right, OWN, torch.float32)
        assert 2 < sum(checks.draw_check(right) for _ in range(640)) < 30


@pytest.mark.parametrize("fault", ["right", "an id", "a value", "the sum", "one left out"])
def test_wrong_logits_differ_by_more_than_kernels_do(fault: str) -> None:
    logits = top.largest(OWN + 1e-4 * torch.randn(OWN.shape), MOST_LOGITS)
    if fault == "an id":
        logits.ids[0, 0] = int(OWN[0].argmin())
    elif fault == "a value":
        logits.values[1, 200] -= 0.1
    elif fault == "the sum":
        logits.log_sum[1] += 0.1
    elif fault == "one left out":
        without = OWN.clone()
        without[1, OWN[1].argmax()] = -100.0
        logits = top.largest(without, MOST_LOGITS)
    assert bool(HeadChecks().find_error(served(logits), OWN, torch.float32)) == (fault != "right")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", ["raw", *CODECS])
def test_what_a_codec_loses_is_no_lie(codec: str, dtype: torch.dtype) -> None:
    """The server's head has the hidden states as they were, the client's as they came."""
    rng = torch.Generator().manual_seed(0)
    weight = torch.randn(2_000, 256, generator=rng).to(dtype) / 16
    hidden = torch.randn(1, 20, 256, generator=rng)
    hidden[..., 7] *= 30  # as real ones have
    sent = hidden.to(dtype)
    meta, payload = pack(sent, torch.arange(20, dtype=torch.int32)[None], None, codec)
    received, _, _ = unpack_untrusted(meta, memoryview(payload))
    server_logits = torch.nn.functional.linear(sent[0], weight).float()
    client_logits = torch.nn.functional.linear(received[0], weight).float()
    largest = top.largest(server_logits, MOST_LOGITS)
    assert not HeadChecks().find_error(served(largest, codec=codec), client_logits, dtype)


def test_the_ends_of_a_model_come_from_its_checkpoint(folder: Path) -> None:
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    expected = Ends(folder, torch.float32).logits(hidden, 0)
    parts = LogitsHead(folder, torch.float32, torch.device("cpu"), 0).largest([hidden[:1], hidden[1:]])
    logits = [top.unpack_untrusted(raw, n, expected.shape[1]) for raw, n in zip(parts, (1, 2), strict=True)]
    assert torch.equal(torch.cat([part.ids[:, 0] for part in logits]), expected.argmax(1))
    assert not HeadChecks().find_error(served(logits[1]), expected[1:], torch.float32)
