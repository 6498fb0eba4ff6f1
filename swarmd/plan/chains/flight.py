"""Several tokens a trip: which tokens that were tried ahead are sent, and what becomes of them. Pure.

A text goes on while tokens that were tried for it travel: each window is sent without waiting for the one before, and
the first wrong token makes all behind it void. That is pipelined speculation (PipeInfer, Butler et al. 2024, section
IV), over a chain of machines of which each answers for its own part of a model.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from swarmd.values import Decision

MOST_AHEAD = 48  # tokens beyond what is known: with those of one window less than a bill takes for tries
WINDOW_TOKENS = 16  # tokens tried in one window: one beyond them is known
HORIZON = 64  # tokens of one run of right ones that are reckoned with
SECOND_ROWS = 1.0  # that a second choice costs: it is computed behind another part of the cache
NEGLIGIBLE = 0.01  # chance of longer runs than this one
WORSE_DEPTHS = 2  # one after the other: what is deeper is worse still, and each costs 10 us to compare
DEEPER_GAIN = 1.01  # that more tries have to give: they cost drafts and hops something
LEAST_GAIN = 1.03  # of the tokens in the same time: below, nothing is tried
DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, MOST_AHEAD)  # that are compared


@dataclass(frozen=True, slots=True)
class ChainCosts:
    """Seconds of one chain: a token's way round it alone, computing included, and each token more of the same op.

    ``hop_s``: an op of one token at the slowest hop, or here; ``hop_row_s``: each token more there. While a hop
    computes one op, others wait.
    """

    trip_s: float
    row_s: float
    hop_s: float
    hop_row_s: float


@dataclass(frozen=True, slots=True)
class FlightPlan:
    """How many tokens are tried ahead, and whether windows follow each other unanswered; 0: nothing is tried."""

    n_ahead: int
    flies: bool


PLAIN = FlightPlan(0, flies=False)


# What is tried is right with a chance that depends on its place: ``chances[i]`` is that of the try at place i, if those
# before it are right; the last one holds for all behind it. Two ways of trying are compared with none:
#
#     one window   n tokens are tried, then all travel; the next are tried when the answer is here
#     in flight    the known token leaves at once, and each try as soon as it is there and the slowest hop is free
#
#     time    0      d      2d     3d ...      L        L+d
#     sent    t0     t1     t2     t3          t4 ...                 t0 is known
#     here                                     of t0    of t1 ...     the first wrong token ends the run
#
# In flight a run of right tokens ends when the answer to the token before the wrong one is here. Deeper is not better:
# what is tried beyond a wrong token occupies the drafter and the hops when the right one comes.
def choose_plan(
    chances: Sequence[float], costs: ChainCosts, draft_s: float, max_ahead: int, can_fly: bool
) -> Decision[FlightPlan]:
    """Choose what gives the most tokens a second; a token that is tried takes ``draft_s``.

    At least LEAST_GAIN times as many as without tries, or nothing is tried.
    """
    if not costs.trip_s:
        return Decision(PLAIN, "nothing is tried ahead: no pass was measured yet")
    best = PLAIN
    best_speed = plain_speed = 1 / costs.trip_s
    n_worse = 0
    for n_ahead in (n for n in DEPTHS if n <= max_ahead):
        n_worse += 1
        if n_worse > WORSE_DEPTHS:
            break
        candidates = []
        if n_ahead <= WINDOW_TOKENS:
            candidates.append((window_speed(chances, costs, draft_s, n_ahead), FlightPlan(n_ahead, flies=False)))
        if can_fly:
            candidates.append((flight_speed(chances, costs, draft_s, n_ahead), FlightPlan(n_ahead, flies=True)))
        for speed, plan in candidates:
            if speed > DEEPER_GAIN * best_speed:
                best = plan
                best_speed = speed
                n_worse = 0
    cost_s = draft_s + costs.row_s
    found = f"{100 * chances[0]:.0f} % are right, each costs {1e3 * cost_s:.1f} ms of {1e3 * costs.trip_s:.0f} a trip"
    gain = best_speed / plain_speed
    if gain < LEAST_GAIN:
        return Decision(PLAIN, f"nothing is tried ahead: {found}")
    how = "in flight" if best.flies else "a window"
    return Decision(best, f"{best.n_ahead} tokens ahead, {how}: {found}, {gain:.2f} tokens in the time of one")


def window_speed(chances: Sequence[float], costs: ChainCosts, draft_s: float, n_ahead: int) -> float:
    """Tokens a second of windows of ``n_ahead`` tries, one after the other."""
    n_tokens = 1.0
    all_right = 1.0
    for place in range(n_ahead):
        all_right *= _chance_at(chances, place)
        n_tokens += all_right
    return n_tokens / (costs.trip_s + n_ahead * (draft_s + costs.row_s))


def flight_speed(chances: Sequence[float], costs: ChainCosts, draft_s: float, n_ahead: int) -> float:
    """Tokens a second where up to ``n_ahead`` tries are under way, in windows that follow each other."""
    n_tokens = 0.0
    seconds = 0.0
    all_right = 1.0
    for n_right, answered_s in enumerate(_answer_times(costs, draft_s, n_ahead), 1):
        is_last = n_right == HORIZON or all_right < NEGLIGIBLE
        wrong_next = 1.0 if is_last else 1 - _chance_at(chances, min(n_right, n_ahead) - 1)
        n_tokens += all_right * wrong_next * n_right  # what a run gives that ends with this answer
        seconds += all_right * wrong_next * answered_s
        if is_last:
            break
        all_right *= 1 - wrong_next
    delay_s = (draft_s + costs.hop_s) / 2  # until what is under way here, and at a hop, is done
    return n_tokens / (seconds + delay_s)


def _answer_times(costs: ChainCosts, draft_s: float, n_ahead: int) -> Iterator[float]:
    """When the answer to each token of a run that never ends is here; the first token is known, and sent at once."""
    answered_s: list[float] = []
    leaves_s = 0.0
    tried_s = 0.0  # when the last try was there

    def next_try_s(place: int) -> float:
        """When the token at a place of the run is there: a token ``n_ahead`` before it has to be known."""
        known = place - n_ahead - 1
        if known >= len(answered_s):
            return math.inf
        return max(tried_s, answered_s[known] if known >= 0 else 0.0) + draft_s

    while True:
        first = len(answered_s)
        n_rows = 1
        while n_rows <= WINDOW_TOKENS and (try_s := next_try_s(first + n_rows)) <= leaves_s:
            tried_s = try_s
            n_rows += 1
        answer_s = leaves_s + costs.trip_s + (n_rows - 1) * costs.row_s
        for _ in range(n_rows):
            answered_s.append(answer_s)
            yield answer_s
        tried_s = next_try_s(first + n_rows)
        leaves_s = max(leaves_s + costs.hop_s + (n_rows - 1) * costs.hop_row_s, tried_s)


def _chance_at(chances: Sequence[float], place: int) -> float:
    return chances[min(place, len(chances) - 1)]


@dataclass(frozen=True, slots=True)
class TokenWindow:
    """Tokens that travel as one op, behind ``n_before`` of the text; the last ``n_cropped`` are dropped before them.

    Of the last ``n_wanted`` the answer decides what follows them. ``second`` is another way to go on behind
    ``n_before``: what follows its tokens comes with the answer, too, and no cache keeps them.
    """

    number: int
    n_before: int
    tokens: tuple[int, ...]
    n_wanted: int
    n_cropped: int
    second: tuple[int, ...] = ()


# A text, what is tried behind it, and where the caches of all hops are:
#
#     text      t1 t2 t3 t4 t5 | d6 d7 d8 d9       tried: as far as it is there
#     sent      [t1 t2 t3][t4 | d5 d6][d7 d8]      windows; d9 is not sent yet
#     answer    to the window with t4: t5 = d5 is right, t6 is chosen: if it is d6 the next window counts, too
#
# Where it is not, ``tried`` is forgotten, all windows behind are void, and the next one begins with t6: it crops what
# the caches hold beyond t5. One of them may still be of use: the one that began with d6, if its ``second`` was t6. Its
# answer says what follows t6, a trip before that of the window that t6 is sent in now.
#
# Each place of the text is decided once, from the first answer that reaches it by tokens that are all the text's.
class Flight:
    """What of one text is known, tried and sent. ``text`` is the caller's list, which grows here.

    ``seconds``: second choices, by the places of tokens that were tried.
    """

    def __init__(self, text: list[int], cached: list[int], next_number: int) -> None:
        """The caches hold the tokens ``cached``: those of the text but the last one."""
        self.text = text
        self.tried: list[int] = []
        self.seconds: dict[int, int] = {}
        self.cached = cached  # what caches hold once all is there that is under way, void tokens included
        self._windows: deque[TokenWindow] = deque()  # under way, and of use
        self._n_sent = len(cached)  # of text and tried
        self._next_number = next_number
        self._void_from: int | None = None

    @property
    def n_under_way(self) -> int:
        """Windows that are under way, and of use."""
        return len(self._windows)

    @property
    def n_unsent(self) -> int:
        """Tokens, known or tried, that are not sent yet."""
        return len(self.text) + len(self.tried) - self._n_sent

    @property
    def n_to_crop(self) -> int:
        """Tokens that the caches hold beyond what is sent of the present text."""
        return len(self.cached) - self._n_sent

    def next_window(self) -> TokenWindow:
        """Send what is not sent yet, WINDOW_TOKENS tries at most."""
        first = self._n_sent
        tried = self.tried[max(0, first - len(self.text)) :][:WINDOW_TOKENS]
        known = self.text[first:]
        n_wanted = len(tried) + bool(known)
        tokens = (*known, *tried)
        second = self.seconds.get(first)
        others = (second,) if second is not None and not known else ()
        window = TokenWindow(self._next_number, first, tokens, n_wanted, self.n_to_crop, others)
        self._next_number += 1
        self.cached[first:] = tokens
        self._n_sent = len(self.cached)
        self._windows.append(window)
        return window

    def begin_answer(self, number: int) -> TokenWindow | None:
        """Return the window whose answer is here; None where that is void."""
        if not self._windows or self._windows[0].number != number:
            return None
        return self._windows.popleft()

    def rows_to_decide(self, window: TokenWindow) -> Iterator[int]:
        """Yield the rows of an answer that decide the next token; each has to be taken before the next is asked for.

        Rows are those of the ``n_wanted`` last tokens, then those of ``second``.
        """
        n_first = len(window.tokens) - window.n_wanted
        for first_row, place, tokens in (
            (-n_first, window.n_before, window.tokens),
            (window.n_wanted, window.n_before, window.second),
        ):
            for index, token in enumerate(tokens):
                if place + index >= len(self.text) or self.text[place + index] != token:
                    break  # it was not the text's, or is not yet
                if place + index == len(self.text) - 1 and first_row + index >= 0:
                    yield first_row + index

    def take(self, token: int) -> bool:
        """Add the next token, as the model chose it; returns whether it was what was tried."""
        place = len(self.text)
        self.text.append(token)
        if self.tried and self.tried[0] == token:
            del self.tried[0]
            self.seconds.pop(place, None)
            return True
        self._drop_from(place)
        return False

    def drop_tried(self) -> None:
        """Make void what was tried beyond the text, and all that is under way with it."""
        self._drop_from(len(self.text))

    def _drop_from(self, place: int) -> None:
        """Forget what was tried from a place on; windows that begin there or behind are void."""
        self.tried.clear()
        self.seconds.clear()
        self._n_sent = min(self._n_sent, place)
        void = [window for window in self._windows if window.n_before >= place]
        if void and place < len(self.text) and void[0].second[:1] == (self.text[place],):
            del void[0]  # its answer says what follows
        if not void:
            return
        while self._windows and self._windows[-1].number >= void[0].number:
            self._windows.pop()
        if self._void_from is None or void[0].number < self._void_from:
            self._void_from = void[0].number

    def take_void(self) -> int | None:
        """Return once from which number on windows are void, for the hops to be told."""
        void_from = self._void_from
        self._void_from = None
        return void_from


def does_second_pay(chances: Sequence[float], second_chance: float, costs: ChainCosts) -> Decision[bool]:
    """Decide whether second choices travel too: each is right where the first is not with the chance ``second_chance``.

    Each costs a row at every hop. One that is right saves a trip where the try behind it is wrong: else that would have
    travelled on, too.
    """
    wrong_twice = (1 - chances[0]) ** 2
    gain_s = wrong_twice * second_chance * costs.trip_s
    cost_s = SECOND_ROWS * (costs.row_s + costs.hop_row_s)
    found = f"second choices are right {100 * second_chance:.0f} % of the time that the first is not"
    return Decision(gain_s > cost_s, f"{found}: {1e3 * gain_s:.1f} ms for {1e3 * cost_s:.1f}")
