"""How long people read a page, as its head says."""

from __future__ import annotations

WORDS_A_MINUTE = 230  # that people read of pages of tables


def reading_minutes(text: str) -> int:
    """Whole minutes, at least one."""
    return max(1, round(len(text.split()) / WORDS_A_MINUTE))
