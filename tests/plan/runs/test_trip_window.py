"""How many micro-batches are under way: as many as fill the links, with about one that waits at each holder."""

from __future__ import annotations

import pytest

from swarmd.plan.runs.trip_window import MOST_MORE, TripWindow


def run(window: TripWindow, least: int, wanted: int, alone_s: float, each_s: float, n_trips: int) -> int:
    """Have trips end one by one: ``alone_s`` for one alone, and no sooner than ``each_s`` after the one before."""
    at_once = least
    for _ in range(n_trips):
        at_once = least + int(window.more)
        window.note(max(alone_s, at_once * each_s), at_once, wanted)
    return at_once


@pytest.mark.parametrize("alone_s", [0.4, 2.0, 6.0])
def test_links_are_filled_and_little_waits(alone_s: float) -> None:
    at_once = run(TripWindow(), least=4, wanted=2, alone_s=alone_s, each_s=0.1, n_trips=400)
    fills = alone_s / 0.1
    assert min(fills, MOST_MORE) + 1 <= at_once <= fills + 5


def test_what_became_too_many_is_taken_back() -> None:
    window = TripWindow()
    many = run(window, least=4, wanted=2, alone_s=6.0, each_s=0.2, n_trips=400)
    few = run(window, least=4, wanted=2, alone_s=1.0, each_s=0.2, n_trips=600)
    assert many > 30
    assert few < 12
