"""How often a server is checked: always at first, less with each right answer, and never nothing.

BOINC's adaptive replication (wiki, AdaptiveReplication): with n right in a row the next is checked with probability
1/n; a wrong one begins anew. Its floor is ours: who has been right for long may lie once, and is found all the same.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmd.values import Decision

ALWAYS_BELOW = 10  # right in a row: BOINC's
LEAST_RATE = 0.02  # 50 windows of a liar's are not checked, on average
FIRST_WINDOW_OPS = 32  # a window twice as long follows each: a session is looked at log2 times


@dataclass(frozen=True, slots=True)
class AuditRecord:
    """What was found of one (peer, span, numerics): checks, right ones since the last wrong one, wrong ones."""

    n_checks: int = 0
    n_right: int = 0
    n_wrong: int = 0

    def after(self, is_right: bool) -> AuditRecord:
        """The record with one more check. One wrong answer sets the count of right ones to 0."""
        if is_right:
            return AuditRecord(self.n_checks + 1, self.n_right + 1, self.n_wrong)
        return AuditRecord(self.n_checks + 1, 0, self.n_wrong + 1)


def audit_rate(record: AuditRecord) -> float:
    """The probability with which a window is checked."""
    return 1.0 if record.n_right < ALWAYS_BELOW else max(LEAST_RATE, 1.0 / record.n_right)


def is_due(record: AuditRecord, draw: float, min_rate: float = 0.0) -> Decision[bool]:
    """Is this window checked? ``draw`` is uniform in [0, 1); a share ``min_rate`` is asked for in any case."""
    probability = max(min_rate, audit_rate(record))
    return Decision(draw < probability, f"{record.n_right} right in a row: one window in {1 / probability:.0f}")


def next_window(n_ops: int) -> int:
    """After how many ops of a session the next window ends."""
    window = FIRST_WINDOW_OPS
    while window <= n_ops:
        window *= 2
    return window
