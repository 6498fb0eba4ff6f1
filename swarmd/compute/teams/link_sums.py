"""Sums over the members of a team on several machines: each sends its part to all others, and adds up what comes.

All parts are added in the order of members, in float32, so that all have the same bits. A part travels in its own type,
in pieces: the next is sent before the one before is read, so that a long part takes no trip for each piece. Two pieces
each way fit what the kernel keeps for a connection, so nobody waits for one that waits for him.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce

import torch

from swarmd.compute.teams.links import FrameKind, Link, receive_part
from swarmd.compute.teams.sums import TeamBroken, next_pass
from swarmd.wire.tensors import raw_bytes

PIECE_BYTES = 1 << 16  # that are on their way at once: two, of at least 200 KiB that Linux keeps


class LinkSums:
    """One member's side. ``links`` are to all others, by their numbers.

    ``n_given``: the number of the sum that this member has given its part to last. ``orders`` get what came where
    a part was waited for.
    """

    def __init__(self, links: Mapping[int, Link], member: int, orders: list[bytearray] | None = None) -> None:
        self._links = dict(sorted(links.items()))
        self._members = sorted({*links, member})
        self._member = member
        self.n_given = 0
        self._orders = [] if orders is None else orders

    def begin(self) -> int:
        """Begin a pass, at the leader; returns what members have to ``align`` to."""
        self.n_given = next_pass(self.n_given)
        return self.n_given

    def align(self, n_given: int) -> None:
        """Begin the pass that the leader has begun."""
        self.n_given = n_given

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over members of parts alike in shape and type, added in float32. Raises TeamBroken or PassGivenUp."""
        pieces = torch.split(part.detach().reshape(-1), PIECE_BYTES // part.element_size())
        number = self.n_given
        self.n_given += len(pieces)
        self._send(pieces[0], number + 1)
        sums = []
        for n, piece in enumerate(pieces, 1):
            if n < len(pieces):
                self._send(pieces[n], number + n + 1)
            parts = {self._member: piece.float()}
            for member in self._links:
                parts[member] = self._receive(member, number + n, piece)
            sums.append(reduce(torch.add, [parts[member] for member in self._members]))
        total = sums[0] if len(sums) == 1 else torch.cat(sums)
        return total.view(part.shape).to(part.dtype)

    def _send(self, piece: torch.Tensor, number: int) -> None:
        data = raw_bytes(piece)
        for link in self._links.values():
            link.send(FrameKind.PART, number, data)

    def _receive(self, member: int, number: int, ours: torch.Tensor) -> torch.Tensor:
        """Another member's piece of a sum, alike to ours."""
        link = self._links[member]
        data = receive_part(link, number, self._orders)
        if len(data) != ours.numel() * ours.element_size():
            raise TeamBroken(f"{link.name} of the team gives {len(data)} B of sum {number}, unlike this member")
        return torch.frombuffer(data, dtype=ours.dtype).float()
