"""How fast one peer computes for a run, and how much of that is checking others: what it tells the others. Pure."""

from __future__ import annotations

MICRO_BATCH_S = 1.0  # what may be lost when the round begins meanwhile
SMOOTHING = 0.3  # weight of the newest micro-batch in samples a second
SPEED_CHANGE = 0.2  # of its last announced speed: a change that others should know


class Workload:
    """``audit_left``: samples of others that are computed again before more of its own.

    Both methods that note something tell whether it has changed so much that the others should hear of it.
    """

    def __init__(self) -> None:
        self.samples_per_s = 0.0
        self.audit_left = 0
        self._announced_rate = 0.0

    def note_speed(self, n: int, took_s: float) -> bool:
        """Note how long ``n`` samples took, rests included."""
        weight = SMOOTHING if self.samples_per_s else 1.0
        self.samples_per_s += (n / took_s - self.samples_per_s) * weight
        has_changed = abs(self.samples_per_s - self._announced_rate) > SPEED_CHANGE * self._announced_rate
        if has_changed:
            self._announced_rate = self.samples_per_s
        return has_changed

    def note_audits(self, n_left: int) -> bool:
        """Note how much is to be audited first; others hear when that begins and ends."""
        n_before = self.audit_left
        self.audit_left = n_left
        return n_left > n_before or (n_before > 0 and not n_left)


def micro_batch_size(largest: int, samples_per_s: float) -> int:
    """Choose the samples of a micro-batch: few where they take long, for nobody breaks one off."""
    if not samples_per_s:
        return largest
    return max(1, min(largest, int(MICRO_BATCH_S * samples_per_s)))
