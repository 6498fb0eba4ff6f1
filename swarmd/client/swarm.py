"""The client's side of a swarm: a throw-away member that listens to records and opens sessions.

``AsyncSwarm`` is what trio programs use; scripts and notebooks use the same from any thread (``blocking``).
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import trio

from swarmd.client.dispatch import MessageDispatch, RunGuest
from swarmd.client.links.checks import Checks
from swarmd.client.links.link import SessionOptions
from swarmd.client.links.trips import MeasuredTrips
from swarmd.client.sessions.audit import Auditor
from swarmd.client.sessions.session import ChainSession
from swarmd.client.sessions.verify import VerifyingChain
from swarmd.client.tuning.pipeline import Pipeline
from swarmd.clocks import steady_clock
from swarmd.errors import (
    ConfigError,
    NoRoute,
    PeerError,
    Refused,
    SwarmError,
    SwarmUnavailable,
    first_error,
)
from swarmd.names import is_model_hash
from swarmd.net.api import Network, TaskStatus, Way
from swarmd.net.direct import DirectNetwork
from swarmd.net.exchange import Exchange
from swarmd.net.libp2p.host import HostOptions, Libp2pNetwork
from swarmd.net.pace import Pace
from swarmd.net.rpc import Rpc
from swarmd.net.standing import Standing
from swarmd.net.tasks import Tasks
from swarmd.plan.chains.view import SwarmView, coverage
from swarmd.plan.links.coordinates import NetworkPoint
from swarmd.plan.trust.reputation import Trust, rate_servers
from swarmd.protocol.membership import records
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.membership.invite import SwarmKeys
from swarmd.protocol.membership.records import AnyRecord, SpanRecord
from swarmd.usage_ledger import UsageLedger
from swarmd.values import ModelId, PeerId
from swarmd.weights.library import Library
from swarmd.weights.supply import Supply
from swarmd.wire.history import Budget

logger = logging.getLogger(__name__)

REFRESH_INTERVAL_S = 3.0  # a client's view is as old at most
JOIN_TIMEOUT_S = 10.0  # for one member to answer; there may be another
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ClientMembership:
    """What a client needs to enter: the swarm's keys, its own identity and certificate, and where members are.

    ``folders`` are checkpoints on this machine, ``weights`` is where those that come from the swarm are kept, and
    ``drafts`` where drafts learned; ``checks`` is what was found of servers, and ``books`` what they gave.
    """

    keys: SwarmKeys
    identity: Identity
    certificate: tuple[bytes, ...]
    bootstrap: dict[PeerId, tuple[str, ...]]
    folders: dict[ModelId, Path]
    weights: Path
    drafts: Path
    checks: Path | None = None
    books: Path | None = None


# A client is a member that serves nothing; it announces records of training runs only. It runs in one trio thread:
#
#     run         joins, then pulls records from one member every REFRESH_INTERVAL_S; ``view`` is frozen in between
#     dispatch    gives each message to the session, lane or run whose key it bears; its ``listeners`` hold all keys
#     start_soon  holds work that outlives its caller: audits, repairs between steps, hops to be given back
#
# Sessions are audited by sessions: an audit opens one through other servers, which see it as a session like any other.
# Such a session is not audited itself (``is_audited=False``).
class AsyncSwarm:
    """A swarm inside a trio program. Made by ``join_swarm``."""

    def __init__(
        self,
        membership: ClientMembership,
        network: Network,
        wall_clock: Callable[[], float],
    ) -> None:
        self.wall_clock = wall_clock
        self.exchange = Exchange(membership.keys, wall_clock)
        self.dispatch = MessageDispatch(self.exchange, membership.certificate)
        self.rpc = Rpc(network, self.dispatch, Standing(steady_clock(wall_clock)), self.exchange.roster.principal)
        self.budget = Budget()
        library = Library(membership.weights, membership.folders)
        self.supply = Supply(library, self.rpc, self.view, Pace(lambda: None))
        self._membership = membership
        self.identity = membership.identity
        self.books = UsageLedger(membership.books)
        self._network = network
        self._trips = MeasuredTrips(network.peer_id)
        self._rng = random.Random()
        self._trusted: tuple[SwarmView, Mapping[tuple[str, int], Trust]] | None = None
        self.checks = Checks(self._rng, membership.checks)
        self.audits = True  # False: nobody's answers are checked
        self._tasks = Tasks()

    @property
    def weights_folder(self) -> Path:
        """Where this client keeps what came from the swarm, and what it compiled."""
        return self._membership.weights

    @property
    def drafts_folder(self) -> Path:
        """Where drafts learned on this machine, each in a folder of its model's hash."""
        return self._membership.drafts

    def view(self) -> SwarmView:
        """The frozen picture of all records."""
        return self.exchange.view()

    def trust(self) -> Mapping[tuple[str, int], Trust]:
        """How servers are regarded, by what members found of each other; made anew with each view."""
        view = self.view()
        if self._trusted is None or self._trusted[0] is not view:
            trust = rate_servers(view.listed(), view.peers.values(), self.voucher_of)
            self._trusted = view, trust
        return self._trusted[1]

    def trips(self, spans: Sequence[SpanRecord]) -> dict[tuple[str, str], float]:
        """Return seconds one way between servers, and from this client, as far as they are known."""
        return self._trips.between(spans)

    def locate(self, spans: Sequence[SpanRecord]) -> NetworkPoint | None:
        """Say where this client is in the net, by which trips are estimated that nobody has measured."""
        return self._trips.locate(spans)

    def addresses_of(self, peer: PeerId) -> tuple[str, ...]:
        """Return where a peer is, by its record, else by what this client joined with."""
        return self.exchange.addresses_of(peer) or self._membership.bootstrap.get(peer, ())

    def voucher_of(self, peer: PeerId) -> bytes:
        """Return the key that brought a member in."""
        return self.exchange.roster.voucher_of(peer)

    def way_to(self, peer: PeerId) -> Way | None:
        """How this client is connected with a member: direct, reversed, punched or relayed; None when it is not."""
        return self._network.way_to(peer)

    async def open_session(self, terms: SessionOptions, is_audited: bool = True) -> ChainSession:
        """Open a session over the cheapest chain; others check it now and then. Raises SwarmError."""
        session = ChainSession(self, terms, self.budget)
        if is_audited and self.audits:
            auditor = Auditor(self, self, session)
            session.auditor = auditor
            session.chain.on_lost = auditor.on_lost
        if terms.verify == 1:
            open_second = partial(self.open_session, is_audited=False)
            session.second = VerifyingChain(session, open_second, self.start_soon)
        self.dispatch.listeners[session.key] = session
        try:
            try:
                await session.open()
            except NoRoute as error:
                raise self._with_clock(error) from None
        except BaseException:
            session.auditor = None  # there is nothing to check
            with trio.CancelScope(shield=True):
                await self.close_session(session)
            raise
        return session

    def pipeline(self, terms: SessionOptions) -> Pipeline:
        """Lanes for fine-tuning through a model's blocks."""
        return Pipeline(self, self.dispatch.listeners, terms, self if self.audits else None)

    async def close_session(self, session: ChainSession) -> None:
        """Check what is left to check, unless this is cancelled, and give the hops back in any case."""
        try:
            if session.auditor is not None:
                await session.auditor.last_look()
        finally:
            with trio.CancelScope(shield=True):
                for (peer, _), (bill, signed) in session.chain.accounts.bills.items():
                    self.books.add(bill, signed, self.voucher_of(peer))
                second = await session.second.stop() if session.second is not None else None
                if second is not None:
                    await self.close_session(second)
                self.dispatch.listeners.pop(session.key, None)
                await session.close()

    async def resolve(self, name: str) -> tuple[ModelId, int]:
        """Find a model by its name in the catalog, or by hash. Raises ConfigError, or SwarmUnavailable for a hash."""
        model = self.view().model_named(name)
        if model is not None:
            return model
        if is_model_hash(name):
            manifest = await self.supply.manifest(ModelId(name))
            return ModelId(name), manifest.n_blocks
        names = ", ".join(sorted(self.view().catalog.models)) or "none yet"
        clock = self._clock_clause()
        raise ConfigError(f"the swarm's catalog has no model {name!r}; it has: {names}{clock}")

    def adapter(self, name: str, model: ModelId) -> str:
        """The hash of an adapter by its name in the catalog, or by hash; "" is none. Raises ConfigError."""
        listed = self.view().catalog.adapters
        if name in listed and listed[name][1] != model:
            raise ConfigError(f"the adapter {name!r} is made for {listed[name][1][:12]}, not for {model[:12]}")
        if name in listed or not name:
            return listed[name][0] if name else ""
        if is_model_hash(name):
            return name
        fitting = sorted(n for n, (_, base) in listed.items() if base == model)
        raise ConfigError(f"the catalog has no adapter {name!r} for this model; it has: {', '.join(fitting) or 'none'}")

    def quantize(self, model: ModelId, n_blocks: int) -> str:
        """Which servers a session that does not care should use: its later tokens must not come from other weights."""
        plain = (s for s in self.view().spans if s.quantize == "none")
        return "none" if all(coverage(plain, model, n_blocks)) else "any"

    async def folder(self, model: ModelId, n_blocks: int) -> Path:
        """Where the client's own part of a model lies: tokenizer, embedding, head; fetched if need be.

        Raises ConfigError when it does not fit, SwarmUnavailable when nobody gives it.
        """
        return (await self.supply.ensure(model, [n_blocks])).folder

    def folder_here(self, model: ModelId) -> Path | None:
        """Where the client's own part of a model lies, if it is on this disk already. Fetches nothing."""
        known = self.supply.library.folders.get(model)
        return known.folder if known is not None and known.head in known.held else None

    async def wait_for(
        self,
        model: ModelId,
        n_blocks: int,
        timeout_s: float,
        dtype: str = "auto",
    ) -> str:
        """Wait until every block is served in a dtype, and return which. Raises NoRoute with what is missing."""
        deadline = trio.current_time() + timeout_s
        while True:
            try:
                return self.view().served_dtype(model, n_blocks, dtype)
            except NoRoute as error:
                if trio.current_time() >= deadline:
                    raise self._with_clock(error) from None
            await trio.sleep(0.3)
            await self.refresh()

    async def refresh(self) -> None:
        """Exchange records with one member, the first that answers. Raises SwarmUnavailable."""
        members = sorted(self.view().peers)
        shuffled = self._rng.sample(members, len(members))
        peers = list(dict.fromkeys([*shuffled, *self._membership.bootstrap]))
        failures: list[str] = []
        for peer in peers:
            if peer == self._network.peer_id:
                continue
            self._network.learn(peer, self.addresses_of(peer))
            try:
                await self.exchange.pull(self.rpc, peer)
                return
            except Refused as error:
                raise Refused(error.code, f"{error}{self._clock_clause()}", error.retry_after_s) from None
            except PeerError as error:
                failures.append(str(error))
        raise SwarmUnavailable(f"no member of the swarm answers: {'; '.join(failures) or 'no address is known'}")

    def _clock_clause(self) -> str:
        """The end of a sentence about a failure that this machine's clock may be the reason of; else ""."""
        wrong_clock = self.exchange.describe_wrong_clock()
        return f"; {wrong_clock}" if wrong_clock else ""

    def _with_clock(self, error: NoRoute) -> NoRoute:
        clause = self._clock_clause()
        return NoRoute(f"{error}{clause}", error.missing) if clause else error

    def take_part(self, run: str, guest: RunGuest | None) -> None:
        """Give ``guest`` the messages about a training run; None: no longer."""
        if guest is None:
            self.dispatch.runs.pop(run, None)
        else:
            self.dispatch.runs[run] = guest

    async def announce(self, record: AnyRecord) -> None:
        """Tell the members that this client is connected with what it does in a run."""
        raw = records.sign(record, self._membership.identity)
        await self.exchange.push(self.rpc, [raw], sorted(self.rpc.peers()))

    @property
    def certificate(self) -> tuple[bytes, ...]:
        """What shows other members that this client is one."""
        return self._membership.certificate

    def start_soon(self, function: Callable[[], Awaitable[None]]) -> None:
        """Start work that goes on beside its caller; what goes wrong in it ends nothing else."""
        self._tasks.start_soon(function)

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Join, then keep the view fresh until cancelled."""
        async with self._tasks.open(), trio.open_nursery() as nursery:
            await nursery.start(self.rpc.run)
            nursery.start_soon(self.books.keep)
            await self._join_swarm()
            task_status.started()
            while True:
                await trio.sleep(REFRESH_INTERVAL_S * self._rng.uniform(0.8, 1.2))
                try:
                    await self.refresh()
                    await self._trips.measure(self.rpc)
                except SwarmError as error:
                    logger.info("the view is getting old: %s", error)

    async def _join_swarm(self) -> None:
        try:
            with trio.fail_after(JOIN_TIMEOUT_S):
                await self.refresh()
                await self._trips.measure(self.rpc)
        except trio.TooSlowError:
            raise SwarmUnavailable(f"no member of the swarm answered within {JOIN_TIMEOUT_S} s") from None


@asynccontextmanager
async def join_swarm(membership: ClientMembership) -> AsyncIterator[AsyncSwarm]:
    """Join over libp2p; leaves on the way out. Raises SwarmError."""
    options = HostOptions(certificate=membership.certificate)
    libp2p = Libp2pNetwork(membership.identity, membership.keys.psk, options)
    network = DirectNetwork(libp2p)
    failure: SwarmError | None = None
    async with libp2p.running(), network.running(), trio.open_nursery() as nursery:
        swarm = AsyncSwarm(membership, network, time.time)
        for peer, addresses in membership.bootstrap.items():
            network.learn(peer, addresses)
        try:
            await nursery.start(swarm.run)
        except* SwarmError as group:
            first = first_error(group)
            assert isinstance(first, SwarmError)
            failure = first
        if failure is None:
            yield swarm
        nursery.cancel_scope.cancel()
    if failure is not None:
        raise failure
