"""Why a micro-batch did not get through a lane, and what the pipeline should do before it sends it again."""

from __future__ import annotations

from swarmd.errors import OUR_MEMBERSHIP, Code, PeerError, Refused, SwarmError
from swarmd.plan.chains.routing import Hop
from swarmd.plan.trust.blame import Blame
from swarmd.protocol.wire.messages import Refusal
from swarmd.values import PeerId

NO_ROOM_PAUSE_S = 1.0  # a server without room has some after a few micro-batches
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


# What a hop's refusal means, by its code:
#
#     NOT_FINITE                          the peer that gave the hop its input is to blame, and the lane is over
#     NOT_HELD                            something has to be given again; nobody is to blame, the lane goes on
#     NO_CAPACITY, NOT_SERVING            the hop is left out for a while; what is under way in the lane goes on
#     SESSION_LOST, NO_SESSION            the lane is over, and the hop is back soon
#     all others                          the lane is over; with one of FINAL others will refuse, too
def failure_of_refusal(hops: tuple[Hop, ...], refusal: Refusal, is_backward: bool) -> LaneFailed:
    """What a refusal to one micro-batch, on its way forward or back, means for it and for the lane of ``hops``."""
    code = Code(refusal.code)
    hop = _refusing_hop(hops, refusal.start, is_backward)
    reason = f"{hop}: {refusal.message}"
    is_final = code in FINAL
    if hop is not None and code is Code.NOT_FINITE:
        givers = _input_giver(hops, hop, is_backward)
        return LaneFailed(reason, *givers, blame=Blame.FAILING, is_final=is_final)
    if code is Code.NOT_HELD:
        return LaneFailed(reason, is_over=False, is_final=is_final)
    if hop is None:
        return LaneFailed(reason, is_final=is_final)
    is_back_soon = code in (Code.SESSION_LOST, Code.NO_SESSION)
    wait_s = None if refusal.retry_after_ms is None else refusal.retry_after_ms / 1000
    return LaneFailed(
        reason,
        hop.peer,
        for_s=wait_s or (NO_ROOM_PAUSE_S if is_back_soon else LEFT_OUT_S),
        blame=Blame.UNAVAILABLE,
        is_over=code not in (Code.NO_CAPACITY, Code.NOT_SERVING),
        is_final=is_final,
    )


def _refusing_hop(hops: tuple[Hop, ...], block: int, is_backward: bool) -> Hop | None:
    """The hop that a refusal names by the block at which it takes its input; else by its first block."""
    for hop in hops:
        if block == (hop.span.end if is_backward else hop.span.start):
            return hop
    return next((hop for hop in hops if hop.span.start == block), None)


def _input_giver(
    hops: tuple[Hop, ...],
    hop: Hop,
    is_backward: bool,
) -> tuple[PeerId, ...]:
    """The peer that gave a hop its input; none if that is the client itself."""
    index = hops.index(hop) + (1 if is_backward else -1)
    return (hops[index].peer,) if 0 <= index < len(hops) else ()
