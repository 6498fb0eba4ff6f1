"""The client's own parameters in one lane: each hop is given its part, once for each version."""

from __future__ import annotations

import trio

from swarmd.client.links.client_parameters import TunedParameters, upload_parameters
from swarmd.client.tuning.lane_failure import LaneFailed, failure_of
from swarmd.client.tuning.lane_life import LaneLife
from swarmd.errors import PeerError
from swarmd.net.rpc import Rpc
from swarmd.plan.chains.routing import Hop
from swarmd.values import ModelId


class LaneParameters:
    """Which version of the parameters each hop of a lane was given."""

    def __init__(
        self,
        rpc: Rpc,
        model: ModelId,
        hops: tuple[Hop, ...],
        life: LaneLife,
    ) -> None:
        self._rpc = rpc
        self._model = model
        self._hops = hops
        self._life = life
        self._versions: dict[int, bytes] = {}  # by a hop's first block
        self._lock = trio.Lock()

    def forget_uploads(self) -> None:
        """A hop lacks what it was given: give all of it again."""
        self._versions.clear()

    async def upload(self, tuned: TunedParameters) -> None:
        """Give the parameters to each hop that has not got this version. Raises LaneFailed."""
        if not tuned.version:
            return
        async with self._lock:
            lacking = [hop for hop in self._hops if self._versions.get(hop.span.start) != tuned.version]
            failures: list[LaneFailed] = []
            async with self._life.while_open() as nursery:
                for hop in lacking:
                    nursery.start_soon(self._upload_to, hop, tuned, failures)
            if failures:
                raise failures[0]

    async def _upload_to(self, hop: Hop, tuned: TunedParameters, failures: list[LaneFailed]) -> None:
        try:
            await upload_parameters(self._rpc, self._model, hop, tuned)
            self._versions[hop.span.start] = tuned.version
        except PeerError as error:
            failures.append(failure_of(hop, error))
