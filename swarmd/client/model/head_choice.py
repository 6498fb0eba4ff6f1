"""Whose head computes the next logits, the client's own or the last server's: whichever takes less time."""

from __future__ import annotations

import statistics

FEW = 6  # passes of one token that are timed each way
SHORT_S = 0.002  # of one's own head: nobody is asked for so little
WORTH = 0.8  # of the time of one's own: another's logits come with checks
AGAIN = 512  # passes after which all is measured anew
MOST_ASKED = 4 * FEW  # passes for which the last server is asked before it counts as one without a head


# Three stages, for each last server that a model's sessions have:
#
#     own        FEW passes tell what one's own head takes, and what the last hop takes without one
#     asking     FEW passes tell what the last hop takes with a head; the more it takes is the head's time
#     decided    for AGAIN passes
class HeadChoice:
    """Decides by what passes of one token took. ``asks``: is the last server asked for logits now?

    Threads share one: what is counted twice, or not at all, costs a measurement and no more.
    """

    def __init__(self) -> None:
        self.reason = "not measured yet"
        self._begin()

    def _begin(self) -> None:
        self.asks = False
        self._own_s: list[float] = []
        self._without_s: list[float] = []
        self._with_s: list[float] = []
        self._n_asked = 0
        self._n_decided = 0  # passes for which it stays decided

    def rests(self) -> bool:
        """Is it decided that one's own head computes a pass of one token? Then nothing of that need be told."""
        if self._n_decided <= 0 or self.asks:
            return False
        self._count_decided()
        return True

    def note(self, hop_s: float, own_s: float | None, is_given: bool) -> None:
        """A pass of one token was computed by the last hop in ``hop_s``, its logits here in ``own_s`` (None: not here).

        ``is_given``: the hop gave logits, and its time has them in it.
        """
        if self._n_decided > 0:
            self._count_decided()
        elif self.asks:
            self._n_asked += 1
            if is_given:
                self._with_s.append(hop_s)
            if len(self._with_s) >= FEW:
                self._compare()
            elif self._n_asked >= MOST_ASKED:
                self._decide(False, "the last server has no head")
        elif own_s is not None and not is_given:
            self._own_s.append(own_s)
            self._without_s.append(hop_s)
            if len(self._own_s) >= FEW:
                self._look_at_own()

    def _count_decided(self) -> None:
        self._n_decided -= 1
        if self._n_decided <= 0:
            self._begin()

    def _look_at_own(self) -> None:
        own_s = statistics.median(self._own_s)
        if own_s < SHORT_S:
            self._decide(False, f"one's own takes {1e3 * own_s:.1f} ms")
        else:
            self.asks = True

    def _compare(self) -> None:
        own_s = statistics.median(self._own_s)
        theirs_s = max(0.0, statistics.median(self._with_s) - statistics.median(self._without_s))
        why = f"one's own takes {1e3 * own_s:.1f} ms, the last server's {1e3 * theirs_s:.1f}"
        self._decide(theirs_s < WORTH * own_s, why)

    def _decide(self, asks: bool, reason: str) -> None:
        self.asks = asks
        self.reason = reason
        self._n_decided = AGAIN
