"""A follower's process on another machine than its leader's: started by a daemon that was asked for a seat.

It says where it can be dialled, waits for the leader and the other members, and follows until the leader ends.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from functools import partial

import msgspec

from swarmd.compute.hardware.device import use_threads
from swarmd.compute.hardware.worker_process import describe_error, serve_daemon
from swarmd.compute.passes.family import PROBE_ERRORS
from swarmd.compute.passes.load_request import load_blocks
from swarmd.compute.passes.span import LoadedSpan
from swarmd.compute.teams.follower import Follower, load
from swarmd.compute.teams.link_sums import LinkSums
from swarmd.compute.teams.links import FrameKind, Link, Seat, dial
from swarmd.compute.teams.measuring import answer_measure
from swarmd.compute.teams.orders import Measure, Order, Take, decode
from swarmd.compute.teams.sums import TeamBroken
from swarmd.compute.teams.whole_span import WholeFollower
from swarmd.errors import ConfigError
from swarmd.protocol.fields import Message
from swarmd.protocol.wire import messages, worker
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.worker import Followed, FollowTeam, LoadSpan, Seated
from swarmd.resources import measure_memory

RECEIVE_BYTES = 1 << 16  # of the daemon's one frame


def follow(connection: socket.socket) -> None:
    """Be a member of one team. Raises EOFError when that ends, and TeamBroken or ConfigError before."""
    request = _read_request(connection)
    seat = Seat(request.hosts)

    def tell(message: Message) -> None:
        connection.sendall(messages.encode_frame(message))

    tell(Seated(seat.ticket))
    try:
        links = seat.wait_for([0])
        leader = links[0]
        leader.set_patience(None)
        try:
            order = _next_order(leader, [])
            if isinstance(order, Measure):
                order = msgspec.structs.replace(order, load=_of_this_machine(order.load, request.load))
                answer_measure(order, LinkSums({0: leader}, 1), partial(leader.send, FrameKind.MEASURED, 0), True)
                order = _next_order(leader, [])
            assert isinstance(order, Take), "the leader says who is who before all else"
            _follow(seat, links, order, request.load, tell)
        except (ConfigError, msgspec.DecodeError, *PROBE_ERRORS) as error:
            leader.send(FrameKind.FAILURE, 0, describe_error(error).encode())
            raise
    finally:
        seat.close()


def _follow(seat: Seat, links: dict[int, Link], take: Take, own: LoadSpan, tell: Callable[[Message], None]) -> None:
    me, n = take.member, len(take.weights)
    links |= {member: dial(take.seats[member - 1], member, me) for member in range(1, me)}
    links |= seat.wait_for(range(me + 1, n))
    seat.close()
    for link in links.values():
        link.set_patience(None)
    orders: list[bytearray] = []
    request = _of_this_machine(take.load, own)
    is_whole = take.load.team_mode == "whole"
    if is_whole:
        use_threads(request.threads)
        follower: Follower | WholeFollower = WholeFollower(load_blocks(request, LoadedSpan), links, me, orders)
    else:
        sums = LinkSums(links, me, orders)
        follower = Follower(load(msgspec.structs.replace(take, load=request), sums), sums)
    free_bytes = max(0, measure_memory().free_bytes - own.leave_free_bytes)
    links[0].send(FrameKind.READY, free_bytes, b"")
    blocks = f"blocks [{own.start},{own.end}) of {own.model[:12]}"
    tell(Followed(f"member {me} of a team of {n}, with {'all' if is_whole else 'slices'} of {blocks}"))
    while True:
        follower.do(_next_order(links[0], orders))


def _read_request(connection: socket.socket) -> FollowTeam:
    """What the daemon asks. Raises EOFError."""
    decoder = FrameDecoder()
    while data := connection.recv(RECEIVE_BYTES):
        for frame in decoder.feed_untrusted(data):
            message = worker.decode(frame.header)
            if isinstance(message, FollowTeam):
                return message
    raise EOFError


def _next_order(leader: Link, waiting: list[bytearray]) -> Order:
    """The leader's next order; parts of a pass that was given up are read over. Raises EOFError when it is gone."""
    while not waiting:
        try:
            kind, _, data = leader.receive()
        except TeamBroken:
            raise EOFError from None
        if kind is FrameKind.ORDER:
            waiting.append(data)
    return decode(waiting.pop(0))


def _of_this_machine(theirs: LoadSpan, own: LoadSpan) -> LoadSpan:
    """What the leader asks, of the files and processors that are here. Raises ConfigError."""
    if (theirs.model, theirs.start, theirs.end) != (own.model, own.start, own.end):
        raise ConfigError(f"asked for blocks [{own.start},{own.end}) of {own.model[:12]}, and then for others")
    return msgspec.structs.replace(
        theirs, path=own.path, threads=own.threads, spill_folder=own.spill_folder, seats=(), device="cpu"
    )


def main() -> None:
    """Follow a leader, as the daemon at the socket says whose number is the first argument."""
    serve_daemon("team", follow)
