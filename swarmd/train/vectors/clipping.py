"""Clipping round the run's momentum: how far one member can move an average, whatever it gives.

CenteredClip with one iteration, round what earlier updates came to (Karimireddy, He and Jaggi 2021, "Learning from
History for Byzantine Robust Optimization", 2012.10333). Who contributes gives how far its mean gradient is from the
momentum, shortened to a radius that follows from the ledger; all add the momentum to the average of that. So sums stay
sums, whatever way they take, and that nobody gives more than the radius is seen from sizes (plan.runs.contributions).
"""

from __future__ import annotations

import math

from swarmd.train.vectors.state import Vector
from swarmd.train.vectors.sums import squares_of


def clip_total(
    total: Vector,
    n_samples: int,
    centre: Vector,
    limit: float,
) -> Vector:
    """Turn a sum of gradients into a sum of their mean's distance to the centre, shortened to ``limit``."""
    distance: Vector = total / n_samples - centre
    norm = math.sqrt(squares_of(distance))
    factor = min(1.0, limit / norm) if norm > 0 else 1.0
    return distance * (n_samples * factor)
