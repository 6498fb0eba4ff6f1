"""Where the time of a token goes, by what frames tell."""

from __future__ import annotations

import pytest

from swarmd.client.links.timing import PassTimes


def test_medians_of_the_present_chain() -> None:
    passes = PassTimes()
    assert passes.where() is None
    passes.note(0.5, 9.0, ((0, 1, 1), (3, 1, 1)))  # of a chain that is no more
    for total_s, waiting_us in ((0.050, 1_000), (0.052, 3_000), (5.0, 2_000)):
        passes.note(0.004, total_s, ((0, waiting_us, 10_000), (4, 0, 20_000)))
    breakdown = passes.where()
    assert breakdown is not None
    assert breakdown.computing_s == pytest.approx((0.010, 0.020))
    assert breakdown.waiting_s == pytest.approx((0.002, 0.0))
    assert breakdown.under_way_s == pytest.approx(0.019)
    assert (
        str(breakdown)
        == "of a pass 10.0 + 20.0 ms are computing, 2.0 waiting for others there, 19.0 on 3 ways, 4.0 here"
    )


def test_hops_that_tell_too_much_are_no_trouble() -> None:
    passes = PassTimes()
    passes.note(0.004, 0.05, ((0, 9_000_000, 9_000_000),))
    breakdown = passes.where()
    assert breakdown is not None
    assert breakdown.under_way_s == 0
