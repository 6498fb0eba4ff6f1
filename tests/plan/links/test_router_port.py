"""When a router is asked for its port again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmd.plan.links.router_port import LEAST_S, LONGEST_REFUSAL_S, LOOK_AGAIN_S, PortLease


def test_a_lease_is_renewed_at_half_of_what_was_granted() -> None:
    assert PortLease().granted(1_000.0, 120.0).ask_at() == 1_060.0
    assert PortLease().granted(1_000.0, 3_600.0).ask_at() == 1_000.0 + LOOK_AGAIN_S, "routers forget"
    assert PortLease().granted(1_000.0, 1.0).ask_at() == 1_000.0 + LEAST_S


def test_who_says_no_is_asked_less_and_less_often() -> None:
    lease = PortLease()
    pauses = []
    for _ in range(6):
        lease = lease.refused(lease.ask_at())
        pauses.append(lease.ask_at() - lease.asked_at)
    assert pauses == [60.0, 120.0, 240.0, 480.0, LONGEST_REFUSAL_S, LONGEST_REFUSAL_S]
    assert lease.granted(0.0, 60.0).n_refusals == 0


@given(st.floats(LEAST_S * 3, 7_200), st.integers(0, 20))
def test_what_was_granted_is_asked_for_again_before_it_ends(lease_s: float, n_refusals: int) -> None:
    lease = PortLease().granted(100.0, lease_s)
    assert lease.ask_at() < lease.ends_at
    for _ in range(n_refusals):
        lease = lease.refused(lease.ask_at())
        if lease.ends_at - lease.asked_at > 2 * LEAST_S:
            assert lease.ask_at() < lease.ends_at
    assert lease.holds(lease.asked_at) == (lease.asked_at < lease.ends_at)
