"""Links between members on several machines: who is let in, and what a sum does with what comes otherwise."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

import pytest
import torch

from swarmd.compute.teams.link_sums import PIECE_BYTES, LinkSums
from swarmd.compute.teams.links import HEAD, MOST_FRAME_BYTES, FrameKind, Link, Seat, dial
from swarmd.compute.teams.sums import OF_ONE_PASS, PassGivenUp, TeamBroken
from swarmd.protocol.wire.teams import TeamSeat
from swarmd.protocol.wire.tickets import DialTicket
from swarmd.wire.pinned_tls import listening_context

HOST = "127.0.0.1"


def in_thread(work: Callable[[], object]) -> Callable[[], object]:
    """Begin to work; what is returned waits for the end, and gives what came of it."""
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()

    def wait() -> object:
        thread.join(30)
        return results[0]

    return wait


@pytest.fixture
def pair() -> tuple[Link, Link]:
    ours, theirs = socket.socketpair()
    return Link(ours, "the other"), Link(theirs, "the first")


def test_members_are_let_in_by_token_and_number_once_each() -> None:
    seat = Seat([HOST])
    place = TeamSeat(HOST, seat.ticket)
    forged = TeamSeat(HOST, DialTicket(seat.ticket.port, seat.ticket.certificate, b"x" * 32))
    waiting = in_thread(lambda: seat.wait_for([0, 2]))
    strangers = [dial(forged, 1, 0), dial(place, 1, 3)]
    leader = dial(place, 1, 0)
    again = dial(place, 1, 0)
    other = dial(place, 1, 2)
    links = waiting()
    assert isinstance(links, dict)
    assert sorted(links) == [0, 2]
    leader.send(FrameKind.PART, 7, b"ours")
    assert links[0].receive() == (FrameKind.PART, 7, b"ours")
    for turned_away in (*strangers, again):
        with pytest.raises(TeamBroken, match="member 1 of the team is gone"):
            turned_away.receive()
    other.close()
    with pytest.raises(TeamBroken, match="member 2 of the team is gone"):
        links[2].receive()
    seat.close()


def test_another_certificate_than_was_told_is_refused() -> None:
    seat = Seat([HOST])
    _, other = listening_context()
    waiting = in_thread(lambda: seat.wait_for([0]))
    with pytest.raises(TeamBroken, match=r"member 1 at 127\.0\.0\.1:\d+ cannot be reached"):
        dial(TeamSeat(HOST, DialTicket(seat.ticket.port, other, seat.ticket.token)), 1, 0)
    dial(TeamSeat(HOST, seat.ticket), 1, 0)
    assert waiting()
    seat.close()
    with pytest.raises(TeamBroken, match="cannot be reached"):
        dial(TeamSeat(HOST, seat.ticket), 1, 0)


def test_a_seat_takes_the_addresses_that_are_here() -> None:
    Seat(["192.0.2.7", HOST]).close()
    with pytest.raises(OSError, match="assign"):
        Seat(["192.0.2.7"])


def test_frames_that_cannot_be_right_end_the_link(pair: tuple[Link, Link]) -> None:
    ours, theirs = pair
    theirs._connection.sendall(HEAD.pack(FrameKind.PART, 1, MOST_FRAME_BYTES + 1))
    with pytest.raises(TeamBroken, match="at most"):
        ours.receive()
    theirs._connection.sendall(HEAD.pack(99, 1, 0))
    with pytest.raises(TeamBroken, match="99 is not a valid"):
        ours.receive()
    ours.set_patience(0.01)
    with pytest.raises(TeamBroken, match="the other of the team has given nothing for 0 s"):
        ours.receive()


@pytest.mark.parametrize("n", [1, 576, PIECE_BYTES // 4, PIECE_BYTES // 4 * 5 + 3])
def test_sums_are_the_same_at_both_ends(n: int, pair: tuple[Link, Link]) -> None:
    first, second = LinkSums({1: pair[0]}, 0), LinkSums({0: pair[1]}, 1)
    parts = [torch.randn(1, n, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1)]
    second.align(first.begin())
    theirs = in_thread(lambda: second.add(parts[1]))
    ours = first.add(parts[0])
    assert torch.equal(ours, parts[0] + parts[1])
    assert torch.equal(ours, theirs())  # type: ignore[arg-type]


def test_a_pass_that_was_given_up_is_over_at_both_ends(pair: tuple[Link, Link]) -> None:
    leader, member = LinkSums({1: pair[0]}, 0), LinkSums({0: pair[1]}, 1)
    part = torch.ones(1, 8)
    member.align(leader.begin())
    pair[0].send(FrameKind.ORDER, 0, b"something else")
    with pytest.raises(PassGivenUp):
        member.add(part)
    assert member._orders == [b"something else"]
    member.align(leader.begin())
    assert leader.n_given == 2 * OF_ONE_PASS
    theirs = in_thread(lambda: member.add(2 * part))
    assert torch.equal(leader.add(part), 3 * part), "what the pass before has left is read over"
    assert torch.equal(theirs(), 3 * part)  # type: ignore[arg-type]


def test_parts_that_are_unlike_or_too_new_end_the_team(pair: tuple[Link, Link]) -> None:
    sums = LinkSums({1: pair[0]}, 0)
    pair[1].send(FrameKind.PART, 1, b"four")
    with pytest.raises(TeamBroken, match="gives 4 B of sum 1"):
        sums.add(torch.ones(8))
    pair[1].send(FrameKind.PART, 9, bytes(32))
    with pytest.raises(TeamBroken, match="gives a part of 9 where 2 is computed"):
        sums.add(torch.ones(8))
    pair[1].send(FrameKind.FAILURE, 0, b"RuntimeError: no memory")
    with pytest.raises(TeamBroken, match="the other of the team: RuntimeError: no memory"):
        sums.add(torch.ones(8))
