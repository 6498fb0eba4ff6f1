"""What comes back of what a session sends: of an op, and of a window of tokens that were tried ahead."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swarmd.client.links.link import ServedLogits


@dataclass(frozen=True, slots=True)
class OpAnswer:
    """What came back of an op: hidden [b, t, d], zeros where it was not wanted, and logits that the last hop gave.

    ``hops_s``: seconds that it took to compute at each hop; none where hops do not tell. The last ``n_alternative``
    tokens are those of alternatives.
    """

    hidden: torch.Tensor
    logits: ServedLogits | None = None
    hops_s: tuple[float, ...] = ()
    n_alternative: int = 0


@dataclass(frozen=True, slots=True)
class WindowAnswer:
    """The answer of a window; ``took_s`` from when it was sent, which is a trip where it ``is_alone``."""

    seq: int
    answer: OpAnswer
    took_s: float
    is_alone: bool
