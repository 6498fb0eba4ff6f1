"""What of a member's own records is worth a new signature, which every other member has to be sent and to check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swarmd.plan.chains.announcement import NEWS_SHARE, is_other_load
from swarmd.plan.links.coordinates import has_moved

LOADS = ("n_decoding", "free_cache_tokens")
"""What changes while a server works; servers announce at once what others should know of it."""
MEASURED = (
    *("round_trip_ms", "decode_tokens_per_s", "prefill_tokens_per_s", "batch_tokens_per_s", "quantization_error"),
    *("point", "up_bytes_per_s", "down_bytes_per_s", "free_disk_bytes", "memory_bytes", "device_memory_bytes"),
)
"""What is measured again and again, and comes out a little different."""
JITTER_MS = 2.0  # of a round trip: it says nothing of the way
MUCH = 2.0  # times as much, or as little: others should know it at once


def is_news(signed: Mapping[str, Any], current: Mapping[str, Any], age_s: float, rarely_s: float) -> bool:
    """Is a description worth a signature, where another one was signed so long ago?

    What differs little, or is measured now and then, is signed ``rarely_s`` apart.
    """
    if signed == current:
        return False
    if signed.keys() != current.keys():
        return True
    differing = [name for name in current if not _are_alike(name, signed[name], current[name])]
    is_urgent = any(_is_urgent(name, signed[name], current[name]) for name in differing)
    return is_urgent or _says_wrong(signed, current) or (bool(differing) and age_s >= rarely_s)


def _are_alike(name: str, before: Any, now: Any) -> bool:
    if name in LOADS:
        return not is_other_load(before, now)
    if name == "point":
        return not has_moved(before, now)
    if name in MEASURED and isinstance(before, Mapping):
        jitter = JITTER_MS if name == "round_trip_ms" else 0.0
        return before.keys() == now.keys() and all(_are_near(before[key], now[key], jitter) for key in now)
    return bool(before == now) or (name in MEASURED and _are_near(before, now))


def _is_urgent(name: str, before: Any, now: Any) -> bool:
    """Should others know at once of what differs?"""
    if name not in (*MEASURED, "found"):
        return True
    are_numbers = isinstance(before, int | float) and isinstance(now, int | float)
    return are_numbers and not before / MUCH <= now <= before * MUCH


def _are_near(before: float | None, now: float | None, jitter: float = 0.0) -> bool:
    """Do two measurements say the same?"""
    if before is None or now is None:
        return before is now
    return abs(before - now) <= max(jitter, NEWS_SHARE * abs(before))


def _says_wrong(signed: Mapping[str, Any], current: Mapping[str, Any]) -> bool:
    """Does it name somebody who computed wrongly, and did not before?"""
    before = {finding for finding in signed.get("found", ()) if not finding.is_right}
    return any(not finding.is_right and finding not in before for finding in current.get("found", ()))
