"""Why a micro-batch did not get through a lane, and what the pipeline should do before it sends it again."""

from __future__ import annotations

from swarmd.errors import OUR_MEMBERSHIP, Code, PeerError, Refused, SwarmError
from swarmd.plan.chains.routing import Hop
from swarmd.plan.trust.blame import Blame
from swarmd.values import PeerId

LEFT_OUT_S = 20.0  # left out: as long as a server that was killed takes to be back
FINAL = (Code.TOO_LONG, Code.UNSUPPORTED, Code.BAD_SHAPE, Code.MALFORMED, *OUR_MEMBERSHIP)


class LaneFailed(SwarmError):
    """A micro-batch did not get through.

    ``peers``: whom to do without, and for how long; ``blame`` says what else follows. ``is_over``: the whole lane;
    ``is_final``: others will say no too.
    """

    def __init__(
        self,
        reason: str,
        *peers: PeerId,
        for_s: float = LEFT_OUT_S,
        blame: Blame | None = None,
        is_over: bool = True,
        is_final: bool = False,
    ) -> None:
        super().__init__(reason)
        self.peers = peers
        self.for_s = for_s
        self.blame = blame or (Blame.AMBIGUOUS if len(peers) > 1 else Blame.SILENT)
        self.is_over = is_over
        self.is_final = is_final


def failure_of(hop: Hop, error: PeerError) -> LaneFailed:
    """What a hop's error means for its lane; a refusal says how long to wait, and whether others would refuse too."""
    if not isinstance(error, Refused):
        return LaneFailed(f"{hop}: {error}", hop.peer)
    return LaneFailed(
        f"{hop}: {error}",
        hop.peer,
        for_s=error.retry_after_s or LEFT_OUT_S,
        blame=Blame.UNAVAILABLE,
        is_final=error.code in FINAL,
    )
