"""LiteLLM against a gateway, as aider and others call it: ``SWARMD_GATEWAY`` is its address, SmolLM2 its model."""

from __future__ import annotations

import json
import os
from typing import Any

import litellm
import pytest

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
PARAMETERS = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}


def options(**more: Any) -> dict[str, Any]:
    url = f"{os.environ['SWARMD_GATEWAY']}/v1"
    given = {"model": "openai/smol", "api_base": url, "api_key": "none", "temperature": 0, "max_tokens": 24}
    return {**given, "messages": QUESTION, **more}


def test_it_answers_whole_and_streamed_alike() -> None:
    whole = litellm.completion(**options())
    assert "Paris" in whole.choices[0].message.content
    chunks = list(litellm.completion(**options(stream=True, stream_options={"include_usage": True})))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_it_answers_asynchronously() -> None:
    assert "Paris" in (await litellm.acompletion(**options())).choices[0].message.content


def test_a_forced_call() -> None:
    answer = litellm.completion(**options(tools=[WEATHER], tool_choice="required"))
    call = answer.choices[0].message.tool_calls[0].function
    assert call.name == "weather"
    assert set(json.loads(call.arguments)) == {"city"}


def test_plain_continuation() -> None:
    url = f"{os.environ['SWARMD_GATEWAY']}/v1"
    more = {"api_base": url, "api_key": "none", "max_tokens": 4}
    assert litellm.text_completion(model="text-completion-openai/smol", prompt="Once upon a", **more).choices[0].text


def test_errors_are_the_classes_that_it_knows() -> None:
    with pytest.raises(litellm.NotFoundError, match="it has"):
        litellm.completion(**options(model="openai/nope"))
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**options(temperature=5))
    with pytest.raises(litellm.ContextWindowExceededError, match="8192"):
        litellm.completion(**options(messages=[{"role": "user", "content": "word " * 9_000}]))
