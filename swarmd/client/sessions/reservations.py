"""The hops of one session at their servers: chosen and opened at first, opened for repairs, and given back."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from functools import partial

import trio

from swarmd.client.links.client_parameters import upload_parameters
from swarmd.client.links.link import HopLink, SessionServices
from swarmd.client.links.ops import codec_for
from swarmd.client.sessions.chain import Chain, is_final
from swarmd.client.sessions.repair_plan import PATIENCE_S
from swarmd.client.sessions.requests import Requests
from swarmd.client.sessions.route_choice import RouteChoice
from swarmd.errors import OUR_MEMBERSHIP, CacheExhausted, Code, NoRoute, PeerError, Refused, SwarmError
from swarmd.protocol.wire.messages import CloseSession, Opened
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_S = 8.0  # for one hop to say yes or no, a connection included
PINNED_PATIENCE_S = 12.0  # where the user named the chain: nobody else can come
REFRESH_TIMEOUT_S = 0.5  # the member that is asked may be the one that is gone; the client goes on asking by itself
REOPEN_PAUSE_S = 0.5  # views change within an exchange
GIVE_BACK_S = 1.0  # to tell one hop that it is free


class Reservations:
    """What servers keep for one session: a hop's caches, from its opening until it is given back."""

    def __init__(self, swarm: SessionServices, chain: Chain, routes: RouteChoice, requests: Requests) -> None:
        self._swarm = swarm
        self._chain = chain
        self._routes = routes
        self._requests = requests
        self._opened: set[tuple[PeerId, int]] = set()

    # --- opening ---------------------------------------------------------------------------------------------

    async def open_chain(self) -> None:
        """Choose hops and open each; retries elsewhere while a refusal allows. Raises SwarmError."""
        chain = self._chain
        pinned = chain.terms.route
        deadline = trio.current_time() + (PINNED_PATIENCE_S if pinned else PATIENCE_S)
        reason: SwarmError | None = None
        while True:
            try:
                hops = pinned or self._routes.choose_route(chain.terms.blocks).hops
                chain.links = [HopLink(hop) for hop in hops]
                chain.codec = codec_for(self._swarm, chain.terms, [hop.peer for hop in hops])
                failures = await self.open_hops(range(len(chain.links)))
                if not failures:
                    await self.give_back_strays()
                    return
                self.raise_if_hopeless(failures)
                reason = next(iter(failures.values()))
                for index, error in failures.items():
                    chain.fail_hop(chain.links[index], error)
                if pinned and all(is_final(error) for error in failures.values()):
                    raise reason
            except NoRoute as error:
                if reason is not None and self._routes.is_refused_for_good():
                    raise reason from None
                reason = reason or error  # what a server said is worth more than that it is left out meanwhile
            if trio.current_time() > deadline:
                raise reason
            chain.trouble = None
            await self.wait_for_records()

    async def open_hops(self, indexes: Iterable[int]) -> dict[int, PeerError]:
        """Open some hops side by side; returns which failed."""
        failures: dict[int, PeerError] = {}
        async with trio.open_nursery() as nursery:
            for index in indexes:
                nursery.start_soon(self.open_hop, index, failures)
        return failures

    async def open_hop(
        self,
        index: int,
        failures: dict[int, PeerError],
        inherit: str = "",
    ) -> None:
        """Open one hop, with ``inherit`` to take over the caches of that peer; notes why it failed."""
        chain = self._chain
        link = chain.links[index]
        place = (link.hop.peer, link.hop.span.start)
        self._swarm.rpc.network.learn(link.hop.peer, self._swarm.addresses_of(link.hop.peer))
        is_exact = chain.terms.grade == "exact"
        numerics = self._routes.numerics if is_exact else ""
        request = self._requests.open(index, numerics, inherit)
        self._opened.add(place)  # whether its answer comes or not
        link.n_tokens_at_open = chain.accounts.n_tokens
        try:
            if chain.terms.tuned is not None:
                await upload_parameters(self._swarm.rpc, chain.terms.model, link.hop, chain.terms.tuned)
            reply, _ = await self._swarm.rpc.call(link.hop.peer, request, timeout_s=OPEN_TIMEOUT_S)
        except PeerError as error:
            failures[index] = error
            return
        chain.accounts.note_reopened(place)  # what came until now is of the cache before
        if isinstance(reply, Opened):
            chain.layer_arity = reply.layer_arity
            link.received = 0 if chain.position.seq == 0 else None
            if is_exact and not self._routes.numerics:
                self._routes.numerics = reply.numerics

    def raise_if_hopeless(self, failures: dict[int, PeerError]) -> None:
        """Refusals that no other server would answer differently end the session."""
        for index, error in failures.items():
            if isinstance(error, Refused) and error.code is Code.TOO_LONG:
                raise CacheExhausted(f"{self._chain.links[index].hop}: {error}")
            if isinstance(error, Refused) and error.code in OUR_MEMBERSHIP:
                raise error

    async def wait_for_records(self) -> None:
        """Wait a little and ask for newer records; nobody answering is a reason to go on waiting, not to fail."""
        await trio.sleep(REOPEN_PAUSE_S)
        try:
            with trio.move_on_after(REFRESH_TIMEOUT_S):
                await self._swarm.refresh()
        except SwarmError as error:
            logger.info("no newer records: %s", error)

    # --- giving back -----------------------------------------------------------------------------------------

    async def give_back_strays(self) -> None:
        """Close what was opened on the way to the present chain and is no part of it."""
        await self._give_back({(link.hop.peer, link.hop.span.start) for link in self._chain.links})

    async def give_back_all(self) -> None:
        """Close every hop that was opened."""
        await self._give_back(set())

    async def _give_back(self, in_use: set[tuple[PeerId, int]]) -> None:
        unused = self._opened - in_use
        self._opened &= in_use
        async with trio.open_nursery() as nursery:
            for peer, start in unused:
                nursery.start_soon(self._give_back_one, peer, start)

    async def _give_back_one(self, peer: PeerId, start: int) -> None:
        with trio.move_on_after(GIVE_BACK_S) as scope:
            await self._tell_closed(peer, start)
        if scope.cancelled_caught:  # the machine is busy: nobody waits for it, but the server's room does
            self._swarm.start_soon(partial(self._tell_closed, peer, start))

    async def _tell_closed(self, peer: PeerId, start: int) -> None:
        channel = self._swarm.rpc.find_channel(peer)
        if channel is not None:
            with suppress(PeerError):
                await channel.send(CloseSession(session=self._chain.key, start=start))
