"""Tokens tried ahead: as many as pay, from where they followed before, and never at much of a loss."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from swarmd.client.model.speculation import Costs, Lookup, Speculation, choose_draft_length


class TimedChain:
    """A model that says ``text``, at the cost of a pass and of each token more, and a clock for it."""

    def __init__(self, text: Sequence[int], one_s: float, more_s: float) -> None:
        self.text = text
        self.one_s = one_s
        self.more_s = more_s
        self.costs = Costs()
        self.seconds = 0.0
        self.n_passes = 0

    def generate(self, n_prompt: int, speculation: Speculation) -> float:
        """Say the text after ``n_prompt`` of its tokens; returns how many times faster than one by one."""
        tokens = list(self.text[:n_prompt])
        draft_tokens: list[int] = []
        while True:
            n_sent = 1 + len(draft_tokens)
            seconds = self.one_s + self.more_s * len(draft_tokens)
            self.costs.measured(n_sent, seconds)
            self.seconds += seconds
            self.n_passes += 1
            expected = self.text[len(tokens) : len(tokens) + n_sent]
            n_most = min(len(draft_tokens), len(expected) - 1)
            n_right = 0
            while n_right < n_most and draft_tokens[n_right] == expected[n_right]:
                n_right += 1
            tokens += expected[: n_right + 1]
            speculation.learn(n_right)
            n_left = len(self.text) - len(tokens)
            if n_left <= 0:
                return (len(self.text) - n_prompt) * self.one_s / self.seconds
            draft_tokens = speculation.propose_tokens(tokens, n_left - 1)


def erratic(n: int, seed: int) -> list[int]:
    """Text in which the same three tokens come again and again, and never go on as they did."""
    rng = random.Random(seed)
    return [t for _ in range(n // 4) for t in (1, 2, 3, rng.randrange(10, 10_000))]


@pytest.mark.parametrize(
    ("chance", "each_s", "expected"), [(0.9, 0.0, 16), (0.9, 0.2, 7), (0.5, 0.2, 1), (0.1, 0.2, 0)]
)
def test_the_number_that_gives_most_tokens_in_the_time(chance: float, each_s: float, expected: int) -> None:
    decision = choose_draft_length(chance, 16, 1.0, each_s)
    assert decision.action == expected
    assert f"{100 * chance:.0f} % are right" in decision.reason


def test_nothing_is_tried_before_a_pass_was_measured() -> None:
    assert Speculation(Costs(), [Lookup()]).propose_tokens([1, 2, 3, 4, 1, 2, 3], 16) == []


def test_lookup_proposes_what_followed_the_longest_run_last() -> None:
    lookup = Lookup()
    text = [7, 1, 2, 3, 8, 9, 5, 1, 2, 3, 6, 4, 1, 2, 3]
    assert lookup.propose(text[:10], 2, 0)[0] == [8, 9]
    assert lookup.propose(text, 3, 0)[0] == [6, 4, 1]
    assert Lookup().propose([4, 5, 1, 2, 3, 9, 9, 0, 1, 2, 3, 7, 4, 5, 1, 2, 3], 1, 0)[0] == [9], "four that agree"
    assert Lookup().propose([1, 2], 3, 0)[0] == []


def test_a_text_that_repeats_itself_is_said_several_times_faster() -> None:
    chain = TimedChain([10 + i % 30 for i in range(400)], 1.0, 0.2)
    assert chain.generate(40, Speculation(chain.costs, [Lookup()])) > 2.5


@pytest.mark.parametrize("more_s", [0.0, 0.02, 0.2, 0.5])
@pytest.mark.parametrize("length", [60, 240, 2_000])
def test_tries_that_fail_cost_less_than_three_percent(more_s: float, length: int) -> None:
    for seed in range(20):
        chain = TimedChain(erratic(100 + length, seed), 1.0, more_s)
        assert chain.generate(100, Speculation(chain.costs, [Lookup()])) > 0.97


def test_a_text_that_begins_to_repeat_itself_late_is_noticed() -> None:
    chain = TimedChain(erratic(1_000, 1) + [10 + i % 30 for i in range(1_000)], 1.0, 0.2)
    assert chain.generate(100, Speculation(chain.costs, [Lookup()])) > 1.4


def test_a_pass_that_took_long_for_once_changes_nothing() -> None:
    costs = Costs()
    for seconds in (1.0, 1.0, 30.0, 1.0):
        costs.measured(1, seconds)
    for seconds in (1.2, 50.0, 1.2):
        costs.measured(2, seconds)
    assert (costs.one_s, round(costs.more_s, 6)) == (1.0, 0.2)


def test_a_source_that_is_right_is_asked_when_another_knows_nothing() -> None:
    class Oracle:
        each_s = 0.05

        def begin(self, prompt: Sequence[int]) -> None:
            pass

        def end(self) -> None:
            pass

        def propose(
            self,
            tokens: Sequence[int],
            max_tokens: int,
            min_chance: float,
        ) -> tuple[list[int], float]:
            return text[len(tokens) : len(tokens) + max_tokens], 0.05 * max_tokens

    rng = random.Random(5)
    text = [rng.randrange(1_000) for _ in range(300)]
    chain = TimedChain(text, 1.0, 0.1)
    speculation = Speculation(chain.costs, [Lookup(), Oracle()])
    assert chain.generate(10, speculation) > 3
    assert speculation.n_taken == speculation.n_sent > 150
