"""Draft tokens: which ones are tried, when they are sent, and how many, so that it pays. Knows no network, no model.

Tokens that a source proposes travel behind the one that is sent anyway, and count as far as they are what the model
chooses then: with greedy decoding, and with a draft that always proposes its likeliest token, that is speculative
decoding (Leviathan et al. 2023, section 2) without a second draw, so what is chosen never depends on what was tried.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from swarmd.client.drafting.recent_median import RecentMedian
from swarmd.client.drafting.source import DraftSource
from swarmd.plan.chains.flight import (
    MOST_AHEAD,
    PLAIN,
    WINDOW_TOKENS,
    ChainCosts,
    Flight,
    FlightPlan,
    TokenWindow,
    choose_plan,
    does_second_pay,
)
from swarmd.values import Decision

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

T = TypeVar("T")

EACH_ASSUMED = 0.2  # of what a pass computes, for each token more, until that is measured: what four rows cost a CPU
GRANTED = 0.5  # passes that tries may cost before one has paid
GRANTED_SHARE = 0.02  # of all passes so far that they may cost beside: a text can begin to repeat itself late
FORGOTTEN = 0.98  # of what is known about a source, each pass without a try
PLACES = 8  # in a run of tries, each with a chance of its own; those behind count as the last
OF_ALL_PLACES = 4.0  # tries that the chance of all places counts as, at each place
LONGEST_PASSES = 4.0  # that an answer counts as, at most: a repair is not the tries' doing


@dataclass(frozen=True, slots=True)
class PassCost:
    """What an answered window took: ``trip_s`` from its sending, ``here_s`` here, and computing at each hop.

    ``is_alone``: nothing else was under way.
    """

    n_tokens: int
    trip_s: float
    here_s: float = 0.0
    hops_s: tuple[float, ...] = ()
    is_alone: bool = True


class Costs:
    """What a pass takes by the number of its tokens, measured on the same chain; for all answers that go through it."""

    def __init__(self) -> None:
        self._single_s = RecentMedian()
        self._extra_s = RecentMedian()
        self._hop_s = RecentMedian()
        self._hop_extra_s = RecentMedian()
        self._computing_s = RecentMedian()
        self._here_s = RecentMedian()

    @property
    def one_s(self) -> float:
        """A pass with one token, what is done here included; 0 until it is measured."""
        return self._single_s.value

    @property
    def more_s(self) -> float:
        """Each further token of a pass."""
        return self._extra_s.value if self._extra_s.is_known else EACH_ASSUMED * (self._computing_s.value or self.one_s)

    @property
    def here_s(self) -> float:
        """What is done here for a window."""
        return self._here_s.value

    def chain(self) -> ChainCosts:
        """What the chain costs, for a plan."""
        hop_s = max(self._hop_s.value, self.here_s)
        hop_row_s = self._hop_extra_s.value if self._hop_extra_s.is_known else EACH_ASSUMED * hop_s
        return ChainCosts(self.one_s, self.more_s, hop_s, min(hop_row_s, self.more_s))

    def measured(self, cost: PassCost) -> None:
        """Note what a pass took."""
        n_more = cost.n_tokens - 1
        slowest_s = max(cost.hops_s, default=0.0)
        if n_more:
            if self._hop_s.is_known:
                self._hop_extra_s.add(max(0.0, slowest_s - self._hop_s.value) / n_more)
        else:
            self._hop_s.add(slowest_s)
            self._computing_s.add(sum(cost.hops_s))
            self._here_s.add(cost.here_s)
        if not cost.is_alone:
            return
        seconds = cost.trip_s + cost.here_s
        if not n_more:
            self._single_s.add(seconds)
        elif self._single_s.is_known:
            self._extra_s.add(max(0.0, seconds - self.one_s) / n_more)


@dataclass(frozen=True, slots=True)
class _Try:
    """A token that was tried: by which source, at which place of a run, and what its second choice was."""

    record: _SourceRecord
    place: int
    second: int | None


# What is tried has a budget (``_allowance_s``): what earlier tries won, and a little beside. A text that never repeats
# itself loses no more than that. What they won is measured: what plain decoding would have taken for the tokens that
# an answer gave, less the time since the answer before.
class Speculation:
    """The tries of one answer: what to try next, by what the ones before were worth, and what to send when.

    ``start`` it with the first token of an answer. Then, again and again: ``draft`` while that gives anything and no
    answer is here, send ``next_window`` where there is one, and tell what became of it: ``begin_answer``, ``take`` the
    token of each of ``rows_to_decide``, ``end_answer``. Time is an argument.
    """

    def __init__(self, costs: Costs, sources: Sequence[DraftSource]) -> None:
        self.costs = costs
        self.n_sent = 0
        self.n_taken = 0
        self.reason = "no pass yet"  # for what is tried now, or is not
        self.last_plan = ""  # how far ahead tokens were tried last, and why
        self.plan = PLAIN
        self._records = [_SourceRecord(source) for source in sources]
        self._record: _SourceRecord | None = None  # whose tries the plan is for
        self._flight = Flight([], [], 0)
        self._most_tokens = 0
        self._can_fly = False
        self._tries_seconds = False
        self._tries: deque[_Try] = deque()  # of the tokens in ``_flight.tried``
        self._is_dry = False  # no source knows how to go on
        self._n_passes = 0
        self._won_s = 0.0
        self.next_at = 0.0  # when the slowest hop is free for what is tried next
        self._answered_at = 0.0

    def begin(self, prompt: Sequence[int]) -> None:
        """A text begins so."""
        for record in self._records:
            record.guard(partial(record.source.begin, prompt))

    def end(self) -> None:
        """It has ended."""
        for record in self._records:
            record.guard(record.source.end, is_last=True)

    def start(self, flight: Flight, most_tokens: int, can_fly: bool, now: float, tries_seconds: bool = False) -> None:
        """Go on from a text, whose last token no window has sent; it will have ``most_tokens`` at most.

        ``tries_seconds``: windows may have a second choice.
        """
        self._flight = flight
        self._most_tokens = most_tokens
        self._can_fly = can_fly
        self._tries_seconds = tries_seconds
        self._answered_at = now
        self._tries.clear()
        self._choose_plan()

    # --- what is tried and sent ------------------------------------------------------------------------------

    @property
    def source(self) -> DraftSource | None:
        """Who is asked for what is tried; nobody, where nothing is."""
        return None if self._record is None else self._record.source

    @property
    def takes_time(self) -> bool:
        """Does whoever is asked next take time for each token?"""
        return self._record is not None and self._record.source.takes_time

    @property
    def can_draft(self) -> bool:
        """Is one token more worth trying?"""
        is_waiting = bool(self._flight.n_under_way) and not self.plan.flies  # what is known then decides what is tried
        return not self._is_dry and not is_waiting and self._n_wanted > 0

    @property
    def _n_wanted(self) -> int:
        """Tokens that may be tried beyond those that are."""
        flight = self._flight
        room = self._most_tokens - 1 - len(flight.text)
        return min(self.plan.n_ahead, room) - len(flight.tried)

    def draft(self) -> None:
        """Have the source propose more: one token of a source that takes time, where windows fly; else all of them."""
        record = self._record
        assert record is not None
        flight = self._flight
        each_s = record.source.each_s
        max_tokens = 1 if self.plan.flies and record.source.takes_time else self._n_wanted
        chain = self.costs.chain()
        cost_s = each_s + (chain.hop_s if self.plan.flies else chain.row_s)
        ask = partial(record.source.propose, flight.text, flight.tried, max_tokens, cost_s / chain.trip_s)
        proposed = record.guard(ask) or []
        n_tried = len(flight.tried)
        flight.tried += proposed
        for number in range(n_tried, len(flight.tried)):
            place = len(flight.text) + number
            second = record.source.second_choice(place)
            self._tries.append(_Try(record, number, second))
            if second is not None and self._tries_seconds and self.plan.flies and record.seconds_pay(chain):
                flight.seconds[place] = second
        self.n_sent += len(proposed)
        if len(proposed) < max_tokens:
            if not flight.tried:
                record.forget()
                self._won_s -= 0.0 if self.plan.flies else each_s
            self._is_dry = not self._choose_plan(behind=record)

    def is_due(self, now: float) -> bool:
        """Is there a window to send now?"""
        flight = self._flight
        if not flight.n_unsent:
            return False
        if not flight.n_under_way:
            return (self.plan.flies and self.takes_time) or not self.can_draft
        return self.plan.flies and now >= self.next_at

    def patience_s(self, now: float) -> float | None:
        """How long to wait for an answer before there is something else to do; None: as long as it takes."""
        if self.can_draft:
            return 0.0
        return max(0.0, self.next_at - now) if self.plan.flies and self._flight.n_unsent else None

    def next_window(self, now: float) -> TokenWindow:
        """Send what ``is_due``."""
        window = self._flight.next_window()
        chain = self.costs.chain()
        self.next_at = now + chain.hop_s + (len(window.tokens) - 1) * chain.hop_row_s
        return window

    # --- what became of it -----------------------------------------------------------------------------------

    def begin_answer(self, number: int, cost: PassCost) -> TokenWindow | None:
        """Return the window whose answer is here; None where it is void."""
        self.costs.measured(cost)
        return self._flight.begin_answer(number)

    def rows_to_decide(self, window: TokenWindow) -> Iterator[int]:
        """See ``Flight``. Stop asking when the text has ended."""
        return self._flight.rows_to_decide(window)

    def hear(self, place: int, hidden: torch.Tensor) -> None:
        """Tell the sources what left the model's last block at a place, [d]."""
        for record in self._records:
            record.guard(partial(record.source.hear, place, hidden))

    def take(self, token: int) -> None:
        """Add the next token of the text."""
        is_right = self._flight.take(token)
        if self._tries:
            tried = self._tries.popleft()
            tried.record.learn(tried.place, is_right)
            if not is_right and tried.second is not None:
                tried.record.learn_second(tried.second == token)
            self.n_taken += is_right
        if not is_right:
            self._tries.clear()

    def end_answer(self, n_tokens: int, now: float) -> int | None:
        """An answer gave so many tokens; returns from which number on windows are void, where some have become so."""
        self._n_passes += 1
        if self.plan.n_ahead:
            took_s = min(now - self._answered_at, LONGEST_PASSES * self.costs.one_s)
            self._won_s += n_tokens * self.costs.one_s - took_s
        self._answered_at = now
        self._is_dry = False
        if not self._flight.tried or not self.plan.flies:
            self._choose_plan()
        elif self._record is not None:
            self._look_deeper(self._record)
        return self._flight.take_void()

    def stop(self) -> int | None:
        """The text has ended; returns from which number on windows are void, where some are under way."""
        self._flight.drop_tried()
        self._tries.clear()
        return self._flight.take_void()

    def _choose_plan(self, behind: _SourceRecord | None = None) -> bool:
        """Choose a source, and how far ahead it is asked: the first that is worth it, of those ``behind`` one.

        False where none is.
        """
        first = 0 if behind is None else self._records.index(behind) + 1
        if behind is None or not self._flight.tried:
            self.plan = PLAIN
            self._record = None
        for record in self._records[first:]:
            if record.is_broken:
                continue
            decision = self._decide(record)
            self.reason = decision.reason if not self._flight.tried else self.reason
            if decision.action.n_ahead > len(self._flight.tried):
                self.plan = decision.action
                self.last_plan = decision.reason
                self._record = record
                return True
            record.forget()
        return False

    def _decide(self, record: _SourceRecord) -> Decision[FlightPlan]:
        """How far ahead a source is best asked now."""
        chain = self.costs.chain()
        each_s = record.source.each_s
        max_ahead = min(MOST_AHEAD, self._most_tokens - 1 - len(self._flight.text))
        allowed = int(self._allowance_s() / max(1e-9, chain.row_s + each_s))
        can_fly = self._can_fly and self._allowance_s() > each_s + chain.hop_s
        if not can_fly:
            max_ahead = min(max_ahead, allowed, WINDOW_TOKENS)
        return choose_plan(record.chances, chain, each_s, max_ahead, can_fly)

    def _look_deeper(self, record: _SourceRecord) -> None:
        """Try further ahead where a source turns out better than was known; what is tried already stays."""
        decision = self._decide(record)
        if decision.action.flies and decision.action.n_ahead > self.plan.n_ahead:
            self.plan = decision.action
            self.last_plan = decision.reason

    def _allowance_s(self) -> float:
        """What the next tries may cost: what others have won, and a little of the time of all passes."""
        return self._won_s + (GRANTED + GRANTED_SHARE * self._n_passes) * self.costs.one_s


class _SourceRecord:
    """What is known of a source in this text: how often its tries were right, by their place in a run."""

    def __init__(self, source: DraftSource) -> None:
        self.source = source
        self._n_right = [0.0] * PLACES
        self._n_tried = [0.0] * PLACES
        self._n_second_right = 0.0
        self._n_second = 0.0
        self.is_broken = False

    def guard(self, call: Callable[[], T], is_last: bool = False) -> T | None:
        """Have the source do something; one that fails is asked for nothing any more but to end."""
        if self.is_broken and not is_last:
            return None
        try:
            return call()
        except Exception as error:  # noqa: BLE001 - whatever is wrong with it, the text does not need it
            logger.warning("a draft fails, the text goes on without it: %s: %s", type(error).__name__, error)
            self.is_broken = True
            return None

    @property
    def chances(self) -> list[float]:
        """For each place, that a token is right whose predecessors are; a half before anything is known."""
        of_all = (sum(self._n_right) + 1) / (sum(self._n_tried) + 2)
        return [
            (right + OF_ALL_PLACES * of_all) / (tried + OF_ALL_PLACES)
            for right, tried in zip(self._n_right, self._n_tried, strict=True)
        ]

    @property
    def second_chance(self) -> float:
        """That a second choice is right where the first is not; a third before anything is known."""
        return (self._n_second_right + 1) / (self._n_second + 3)

    def seconds_pay(self, chain: ChainCosts) -> bool:
        """Are second choices worth a row each?"""
        return does_second_pay(self.chances, self.second_chance, chain).action

    def learn_second(self, is_right: bool) -> None:
        """Note whether a second choice was right where the first was not."""
        self._n_second_right += is_right
        self._n_second += 1

    def learn(self, place: int, is_right: bool) -> None:
        """Note what became of a token that was tried; of those behind a wrong one nothing is known."""
        place = min(place, PLACES - 1)
        self._n_right[place] += is_right
        self._n_tried[place] += 1

    def forget(self) -> None:
        """Let what is known fade, so that a source that was poor is tried again some time."""
        self._n_right = [FORGOTTEN * n for n in self._n_right]
        self._n_tried = [FORGOTTEN * n for n in self._n_tried]
