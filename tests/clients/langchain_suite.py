"""LangChain's own suite for chat models, on a gateway: ``SWARMD_GATEWAY`` is its address, SmolLM2 its model."""

from __future__ import annotations

import os
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_openai import ChatOpenAI
from langchain_tests.integration_tests import ChatModelIntegrationTests


class TestChatModel(ChatModelIntegrationTests):
    """A model of 135 million parameters calls a tool only when it must, and ends a text when it is cut."""

    @property
    def chat_model_class(self) -> type[ChatOpenAI]:
        return ChatOpenAI

    @property
    def chat_model_params(self) -> dict[str, Any]:
        url = f"{os.environ['SWARMD_GATEWAY']}/v1"
        more = {"stream_usage": True, "temperature": 0, "max_tokens": 100, "frequency_penalty": 1}
        return {"model": "smol", "base_url": url, "api_key": "none", **more}

    @property
    def has_tool_calling(self) -> bool:
        return True

    @property
    def has_structured_output(self) -> bool:
        return True

    @property
    def supports_json_mode(self) -> bool:
        return True

    # what no gateway can mend: the suite takes a test's override only with its reason

    @pytest.mark.xfail(reason="SmolLM2-135M's template shows it no tools: unforced, it calls none")
    def test_agent_loop(self, model: BaseChatModel) -> None:
        super().test_agent_loop(model)

    @pytest.mark.xfail(reason="json_object gives some object: a model this small does not name the keys it was told to")
    def test_json_mode(self, model: BaseChatModel) -> None:
        super().test_json_mode(model)
