"""One token out of logits: as transformers does it, where transformers does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from swarmd.gateway.generation.answer import AnswerOptions
from swarmd.gateway.generation.sampling import Sampler, Sampling

LOGITS = torch.tensor([1.0, 2.0, 3.0, 2.5, -1.0])


def drawn(sampling: Sampling, n: int = 400, prompt: tuple[int, ...] = ()) -> list[int]:
    sampler = Sampler(sampling, prompt)
    return [sampler.choose(LOGITS).token for _ in range(n)]


def test_no_temperature_takes_the_best() -> None:
    assert set(drawn(Sampling(temperature=0))) == {2}


def test_a_seed_decides_whatever_else_draws() -> None:
    first = drawn(Sampling(seed=7))
    torch.rand(100)
    assert drawn(Sampling(seed=7)) == first
    assert drawn(Sampling(seed=8)) != first


def test_it_draws_as_often_as_the_softmax_says() -> None:
    n = 20_000
    counts = torch.bincount(torch.tensor(drawn(Sampling(seed=1), n)), minlength=5) / n
    assert torch.allclose(counts, LOGITS.softmax(-1), atol=0.015)


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(top_k=2, seed=1), {2, 3}),
        (Sampling(top_p=0.5, seed=1), {2, 3}),
        (Sampling(min_p=0.5, seed=1), {2, 3}),
        (Sampling(bias={4: 100.0}, seed=1), {4}),
        (Sampling(bias={2: -100.0}, temperature=0), {3}),
    ],
)
def test_cuts_and_bias(sampling: Sampling, allowed: set[int]) -> None:
    assert set(drawn(sampling)) == allowed


def test_penalties_push_away_what_was_said() -> None:
    for sampling in (Sampling(temperature=0, presence_penalty=1.0), Sampling(temperature=0, frequency_penalty=1.0)):
        sampler = Sampler(sampling, (2,))
        assert sampler.choose(LOGITS).token == 2, "a prompt is not counted"
        sampler.count_token(2)
        assert sampler.choose(LOGITS).token == 3


def test_the_repetition_penalty_counts_the_prompt_as_transformers_does() -> None:
    assert Sampler(Sampling(temperature=0, repetition_penalty=1.5), (2,)).choose(LOGITS).token == 3


def test_a_mask_leaves_what_it_allows_and_probabilities_are_the_models_own() -> None:
    allowed = torch.tensor([True, False, False, False, False])
    choice = Sampler(Sampling(temperature=0, wants_logprobs=True, n_top=2), ()).choose(LOGITS, allowed)
    logprobs = LOGITS.log_softmax(-1)
    assert choice.token == 0
    assert choice.logprob == pytest.approx(float(logprobs[0]))
    assert [token for token, _ in choice.top] == [2, 3]


@pytest.mark.parametrize(
    ("fields", "n"),
    [
        ({"temperature": 0}, 1),
        ({"temperature": 0, "top_k": 40}, 1),
        ({"top_k": 40, "top_p": 0.9}, 40),
        ({}, None),
        ({"top_p": 0.9}, None),
        ({"temperature": 0, "bias": {3: 1.0}}, None),
        ({"temperature": 0, "presence_penalty": 0.5}, None),
        ({"temperature": 0, "frequency_penalty": -0.5}, None),
        ({"top_k": 40, "repetition_penalty": 1.1}, None),
    ],
)
def test_it_is_known_how_many_of_the_largest_logits_decide(fields: dict[str, Any], n: int | None) -> None:
    assert Sampling(**fields).n_needed == n
    assert AnswerOptions((1,), 8, Sampling(**fields, n_top=60)).n_needed == (n and 60)
    assert AnswerOptions((1,), 8, Sampling(**fields), grammar=object()).n_needed is None  # type: ignore[arg-type]
