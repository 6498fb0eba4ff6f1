"""What a client found by checking the answers of servers: how often each was right or wrong, and what checking cost.

With a file it outlives the process. The rules are ``plan.trust.audits``'s.
"""

from __future__ import annotations

import logging
import random
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from swarmd.errors import ConfigError
from swarmd.plan.trust.audits import AuditRecord, is_due
from swarmd.plan.trust.evasions import EvasionCounts, forget_oldest
from swarmd.protocol.untrusted import read_json
from swarmd.values import Decision

logger = logging.getLogger(__name__)

T = TypeVar("T")
N_KEPT = 64  # findings that people are shown


@dataclass(frozen=True, slots=True)
class CheckFinding:
    """One check: of which hop, how it ended, and why."""

    hop: str
    outcome: str
    reason: str


class Checks:
    """See the module. Owned by the client's trio thread."""

    def __init__(self, rng: random.Random, file: Path | None = None) -> None:
        self.n_served_tokens = 0  # tokens times blocks, of sessions that are checked
        self.n_computed_tokens = 0  # the same, computed again
        self.outcomes: Counter[str] = Counter()
        self.evasions = EvasionCounts()
        self.findings: deque[CheckFinding] = deque(maxlen=N_KEPT)
        self._rng = rng
        self._file = file
        self._records: dict[str, AuditRecord] = self._read_records()

    def record(self, key: str) -> AuditRecord:
        """Return how often a server was right and wrong so far; an empty record for one that was never checked."""
        return self._records.get(key, AuditRecord())

    def is_due(self, key: str, min_share: float = 0.0) -> Decision[bool]:
        """Is a window checked? At least a share ``min_share`` of them is."""
        return is_due(self.record(key), self._rng.random(), min_share)

    def shuffle(self, items: Sequence[T]) -> list[T]:
        """Return the items in an order that nobody can foresee."""
        return self._rng.sample(items, len(items))

    def note(self, key: str, is_right: bool) -> None:
        """Count one check that was decided."""
        self._records[key] = self._records.pop(key, AuditRecord()).after(is_right)
        forget_oldest(self._records)

    def record_finding(self, finding: CheckFinding) -> None:
        """Keep how a check ended, decided or not."""
        self.findings.append(finding)
        self.outcomes[finding.outcome] += 1

    def share(self) -> float:
        """What checking computed, as a share of what was served."""
        return self.n_computed_tokens / self.n_served_tokens if self.n_served_tokens else 0.0

    @property
    def n_checks(self) -> int:
        """How many checks were decided, of all servers."""
        return sum(record.n_checks for record in self._records.values())

    def save(self) -> None:
        """Keep the records for the next process; a disk that is full costs checks, and nothing else."""
        if self._file is None:
            return
        rows = {key: (r.n_checks, r.n_right, r.n_wrong) for key, r in self._records.items()}
        new = self._file.with_suffix(".new")
        try:
            new.write_bytes(msgspec.json.encode(rows))
            new.replace(self._file)
        except OSError as error:
            logger.warning("cannot keep what was checked in %s: %s", self._file, error.strerror)

    def _read_records(self) -> dict[str, AuditRecord]:
        if self._file is None or not self._file.is_file():
            return {}
        try:
            rows = read_json(self._file, dict[str, tuple[int, int, int]], "it is made anew")
        except ConfigError as error:
            logger.warning("%s", error)
            return {}
        return {key: AuditRecord(*row) for key, row in rows.items()}
