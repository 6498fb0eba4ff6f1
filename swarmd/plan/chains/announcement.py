"""What a server's record says of its neighbours and its load, and when a change is worth a new record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from swarmd.protocol.membership.records import SpanRecord
from swarmd.values import ModelId, PeerId, Span

ROUND_TRIPS_IN_RECORD = 8  # a record has 8 KiB for everything; chains need the links to neighbours only
NEWS_SHARE = 0.2  # of what was announced last: a change that others should know


@dataclass(frozen=True, slots=True)
class ServerLoad:
    """How full a server is: cache tokens that somebody new could get, and sessions that decode."""

    room_tokens: int
    n_decoding: int


def is_news(announced: ServerLoad, current: ServerLoad, total_tokens: int) -> bool:
    """Should others hear how room or load has changed?"""
    is_room_news = abs(current.room_tokens - announced.room_tokens) > NEWS_SHARE * total_tokens
    return is_room_news or is_other_load(announced.n_decoding, current.n_decoding)


def is_other_load(announced: int, current: int) -> bool:
    """Do two numbers of what a server has to do differ by more than one, and by a share of what was announced?"""
    return abs(current - announced) > max(1, NEWS_SHARE * announced)


def find_neighbours(spans: Iterable[SpanRecord], model: ModelId, own_span: Span) -> set[PeerId]:
    """Name the peers that serve the block after a server's last or before its first: chains need these links."""
    neighbours = set()
    for span in spans:
        is_before = span.start <= own_span.start - 1 < span.end
        is_behind = span.start <= own_span.end < span.end
        if span.model == model and (is_before or is_behind):
            neighbours.add(PeerId(span.peer))
    return neighbours


def choose_round_trips_ms(
    trips_s: Mapping[PeerId, float],
    neighbours: set[PeerId],
) -> dict[PeerId, float]:
    """Choose the measured links that a record has room for: likely neighbours in chains first, then the nearest."""
    nearest = sorted(trips_s, key=lambda peer: (peer not in neighbours, trips_s[peer]))
    return {peer: 1000 * trips_s[peer] for peer in nearest[:ROUND_TRIPS_IN_RECORD]}
