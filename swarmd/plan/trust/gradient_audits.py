"""Which contributions to a run are computed again, by whom, and whether what came of it is the same. Pure.

A contribution is a sum of gradients of draws that everybody can compute: the ledger says which, and on which state. Its
contributor has signed what it comes to along directions that nobody knew while computing (protocol.runs.backing), so
whoever computes it again can tell, and no vector need travel. Every member draws for itself whom it looks at: nobody
can know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from swarmd.plan.trust.audits import ALWAYS_BELOW
from swarmd.protocol.runs.backing import Sums
from swarmd.values import Decision, PeerId

BOUND = 0.05  # of a contribution's norm: honest machines differ by 1e-5, and less than this does no harm
LOSS_BOUND = 0.01  # relative


@dataclass(frozen=True, slots=True)
class RecheckResult:
    """What a contribution comes to: its summed loss, its norm, and its sums along the directions."""

    loss: float
    norm: float
    sums: Sums


def rate(n_right: int, one_in: int) -> float:
    """How often contributions of a peer are computed again that were right, or not looked at, so often in a row.

    All of the first ten, then one in n as BOINC's (plan.trust.audits), at least one in ``one_in``; none where that is
    0.
    """
    if not one_in:
        return 0.0
    return 1.0 if n_right < ALWAYS_BELOW else max(1 / one_in, 1 / n_right)


def draw(
    rates: Mapping[PeerId, float],
    n_samples: Mapping[PeerId, float],
    me: PeerId,
    uniform: float,
) -> Decision[PeerId | None]:
    """Whose contribution ``me`` computes again, if anybody's; ``uniform`` is a private number in [0, 1).

    ``rates`` are of who contributed. Each of the others checks one in proportion to ``n_samples`` that it contributed
    itself, so that all together check as many as the rate says, and nobody waits for the slow. One at a time: who is
    much faster than the others checks fewer than its share while all are to be checked.
    """
    mine, total = n_samples.get(me, 0.0), sum(n_samples.values())
    others = sorted(rates.keys() - {me}) if mine else []
    chances = {peer: rates[peer] * mine / (total - n_samples[peer]) for peer in others}
    reached, left = 0.0, uniform * max(1.0, sum(chances.values()))
    for peer, chance in chances.items():
        reached += chance
        if left < reached:
            return Decision(peer, f"drawn: one of {1 / rates[peer]:.0f} of its contributions is computed again")
    return Decision(None, f"nobody was drawn, of {len(rates)} contributors")


def work(n_right: Mapping[PeerId, int], n_samples: Mapping[PeerId, float], one_in: int) -> dict[PeerId, float]:
    """How many samples each contributor is expected to compute again of an update, by ``draw``; ``n_samples``: own."""
    total = sum(n_samples.values())
    found = {}
    for me, mine in n_samples.items():
        others = {p: n for p, n in n_samples.items() if p != me and n > 0}
        chances = {p: rate(n_right.get(p, 0), one_in) * mine / (total - n) for p, n in others.items() if total > n}
        found[me] = sum(chance * others[p] for p, chance in chances.items()) / max(1.0, sum(chances.values()))
    return found


def is_same(said: RecheckResult, found: RecheckResult, rounding: float = 0.0) -> Decision[bool | None]:
    """Has a contributor given what comes of its draws? ``rounding``: what its codec may be off by along a direction.

    None: what comes of them is no number, and proves nothing.
    Along a random direction another vector is off by a normal number times its distance: with four directions one that
    is off by its own size passes once in 400,000 times, by a fifth of it once in 700.
    """
    if not math.isfinite(found.norm):
        return Decision(None, "the gradient is not finite here either")
    most, size = BOUND * found.norm + rounding, found.norm or 1.0
    off = max((abs(a - b) for a, b in zip(said.sums, found.sums, strict=True)), default=0.0)
    if not off <= most:
        return Decision(False, f"its sums are off by {off / size:.2g} of the gradient's norm; {most / size:.2g} may be")
    if not abs(said.norm - found.norm) <= most:
        return Decision(False, f"it says a norm of {said.norm:.4g}, which is {found.norm:.4g}")
    if not abs(said.loss - found.loss) <= LOSS_BOUND * abs(found.loss):
        return Decision(False, f"it says a loss of {said.loss:.4g}, which is {found.loss:.4g}")
    return Decision(True, f"the same, within {most / size:.2g} of the gradient's norm")
