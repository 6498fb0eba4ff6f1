"""How a request's tokens are chosen: what it says itself, what the model's author says, and what else."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from swarmd.client.links.link import Doubt
from swarmd.gateway.apis.openai import format_extra
from swarmd.gateway.apis.refusals import ApiError
from swarmd.gateway.apis.schema import SamplingFields
from swarmd.gateway.apis.talk import GenerationRequest, choose_sampling
from swarmd.gateway.generation.row import RowReport
from swarmd.gateway.generation.sampling import Sampling


def chosen(author: dict[str, Any], **fields: Any) -> Sampling:
    ends: Any = SimpleNamespace(generation=author, vocabulary=8)
    return choose_sampling(GenerationRequest("m", msgspec.convert(fields, SamplingFields)), ends)


@pytest.mark.parametrize("author", [{}, {"eos_token_id": 0}, {"do_sample": False, "temperature": 1.0}])
def test_a_model_without_settings_of_its_own_is_sampled_cautiously(author: dict[str, Any]) -> None:
    assert chosen(author) == Sampling(temperature=0.8, top_k=40, min_p=0.05)


def test_an_authors_settings_count_as_they_are() -> None:
    assert chosen({"do_sample": True, "temperature": 0.6}) == Sampling(temperature=0.6)
    assert chosen({"do_sample": True}) == Sampling()


@pytest.mark.parametrize("author", [{}, {"do_sample": True, "temperature": 0.6, "top_k": 20, "min_p": 0.1}])
def test_what_a_request_names_wins(author: dict[str, Any]) -> None:
    assert chosen(author, temperature=1.0, top_k=0, min_p=0.0) == Sampling()
    assert chosen(author, temperature=0.0).temperature == 0
    assert chosen(author, top_p=0.5).top_p == 0.5


@pytest.mark.parametrize("token", ["8", "-1", "1" * 5_000])
def test_a_bias_of_what_is_no_token_is_refused(token: str) -> None:
    with pytest.raises(ApiError, match="token ids up to 7"):
        chosen({}, logit_bias={token: 1.0})


def test_a_doubt_names_the_token_of_the_answer_from_which_on_it_may_be_wrong() -> None:
    in_prompt = Doubt(first_token=1, hop="a", reason="r")
    in_answer = Doubt(first_token=6, hop="b", reason="r")
    report = RowReport(n_prompt=5, doubts=[in_prompt, in_answer])
    shown = format_extra([report], GenerationRequest("m", SamplingFields()))["doubts"]
    assert [(doubt["token"], doubt["hop"]) for doubt in shown] == [(0, "a"), (2, "b")]
