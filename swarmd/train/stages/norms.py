"""The norm of an update over all stages: each stage's commit names that of its own average, and all are clipped alike.

An update counts in no stage before all stages have committed it: only then is it known by how much it is clipped.
"""

from __future__ import annotations

import logging
import math

import trio

from swarmd.errors import IntegrityError, PeerError
from swarmd.net.rpc import Rpc
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.runs import commit as commits
from swarmd.protocol.runs.commit import Commit
from swarmd.protocol.runs.recipe import Run
from swarmd.train.store import recovery
from swarmd.train.store.chronicle import Chronicle
from swarmd.train.store.members import Members

logger = logging.getLogger(__name__)

KEPT_UPDATES = 256  # of which norms are remembered: what a member misses and applies one by one


class StageNorms:
    """See the module. ``members``: who keeps the ledger of each stage, this one's included."""

    def __init__(self, rpc: Rpc, chronicle: Chronicle, members: dict[int, Members]) -> None:
        self._rpc = rpc
        self._chronicle = chronicle
        self._run = chronicle.run
        self._members = members
        self._norms: dict[tuple[int, int], float] = {}  # by stage and update

    async def clip_of(self, commit: Commit) -> float | None:
        """Return what clips an update of all stages; None while some have not committed it."""
        update = commit.epoch
        assert self._run.stage is not None
        self._norms[self._run.stage, update] = commit.norm or 0.0
        lacking = [stage for stage in range(len(self._run.stages)) if (stage, update) not in self._norms]
        async with trio.open_nursery() as nursery:
            for stage in lacking:
                nursery.start_soon(self._ask_stage, stage, update)
        if any((stage, update) not in self._norms for stage in lacking):
            return None
        norms = [self._norms[stage, update] for stage in range(len(self._run.stages))]
        oldest = update - KEPT_UPDATES
        self._norms = {key: norm for key, norm in self._norms.items() if key[1] > oldest}
        return clip_over_stages(norms, self._run.recipe.clip_norm)

    async def _ask_stage(self, stage: int, update: int) -> None:
        """Ask members of a stage for its commits from an update on, until one gives them."""
        part = self._run.in_stage(stage)
        records = self._members[stage].look(trio.current_time())
        for peer, record in records.items():
            if record.epoch < update and record.role != "train":
                continue
            try:
                raws = await recovery.fetch_commits(self._rpc, peer, part.id, update - 1)
                for raw in raws:
                    self._note(part, stage, raw)
            except IntegrityError as error:
                self._rpc.standing.fault(peer, Fault.FORGED, str(error))
            except PeerError as error:
                logger.info("%s does not tell the commits of stage %d: %s", peer[-8:], stage, error)
            if (stage, update) in self._norms:
                return

    def _note(self, part: Run, stage: int, raw: bytes) -> None:
        """Note a commit of another stage. Raises IntegrityError."""
        commit = commits.read_untrusted(raw, self._chronicle.order.sets_of(self._run.recipe)).commit
        if commit.run != part.genesis:
            raise IntegrityError("a commit of another stage than was asked for")
        self._norms[stage, commit.epoch] = commit.norm or 0.0


def clip_over_stages(norms: list[float], limit: float) -> float:
    """Compute what brings the norm of all stages together to ``limit``; 1.0 where it is not above."""
    norm = math.sqrt(math.fsum(norm * norm for norm in norms))
    return min(1.0, limit / norm) if norm else 1.0
