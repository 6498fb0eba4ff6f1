"""An answer as it grows: the same tokens whatever is tried ahead, and an end where it ends."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer

from swarmd.client.drafting.lookup import Lookup
from swarmd.client.drafting.source import DraftSource
from swarmd.client.drafting.speculation import Costs, PassCost
from swarmd.gateway.generation.answer import Answer, AnswerOptions
from swarmd.gateway.generation.grammar import Grammar
from swarmd.gateway.generation.sampling import SampledToken, Sampling
from swarmd.gateway.generation.schema_compiler import Compiler
from swarmd.gateway.generation.token_bytes import TokenBytes
from swarmd.plan.chains.flight import TokenWindow
from tests.scripted_source import ScriptedSource

N = 64  # tokens of the toy models below
Model = Callable[[list[int]], torch.Tensor]


def cycle(tokens: list[int]) -> torch.Tensor:
    """A model that counts to twelve, over and over, and is a little unsure."""
    logits = torch.zeros(N)
    logits[10 + (tokens[-1] - 9) % 12] = 4.0
    return logits


def hidden_of(places: list[int]) -> torch.Tensor:
    """What left the last block at some places: here, which place it is."""
    return torch.tensor(places, dtype=torch.float32)[:, None]


def run(
    options: AnswerOptions,
    tokenizer: Tokenizer,
    model: Model = cycle,
    can_fly: bool = False,
    sources: list[DraftSource] | None = None,
) -> tuple[list[int], str, Answer, int, list[SampledToken]]:
    """Drive an answer as the engine does; returns its tokens, its text, itself, its passes, and its choices."""
    costs = Costs()
    answer = Answer(options, TokenBytes(tokenizer), costs, [Lookup()] if sources is None else sources)
    n_passes = 1
    text = ""
    choices: list[SampledToken] = []

    def take_piece() -> None:
        nonlocal text
        piece = answer.piece()
        choices.extend(piece.choices)
        text += piece.text

    answer.speculation.begin(options.prompt)
    answer.begin(torch.stack([model(list(options.prompt))]), hidden_of([len(options.prompt) - 1]))
    take_piece()
    flight = answer.fly(list(options.prompt), 7, 1_000, can_fly, 0.0)
    speculation = answer.speculation
    windows: deque[TokenWindow] = deque()
    now = 0.0
    while not answer.finish:
        while speculation.can_draft:
            speculation.draft()
        now = max(now, speculation.next_at)
        if speculation.is_due(now):
            windows.append(speculation.next_window(now))
            continue
        window = windows.popleft()
        n_passes += 1
        now += 1.0
        cost = PassCost(len(window.tokens), 1 + 0.05 * len(window.tokens), hops_s=(0.01,), is_alone=not windows)
        assert speculation.begin_answer(window.number, cost) == window
        sent = [*flight.text[: window.n_before], *window.tokens]
        n_first = len(sent) - window.n_wanted
        logits = torch.stack([model(sent[: n_first + i + 1]) for i in range(window.n_wanted)])
        hidden = hidden_of(list(range(n_first, len(sent))))
        if answer.read(window, logits, hidden, now) is not None:
            windows.clear()
        take_piece()
    speculation.end()
    return [choice.token for choice in choices], text, answer, n_passes, choices


@pytest.mark.parametrize("can_fly", [False, True])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=1.0, seed=5, top_p=0.9, repetition_penalty=1.05, wants_logprobs=True, n_top=3),
        Sampling(temperature=0.7, seed=6, top_k=8, presence_penalty=0.1, frequency_penalty=0.05, bias={12: -1.0}),
        Sampling(temperature=0.0, min_p=0.1, frequency_penalty=0.2, wants_logprobs=True),
    ],
    ids=["log-probabilities", "penalties and bias", "greedy"],
)
def test_whatever_is_asked_for_is_the_same_with_tries(tokenizer: Tokenizer, sampling: Sampling, can_fly: bool) -> None:
    prompt = tuple(10 + i % 12 for i in range(30))
    options = AnswerOptions(prompt, 60, sampling, stops=(tokenizer.decode([14, 15, 16]),))
    without_end = run(replace(options, stops=()), tokenizer, sources=[])
    for each in (options, replace(options, stops=())):
        plain = run(each, tokenizer, sources=[])
        source = ScriptedSource([*prompt, *without_end[0]], chance=0.8, each_s=0.001, seed=3)
        told = run(each, tokenizer, can_fly=can_fly, sources=[source])
        assert (told[0], told[1], told[2].finish) == (plain[0], plain[1], plain[2].finish)
        assert told[4] == plain[4], "and its log-probabilities"
        assert told[2].speculation.n_taken > 0


@pytest.mark.parametrize("can_fly", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_what_is_tried_ahead_changes_no_token(tokenizer: Tokenizer, temperature: float, can_fly: bool) -> None:
    sampling = Sampling(temperature=temperature, seed=5)
    prompt = tuple(10 + i % 12 for i in range(30))
    plain = run(AnswerOptions(prompt, 60, sampling, may_try=False), tokenizer)
    with_draft = run(AnswerOptions(prompt, 60, sampling), tokenizer, can_fly=can_fly)
    assert with_draft[0] == plain[0]
    assert with_draft[1] == plain[1]
    assert plain[3] == 60, "one pass a token"
    assert plain[2].speculation.n_sent == 0
    assert with_draft[2].speculation.n_sent > 0
    if temperature == 0:
        assert with_draft[3] < 12, "what was copied was right"


class Listener(ScriptedSource):
    """Notes the place of each hidden state that it hears of."""

    def __init__(self, text: list[int]) -> None:
        super().__init__(text, chance=0.7, each_s=0.001, seed=3)
        self.heard: list[tuple[int, float]] = []

    def hear(self, place: int, hidden: torch.Tensor) -> None:
        self.heard.append((place, float(hidden)))


@pytest.mark.parametrize("can_fly", [False, True])
def test_who_drafts_hears_each_hidden_state_once_whatever_was_wrong(tokenizer: Tokenizer, can_fly: bool) -> None:
    options = AnswerOptions(tuple(10 + i % 12 for i in range(30)), 60, Sampling(temperature=0))
    plain = run(options, tokenizer, sources=[])
    listener = Listener([*options.prompt, *plain[0]])
    tokens, _, answer, *_ = run(options, tokenizer, can_fly=can_fly, sources=[listener])
    assert tokens == plain[0]
    assert 0 < answer.speculation.n_taken < answer.speculation.n_sent
    assert listener.heard == [(place, float(place)) for place in range(29, 89)], "in order, none of what was void"


class Failing(ScriptedSource):
    """Proposes rightly, and then fails at one thing."""

    def __init__(self, text: list[int], at: str) -> None:
        super().__init__(text, chance=0.9, each_s=0.001, seed=3)
        self.n_failed = 0
        self._at = at

    def _fail(self, what: str) -> None:
        if what == self._at:
            self.n_failed += 1
            raise RuntimeError("out of memory")

    def begin(self, prompt: Sequence[int]) -> None:
        self._fail("begin")

    def end(self) -> None:
        self._fail("end")

    def hear(self, place: int, hidden: torch.Tensor) -> None:
        if place > 50:
            self._fail("hear")

    def propose(self, text: Sequence[int], tried: Sequence[int], max_tokens: int, min_chance: float) -> list[int]:
        if len(text) > 50:
            self._fail("propose")
        return super().propose(text, tried, max_tokens, min_chance)


@pytest.mark.parametrize("can_fly", [False, True])
@pytest.mark.parametrize("at", ["begin", "hear", "propose", "end"])
def test_a_source_that_fails_is_done_without(tokenizer: Tokenizer, at: str, can_fly: bool) -> None:
    options = AnswerOptions(tuple(10 + i % 12 for i in range(30)), 60, Sampling(temperature=0))
    plain = run(options, tokenizer, sources=[])
    failing = Failing([*options.prompt, *plain[0]], at)
    told = run(options, tokenizer, can_fly=can_fly, sources=[failing])
    assert (told[0], told[2].finish) == (plain[0], "length")
    assert failing.n_failed == 1, "it is asked for nothing any more"


def test_it_ends_at_the_length_and_at_the_end_token(tokenizer: Tokenizer) -> None:
    options = AnswerOptions((10,), 5, Sampling(temperature=0))
    tokens, _, answer, *_ = run(options, tokenizer)
    assert (len(tokens), answer.finish) == (5, "length")
    options = AnswerOptions((10,), 50, Sampling(temperature=0), eos=frozenset({14}))
    tokens, _, answer, *_ = run(options, tokenizer)
    assert tokens == [11, 12, 13], "the end token is none of the text's"
    assert answer.finish == "stop"
    assert answer.n_tokens == 4, "but it was generated"


def test_a_stop_string_ends_it(tokenizer: Tokenizer) -> None:
    full_text = tokenizer.decode([11, 12, 13, 14, 15])
    stop = tokenizer.decode([13])
    options = AnswerOptions((10,), 50, Sampling(temperature=0), stops=(stop,))
    _, text, answer, *_ = run(options, tokenizer)
    assert text == full_text[: full_text.index(stop)]
    assert answer.finish == "stop"
    assert answer.piece().stopped == stop


SCHEMA = {
    "type": "object",
    "properties": {"answer": {"enum": ["yes", "no"]}, "sure": {"type": "boolean"}},
    "required": ["answer", "sure"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("seed", range(5))
def test_whatever_the_model_says_it_fits_the_schema(tokenizer: Tokenizer, seed: int) -> None:
    torch.manual_seed(seed)
    size = tokenizer.get_vocab_size()
    grammar = Grammar(Compiler(tokenizer, size, 0).compile(json.dumps(SCHEMA)), size)
    options = AnswerOptions((10,), 200, Sampling(temperature=1, seed=seed), grammar=grammar)
    _, text, answer, n_passes, _ = run(options, tokenizer, lambda tokens: torch.randn(size))
    reply = json.loads(text)
    assert reply["answer"] in ("yes", "no")
    assert reply["sure"] in (True, False)
    assert answer.finish == "stop"
    assert n_passes < len(tokenizer.encode(text).ids), "what was forced travelled together"
