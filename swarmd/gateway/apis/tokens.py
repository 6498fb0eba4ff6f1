"""A model's tokens without the model: text to tokens and back, and what its tokenizer's files say, as vLLM serves them.

lm-eval asks for these before anything else, where it has no tokenizer of its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from swarmd.errors import ConfigError
from swarmd.gateway.apis import refusals
from swarmd.gateway.apis.openai import read_turn
from swarmd.gateway.apis.refusals import bad_request
from swarmd.gateway.apis.schema import MAX_MESSAGES, ChatMessage, JsonObject, SamplingFields
from swarmd.gateway.apis.skipped import Skipped
from swarmd.gateway.apis.talk import GenerationRequest, make_prompt
from swarmd.gateway.generation.ending import read_settings
from swarmd.gateway.generation.engine import GenerationEngine

TEMPLATE = "chat_template"
TOLD = ("tokenizer_class", "model_max_length", "bos_token", "eos_token", "pad_token", "unk_token", TEMPLATE)
MOST_TOKENS = 1_000_000  # to be turned into text


class TokenizeRequest(msgspec.Struct):
    """POST /tokenize: ``prompt`` or ``messages``. Without a model it is the only one that is served."""

    model: str = ""
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)] | None = None
    add_special_tokens: bool = True
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeRequest(msgspec.Struct):
    """POST /detokenize."""

    tokens: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(max_length=MOST_TOKENS)]
    model: str = ""


async def tokenize(engine: GenerationEngine, request: TokenizeRequest, skipped: Skipped) -> JsonObject:
    """Return the tokens of a text or a conversation. Raises ApiError."""
    if (request.prompt is None) == (request.messages is None):
        raise bad_request("either prompt or messages", "prompt")
    if request.messages is not None:
        turns = [read_turn(message, index, skipped) for index, message in enumerate(request.messages)]
        asked = GenerationRequest("", SamplingFields(), turns, begins_answer=request.add_generation_prompt)
        tokens = list((await make_prompt(engine, asked)).ids)
    else:
        try:
            tokens = list((await engine.prompts.text(request.prompt or "", request.add_special_tokens)).ids)
        except ConfigError as error:
            raise bad_request(str(error), "prompt") from None
    texts = [engine.tokenizer.id_to_token(token) for token in tokens] if request.return_token_strs else None
    return {"count": len(tokens), "max_model_len": engine.ends.max_tokens, "tokens": tokens, "token_strs": texts}


def detokenize(engine: GenerationEngine, request: DetokenizeRequest) -> JsonObject:
    """Return the text of tokens. Raises ApiError."""
    refusals.require_tokens(request.tokens, engine.ends.vocabulary, "tokens")
    return {"prompt": engine.tokenizer.decode(request.tokens, skip_special_tokens=False)}


def tokenizer_info(folder: Path) -> JsonObject:
    """Return what the tokenizer's files of a model say."""
    settings = read_settings(folder / "tokenizer_config.json")
    file = folder / "chat_template.jinja"
    if file.is_file():
        settings[TEMPLATE] = file.read_text(encoding="utf-8", errors="replace")
    told = {name: settings[name] for name in TOLD if name in settings}
    return {name: value["content"] if _is_token(value) else value for name, value in told.items()}


def _is_token(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("content"), str)
