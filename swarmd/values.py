"""The words every other module uses: who, which model, which blocks, and what was decided and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Generic, NewType, TypeVar

ActionT = TypeVar("ActionT")

N_NAMED = 3  # of many names, in a sentence

PeerId = NewType("PeerId", str)
"""A libp2p peer id in base58, derived from an ed25519 public key."""

ModelId = NewType("ModelId", str)
"""The sha256 of a model's manifest, in hex."""

RunId = NewType("RunId", str)
"""The sha256 of a training run's signed recipe, in hex."""


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Blocks ``start`` to ``end`` (exclusive) of one model."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"a span needs 0 <= start < end, not {self.start}:{self.end}")

    def __len__(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"[{self.start},{self.end})"

    def blocks(self) -> range:
        """The numbers of its blocks."""
        return range(self.start, self.end)

    def covers(self, inner: Span) -> bool:
        """Does it hold all blocks of another span?"""
        return self.start <= inner.start and inner.end <= self.end


@dataclass(frozen=True, slots=True)
class Decision(Generic[ActionT]):
    """What a pure function decided, and the sentence that explains it."""

    action: ActionT
    reason: str


def count(n: int, noun: str) -> str:
    """Write a number of things for people: 1 anchor, 2 anchors."""
    return f"{n} {noun}{'' if n == 1 else 's'}"


def format_span(seconds: float) -> str:
    """Write how long something lasts for people: 400 days, 2 hours, 45 s."""
    for unit, size_s in (("day", 86_400), ("hour", 3_600), ("minute", 60)):
        if seconds >= 2 * size_s:
            return count(round(seconds / size_s), unit)
    return f"{seconds:.0f} s"


def format_moment(unix_s: float) -> str:
    """Write a time of the calendar for people in any place: 2026-11-27 22:00 UTC."""
    try:
        return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M} UTC"
    except (ValueError, OverflowError, OSError):
        return f"{unix_s:.0f} s after 1970"


def some_of(names: Sequence[str]) -> str:
    """The first of some names for a sentence, and how many more there are."""
    suffix = f" and {len(names) - N_NAMED} more" if len(names) > N_NAMED else ""
    return ", ".join(names[:N_NAMED]) + suffix


def ranges(blocks: set[int] | frozenset[int]) -> list[Span]:
    """Gather block numbers into the fewest spans, in order."""
    spans: list[Span] = []
    for block in sorted(blocks):
        if spans and spans[-1].end == block:
            spans[-1] = Span(spans[-1].start, block + 1)
        else:
            spans.append(Span(block, block + 1))
    return spans
