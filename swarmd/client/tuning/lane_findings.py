"""What the audits of one pipeline found: remembered of each server, told to the user, held against liars."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from swarmd.client.links.checks import CheckFinding, Checks
from swarmd.errors import NoRoute, SwarmError
from swarmd.net.standing import Standing
from swarmd.plan.chains.routing import Hop
from swarmd.plan.trust.judge import AuditVerdict, Ruling
from swarmd.values import ModelId, PeerId

logger = logging.getLogger(__name__)


class LaneFindings:
    """See the module. ``doubts`` are read by the pipeline's user."""

    def __init__(
        self,
        standing: Standing,
        checks: Checks,
        model: ModelId,
        doubts: list[str],
    ) -> None:
        self.doubts = doubts
        self._standing = standing
        self._checks = checks
        self._model = model
        self._has_told_alone = False

    def due_hops(self, hops: Iterable[Hop], min_share: float) -> list[Hop]:
        """Draw the hops whose turn it is to be looked at; those first that were so the least."""
        due = [hop for hop in hops if self._checks.is_due(self._record_key(hop), min_share).action]
        return sorted(due, key=lambda hop: self._checks.record(self._record_key(hop)).n_checks)

    def banned_hop(self, hops: Iterable[Hop]) -> Hop | None:
        """The first of some hops whose server is banned by now."""
        banned = (hop for hop in hops if self._standing.ban_left_s(hop.peer))
        return next(banned, None)

    def note_right(self, hops: tuple[Hop, ...]) -> None:
        """Note that these hops gave what others computed, too."""
        for hop in hops:
            self._checks.note(self._record_key(hop), is_right=True)
        self.record(hops, AuditVerdict.RIGHT, "a micro-batch, there and back")

    def hold_to_account(
        self,
        ruling: Ruling,
        hops: tuple[Hop, ...],
        reason: str,
    ) -> frozenset[PeerId]:
        """Hold a ruling against those of some hops that it charges; returns whom to do without from now on."""
        faults = ruling.faults
        charged = tuple(hop for hop in hops if hop.peer in faults)
        if all(self._standing.ban_left_s(hop.peer) for hop in charged):
            return frozenset()  # another micro-batch has shown it
        for peer, fault in faults.items():
            self._standing.fault(peer, fault, f"fine-tuning: {reason}")
        for hop in charged:
            self._checks.note(self._record_key(hop), is_right=False)
        self.record(charged, AuditVerdict.WRONG, reason)
        self.doubts.append(f"{names_of(charged)} computed wrongly in fine-tuning, and is left out: {reason}")
        return frozenset(faults)

    def record(self, hops: tuple[Hop, ...], verdict: AuditVerdict, reason: str) -> None:
        """Keep how an audit ended."""
        level = logging.INFO if verdict in (AuditVerdict.RIGHT, AuditVerdict.INCONCLUSIVE) else logging.WARNING
        logger.log(level, "audit of the lane through %s: %s: %s", names_of(hops), verdict, reason)
        self._checks.record_finding(CheckFinding(names_of(hops), verdict, reason))

    def record_no_conclusion(self, hops: tuple[Hop, ...], error: SwarmError) -> None:
        """Record an audit that came to nothing; where nobody else holds the blocks, once."""
        if not isinstance(error, NoRoute) or not self._has_told_alone:
            self._has_told_alone |= isinstance(error, NoRoute)
            self.record(hops, AuditVerdict.INCONCLUSIVE, str(error))

    def _record_key(self, hop: Hop) -> str:
        return f"{hop.peer}/{self._model[:16]}/{hop.span.start}:{hop.span.end}/tuning"


def names_of(hops: tuple[Hop, ...]) -> str:
    """Some hops, as people read them."""
    return ", ".join(map(str, hops))
