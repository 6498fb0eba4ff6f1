"""OpenAI's completions: texts that are gone on with, and how likely the tokens of a prompt are.

Source: OpenAI's API reference; log-probabilities of prompts as lm-eval asks for them (``echo`` with ``logprobs``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

from swarmd.gateway.apis.openai import (
    DONE,
    CollectedAnswer,
    format_extra,
    format_usage,
    make_envelope,
    run_all,
    run_together,
)
from swarmd.gateway.apis.refusals import bad_request
from swarmd.gateway.apis.schema import CompletionRequest, JsonObject, read_length
from swarmd.gateway.apis.skipped import Skipped
from swarmd.gateway.apis.streams import Emit
from swarmd.gateway.apis.talk import AnswerEvent, GenerationRequest, PreparedRequest
from swarmd.gateway.generation.row import RowReport
from swarmd.gateway.generation.sampling import SampledToken

MAX_PROMPTS = 64  # of one request


def parse_completion(request: CompletionRequest, key: str, skipped: Skipped) -> list[GenerationRequest]:
    """Translate a request for continuations, one for each prompt. Raises ApiError for what is not done here."""
    if request.suffix:
        raise bad_request("suffix is not supported here: this model continues text", "suffix", "unsupported_parameter")
    if request.best_of not in (None, 1, request.n):
        raise bad_request("best_of is not supported here: ask for n", "best_of", "unsupported_parameter")
    prompts: list[Any] = [request.prompt] if isinstance(request.prompt, str) else request.prompt
    if prompts and isinstance(prompts[0], int):
        prompts = [prompts]
    are_prompts = all(isinstance(prompt, str) or _are_ids(prompt) for prompt in prompts)
    if not 1 <= len(prompts) <= MAX_PROMPTS or not are_prompts:
        raise bad_request(f"prompt is a text, token ids, or 1 to {MAX_PROMPTS} of these", "prompt")
    length = 16 if request.max_tokens is None else request.max_tokens
    return [
        GenerationRequest(
            model=request.model,
            sampled=request,
            prompt=prompt if isinstance(prompt, str) else tuple(prompt),
            max_tokens=1 if only_scores(request) else read_length(length, "max_tokens"),
            wants_logprobs=request.logprobs is not None,
            n_top=request.logprobs or 0,
            key=key,
            skipped=skipped.told,
        )
        for prompt in prompts
    ]


def only_scores(request: CompletionRequest) -> bool:
    """Is only the prompt wanted back, and how likely it is?"""
    return bool(request.echo) and request.logprobs is not None and request.max_tokens == 0


def _are_ids(prompt: Any) -> bool:
    return isinstance(prompt, list) and all(type(i) is int and i >= 0 for i in prompt)


async def answer_completion(prepared_requests: Sequence[PreparedRequest], request: CompletionRequest) -> JsonObject:
    """Generate the whole continuation of every prompt."""
    n = request.n or 1
    scored = await _score_prompts(prepared_requests, request)
    if only_scores(request):
        answers = [CollectedAnswer(finish="length") for _ in range(n * len(prepared_requests))]
        reports = [RowReport(len(prepared.options.prompt)) for prepared in prepared_requests for _ in range(n)]
    else:
        answers, reports = await run_all(prepared_requests, n)
    choices = []
    for index, answer in enumerate(answers):
        prepared = prepared_requests[index // n]
        text = (_echo_prompt(prepared) if request.echo else "") + answer.content
        has_logprobs = request.logprobs is not None
        tokens = [*scored[index // n], *answer.choices]
        logprobs = _format_completion_logprobs(tokens, prepared) if has_logprobs else None
        choices.append({"index": index, "text": text, "logprobs": logprobs, "finish_reason": answer.finish})
    head = make_envelope("text_completion", "cmpl", request.model)
    usage = format_usage(reports, len(prepared_requests))
    return {**head, "choices": choices, "usage": usage, "swarmd": format_extra(reports, prepared_requests[0].request)}


async def _score_prompts(
    prepared_requests: Sequence[PreparedRequest], request: CompletionRequest
) -> list[list[SampledToken]]:
    """How likely the tokens of each prompt are, where they are to be told: of the first nobody knows.

    Raises ApiError.
    """
    scored: list[list[SampledToken]] = [[] for _ in prepared_requests]
    if not request.echo or request.logprobs is None:
        return scored

    async def score(index: int, prepared: PreparedRequest) -> None:
        first = SampledToken(prepared.options.prompt[0], math.nan)
        scored[index] = [first, *await prepared.score_prompt()]

    await run_together([partial(score, index, prepared) for index, prepared in enumerate(prepared_requests)])
    return scored


def _echo_prompt(prepared: PreparedRequest) -> str:
    prompt = prepared.request.prompt
    return prompt if isinstance(prompt, str) else prepared.engine.tokenizer.decode(list(prompt))


def _format_completion_logprobs(
    choices: Sequence[SampledToken], prepared: PreparedRequest, offset: int = 0
) -> JsonObject:
    decode = partial(prepared.engine.tokenizer.decode, skip_special_tokens=False)
    texts = [decode([choice.token]) for choice in choices]
    offsets = []
    for text in texts:
        offsets.append(offset)
        offset += len(text)
    tops: list[JsonObject | None] = [
        {decode([token]): logprob for token, logprob in choice.top} if choice.top else None for choice in choices
    ]
    logprobs = [None if math.isnan(choice.logprob) else choice.logprob for choice in choices]
    return {"tokens": texts, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}


async def stream_completion(
    prepared_requests: Sequence[PreparedRequest], request: CompletionRequest, emit: Emit
) -> None:
    """Generate the continuation of every prompt in pieces, all at once."""
    head = make_envelope("text_completion", "cmpl", request.model)
    silence = {"index": 0, "text": "", "logprobs": None, "finish_reason": None}
    emit.sign_of_life = lambda: emit.send_event({**head, "choices": [silence]})
    wants_usage = bool(request.stream_options and request.stream_options.include_usage)
    n = request.n or 1
    reports: list[RowReport] = []

    async def run_one(index: int) -> None:
        prepared = prepared_requests[index // n]
        n_characters = 0

        async def write_piece(text: str, finish: str | None = None, logprobs: Any = None) -> None:
            choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}
            usage = {"usage": None} if wants_usage else {}
            await emit.send_event({**head, "choices": [choice], **usage})

        async def write_event(event: AnswerEvent) -> None:
            nonlocal n_characters
            text = "".join(part.text for part in event.parts)
            has_logprobs = request.logprobs is not None and event.choices
            logprobs = _format_completion_logprobs(event.choices, prepared, n_characters) if has_logprobs else None
            n_characters += len(text)
            if text or logprobs or event.finish:
                await write_piece(text, event.finish, logprobs)

        if request.echo:
            scores = scored[index // n]
            logprobs = _format_completion_logprobs(scores, prepared) if scores else None
            await write_piece(_echo_prompt(prepared), "length" if only_scores(request) else None, logprobs)
            n_characters = len(_echo_prompt(prepared))
        if only_scores(request):
            reports.append(RowReport(len(prepared.options.prompt)))
        else:
            reports.append(await prepared.run(index % n, write_event))

    scored = await _score_prompts(prepared_requests, request)
    await run_together([partial(run_one, index) for index in range(n * len(prepared_requests))])
    if wants_usage:
        usage_of_all = format_usage(reports, len(prepared_requests))
        totals = {"usage": usage_of_all, "swarmd": format_extra(reports, prepared_requests[0].request)}
        await emit.send_event({**head, "choices": [], **totals})
    await emit.send_event(DONE)
