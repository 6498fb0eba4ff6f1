"""What follows from what members say who tried to connect."""

from __future__ import annotations

import pytest

from swarmd.plan.links.reachability import (
    ReachabilityReport,
    choose_relays,
    find_blocked_versions,
    find_forwarded_ports,
    judge_reachability,
    versions_to_try,
)
from swarmd.values import PeerId

A, B, C, D = map(PeerId, "ABCD")
HOME = ("192.168.1.2", "fd00::2")
ROUTER = "5.0.1.2"
SIX = "2600::2"
DUAL = ("192.168.1.2", SIX)


def test_nobody_asked_is_not_known() -> None:
    assert judge_reachability([], HOME).action == "unknown"


@pytest.mark.parametrize(
    ("answers", "reach"),
    [
        ([ReachabilityReport(A, "192.168.1.2", (4117,))], "open"),
        ([ReachabilityReport(A, "192.168.1.2", ())], "closed"),
        ([ReachabilityReport(A, ROUTER, ())], "closed"),
        ([ReachabilityReport(A, ROUTER, (4117,))], "open"),
        ([ReachabilityReport(A, "192.168.1.2", (4117,)), ReachabilityReport(B, ROUTER, ())], "closed"),
        ([ReachabilityReport(A, "192.168.1.2", ()), ReachabilityReport(B, ROUTER, (4117,))], "open"),
        ([ReachabilityReport(A, ROUTER, (4117,)), ReachabilityReport(B, "5.0.9.9", ())], "open"),
        (
            [
                ReachabilityReport(A, ROUTER, (4117,)),
                ReachabilityReport(B, ROUTER, ()),
                ReachabilityReport(C, ROUTER, (4117,)),
            ],
            "open",
        ),
        (
            [
                ReachabilityReport(A, ROUTER, ()),
                ReachabilityReport(B, ROUTER, ()),
                ReachabilityReport(C, ROUTER, (4117,)),
            ],
            "closed",
        ),
        ([ReachabilityReport(A, "no address", ())], "closed"),
    ],
)
def test_who_asks_from_outside_counts_and_most_are_believed(answers: list[ReachabilityReport], reach: str) -> None:
    assert judge_reachability(answers, HOME).action == reach


def test_ipv4_decides_as_not_all_members_have_ipv6() -> None:
    shut, reached = ReachabilityReport(A, ROUTER, ()), ReachabilityReport(B, SIX, (4117,))
    assert judge_reachability([shut, reached], DUAL).action == "closed"
    assert (
        judge_reachability([ReachabilityReport(A, ROUTER, (4117,)), ReachabilityReport(B, SIX, ())], DUAL).action
        == "open"
    )
    assert judge_reachability([reached], DUAL).action == "open"
    neighbour = ReachabilityReport(C, SIX, (4117,), is_neighbour=True)
    assert judge_reachability([neighbour, ReachabilityReport(B, SIX, ())], DUAL).action == "closed", (
        "no firewall is between neighbours"
    )


def test_addresses_of_a_version_that_is_shut_are_not_announced() -> None:
    shut_4, open_4 = ReachabilityReport(A, ROUTER, ()), ReachabilityReport(A, ROUTER, (1,))
    shut_6, open_6 = ReachabilityReport(B, SIX, ()), ReachabilityReport(B, SIX, (1,))
    assert find_blocked_versions([], DUAL) == frozenset()
    assert find_blocked_versions([open_4], DUAL) == frozenset()
    assert find_blocked_versions([open_4, shut_6], DUAL) == {6}
    assert find_blocked_versions([shut_4, open_6], DUAL) == {4}
    assert find_blocked_versions([shut_4], DUAL) == {4, 6}, "nobody has tried IPv6: most routers shut it"
    assert find_blocked_versions([ReachabilityReport(A, "192.168.1.2", ())], DUAL) == {4, 6}


def test_members_try_each_version_that_leads_outside() -> None:
    four, six = ReachabilityReport(A, ROUTER, ()), ReachabilityReport(B, SIX, (1,))
    assert versions_to_try([], DUAL) == (4, 6)
    assert versions_to_try([four], DUAL) == (6, 4)
    assert versions_to_try([four] * 3 + [six] * 2, DUAL) == (6,)
    assert versions_to_try([four] * 3 + [six] * 3, DUAL) == ()
    assert versions_to_try([four] * 3, HOME) == (), "fd00:: leads to neighbours only"
    assert versions_to_try([ReachabilityReport(A, "192.168.1.2", (1,))] * 3, HOME) == (4,), "neighbours do not count"
    assert versions_to_try([], ("::1",)) == (6,)
    assert versions_to_try([], ()) == ()


def test_a_public_machine_sees_its_own_address() -> None:
    assert judge_reachability(
        [ReachabilityReport(A, ROUTER, (4117,)), ReachabilityReport(B, ROUTER, (4117,))], [ROUTER]
    ).reason == ("2 of 2 members that tried could connect to it")


def test_a_port_that_a_router_forwards_is_found() -> None:
    answers = [
        ReachabilityReport(A, ROUTER, (4117,)),
        ReachabilityReport(B, "192.168.1.2", (4117,)),
        ReachabilityReport(C, ROUTER, (4117,)),
    ]
    assert find_forwarded_ports(answers, HOME) == ((ROUTER, 4117),)
    assert find_forwarded_ports(answers[:1], HOME) == ((ROUTER, 4117),), "the only one that was asked"


def test_one_member_names_no_address_of_others() -> None:
    answers = [
        ReachabilityReport(A, "8.8.8.8", (4117,)),
        ReachabilityReport(B, ROUTER, (4117,)),
        ReachabilityReport(C, ROUTER, (4117,)),
    ]
    assert find_forwarded_ports(answers, HOME) == ((ROUTER, 4117),)
    assert find_forwarded_ports([ReachabilityReport(A, "10.1.1.1", (4117,))], HOME) == (), (
        "another network's private address"
    )
    assert find_forwarded_ports([ReachabilityReport(A, SIX, (4117,))], HOME) == (), (
        "an address of this machine's own that passes"
    )


def test_relays_are_the_nearest_and_those_in_use_stay() -> None:
    trips = {A: 0.2, B: 0.01, C: None, D: 0.05}
    assert choose_relays(trips, []) == (B, D)
    assert choose_relays(trips, [C]) == (C, B)
    assert choose_relays(trips, [PeerId("gone"), A]) == (A, B)
    assert choose_relays({C: None}, []) == (C,)
    assert choose_relays({}, [A]) == ()
