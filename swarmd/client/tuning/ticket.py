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
