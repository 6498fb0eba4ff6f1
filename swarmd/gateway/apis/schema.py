"""What clients may send: every field with its bounds. What is not known here is skipped; see ``decode_request``.

Source: OpenAI's API reference (chat completions, completions) and what vLLM and llama-server add to it.
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from swarmd.gateway.apis.refusals import bad_request, from_decoding_error
from swarmd.gateway.apis.skipped import Skipped

MAX_MESSAGES = 4_096  # of a conversation; agents send some hundred
MAX_TOOLS = 256  # each with its schema
MAX_STOPS = 16  # OpenAI takes 4
MAX_N = 16  # answers to one prompt, each a session of its own

JsonObject = dict[str, Any]
Temperature = Annotated[float, Meta(ge=0, le=2)]
Share = Annotated[float, Meta(ge=0, le=1)]
RepetitionPenalty = Annotated[float, Meta(ge=0.01, le=2)]  # less makes a logit infinite
Penalty = Annotated[float, Meta(ge=-2, le=2)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
Count = Annotated[int, Meta(ge=1, le=10_000_000)]
Length = Annotated[int, Meta(ge=-1, le=10_000_000)]  # -1 leaves it open, as llama.cpp and LM Studio have it
Stop = Annotated[str, Meta(max_length=256)]
Stops = Stop | Annotated[list[Stop], Meta(max_length=MAX_STOPS)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
IGNORED_FIELDS = {
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("verbosity", "cache_prompt", "context_management", "cache_control"),
    *("client_metadata", "request_id", "session_id", "user_id", "trace_id", "tags"),
}
"""Fields that change nothing that a user would miss: labels, and hints for billing and caching."""
_NO_MEMORY = "nothing is stored here, so nothing can be looked up: send the whole conversation"
NEEDED_FIELDS = {
    **dict.fromkeys(("previous_response_id", "conversation"), _NO_MEMORY),
    "background": "nothing is stored here: ask with stream, and stay connected",
    "suffix": "models here continue text, and fill no gaps",
    "template": "the model's own template is used: ask with raw, or leave it out",
}
"""Fields without which an answer would be to another question: these are refused."""
NEUTRAL_VALUES: JsonObject = {
    **dict.fromkeys(("typical_p", "tfs_z", "length_penalty", "top_n_sigma"), 1),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), True),
    "modalities": ["text"],
}
"""Fields of others that are not done here, with the value that asks for nothing (0, false, [] and null never do)."""


class SamplingFields(msgspec.Struct, kw_only=True):
    """What every form of request can say of sampling; None is the author's or a default (``talk.sampling_of``)."""

    temperature: Temperature | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Meta(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    repetition_penalty: RepetitionPenalty | None = None
    repeat_penalty: RepetitionPenalty | None = None  # the same, as llama.cpp calls it
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Meta(max_length=1024)] | None = None
    seed: Seed | None = None
    stop: Stops | None = None
    ignore_eos: bool = False


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    include_obfuscation: bool | None = False


class ChatMessage(msgspec.Struct):
    """One turn. ``content`` is text, or parts of which only text is taken."""

    role: str
    content: str | list[JsonObject] | None = None
    name: str | None = None
    tool_calls: list[JsonObject] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions."""

    model: str
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES)]
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = 1
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    response_format: JsonObject | None = None
    tools: Annotated[list[JsonObject], Meta(max_length=MAX_TOOLS)] | None = None
    tool_choice: str | JsonObject | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: JsonObject | None = None
    thinking: JsonObject | None = None
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None


class CompletionRequest(SamplingFields):
    """POST /v1/completions: plain continuation."""

    model: str
    prompt: str | list[Any]  # texts or lists of token ids: msgspec takes no union of lists, ``openai`` checks it
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Length | None = 16
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = 1
    logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    echo: bool | None = False
    suffix: str | None = None
    best_of: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None


T = TypeVar("T", bound=msgspec.Struct)


def read_length(value: int | None, param: str) -> int | None:
    """Return how long an answer may be; None where that is left open. Raises ApiError."""
    if value == 0:
        raise bad_request(f"{param} is at least 1, or -1 for as long as there is room", param)
    return None if value == -1 else value


def decode_request(body: bytes, kind: type[T], skipped: Skipped) -> T:
    """Decode a request; fields that are not known here are ``skipped``. Raises ApiError that names what is wrong."""
    # Not told are fields that change nothing a user would miss, and any whose value asks for nothing. null is as if
    # left out.
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad_request(f"the body is no JSON: {error}") from None
    if not isinstance(decoded, dict):
        raise bad_request(f"the body is a JSON object, not {type(decoded).__name__}")
    known = {field.encode_name for field in msgspec.structs.fields(kind)}
    fields = {name: value for name, value in decoded.items() if value is not None}
    for name, value in fields.items():
        is_neutral = value in (False, [], {})
        if name in NEUTRAL_VALUES and value == NEUTRAL_VALUES[name]:
            is_neutral = True
        if name in NEEDED_FIELDS and name not in known and not is_neutral:
            raise bad_request(f"{name}: {NEEDED_FIELDS[name]}", name, "unsupported_parameter")
        if name not in known | IGNORED_FIELDS and not is_neutral:
            skipped.add(name)
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise from_decoding_error(error) from None
