"""Logits of real servers in place of the client's: the same text, whoever dies, and a liar is done without."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import swarmd
from swarmd.client.model import head_choice
from swarmd.plan.chains.routing import Hop
from swarmd.values import Span
from tests.real.faults import inputs_for
from tests.real.gateways import real_gateway
from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.liars import HEAD_LIE
from tests.real.test_speculation import Collector
from tools.prove.trust import add_liar

pytestmark = pytest.mark.slow
N_TOKENS = 40
GREEDY: dict[str, Any] = {"max_new_tokens": N_TOKENS, "min_new_tokens": N_TOKENS, "do_sample": False}
TOP: dict[str, Any] = {**GREEDY, "do_sample": True, "top_k": 20}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalSwarm, list[Volunteer]]]:
    """The first half of the blocks, the second with a head, and without one."""
    torch.set_num_threads(1)
    with local_swarm(tmp_path_factory.mktemp("head")) as swarm:
        first = swarm.add("--serve", "demo", "--blocks", "0:3", SWARMD_HEAD="1")
        last = [swarm.add("--serve", "demo", "--blocks", "3:6", SWARMD_HEAD=has_head) for has_head in "10"]
        swarm.wait_online()
        yield swarm, [first, *last]


def chain(*volunteers: Volunteer) -> dict[str, tuple[Hop, ...]]:
    return {"chain": tuple(Hop(v.peer, Span(3 * i, 3 * i + 3)) for i, v in enumerate(volunteers))}


def ask(model: Any, how: dict[str, Any], streamer: Any = None) -> list[int]:
    torch.manual_seed(0)
    ids = model.generate(inputs_for("greedy", 1024, 1)["input_ids"], streamer=streamer, **how)
    return [int(token) for token in ids[0]]


def test_logits_come_from_those_who_announce_a_head_and_say_the_same(
    stage: tuple[LocalSwarm, list[Volunteer]],
) -> None:
    swarm, (first, with_head, without) = stage
    with swarmd.connect(swarm.invite()) as client:
        heads = {span.peer for span in client.view().spans if span.head}
        assert heads == {with_head.peer}, "of the first blocks nobody has one"
        shown = {row["peer"] for row in first.ask("peers")["peers"] for span in row["spans"] if span["head"]}
        assert shown == heads
        own = client.model("demo")
        for how in (GREEDY, TOP):
            expected = ask(own, how)
            for last, n_given in ((with_head, N_TOKENS), (without, 0)):
                model = client.model("demo", head="swarm", lookup=False, **chain(first, last))
                assert ask(model, how) == expected
                assert model.last_session.statistics.n_logits == n_given
        with pytest.raises(swarmd.ConfigError, match="head is one of auto, own, int8, swarm, not 'mine'"):
            client.model("demo", head="mine")
        for device in ("cuda:7", "meta", "privateuseone", "nonsense"):
            with pytest.raises(swarmd.ConfigError, match=f"the device '{device}' cannot be used here"):
                client.model("demo", device=device)


def test_programs_take_them_where_that_is_quicker(
    stage: tuple[LocalSwarm, list[Volunteer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm, (first, with_head, without) = stage
    with swarmd.connect(swarm.invite()) as client:
        expected = ask(client.model("demo", head="own"), GREEDY)
        small = client.model("demo", lookup=False, **chain(first, with_head))
        assert ask(small, GREEDY) == expected
        assert small.last_head.action == "own", "its head takes less than anybody is asked for"
        monkeypatch.setattr(head_choice, "SHORT_S", 0.0)
        monkeypatch.setattr(head_choice, "WORTH", 1e6)
        for last, action in ((with_head, "swarm"), (without, "own")):
            model = client.model("demo", lookup=False, **chain(first, last))
            assert ask(model, GREEDY) == expected
            assert model.last_head.action == action
            assert (model.last_session.statistics.n_logits > 0) == (action == "swarm")


def test_a_gateway_takes_them_for_requests_that_they_decide(
    stage: tuple[LocalSwarm, list[Volunteer]],
) -> None:
    swarm, (first, *_) = stage
    (first.home.folder / "config.toml").write_text('[gateway]\nhead = "swarm"\n')
    asked = {"model": "demo", "max_tokens": 24, "temperature": 0, "logprobs": 3}
    answers, n_given = [], []
    others = ({"top_k": 1, "temperature": 1}, {"presence_penalty": 1e-6}, {"temperature": 1, "top_k": 0})
    numbers = itertools.count()

    def ask_for(more: dict[str, object]) -> int:
        """Ask, and note how many tokens servers have given logits of; returns how many are new."""
        n_before = gateway.metric("swarmd_tokens_with_given_logits_total")
        answers.append(http.post("/v1/completions", json={**asked, **more}).json()["choices"][0])
        n_given.append(gateway.metric("swarmd_tokens_with_given_logits_total"))
        return int(n_given[-1] - n_before)

    def is_given() -> bool:
        """Does a whole answer come from the server with a head? A busy machine may leave it out for a while."""
        answers.clear()
        n_given.clear()
        asked["prompt"] = f"{next(numbers)} is what the function returns"  # sessions are kept: no two alike
        return ask_for({}) >= len(answers[0]["logprobs"]["tokens"])

    with real_gateway(first.home.folder) as gateway, gateway.http() as http:
        swarm.wait(is_given, "an answer with logits of the server with a head")
        for more in others:
            ask_for(more)
    assert n_given[1] > n_given[0]
    assert n_given[1] == n_given[2] == n_given[3], "penalties and plain sampling may take any token"
    by_swarm, of_one, own, _ = answers
    assert by_swarm["text"] == of_one["text"] == own["text"]
    found, expected = (torch.tensor(one["logprobs"]["token_logprobs"]) for one in (by_swarm, own))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_the_text_goes_on_when_the_head_dies(stage: tuple[LocalSwarm, list[Volunteer]]) -> None:
    swarm, (first, with_head, _) = stage
    with swarmd.connect(swarm.invite()) as client:
        expected = ask(client.model("demo"), GREEDY)
        model = client.model("demo", head="swarm", lookup=False, **chain(first, with_head))
        n_prompt = inputs_for("greedy", 1024, 1)["input_ids"].shape[1]
        kill = Collector(n_prompt + 10, lambda: with_head.signal(signal.SIGKILL, "both"))
        assert ask(model, GREEDY, kill) == expected
        assert len(model.last_session.statistics.repairs) == 1
        assert 10 <= model.last_session.statistics.n_logits < N_TOKENS, "the other one has no head"
    with_head.stop()


def test_a_head_that_lies_is_found_by_the_first_user(stage: tuple[LocalSwarm, list[Volunteer]]) -> None:
    swarm, (first, *_) = stage
    liar = add_liar(swarm, HEAD_LIE, "bundled", 6, blocks="3:6", SWARMD_HEAD="1")
    with swarmd.connect(swarm.invite()) as client:
        expected = ask(client.model("demo"), GREEDY)
        model = client.model("demo", head="swarm", lookup=False, **chain(first, liar))
        assert ask(model, GREEDY) == expected
        statistics = model.last_session.statistics
        assert [(peer, "logits that are off by" in reason) for peer, reason in statistics.blamed] == [(liar.peer, True)]
        assert liar.peer[-8:] in statistics.doubts[0].hop
        assert liar.peer not in {link.hop.peer for link in model.last_session.chain_session.chain.links}
    liar.stop()
