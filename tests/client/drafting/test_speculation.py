"""Tokens tried ahead: as many as pay, from where they followed before, and never at much of a loss."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence

import pytest

from swarmd.client.drafting.lookup import Lookup
from swarmd.client.drafting.speculation import Costs, PassCost, Speculation
from swarmd.plan.chains.flight import Flight, TokenWindow
from tests.scripted_source import ScriptedSource


class TimedChain:
    """A chain of hops that says ``text``, and a clock for it: what hops compute one after the other, and trips between.

    A plain pass takes ``one_s``, each token more ``more_s``, of which the ``n_hops`` have the share ``computing``.
    """

    def __init__(
        self, text: Sequence[int], one_s: float, more_s: float, n_hops: int = 1, computing: float = 1.0
    ) -> None:
        self.text = text
        self.one_s = one_s
        self.hop_s = one_s * computing / n_hops
        self.hop_more_s = more_s / n_hops
        self.way_s = one_s * (1 - computing) / (n_hops + 1)
        self.costs = Costs()
        self.now = 0.0
        self.n_computed = 0  # windows, by all hops together
        self._free_at = [0.0] * n_hops
        self._begun: list[list[tuple[float, float, int]]] = [[] for _ in range(n_hops)]  # begin, end, window

    def generate(self, n_prompt: int, speculation: Speculation, can_fly: bool = False) -> float:
        """Say the text after ``n_prompt`` of its tokens; returns how many times faster than one by one."""
        tokens = list(self.text[: n_prompt + 1])
        flight = Flight(tokens, tokens[:-1], 0)
        self.now = 0.0
        speculation.start(flight, len(self.text), can_fly, self.now, tries_seconds=can_fly)
        under_way: deque[tuple[float, TokenWindow, bool]] = deque()
        while len(tokens) < len(self.text):
            if speculation.is_due(self.now):
                window = speculation.next_window(self.now)
                under_way.append((self._answer_at(window), window, not under_way))
                continue
            patience_s = speculation.patience_s(self.now)
            arrives_at = under_way[0][0] if under_way else float("inf")
            if patience_s is not None and arrives_at > self.now + patience_s:
                if speculation.can_draft:
                    assert speculation.source is not None
                    each_s = speculation.source.each_s
                    n_tried = len(flight.tried)
                    speculation.draft()
                    self.now += each_s * (len(flight.tried) - n_tried)
                else:
                    self.now += max(1e-6, patience_s)
                continue
            answer_at, window, is_alone = under_way.popleft()
            self.now = max(self.now, answer_at)
            n = len(window.tokens) + len(window.second)
            took_s = self.one_s + (n - 1) * self.hop_more_s * len(self._free_at)
            hops_s = tuple(self.hop_s + (n - 1) * self.hop_more_s for _ in self._free_at)
            assert speculation.begin_answer(window.number, PassCost(n, took_s, 0.0, hops_s, is_alone)) is window
            n_before = len(tokens)
            for _ in speculation.rows_to_decide(window):
                speculation.take(self.text[len(tokens)])
                if len(tokens) == len(self.text):
                    break
            void_from = speculation.end_answer(len(tokens) - n_before, self.now)
            if void_from is not None:
                assert void_from in [w.number for _, w, _ in under_way]
                under_way = deque(entry for entry in under_way if entry[1].number < void_from)
                self._drop_void(void_from)
        assert tokens == list(self.text)
        return (len(self.text) - n_prompt - 1) * self.one_s / self.now

    def _answer_at(self, window: TokenWindow) -> float:
        at = self.now
        for hop, begun in enumerate(self._begun):
            begin = max(at + self.way_s, self._free_at[hop])
            end = begin + self.hop_s + (len(window.tokens) + len(window.second) - 1) * self.hop_more_s
            begun.append((begin, end, window.number))
            self._free_at[hop] = at = end
        return at + self.way_s

    def _drop_void(self, void_from: int) -> None:
        """Every hop hears of it after one way, and computes nothing void that it has not begun."""
        heard_at = self.now + self.way_s
        for hop, begun in enumerate(self._begun):
            begun[:] = [entry for entry in begun if entry[2] < void_from or entry[0] < heard_at]
            self._free_at[hop] = max((end for _, end, _ in begun), default=0.0)


def erratic(n: int, seed: int) -> list[int]:
    """Text in which the same three tokens come again and again, and never go on as they did."""
    rng = random.Random(seed)
    return [t for _ in range(n // 4) for t in (1, 2, 3, rng.randrange(10, 10_000))]


def test_nothing_is_tried_before_a_pass_was_measured() -> None:
    speculation = Speculation(Costs(), [Lookup()])
    speculation.start(Flight([1, 2, 3, 4, 1, 2, 3], [1, 2, 3, 4, 1, 2], 0), 50, can_fly=True, now=0.0)
    assert not speculation.can_draft
    assert "no pass was measured" in speculation.reason


def test_lookup_proposes_what_followed_the_longest_run_last() -> None:
    lookup = Lookup()
    text = [7, 1, 2, 3, 8, 9, 5, 1, 2, 3, 6, 4, 1, 2, 3]
    assert lookup.propose(text[:10], [], 2, 0) == [8, 9]
    assert lookup.propose(text, [], 3, 0) == [6, 4, 1]
    assert Lookup().propose([4, 5, 1, 2, 3, 9, 9, 0, 1, 2, 3, 7, 4, 5, 1, 2, 3], [], 1, 0) == [9], "four that agree"
    assert Lookup().propose([1, 2], [], 3, 0) == []


def test_lookup_goes_on_behind_what_is_tried_and_learns_nothing_from_it() -> None:
    lookup = Lookup()
    assert lookup.propose([1, 2, 3, 4, 5, 1, 2], [3, 4], 1, 0) == [5]
    assert lookup.propose([1, 2, 3, 4, 5, 1, 2, 9], [], 2, 0) == [], "3 and 4 were wrong, and never said"


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
        costs.measured(PassCost(1, seconds))
    for seconds in (1.2, 50.0, 1.2):
        costs.measured(PassCost(2, seconds))
    assert (costs.one_s, round(costs.more_s, 6)) == (1.0, 0.2)


def test_what_waits_for_others_is_no_trip() -> None:
    costs = Costs()
    costs.measured(PassCost(1, 1.0, hops_s=(0.1, 0.2)))
    costs.measured(PassCost(1, 9.0, hops_s=(0.1, 0.2), is_alone=False))
    assert costs.one_s == 1.0
    assert costs.chain().hop_s == 0.2


def test_a_source_that_is_right_is_asked_when_another_knows_nothing() -> None:
    rng = random.Random(5)
    text = [rng.randrange(1, 1_000) for _ in range(300)]
    chain = TimedChain(text, 1.0, 0.1)
    speculation = Speculation(chain.costs, [Lookup(), ScriptedSource(text, 1.0, 0.05, 1)])
    assert chain.generate(10, speculation) > 3
    assert speculation.n_taken == speculation.n_sent > 150


# --- several windows under way ----------------------------------------------------------------------------------


def formula(chance: float, trip_s: float, each_s: float) -> float:
    """Tokens a second of windows in flight: docs/performance.md."""
    run = 1 / (1 - chance)
    return run / (trip_s + (run - 1) * each_s)


@pytest.mark.parametrize("chance", [0.7, 0.8, 0.9])
def test_windows_in_flight_come_near_what_can_be(chance: float) -> None:
    rng = random.Random(2)
    text = [rng.randrange(1, 1_000) for _ in range(3_000)]
    chain = TimedChain(text, 0.22, 0.003, n_hops=3, computing=0.1)
    speculation = Speculation(chain.costs, [ScriptedSource(text, chance, 0.015, 1)])
    speed = chain.generate(10, speculation, can_fly=True) / 0.22
    assert speed > 0.9 * formula(chance, 0.22, 0.015), speculation.reason
    one_window = TimedChain(text, 0.22, 0.003, n_hops=3, computing=0.1)
    slower = one_window.generate(10, Speculation(one_window.costs, [ScriptedSource(text, chance, 0.015, 1)])) / 0.22
    assert speed > 1.2 * slower


@pytest.mark.parametrize("computing", [0.1, 0.5, 1.0])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6])
def test_in_flight_too_tries_cost_less_than_three_percent(chance: float, computing: float) -> None:
    rng = random.Random(3)
    text = [rng.randrange(1, 1_000) for _ in range(1_000)]
    chain = TimedChain(text, 0.1, 0.02 * computing, n_hops=3, computing=computing)
    speculation = Speculation(chain.costs, [Lookup(), ScriptedSource(text, chance, 0.03, 1)])
    assert chain.generate(10, speculation, can_fly=True) > 0.97, speculation.reason


@pytest.mark.parametrize("chance", [0.6, 0.7])
def test_second_choices_save_trips(chance: float) -> None:
    rng = random.Random(2)
    text = [rng.randrange(1, 1_000) for _ in range(3_000)]
    speeds = []
    for second_chance in (0.0, 0.45):
        chain = TimedChain(text, 0.22, 0.003, n_hops=3, computing=0.1)
        source = ScriptedSource(text, chance, 0.015, 1, second_chance)
        speeds.append(chain.generate(10, Speculation(chain.costs, [source]), can_fly=True))
    assert speeds[1] > 1.04 * speeds[0]


def test_second_choices_that_are_never_right_are_not_sent() -> None:
    rng = random.Random(2)
    text = [rng.randrange(1, 1_000) for _ in range(1_000)]
    chain = TimedChain(text, 0.1, 0.01, n_hops=3, computing=0.4)
    source = ScriptedSource(text, 0.9, 0.01, 1, second_chance=1e-9)
    speculation = Speculation(chain.costs, [source])
    plain = TimedChain(text, 0.1, 0.01, n_hops=3, computing=0.4)
    without = ScriptedSource(text, 0.9, 0.01, 1)
    slower = plain.generate(10, Speculation(plain.costs, [without]), can_fly=True)
    assert chain.generate(10, speculation, can_fly=True) > 0.95 * slower


def test_a_source_that_is_never_wrong_is_asked_further_ahead_than_one_that_errs() -> None:
    """What is tried never ends there, so that the depth has to be looked at meanwhile."""
    text = [random.Random(5).randrange(1, 10_000) for _ in range(400)]
    gains = {}
    for chance in (0.97, 1.0):
        chain = TimedChain(text, 1.0, 0.01, n_hops=3, computing=0.05)
        speculation = Speculation(chain.costs, [ScriptedSource(text, chance, 0.005, seed=2)])
        gains[chance] = chain.generate(4, speculation, can_fly=True)
    assert gains[1.0] > gains[0.97] > 4
