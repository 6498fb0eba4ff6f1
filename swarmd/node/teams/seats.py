"""The members of a team on other machines, as its leader's daemon gets them together before each start of its worker.

Who cannot come is left out, and its slices are the others': so a team goes on without a machine that was switched off.
It is asked again when the worker starts the next time.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import msgspec
import trio

from swarmd.config import split
from swarmd.errors import PeerError, Refused, RemoteProtocolError
from swarmd.net.rpc import Rpc
from swarmd.node.machine.store import Store
from swarmd.plan.chains.memory import group_bytes
from swarmd.protocol.wire.teams import JoinTeam, SeatIs, TeamSeat
from swarmd.protocol.wire.worker import LoadSpan
from swarmd.values import Decision, ModelId, PeerId

logger = logging.getLogger(__name__)

FIRST_PATIENCE_S = 60.0  # for machines that start at the same time as this one
PATIENCE_S = 2.0  # later, when a session may wait for the worker
FETCHING_S = 3600.0  # for a member that fetches blocks, and says so
ASK_AGAIN_S = 0.5  # after somebody could not be reached
CALL_S = 5.0  # for an answer


@dataclass(frozen=True, slots=True)
class Seating:
    """Where a member is, or why it does not come."""

    seat: TeamSeat | None
    reason: str = ""


class TeamSeats:
    """See the module. ``peers``: comma-separated ids of the members behind the leader."""

    def __init__(self, rpc: Rpc, store: Store, peers: str) -> None:
        self._rpc = rpc
        self._store = store
        self._peers = tuple(map(PeerId, split(peers)))
        self._patience_s = FIRST_PATIENCE_S
        self.seated: tuple[PeerId, ...] = ()  # in the order of the request's seats

    async def prepare(self, request: LoadSpan) -> Decision[LoadSpan]:
        """Have all members asked; returns the request with those that come, and why others do not."""
        first, *others = request.team
        manifest = await self._store.supply.manifest(ModelId(request.model))
        block_bytes, _ = group_bytes(manifest, request.dtype, request.quantize)
        n_bytes = sum(block_bytes[request.start : request.end])
        seatings: dict[int, Seating] = {}

        async def ask(number: int, peer: PeerId, weight: float) -> None:
            join = JoinTeam(
                model=request.model,
                start=request.start,
                end=request.end,
                hold_bytes=n_bytes if request.team_mode == "whole" else int(n_bytes * weight / sum(request.team)),
            )
            seatings[number] = await self._ask(peer, join)

        async with trio.open_nursery() as nursery:
            for number, (peer, weight) in enumerate(zip(self._peers, others, strict=True)):
                nursery.start_soon(ask, number, peer, weight)
        self._patience_s = PATIENCE_S
        weights, seats, missing = [first], [], []
        self.seated = tuple(peer for number, peer in enumerate(self._peers) if seatings[number].seat is not None)
        for number, weight in enumerate(others):
            seating = seatings[number]
            if seating.seat is None:
                missing.append(f"without {self._peers[number]} in its team: {seating.reason}")
                logger.warning("%s", missing[-1])
            else:
                weights.append(weight)
                seats.append(seating.seat)
        return Decision(
            msgspec.structs.replace(request, team=tuple(weights), seats=tuple(seats), n_bytes=n_bytes),
            "; ".join(missing),
        )

    async def _ask(self, peer: PeerId, join: JoinTeam) -> Seating:
        """Ask one member until it comes, refuses for good, or has been waited for long enough."""
        begun = trio.current_time()
        while True:
            patience_s = self._patience_s
            try:
                answer, _ = await self._rpc.call(peer, join, timeout_s=CALL_S)
                if not isinstance(answer, SeatIs):
                    raise RemoteProtocolError(f"{peer} answers {type(answer).__name__} where a seat was asked for")
                host = self._rpc.network.remote_host(peer)
                if host is not None:
                    return Seating(TeamSeat(host, answer.ticket))
                reason = f"{peer} cannot be dialled from here: a team is for machines of one site"
            except Refused as error:
                reason = str(error)
                if error.retry_after_s is None:
                    return Seating(None, reason)
                patience_s = FETCHING_S
            except PeerError as error:
                reason = str(error)
            if trio.current_time() - begun > patience_s:
                return Seating(None, reason)
            await trio.sleep(ASK_AGAIN_S)
