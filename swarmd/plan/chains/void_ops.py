"""Which ops of a session are void: tokens that were tried, and that the client knows by now to be wrong.

An op that is void and not computed yet becomes one of *absent* tokens: they count as the tokens of the session, as
they do at the hops that did compute them, and the client's next crop takes them away everywhere.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

MOST_WINDOWS = 64  # ops of one session that are under way at a time, and may so be void before they come


# A client names only ops of its own session, and gains nothing by it: what is void is not computed. It could send such
# messages without end, though, each of which costs the hop a frame to its worker. So each has to name ops beyond those
# named before, and none more than MOST_WINDOWS beyond those that came.
@dataclass(slots=True)
class VoidOps:
    """The void ops of one hop, which are not all there yet."""

    _ranges: deque[tuple[int, int]] = field(default_factory=deque)
    _last: int = 0

    def add(self, first: int, last: int, received: int) -> bool:
        """Note that ops ``first`` to ``last`` are void, after ``received`` came; False where nobody has to say that."""
        if not self._last < first <= last <= received + MOST_WINDOWS:
            return False
        while self._ranges and self._ranges[0][1] <= received - MOST_WINDOWS:
            self._ranges.popleft()
        self._ranges.append((first, last))
        self._last = last
        return True

    def covers(self, seq: int) -> bool:
        """Is an op void?"""
        return any(first <= seq <= last for first, last in self._ranges)
