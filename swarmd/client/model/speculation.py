"""Draft tokens: which ones are tried, and how many of them, so that it pays. Knows no network and no model.

Tokens that a source proposes travel behind the one that is sent anyway, and count as far as they are what the model
chooses then: with greedy decoding, and with a draft that always proposes its likeliest token, that is speculative
decoding (Leviathan et al. 2023, section 2) without a second draw, so what is chosen never depends on what was tried.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from typing import Protocol

from swarmd.values import Decision

MOST_AHEAD = 16  # tokens tried in one pass
LOOK_BACK = 4_096  # tokens of a prompt that are looked through
GRAMS = (4, 2)  # so many last tokens have to occur before, for what followed them to be tried; the longest first
N_MEASURED = 9  # passes whose median counts: a repair takes as long as a hundred passes
EACH_ASSUMED = 0.2  # of a pass, for each token more, until that is measured: what four rows cost a CPU
LEAST_GAIN = 1.03  # of the tokens in the same time: below, nothing is tried
GRANTED = 0.5  # passes that tries may cost before one has paid
GRANTED_SHARE = 0.02  # of all passes so far that they may cost beside: a text can begin to repeat itself late
FORGOTTEN = 0.98  # of what is known about a source, each pass without a try


class Costs:
    """What a pass takes by the number of its tokens, measured on the same chain; for all answers that go through it."""

    def __init__(self) -> None:
        self._single_passes_s: deque[float] = deque(maxlen=N_MEASURED)
        self._extra_tokens_s: deque[float] = deque(maxlen=N_MEASURED)
        self.one_s = 0.0  # a pass with one token, 0 until it is measured
        self.more_s = 0.0  # each further token of a pass

    def measured(self, n_tokens: int, seconds: float) -> None:
        """Note a pass that sent ``n_tokens`` and took ``seconds``."""
        if n_tokens == 1:
            self._single_passes_s.append(seconds)
            self.one_s = statistics.median(self._single_passes_s)
        elif self._single_passes_s:
            self._extra_tokens_s.append(max(0.0, (seconds - self.one_s) / (n_tokens - 1)))
        self.more_s = statistics.median(self._extra_tokens_s) if self._extra_tokens_s else EACH_ASSUMED * self.one_s


# A pass with n draft tokens gives 1 + c + c^2 + ... + c^n tokens on average, when each is right with the chance c after
# right ones. It takes one_s + n * each_s. The n with the best ratio of the two is tried, if it gains LEAST_GAIN at
# least. Chances and times are measured as a text goes on. So tries have a budget (``_allowance_s``): what earlier tries
# won, and a little beside. A text that never repeats itself loses no more than that.
def choose_draft_length(chance: float, max_tokens: int, one_s: float, each_s: float) -> Decision[int]:
    """Choose how many of ``max_tokens`` draft tokens to try; each is right with this chance if those before it are.

    A pass takes ``one_s``, each token tried ``each_s`` more. The most tokens in the time are what counts.
    """
    if not one_s:
        return Decision(0, "nothing is tried ahead: no pass was measured yet")
    best = 0
    gain = 1.0
    expected = 1.0  # tokens of one pass
    all_right = 1.0  # chance that the first n are right
    for n in range(1, max_tokens + 1):
        all_right *= chance
        expected += all_right
        speed = expected * one_s / (one_s + n * each_s)
        if speed > gain:
            best = n
            gain = speed
    costs = f"{100 * chance:.0f} % are right, each costs {each_s / one_s:.2f} of a pass"
    if gain < LEAST_GAIN:
        return Decision(0, f"nothing is tried ahead: {costs}")
    return Decision(best, f"{best} tokens ahead: {costs}, {gain:.2f} tokens in the time of one")


class DraftSource(Protocol):
    """Who proposes how a text goes on."""

    @property
    def each_s(self) -> float:
        """Seconds that proposing a token usually takes."""

    def begin(self, prompt: Sequence[int]) -> None:
        """Start to prepare for a text that begins so, while the first pass is computed elsewhere."""

    def end(self) -> None:
        """There is no more to propose."""

    def propose(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        min_chance: float,
    ) -> tuple[list[int], float]:
        """At most ``max_tokens`` tokens after these, and the seconds that it took.

        None that follow with less than the chance ``min_chance``, where it knows.
        """


class Lookup:
    """Proposes what followed the last tokens where they occurred before in the same text (prompt lookup)."""

    each_s = 0.0

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}  # some tokens that follow each other, and where they last ended
        self._n_known = 0

    def begin(self, prompt: Sequence[int]) -> None:
        """Do nothing: the text is read as it grows."""

    def end(self) -> None:
        """Do nothing."""

    def propose(
        self,
        tokens: Sequence[int],
        max_tokens: int,
        min_chance: float,
    ) -> tuple[list[int], float]:
        """``tokens`` begin as they did the last time."""
        self._learn_grams(tokens)
        for n in GRAMS:
            end = self._after.get(tuple(tokens[-n:]))
            if end is not None and len(tokens) > n:
                proposed = list(tokens[end : end + max_tokens])
                return proposed, 0.0
        return [], 0.0

    def _learn_grams(self, tokens: Sequence[int]) -> None:
        first = max(self._n_known, len(tokens) - LOOK_BACK)
        for end in range(first, len(tokens)):  # what ends here is found from the next token on
            for n in GRAMS:
                if end >= n:
                    self._after[tuple(tokens[end - n : end])] = end
        self._n_known = len(tokens)


class Speculation:
    """The tries of one answer: what to try next, by what the ones before were worth."""

    def __init__(self, costs: Costs, sources: Sequence[DraftSource]) -> None:
        self.costs = costs
        self._sources = [_SourceRecord(source) for source in sources]
        self._last: tuple[_SourceRecord, int] | None = None
        self._n_passes = 0
        self._won_s = 0.0
        self.n_sent = 0
        self.n_taken = 0
        self.reason = "no pass yet"

    def begin(self, prompt: Sequence[int]) -> None:
        """A text begins so."""
        for record in self._sources:
            record.source.begin(prompt)

    def end(self) -> None:
        """It has ended."""
        for record in self._sources:
            record.source.end()

    def propose_tokens(self, tokens: Sequence[int], room: int) -> list[int]:
        """Propose tokens to send behind the last of these, at most ``room``; ``learn`` is told what became of them."""
        self._n_passes += 1
        one_s = self.costs.one_s
        for record in self._sources:
            each_s = self.costs.more_s + record.source.each_s
            max_tokens = min(MOST_AHEAD, room)
            if each_s:
                max_tokens = min(max_tokens, int(self._allowance_s() / each_s))
            decision = choose_draft_length(record.chance, max_tokens, one_s, each_s)
            self.reason = decision.reason
            if decision.action:
                proposed, seconds = record.source.propose(tokens, decision.action, each_s / one_s)
                self._won_s -= seconds
                if proposed:
                    self._last = record, len(proposed)
                    return proposed
            record.forget()
        return []

    def learn(self, n_taken: int) -> None:
        """So many of the tokens sent ahead in the last pass were right."""
        if self._last is None:
            return
        record, n_sent = self._last
        self._last = None
        record.learn(n_sent, n_taken)
        self._won_s += n_taken * self.costs.one_s - n_sent * self.costs.more_s
        self.n_sent += n_sent
        self.n_taken += n_taken

    def _allowance_s(self) -> float:
        """What the next try may cost: what others have won, and a little of the time of all passes."""
        return self._won_s + (GRANTED + GRANTED_SHARE * self._n_passes) * self.costs.one_s


class _SourceRecord:
    """What is known of a source in this text."""

    def __init__(self, source: DraftSource) -> None:
        self.source = source
        self._n_right = 0.0
        self._n_tried = 0.0

    @property
    def chance(self) -> float:
        """That a token is right whose predecessors are; a half before anything is known."""
        return (self._n_right + 1) / (self._n_tried + 2)

    def learn(self, n_sent: int, n_taken: int) -> None:
        """Note a try: the tokens taken were right, and the one behind them, if it was sent, was wrong."""
        self._n_right += n_taken
        self._n_tried += n_taken + (n_taken < n_sent)

    def forget(self) -> None:
        """Let what is known fade, so that a source that was poor is tried again some time."""
        self._n_right *= FORGOTTEN
        self._n_tried *= FORGOTTEN
