"""A micro-batch that went forward: what came of it, and what is to happen on the way back."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from swarmd.client.tuning.lane import Lane
from swarmd.client.tuning.lane_pass import MicroBatch
from swarmd.plan.chains.routing import Hop
from swarmd.values import PeerId


@dataclass(frozen=True, slots=True)
class OtherHolders:
    """The peers that an audit excludes, and the format of weights that it asks other servers for."""

    without: frozenset[PeerId] = frozenset()
    quantize: str = ""


@dataclass(slots=True)
class DuplicateBatch:
    """The same micro-batch another way: without these hops, whose turn it is to be looked at."""

    ticket: ForwardTicket
    audited: tuple[Hop, ...]


# Where a micro-batch is, as its ticket says:
#
#     forward --> held by its lane's hops (``seq``) --take_seq--> on its way back --> done
#                    |                                                |
#                    |  the lane is over                              |  failed
#                    +-------------> forward again, elsewhere <-------+
#
# Invariant: a hop gives a gradient once, and each micro-batch's gradient counts once. So ``seq`` is given up before the
# gradient is sent: whatever goes wrong then begins with another forward, whose number no older answer can have.
@dataclass(slots=True)
class ForwardTicket:
    """What left the last block [b, t, d], and where its backward should go, which calls it ``seq`` (0: nowhere).

    One that is audited has duplicates.
    """

    batch: MicroBatch
    out: torch.Tensor
    lane: Lane
    seq: int
    holders: OtherHolders
    duplicates: list[DuplicateBatch] = field(default_factory=list)
    was_resent: bool = False  # its lane ended: what comes back comes another way, which nobody has looked at

    def __del__(self) -> None:
        self.lane.live.discard(self.seq)  # its backward will never come

    @property
    def is_held(self) -> bool:
        """Do a lane's hops still hold what its backward needs?"""
        return self.lane.is_open and self.seq > 0

    def take_seq(self) -> int:
        """Give its number up, for a gradient that is sent now."""
        seq = self.seq
        self.seq = 0
        return seq

    def move_to(self, resent: ForwardTicket) -> None:
        """Let its backward go where the same micro-batch went forward again. Nobody has looked at that way yet."""
        self.lane = resent.lane
        self.seq = resent.take_seq()
        self.duplicates = []
        self.was_resent = True
