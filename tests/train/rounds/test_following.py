"""How long a peer follows a leader, decided without network or clock: each way out, and that there always is one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.protocol.wire.rounds import Group, GroupMember, GroupPart, Pulse
from swarmd.train.rounds.following import LONGEST_GATHER_S, LONGEST_STILL_S, Following, Parting, RoundSeen
from swarmd.values import PeerId

ME, LEADER, OTHER = PeerId("me"), PeerId("leader"), PeerId("other")
SILENT_S = 3.0  # the limit while nothing was heard yet


def pulse(retry_ms: int | None = None, *, is_awaited: bool = False) -> Pulse:
    return Pulse(run="r", parent=b"p", retry_ms=retry_ms, is_awaited=is_awaited)


def seen(counted: str, moved_at: float) -> RoundSeen:
    """A round of three who gave; those named in ``counted`` still count."""
    members = tuple(GroupMember(peer, 0, 2, True, is_counted=peer in counted) for peer in (ME, LEADER, OTHER))
    return RoundSeen(Group(n_elements=8, members=members, parts=(GroupPart(0, 0, 8),)), moved_at)


@pytest.fixture
def following() -> Following:
    """Joined under the leader at 100 s."""
    begun = Following(ME)
    begun.follow(LEADER, 100.0)
    begun.joined(100.0)
    return begun


def decide(following: Following, now: float, round_seen: RoundSeen | None = None, first: PeerId = LEADER) -> Parting:
    return following.decide_parting(round_seen, first, now).action


def hear(following: Following, until: float) -> None:
    """Half a second between two pulses, as leaders send them."""
    now = 100.0
    while now < until:
        now += 0.5
        following.take_pulse(pulse(), now)


def test_a_silent_leader_is_suspected(following: Following) -> None:
    assert decide(following, 100.0 + SILENT_S) is Parting.NOT_YET
    assert decide(following, 100.1 + SILENT_S) is Parting.SUSPECT


def test_a_leader_that_begins_nothing_is_passed_over_however_lively_it_is(following: Following) -> None:
    hear(following, 100.0 + LONGEST_GATHER_S)
    assert decide(following, 100.0 + LONGEST_GATHER_S) is Parting.NOT_YET
    assert decide(following, 100.1 + LONGEST_GATHER_S) is Parting.PASS_OVER


def test_a_round_in_which_nothing_moves_is_left(following: Following) -> None:
    hear(following, 105.0 + LONGEST_STILL_S)
    still = seen("me leader other", moved_at=104.0)
    assert decide(following, 104.0 + LONGEST_STILL_S, still) is Parting.NOT_YET
    assert decide(following, 104.1 + LONGEST_STILL_S, still) is Parting.PASS_OVER


@pytest.mark.parametrize(
    ("counted", "parting"),
    [
        ("me leader other", Parting.NOT_YET),
        ("leader other", Parting.NOT_YET),  # this peer is left out, most are not: it may be its own fault
        ("me", Parting.NOT_YET),
        ("leader", Parting.PASS_OVER),
    ],
)
def test_a_leader_that_leaves_out_most_others_is_left(following: Following, counted: str, parting: Parting) -> None:
    assert decide(following, 101.0, seen(counted, moved_at=101.0)) is parting


def test_another_that_comes_first_is_pointed_out_until_a_round_begins(following: Following) -> None:
    assert decide(following, 101.0, first=OTHER) is Parting.POINT_OUT
    assert decide(following, 101.0, seen("me leader other", 101.0), first=OTHER) is Parting.NOT_YET


def test_a_round_that_was_called_off_is_left_until_the_time_that_was_named(following: Following) -> None:
    following.take_pulse(pulse(retry_ms=2_000), 101.0)
    assert decide(following, 101.0) is Parting.LEAVE
    assert following.is_early(102.9)
    assert not following.is_early(103.0)


def test_a_leader_that_has_not_heard_of_this_peer_is_joined_again(following: Following) -> None:
    following.take_pulse(pulse(is_awaited=True), 100.4)
    assert decide(following, 100.4) is Parting.NOT_YET, "that pulse may have been under way as it joined"
    following.take_pulse(pulse(is_awaited=True), 100.9)
    assert decide(following, 100.9) is Parting.LEAVE


@given(
    gaps_s=st.lists(st.floats(0.01, 2.0), max_size=40),
    n_until_group=st.none() | st.integers(0, 40),
)
def test_no_leader_holds_a_follower_for_ever(gaps_s: list[float], n_until_group: int | None) -> None:
    """Whatever a leader sends, and whenever: if nothing comes of it there is an end."""
    following = Following(ME)
    following.follow(LEADER, 0.0)
    following.joined(0.0)
    now = 0.0
    round_seen = None
    for i, gap_s in enumerate(gaps_s):
        now += gap_s
        following.take_pulse(pulse(), now)
        if i == n_until_group:
            round_seen = seen("me leader other", now)
    late = now + LONGEST_GATHER_S + LONGEST_STILL_S + 1
    assert decide(following, late, round_seen) in (Parting.PASS_OVER, Parting.SUSPECT)
    while now < late:  # it stays lively
        now += 0.5
        following.take_pulse(pulse(), now)
    assert decide(following, now, round_seen) is Parting.PASS_OVER
