"""docs/limits.md says what the source says, of limits that exist and have a reason."""

from __future__ import annotations

import pytest

from tools import limits


def test_the_page_of_limits_is_that_of_the_source() -> None:
    assert limits.PAGE.read_text() == limits.page(), "python -m tools.limits writes it anew"


@pytest.mark.parametrize("place", [place for rows in limits.SEEN.values() for place in rows])
def test_a_limit_on_the_page_says_why_it_is_as_it_is(place: str) -> None:
    assert limits.limit_of(place).reason
