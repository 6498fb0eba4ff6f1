"""What a ledger's latest contributions say of the next one: how large they usually are, how far one may be off."""

from __future__ import annotations

import math

from swarmd.plan.runs.contributions import LEAST_MEMBERS, WeighedContributions, clipping_radius
from swarmd.plan.runs.ledger import Ledger


def latest_contributions(ledger: Ledger, n: int) -> list[WeighedContributions]:
    """Return the latest ones that were counted, as the outlier rule wants them."""
    return _of_newest_commits(ledger, n)[:n]


def contribution_radius(ledger: Ledger, n_samples: int, update: int | None = None) -> float:
    """Say how far the mean of so many samples may be from the momentum, in an update (None: the next)."""
    if ledger.run.recipe.robust != "clip":
        return math.inf
    return clipping_radius(_of_newest_commits(ledger, LEAST_MEMBERS, update), n_samples)


def _of_newest_commits(ledger: Ledger, n: int, update: int | None = None) -> list[WeighedContributions]:
    """Return those of the newest commits before ``update``, as many commits as it takes for ``n``."""
    end = None if update is None else update - 1
    latest: list[WeighedContributions] = []
    for sealed in reversed(ledger.sealed[:end]):
        latest += [WeighedContributions(c.n, c.norm) for c in sealed.commit.contributors]
        if len(latest) >= n:
            break
    return latest
