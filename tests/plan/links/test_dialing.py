"""Which address is tried first, and what is not tried at all."""

from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.plan.links.dialing import (
    HEAD_START_S,
    STAGGER_S,
    Attempt,
    is_reachable_from,
    order_attempts,
    origin_of,
    relay_of,
)

HOME = (ipaddress.ip_network("127.0.0.0/8"), ipaddress.ip_network("192.168.1.0/24"))
LAN, OTHER_LAN, PUBLIC, PUBLIC_6 = (
    "/ip4/192.168.1.7/tcp/1",
    "/ip4/10.0.0.7/tcp/1",
    "/ip4/5.0.1.2/tcp/1",
    "/ip6/2600::1/tcp/1",
)
CIRCUIT = f"{PUBLIC}/p2p/R/p2p-circuit/p2p/T"
NAME = "/dns4/volunteer.example/tcp/1"


def order(*addresses: str, own: tuple[str, ...] = ()) -> list[str]:
    return [attempt.address for attempt in order_attempts(addresses, HOME, own)]


def test_near_ones_come_first_and_circuits_last() -> None:
    assert order(CIRCUIT, PUBLIC, PUBLIC_6, LAN) == [LAN, PUBLIC_6, PUBLIC, CIRCUIT]
    assert order(CIRCUIT, NAME) == [NAME, CIRCUIT]


def test_others_wait_for_a_head_start_and_equals_for_less() -> None:
    assert order_attempts([CIRCUIT, LAN, "/ip4/192.168.1.8/tcp/1"], HOME) == [
        Attempt(LAN, 0.0),
        Attempt("/ip4/192.168.1.8/tcp/1", STAGGER_S),
        Attempt(CIRCUIT, STAGGER_S + HEAD_START_S),
    ]


def test_an_address_of_another_network_is_tried_last() -> None:
    assert order(OTHER_LAN, CIRCUIT) == [CIRCUIT, OTHER_LAN]
    assert order(OTHER_LAN, PUBLIC) == [PUBLIC, OTHER_LAN]
    assert order(OTHER_LAN) == [OTHER_LAN], "a company's network, perhaps"
    assert order("/ip4/100.64.3.3/tcp/1", CIRCUIT) == [CIRCUIT, "/ip4/100.64.3.3/tcp/1"], "a carrier's"


def test_two_homes_alike_that_share_an_overlay_dial_it_after_the_address_that_both_know() -> None:
    """The overlay's interface has a single address (/32): which others it leads to, only routes say."""
    networks = (*HOME, ipaddress.ip_network("100.101.0.1/32"))
    overlay = "/ip4/100.101.0.2/tcp/1"
    assert order_attempts([LAN, overlay], networks) == [Attempt(LAN, 0.0), Attempt(overlay, HEAD_START_S)]


def test_a_machine_with_a_whole_network_counts_as_one() -> None:
    assert origin_of("2600::1:2") == origin_of("2600::ffff") != origin_of("2600:0:0:1::1")
    assert origin_of("5.0.1.2") == "5.0.1.2"


def test_a_machine_does_not_dial_itself() -> None:
    assert order(f"{LAN}/p2p/T", CIRCUIT, own=(LAN,)) == [CIRCUIT]
    assert order("/ip4/0.0.0.0/tcp/4117/p2p/T", "/ip6/::/tcp/1", CIRCUIT) == [CIRCUIT], "libp2p's identify says so"


def test_who_is_closed_to_dialling_is_reached_by_neighbours_and_through_relays() -> None:
    assert is_reachable_from([OTHER_LAN, LAN], HOME)
    assert is_reachable_from([OTHER_LAN, CIRCUIT], HOME)
    assert not is_reachable_from([OTHER_LAN, PUBLIC, PUBLIC_6], HOME)
    assert is_reachable_from([OTHER_LAN, PUBLIC_6], [*HOME, ipaddress.ip_network("2600:1::/64")]), (
        "it is open over IPv6"
    )


@pytest.mark.parametrize(
    ("address", "relay"),
    [
        (CIRCUIT, ("R", PUBLIC)),
        (f"{PUBLIC}/p2p-circuit/p2p/T", None),
        ("/p2p-circuit", None),
        ("/p2p/R/p2p-circuit", None),
        (PUBLIC, None),
    ],
)
def test_the_relay_that_an_address_names(address: str, relay: tuple[str, str] | None) -> None:
    assert relay_of(address) == relay


@given(st.lists(st.text() | st.sampled_from([LAN, PUBLIC, CIRCUIT, "/ip4//tcp", "/ip6/::1%lo/tcp/1"]), max_size=8))
def test_whatever_others_announce_is_ordered(addresses: list[str]) -> None:
    planned = order_attempts(addresses, HOME)
    assert {a.address for a in planned} <= set(addresses)
    assert [a.after_s for a in planned] == sorted(a.after_s for a in planned)
