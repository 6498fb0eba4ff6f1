"""Requests of all APIs in one form: a conversation or a text, how to go on, and the parts of the answer.

``prepare_request`` refuses whatever can be refused before any work; ``PreparedRequest.run`` writes, part by part.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from swarmd.client.text.answer_formats import AnswerFormats
from swarmd.client.text.answer_reader import AnswerPart, AnswerReader
from swarmd.client.text.prompts import Prompt
from swarmd.compute.model.ends import Ends
from swarmd.gateway.apis import refusals
from swarmd.gateway.apis.refusals import ApiError, bad_request
from swarmd.gateway.apis.schema import JsonObject, SamplingFields
from swarmd.gateway.generation.answer import AnswerDelta, AnswerOptions
from swarmd.gateway.generation.engine import GenerationEngine
from swarmd.gateway.generation.grammar import Grammar
from swarmd.gateway.generation.json_schema import BadSchema, schema_of_calls
from swarmd.gateway.generation.metrics import Metrics
from swarmd.gateway.generation.quotas import Quotas, Used
from swarmd.gateway.generation.row import RowReport
from swarmd.gateway.generation.sampling import SampledToken, Sampling

LEAST_PENALTY = 0.01  # for repetition, whatever a model's author wrote: less makes a logit infinite
MOST_DIGITS = 9  # of a token's number, as text: Python reads no number of some thousands
TEMPLATE_FIELDS = 32  # that a request may give a chat template
# As in llama.cpp: small models at temperature 1.0, uncut, write nonsense.
CAUTIOUS_SAMPLING = {
    "temperature": 0.8,
    "top_k": 40,
    "min_p": 0.05,
}
ANY_JSON = {"type": "object"}
HOW_TO_CALL = (  # for a model whose template does not say it
    'To call one, write this and nothing behind it:\n<tool_call>\n{"name": "NAME", "arguments": {...}}\n</tool_call>'
)
RESERVED_FIELDS = (
    "messages",
    "tools",
    "add_generation_prompt",
    "tokenize",
    "chat_template",
    "return_dict",
    "conversation",
)


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """What any API's request comes down to. ``prompt`` without messages is text, or tokens."""

    model: str
    sampled: SamplingFields
    messages: list[JsonObject] = field(default_factory=list)
    prompt: str | tuple[int, ...] = ""
    max_tokens: int | None = None
    wants_logprobs: bool = False
    n_top: int = 0
    schema: JsonObject | None = None  # {} is any JSON object
    tools: tuple[JsonObject, ...] = ()
    tool_choice: str = "auto"  # "none", "required", or the name of one after "="
    several_calls: bool = False  # where a call is forced: a small model would not stop
    template: JsonObject = field(default_factory=dict)
    continues: bool = False  # the last message, an assistant's, instead of answering it
    is_guess: bool = False  # that it continues: nobody said so
    keeps: bool = True  # the session, for a next turn
    begins_answer: bool = True  # the template writes what an answer begins with
    key: str = ""
    skipped: tuple[str, ...] = ()  # what of it is left out

    @property
    def is_forced(self) -> bool:
        """Whether the answer has to be a call."""
        return bool(self.tools) and self.tool_choice not in ("auto", "none")


@dataclass(frozen=True, slots=True)
class AnswerEvent:
    """What came: parts, the tokens that they came from, and at the end why it ended."""

    parts: tuple[AnswerPart, ...]
    choices: tuple[SampledToken, ...] = ()
    finish: str | None = None
    stopped: str | None = None
    repairs: tuple[str, ...] = ()  # of the chain, since the event before


OnEvent = Callable[[AnswerEvent], Awaitable[None]]


@dataclass(slots=True)
class PreparedRequest:
    """A request that is ready to run, once or several times."""

    engine: GenerationEngine
    options: AnswerOptions
    request: GenerationRequest
    formats: AnswerFormats | None  # of an answer to a conversation
    is_thinking: bool  # the prompt ends within thoughts
    metrics: Metrics
    quotas: Quotas
    is_prompt_counted: bool = False  # for the key: once, however many answers it has

    async def run(self, number: int, on_event: OnEvent) -> RowReport:
        """Write answer ``number`` of those that the request wants. Raises ApiError."""
        n_prompt = len(self.options.prompt)
        n_granted = self._reserve(self.options.max_tokens)
        report = RowReport(n_prompt)
        reader = self._make_reader()
        n_calls = 0
        n_repairs = 0  # told so far
        n_unread = 0  # tokens, since the last part: what they are is known with the next
        outcome = "abort"

        async def on_delta(delta: AnswerDelta) -> None:
            nonlocal n_calls, outcome, n_repairs, n_unread
            new_parts = reader.feed(delta.text)
            if delta.finish:
                new_parts = [*new_parts, *reader.end(was_cut=delta.finish == "length" or delta.stopped is not None)]
            n_unread += len(delta.choices)
            if new_parts:
                report.n_reasoning += n_unread if any(part.kind == "reasoning" for part in new_parts) else 0
                n_unread = 0
            n_calls += sum(part.kind == "call" for part in new_parts)
            finish = "tool_calls" if delta.finish == "stop" and n_calls else delta.finish
            outcome = finish or outcome
            repairs = tuple(report.repairs[n_repairs:])
            n_repairs = len(report.repairs)
            await on_event(AnswerEvent(tuple(new_parts), delta.choices, finish, delta.stopped, repairs))

        try:
            with refusals.as_api_errors():
                await self.engine.write(self._options_of(number, n_granted), on_delta, report)
        except ApiError:
            outcome = "error"
            raise
        finally:
            n_read = self._count_prompt() if report.is_sent else 0  # of one without a turn nothing was computed
            self.quotas.settle(self.options.key, n_prompt + n_granted, Used(0, n_read, report.n_generated))
            self.metrics.count_answer(self.request.model, report, outcome, self.options.key)
        return report

    async def score_prompt(self) -> list[SampledToken]:
        """How likely the prompt's tokens are, but for its first. Raises ApiError."""
        n_prompt = len(self.options.prompt)
        n_granted = self._reserve(0)
        report = RowReport(n_prompt)
        try:
            with refusals.as_api_errors():
                return await self.engine.score(self.options, self.request.n_top, report)
        finally:
            n_read = self._count_prompt() if report.is_sent else 0
            self.quotas.settle(self.options.key, n_prompt + n_granted, Used(0, n_read, 0))

    def _count_prompt(self) -> int:
        """How many tokens of the prompt count now: all, the first time."""
        if self.is_prompt_counted:
            return 0
        self.is_prompt_counted = True
        return len(self.options.prompt)

    def _reserve(self, n_more: int) -> int:
        """Say how many of the tokens asked for the key may have. Raises ApiError."""
        with refusals.as_api_errors():
            return self.quotas.reserve(self.options.key, len(self.options.prompt), n_more)

    def _make_reader(self) -> AnswerReader:
        """Make the reader of an answer; what completes a text is text."""
        if self.formats is None:
            return AnswerReader(())
        regions = self.formats.forced_regions if self.request.is_forced else self.formats.regions
        tools = None if self.request.schema is not None else _shown_tools(self.request)
        return AnswerReader(regions, tools, self.is_thinking)

    def _options_of(self, number: int, max_tokens: int) -> AnswerOptions:
        """Give each answer its own seed, so that answers to one prompt differ, and its own place in the grammar."""
        sampling = self.options.sampling
        grammar = self.options.grammar
        seed = None if sampling.seed is None else (sampling.seed + number) % 2**63
        mark = "" if self.formats is None else self.formats.answer_mark(self.is_thinking, self.request.continues)
        grammar_copy = None if grammar is None else grammar.copy(begins_after=mark)
        seeded = replace(sampling, seed=seed)
        return replace(self.options, sampling=seeded, grammar=grammar_copy, max_tokens=max_tokens)


async def prepare_request(
    engine: GenerationEngine, request: GenerationRequest, metrics: Metrics, quotas: Quotas
) -> PreparedRequest:
    """Make the prompt and check what can be checked. Raises ApiError."""
    # In the order of cost: a full queue is seen at once, a template takes a child process, a grammar another one.
    # Nothing here opens a session: what is refused has cost the swarm nothing.
    with refusals.as_api_errors():
        engine.turns.require_room(request.key)
    request, prompt = await _make_prompt_of_guess(engine, request)
    limit = engine.ends.max_tokens
    n_prompt = len(prompt.ids)
    if not n_prompt:
        raise bad_request("the prompt is empty", "prompt")
    if n_prompt >= limit:
        raise refusals.too_long(n_prompt, limit)
    with refusals.as_api_errors():  # also here, as a stream that has begun can only end with an error
        quotas.grant(request.key, n_prompt, 1)
    room = limit - n_prompt  # agents name lengths that are meant as "as long as it takes", or none
    max_tokens = min(request.max_tokens or room, room)
    grammar = await _make_grammar(engine, request)
    sampling = choose_sampling(request, engine.ends)
    ids = tuple(prompt.ids)
    refusals.require_tokens(ids, engine.ends.vocabulary, "prompt")
    stop = request.sampled.stop or []
    stops = [stop] if isinstance(stop, str) else stop
    formats = prompt.formats
    is_thinking = formats is not None and formats.is_thinking(prompt.tail, _continued(request))
    options = AnswerOptions(
        prompt=ids,
        max_tokens=max_tokens,
        sampling=sampling,
        stops=tuple(text for text in stops if text),
        eos=frozenset() if request.sampled.ignore_eos else engine.eos | prompt.ends,
        grammar=grammar,
        shown=engine.token_bytes.special_among(() if formats is None else formats.tokens),
        may_try=engine.ends.can_crop,
        key=request.key,
        keeps=request.keeps,
    )
    return PreparedRequest(engine, options, request, formats, is_thinking, metrics, quotas)


async def _make_prompt_of_guess(
    engine: GenerationEngine, request: GenerationRequest
) -> tuple[GenerationRequest, Prompt]:
    """Make the prompt; a request of which it was but a guess that it continues answers where it cannot.

    Raises ApiError.
    """
    answering = replace(request, continues=False)
    if request.is_guess and (request.is_forced or request.schema is not None):  # a schema holds a whole answer
        request = answering
    try:
        return request, await make_prompt(engine, request)
    except ApiError:
        if not (request.is_guess and request.continues):
            raise
        return answering, await make_prompt(engine, answering)


async def make_prompt(engine: GenerationEngine, request: GenerationRequest) -> Prompt:
    """Turn messages or text into the model's tokens, however many. Raises ApiError."""
    with refusals.as_api_errors("messages" if request.messages else "prompt"):
        if not request.messages:
            if isinstance(request.prompt, tuple):
                return Prompt(request.prompt)
            return await engine.prompts.text(request.prompt)
        return await engine.prompts.chat(
            _messages_with_tools(engine, request), _shown_tools(request), _template_options(request)
        )


def _template_options(request: GenerationRequest) -> JsonObject:
    """Return what the template is told beside the messages. Raises ApiError."""
    refused_names = [name for name in request.template if name in RESERVED_FIELDS or not name.isidentifier()]
    if refused_names or len(request.template) > TEMPLATE_FIELDS:
        raise bad_request(
            f"a chat template cannot be told {', '.join(refused_names) or 'so much'}", "chat_template_kwargs"
        )
    begins = request.begins_answer and not request.continues
    return {**request.template, "add_generation_prompt": begins, "continue_final_message": request.continues}


def ends_unfinished(messages: Sequence[JsonObject]) -> bool:
    """Whether messages end with an assistant's text: then there is nothing to answer, but that text to go on with."""
    last = messages[-1] if messages else {"role": ""}
    return last["role"] == "assistant" and bool(last["content"]) and not last.get("tool_calls")


def _continued(request: GenerationRequest) -> str | None:
    """Return the beginning of the answer, where the request has one."""
    content = request.messages[-1].get("content") if request.continues and request.messages else None
    return content if isinstance(content, str) else None


def _shown_tools(request: GenerationRequest) -> list[JsonObject] | None:
    return None if request.tool_choice == "none" else list(request.tools) or None


def _messages_with_tools(engine: GenerationEngine, request: GenerationRequest) -> list[JsonObject]:
    """Return the messages, with the tools in the system's turn where the template would leave them out."""
    tools = _shown_tools(request)
    if tools is None or engine.prompts.shows_tools:
        return request.messages
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = f"You can call these functions, each described by a JSON schema:\n{listed}\n\n{HOW_TO_CALL}"
    first, *rest = request.messages
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, *request.messages]


async def _make_grammar(engine: GenerationEngine, request: GenerationRequest) -> Grammar | None:
    """Compile what the answer has to fit. Raises ApiError."""
    try:
        schema = _forced_schema(request) if request.is_forced else request.schema
        if schema is None:
            return None
        with refusals.as_api_errors():
            return await engine.grammars.of_schema(schema or ANY_JSON, request.key)
    except BadSchema as error:
        raise bad_request(
            f"the schema cannot be used: {error}", "tools" if request.is_forced else "response_format"
        ) from None


def _forced_schema(request: GenerationRequest) -> JsonObject:
    """Make the schema of the calls that have to be made. Raises BadSchema."""
    name = request.tool_choice.removeprefix("=") if request.tool_choice.startswith("=") else None
    chosen = [tool for tool in request.tools if name in (None, tool["function"]["name"])]
    if not chosen:
        raise BadSchema(f"tool_choice names {name!r}, which is none of the tools")
    return schema_of_calls(chosen, request.several_calls and name is None)


def choose_sampling(request: GenerationRequest, ends: Ends) -> Sampling:
    """Decide how tokens are chosen. Raises ApiError.

    The request decides each number. What it leaves open is as the model's author says, where he wants sampling at
    all. Most GGUF files say nothing: cautious defaults count for them.
    """
    fields = request.sampled
    author = ends.generation
    defaults = author if author.get("do_sample") else CAUTIOUS_SAMPLING
    bias: dict[int, float] = {}
    for token, value in (fields.logit_bias or {}).items():
        if not token.isdecimal() or len(token) > MOST_DIGITS or int(token) >= ends.vocabulary:
            raise bad_request(f"logit_bias has token ids up to {ends.vocabulary - 1}, not {token[:32]!r}", "logit_bias")
        bias[int(token)] = value

    def choose(name: str, neutral: float) -> float:
        value = getattr(fields, name)
        return float(defaults.get(name, neutral) if value is None else value)

    penalty = fields.repeat_penalty if fields.repetition_penalty is None else fields.repetition_penalty
    if penalty is None:
        penalty = max(LEAST_PENALTY, float(author.get("repetition_penalty", 1.0)))
    return Sampling(
        temperature=max(0.0, choose("temperature", 1.0)),
        top_p=min(max(0.0, choose("top_p", 1.0)), 1.0),
        top_k=max(0, int(choose("top_k", 0))),
        min_p=min(max(0.0, choose("min_p", 0.0)), 1.0),
        repetition_penalty=penalty,
        presence_penalty=fields.presence_penalty or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        bias=bias,
        seed=None if fields.seed is None else fields.seed % 2**63,
        wants_logprobs=request.wants_logprobs,
        n_top=request.n_top,
    )
