"""The lanes of fine-tuning through one server: who may open one and put something in, how much waits, which ones end.

No I/O: the daemon (``node.serving.lanes``) passes frames on, and tells clients of the lanes that are over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from swarmd.errors import Code, Refused
from swarmd.protocol.wire.tuning import Backward, Forward
from swarmd.values import PeerId, Span

MAX_LANES = 512  # of all clients: each costs a record here and some parameters in the worker
MAX_LANES_PER_CLIENT = 64  # a client has one for each chain that it goes through
LEASE_S = 600.0  # a client that evaluates between two steps is not gone
LANES_RETRY_S = 10.0  # a lane that nobody needs any more is closed by then
RETRY_AFTER_S = 1.0  # some micro-batches: then there is room again

Key = tuple[bytes, int]
"""A lane, and its first block here."""


@dataclass(slots=True)
class LaneHop:
    """One hop of one client's lane. ``waiting`` counts the bytes of each message that its worker has not answered.

    ``principal``: the key that answers for the client. ``push``, ``why``: whether outputs go straight to the successor.
    """

    client: PeerId
    principal: bytes
    span: Span
    predecessor: PeerId
    successor: PeerId
    push: bool = False
    why: str = ""
    used_at: float = 0.0
    waiting: dict[tuple[type, int], int] = field(default_factory=dict)

    @property
    def waiting_bytes(self) -> int:
        """What its worker has not answered yet."""
        return sum(self.waiting.values())

    def finish_part(self, message: Forward | Backward) -> None:
        """The worker gave a part of an answer; with the last one nothing waits for it any more."""
        if is_last_part(message.part):
            self.waiting.pop((type(message), message.seq), None)


EnteredLane = tuple[Key, LaneHop]


def is_last_part(part: tuple[int, int]) -> bool:
    """Is this the last of a message's parts? ``part``: its number from 0, and how many there are."""
    number, n_parts = part
    return number + 1 == n_parts


# A lane's life here. It has no caches and no history, so nothing of it is repaired: its client hears of each end that
# it did not bring about, and sends the micro-batch through another lane.
#
#     admit, open --> frames come, wait for the worker, and leave --> over:
#                                                          its client closed it, or is gone, or was silent for LEASE_S
#                                                          a neighbour cannot be reached      (the client is told)
#                                                          the worker ended, the server leaves (the client is told)
#
# Invariant: what waits for the worker is at most twice ``limit_bytes``, and half of that for each principal, as many
# keys as one may have.
class LaneTable:
    """All lanes through one server, by session and first block."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._lanes: dict[Key, LaneHop] = {}

    def __len__(self) -> int:
        return len(self._lanes)

    def __iter__(self) -> Iterator[LaneHop]:
        return iter(self._lanes.values())

    def get(self, session: bytes, start: int) -> LaneHop | None:
        """Find the lane that starts at a block."""
        return self._lanes.get((session, start))

    def ending_at(self, session: bytes, end: int) -> LaneHop | None:
        """Find the lane that ends at a block; of two the one that was opened last."""
        for (name, _), lane in reversed(self._lanes.items()):
            if name == session and lane.span.end == end:
                return lane
        return None

    def admit(self, session: bytes, client: PeerId, principal: bytes) -> None:
        """May a client open one more lane of this name? Raises Refused."""
        n_of_client = sum(lane.principal == principal for lane in self)
        if n_of_client >= MAX_LANES_PER_CLIENT or len(self) >= MAX_LANES:
            text = f"{len(self)} lanes are open here, {n_of_client} of this client"
            raise Refused(Code.NO_CAPACITY, text, LANES_RETRY_S)
        if any(key[0] == session and lane.client != client for key, lane in self._lanes.items()):
            raise Refused(Code.STRANGER, "another client has a lane of this name")

    def open(self, session: bytes, lane: LaneHop) -> None:
        """Enter a lane, in place of one that starts at the same block."""
        key = (session, lane.span.start)
        self._lanes.pop(key, None)
        self._lanes[key] = lane

    # --- what waits ------------------------------------------------------------------------------------------

    def find_for(self, peer: PeerId, message: Forward | Backward) -> LaneHop:
        """Find the lane of a message from its client, or from the neighbour on that side. Raises Refused."""
        is_forward = isinstance(message, Forward)
        find = self.get if is_forward else self.ending_at
        lane = find(message.session, message.start)
        if lane is None:
            raise Refused(Code.NO_SESSION, f"no lane {message.session.hex()[:8]} at block {message.start} here")
        if peer not in (lane.client, lane.predecessor if is_forward else lane.successor):
            raise Refused(Code.STRANGER, f"{peer} is no neighbour in this lane")
        return lane

    def take_in(
        self,
        lane: LaneHop,
        message: Forward | Backward,
        n_bytes: int,
        now: float,
    ) -> None:
        """Count a frame until the worker has answered it. Raises Refused where too much waits."""
        total_bytes = sum(other.waiting_bytes for other in self)
        client_bytes = sum(other.waiting_bytes for other in self if other.principal == lane.principal)
        if max(2 * client_bytes, total_bytes) + n_bytes > 2 * self._limit_bytes:
            text = f"{client_bytes} B of this client, and {total_bytes} B in all, wait to be computed here"
            raise Refused(Code.NO_CAPACITY, text, RETRY_AFTER_S)
        kind = (type(message), message.seq)
        lane.waiting[kind] = lane.waiting.get(kind, 0) + n_bytes
        lane.used_at = now

    def refuse(self, session: bytes, block: int, seq: int) -> LaneHop | None:
        """The worker refused a message that was given at ``block``; returns the lane that it was for."""
        lane = self.get(session, block)
        refused: type = Forward
        if lane is None:
            lane = self.ending_at(session, block)
            refused = Backward
        if lane is not None:
            lane.waiting.pop((refused, seq), None)
        return lane

    def look(
        self,
        now: float,
        is_sending_to: Callable[[PeerId], bool],
    ) -> tuple[list[EnteredLane], list[Key]]:
        """Say which lanes' clients should hear that work goes on, and which lanes nobody uses any more.

        ``is_sending_to``: are frames on their way to a peer?
        """
        working = []
        unused = []
        for key, lane in self._lanes.items():
            if lane.waiting or is_sending_to(lane.predecessor) or is_sending_to(lane.successor):
                working.append((key, lane))
            elif now - lane.used_at > LEASE_S:
                unused.append(key)
        return working, unused

    # --- what ends -------------------------------------------------------------------------------------------

    def close(self, key: Key) -> None:
        """A lane is over, as its client knows."""
        self._lanes.pop(key, None)

    def close_all_of(self, client: PeerId) -> list[Key]:
        """A client is gone; returns the lanes that it had."""
        closed = [key for key, lane in self._lanes.items() if lane.client == client]
        for key in closed:
            del self._lanes[key]
        return closed

    def cut(self, peer: PeerId) -> list[EnteredLane]:
        """A peer cannot be reached; returns the lanes that are over for it, whose clients must hear so."""
        lost = []
        for key, lane in list(self._lanes.items()):
            is_neighbour = peer in (lane.predecessor, lane.successor)
            if is_neighbour and lane.client != peer:
                lost.append((key, lane))
                del self._lanes[key]
        return lost

    def end_all(self) -> list[EnteredLane]:
        """Nothing is computed here any more; returns all lanes, whose clients must hear so."""
        lost = list(self._lanes.items())
        self._lanes.clear()
        return lost
