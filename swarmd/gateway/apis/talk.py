"""A request in one form, whoever's API it came by: a conversation or a text, how to go on, and what comes of it.

``prepare`` refuses whatever can be refused before any work; ``PreparedRequest.run`` writes, part by part.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any

from swarmd.client.text.prompts import Prompt
from swarmd.compute.model.ends import Ends
from swarmd.errors import ConfigError, SwarmError
from swarmd.gateway.apis import refusals
from swarmd.gateway.apis.parts import AnswerPart, MarkedParts, Parts, PlainParts, ToolCallParts, marks_of
from swarmd.gateway.apis.refusals import bad
from swarmd.gateway.apis.schema import SamplingFields
from swarmd.gateway.generation.answer import AnswerDelta, AnswerOptions
from swarmd.gateway.generation.engine import GenerationEngine
from swarmd.gateway.generation.grammar import Grammar
from swarmd.gateway.generation.json_schema import BadSchema, calls_of
from swarmd.gateway.generation.metrics import Metrics
from swarmd.gateway.generation.row import RowReport
from swarmd.gateway.generation.sampling import SampledToken, Sampling
from swarmd.gateway.generation.turns import QueueFull

DEFAULT_TOKENS = 2_048  # of an answer whose length nobody named, if the context has room
LEAST_PENALTY = 0.01  # for repetition, whatever a model's author wrote: less makes a logit infinite
MOST_DIGITS = 9  # of a token's number, as text: Python reads no number of some thousands
TEMPLATE_FIELDS = 32  # that a request may give a chat template
CAUTIOUS = {"temperature": 0.8, "top_k": 40, "min_p": 0.05}  # as llama.cpp: small models at 1.0, uncut, write nonsense
ANY_JSON = {"type": "object"}
OWN_FIELDS = ("messages", "tools", "add_generation_prompt", "tokenize", "chat_template", "return_dict", "conversation")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What any API's request comes down to. ``prompt`` without messages is text, or tokens."""

    model: str
    sampled: SamplingFields
    messages: list[dict[str, Any]] = field(default_factory=list)
    prompt: str | tuple[int, ...] = ""
    max_tokens: int | None = None
    tells: bool = False
    n_top: int = 0
    schema: dict[str, Any] | None = None  # {} is any JSON object
    tools: tuple[dict[str, Any], ...] = ()
    tool_choice: str = "auto"  # "none", "required", or the name of one after "="
    several_calls: bool = False  # where a call is forced: a small model would not stop
    template: dict[str, Any] = field(default_factory=dict)
    continues: bool = False  # the last message, an assistant's, instead of answering it
    begins_answer: bool = True  # the template writes what an answer begins with
    is_most: bool = False  # max_tokens is what it may come to, not what there has to be room for
    key: str = ""


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """What came: parts, the tokens that they came from, and at the end why it ended."""

    parts: tuple[AnswerPart, ...]
    choices: tuple[SampledToken, ...] = ()
    finish: str | None = None
    stopped: str | None = None
    repairs: tuple[str, ...] = ()  # of the chain, since the event before


Hear = Callable[[AnswerEvent], Awaitable[None]]


@dataclass(slots=True)
class PreparedRequest:
    """A request that is ready to run, once or several times."""

    engine: GenerationEngine
    wanted: AnswerOptions
    tail: str
    asked: GenerationRequest
    is_forced: bool
    metrics: Metrics

    async def run(self, number: int, hear: Hear) -> RowReport:
        """Write answer ``number`` of those asked for. Raises ApiError."""
        told, parts, calls, ended, n_repairs = RowReport(len(self.wanted.prompt)), self._parts(), 0, "abort", 0

        async def give(piece: AnswerDelta) -> None:
            nonlocal calls, ended, n_repairs
            found = [*parts.feed(piece.text), *(parts.end() if piece.finish else [])]
            calls += sum(part.kind == "call" for part in found)
            finish = "tool_calls" if piece.finish == "stop" and calls else piece.finish
            ended = finish or ended
            repairs, n_repairs = tuple(told.repairs[n_repairs:]), len(told.repairs)
            await hear(AnswerEvent(tuple(found), piece.choices, finish, piece.stopped, repairs))

        try:
            await self.engine.write(self._numbered(number), give, told)
        except QueueFull as error:
            ended = "error"
            raise refusals.queue_full(error) from None
        except SwarmError as error:
            ended = "error"
            raise refusals.of(error) from error
        finally:
            self.metrics.answered(self.asked.model, told, ended)
        return told

    def _parts(self) -> Parts:
        if self.is_forced:
            return ToolCallParts()
        marks = marks_of(self.engine.ends.family) if self.asked.messages else None
        tools = list(self.asked.tools) or None
        return PlainParts() if marks is None or self.wanted.grammar else MarkedParts(marks, self.tail, tools)

    def _numbered(self, number: int) -> AnswerOptions:
        """Several answers to one prompt draw differently, and each follows the grammar by itself."""
        sampling, grammar = self.wanted.sampling, self.wanted.grammar
        seed = None if sampling.seed is None else (sampling.seed + number) % 2**63
        own = None if grammar is None else grammar.copy()
        return replace(self.wanted, sampling=replace(sampling, seed=seed), grammar=own)


async def prepare(engine: GenerationEngine, asked: GenerationRequest, metrics: Metrics) -> PreparedRequest:
    """Make the prompt and check what can be checked. Raises ApiError."""
    try:
        engine.turns.require_room(asked.key)
    except QueueFull as error:
        raise refusals.queue_full(error) from None
    prompt = await prompt_of(engine, asked)
    limit, n_prompt = engine.ends.max_tokens, len(prompt.ids)
    if not n_prompt:
        raise bad("the prompt is empty", "prompt")
    room = max(1, limit - n_prompt)
    most = asked.max_tokens or min(DEFAULT_TOKENS, room)
    if asked.is_most:
        most = min(most, room)
    if n_prompt + most > limit:
        raise refusals.too_long(n_prompt, most, limit)
    is_forced = bool(asked.tools) and asked.tool_choice not in ("auto", "none")
    grammar = await _grammar(engine, asked, is_forced)
    sampling = sampling_of(asked, engine.ends)
    ids = tuple(prompt.ids)
    if not 0 <= min(ids) <= max(ids) < engine.ends.vocabulary:
        raise bad(f"token ids are from 0 to {engine.ends.vocabulary - 1}", "prompt")
    stop = asked.sampled.stop or []
    wanted = AnswerOptions(
        prompt=ids,
        max_tokens=most,
        sampling=sampling,
        stops=tuple(s for s in ([stop] if isinstance(stop, str) else stop) if s),
        eos=frozenset() if asked.sampled.ignore_eos else engine.eos | prompt.ends,
        grammar=grammar,
        keeps_special=bool(asked.messages) and marks_of(engine.ends.family) is not None and grammar is None,
        looks_up=engine.ends.can_crop,
        key=asked.key,
    )
    return PreparedRequest(engine, wanted, prompt.tail, asked, is_forced, metrics)


async def prompt_of(engine: GenerationEngine, asked: GenerationRequest) -> Prompt:
    """What the model is given, however long. Raises ApiError."""
    try:
        if not asked.messages:
            if isinstance(asked.prompt, tuple):
                return Prompt(asked.prompt)
            return await engine.prompts.text(asked.prompt)
        return await engine.prompts.chat(_with_tools(engine, asked), _shown(asked), _options(asked))
    except ConfigError as error:
        raise bad(str(error), "messages" if asked.messages else "prompt") from None
    except SwarmError as error:
        raise refusals.of(error) from None


def _options(asked: GenerationRequest) -> dict[str, Any]:
    """What the template is told beside the messages. Raises ApiError."""
    wrong = [name for name in asked.template if name in OWN_FIELDS or not name.isidentifier()]
    if wrong or len(asked.template) > TEMPLATE_FIELDS:
        raise bad(f"a chat template cannot be told {', '.join(wrong) or 'so much'}", "chat_template_kwargs")
    begins = asked.begins_answer and not asked.continues
    return {**asked.template, "add_generation_prompt": begins, "continue_final_message": asked.continues}


def _shown(asked: GenerationRequest) -> list[dict[str, Any]] | None:
    return None if asked.tool_choice == "none" else list(asked.tools) or None


def _with_tools(engine: GenerationEngine, asked: GenerationRequest) -> list[dict[str, Any]]:
    """The messages; a template that knows no tools leaves them out, so they are told in the system's turn."""
    tools = _shown(asked)
    if tools is None or engine.prompts.shows_tools:
        return asked.messages
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = f"You can call these functions, each described by a JSON schema:\n{listed}"
    first, *rest = asked.messages
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *asked.messages]


async def _grammar(engine: GenerationEngine, asked: GenerationRequest, is_forced: bool) -> Grammar | None:
    """What the answer has to fit. Raises ApiError."""
    try:
        schema = _forced_calls(asked) if is_forced else asked.schema
        if schema is None:
            return None
        return await engine.grammars.of_schema(schema or ANY_JSON, asked.key)
    except BadSchema as error:
        raise bad(f"the schema cannot be used: {error}", "tools" if is_forced else "response_format") from None
    except QueueFull as error:
        raise refusals.queue_full(error) from None
    except SwarmError as error:
        raise refusals.of(error) from None


def _forced_calls(asked: GenerationRequest) -> dict[str, Any]:
    """The schema of the calls that have to be made. Raises BadSchema."""
    name = asked.tool_choice.removeprefix("=") if asked.tool_choice.startswith("=") else None
    chosen = [tool for tool in asked.tools if name in (None, tool["function"]["name"])]
    if not chosen:
        raise BadSchema(f"tool_choice names {name!r}, which is none of the tools")
    return calls_of(chosen, asked.several_calls and name is None)


def sampling_of(asked: GenerationRequest, ends: Ends) -> Sampling:
    """Decide how tokens are chosen. Raises ApiError.

    For each number: what the request says, else what the model's author does (where he wants sampling). An author who
    says nothing of it, as in most GGUF files, leaves cautious defaults.
    """
    said, author = asked.sampled, ends.generation
    defaults = author if author.get("do_sample") else CAUTIOUS
    bias: dict[int, float] = {}
    for token, value in (said.logit_bias or {}).items():
        if not token.isdecimal() or len(token) > MOST_DIGITS or int(token) >= ends.vocabulary:
            raise bad(f"logit_bias has token ids up to {ends.vocabulary - 1}, not {token[:32]!r}", "logit_bias")
        bias[int(token)] = value

    def either(name: str, neutral: float) -> float:
        value = getattr(said, name)
        return float(defaults.get(name, neutral) if value is None else value)

    penalty = said.repeat_penalty if said.repetition_penalty is None else said.repetition_penalty
    return Sampling(
        temperature=max(0.0, either("temperature", 1.0)),
        top_p=min(max(0.0, either("top_p", 1.0)), 1.0),
        top_k=max(0, int(either("top_k", 0))),
        min_p=min(max(0.0, either("min_p", 0.0)), 1.0),
        repetition_penalty=max(LEAST_PENALTY, float(author.get("repetition_penalty", 1.0)))
        if penalty is None
        else penalty,
        presence_penalty=said.presence_penalty or 0.0,
        frequency_penalty=said.frequency_penalty or 0.0,
        bias=bias,
        seed=None if said.seed is None else said.seed % 2**63,
        tells=asked.tells,
        n_top=asked.n_top,
    )
