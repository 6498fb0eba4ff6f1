"""Which contributions to a run are computed again, by which member, and whether the result is the same. Pure.

A contribution is a sum of gradients of draws that everybody can compute: the ledger says which, and on which state. Its
contributor has signed its projections along directions that nobody knew while computing (protocol.runs.backing). So a
member that computes it again can compare, and no vector need travel. Every member draws by itself which contribution it
computes again: nobody can know it before.
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


def recheck_rate(n_right: int, one_in: int) -> float:
    """How often contributions of a peer are computed again that were right, or not looked at, so often in a row.

    All of the first ten, then one in n as BOINC's (plan.trust.audits), at least one in ``one_in``; none where that is
    0.
    """
    if not one_in:
        return 0.0
    return 1.0 if n_right < ALWAYS_BELOW else max(1 / one_in, 1 / n_right)


def draw_recheck(
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
    # The others are laid side by side on a line, each as wide as its chance; ``uniform`` points at one, or past all:
    #
    #     0 |--- peer 1 ---|-- peer 2 --|- peer 3 -|........ nobody ........| 1
    #
    # Where the chances add up to more than 1 the line is longer, and somebody is drawn in any case.
    total = sum(n_samples.values())
    own_samples = n_samples.get(me, 0.0)
    contributors = sorted(rates.keys() - {me}) if own_samples else []
    chances = {peer: rates[peer] * own_samples / (total - n_samples[peer]) for peer in contributors}
    cumulative = 0.0
    target = uniform * max(1.0, sum(chances.values()))
    for peer, chance in chances.items():
        cumulative += chance
        if target < cumulative:
            return Decision(peer, f"drawn: one of {1 / rates[peer]:.0f} of its contributions is computed again")
    return Decision(None, f"nobody was drawn, of {len(rates)} contributors")


def expected_rechecks(
    n_right: Mapping[PeerId, int], n_samples: Mapping[PeerId, float], one_in: int
) -> dict[PeerId, float]:
    """How many samples each contributor is expected to compute again of an update, by ``draw_recheck``.

    ``n_samples``: what each contributed itself.
    """
    total = sum(n_samples.values())
    expected = {}
    for me, own_samples in n_samples.items():
        other_samples = {peer: n for peer, n in n_samples.items() if peer != me and n > 0}
        chances = {}
        for peer, n in other_samples.items():
            if total > n:
                chances[peer] = recheck_rate(n_right.get(peer, 0), one_in) * own_samples / (total - n)
        drawn = sum(chance * other_samples[peer] for peer, chance in chances.items())
        expected[me] = drawn / max(1.0, sum(chances.values()))
    return expected


def is_same(claimed: RecheckResult, recomputed: RecheckResult, rounding: float = 0.0) -> Decision[bool | None]:
    """Has a contributor given what comes of its draws? ``rounding``: what its codec may be off by along a direction.

    None: what comes of them is no number, and proves nothing.
    Along a random direction another vector is off by a normal number times its distance: with four directions one that
    is off by its own size passes once in 400,000 times, by a fifth of it once in 700.
    """
    if not math.isfinite(recomputed.norm):
        return Decision(None, "the gradient is not finite here either")
    tolerance = BOUND * recomputed.norm + rounding
    size = recomputed.norm or 1.0
    differences = [abs(a - b) for a, b in zip(claimed.sums, recomputed.sums, strict=True)]
    off = max(differences, default=0.0)
    # "not off <= tolerance", because a NaN that somebody claims must fail, and "off > tolerance" is False for it.
    if not off <= tolerance:
        text = f"its sums are off by {off / size:.2g} of the gradient's norm; {tolerance / size:.2g} may be"
        return Decision(False, text)
    if not abs(claimed.norm - recomputed.norm) <= tolerance:
        return Decision(False, f"it says a norm of {claimed.norm:.4g}, which is {recomputed.norm:.4g}")
    if not abs(claimed.loss - recomputed.loss) <= LOSS_BOUND * abs(recomputed.loss):
        return Decision(False, f"it says a loss of {claimed.loss:.4g}, which is {recomputed.loss:.4g}")
    return Decision(True, f"the same, within {tolerance / size:.2g} of the gradient's norm")
