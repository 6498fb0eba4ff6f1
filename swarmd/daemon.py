"""The composition root: the only place that wires a daemon's parts together. It decides nothing by itself.

``Daemon`` takes its services as arguments (network, rendezvous, clock, randomness, how workers start), so that the
simulator and the tests run the same program; ``main`` gives it the real ones.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import random
import signal
import socket
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import trio

from swarmd.clocks import steady_clock
from swarmd.config import Config, split
from swarmd.errors import Refused, SwarmError
from swarmd.home.founder import Founder
from swarmd.home.membership import MembershipFiles, by_peer
from swarmd.home.models import ModelFolders
from swarmd.home.paths import Home
from swarmd.names import choose_member_name
from swarmd.net.api import NatTraversal, Network, Purpose, RecordStore, TaskStatus
from swarmd.net.exchange import Exchange
from swarmd.net.port_control import NONCE_BYTES
from swarmd.net.rpc import Channel, Rpc
from swarmd.net.standing import Standing
from swarmd.net.traffic import Traffic
from swarmd.node.machine.control import serve_control
from swarmd.node.machine.gateway_process import GatewayProcess, command
from swarmd.node.machine.health import Health
from swarmd.node.machine.heap import trim_heap
from swarmd.node.machine.metrics import serve_metrics
from swarmd.node.machine.presence import Presence, limits_of, verdict_now
from swarmd.node.machine.service_manager import ServiceManager
from swarmd.node.machine.store import Store
from swarmd.node.members.address_memory import AddressMemory
from swarmd.node.members.directory import Directory, DirectoryServices
from swarmd.node.members.order import Order
from swarmd.node.members.reachability import Reachability
from swarmd.node.members.record_signer import RecordSigner
from swarmd.node.members.registrar import Registrar
from swarmd.node.members.rendezvous import value_validator
from swarmd.node.members.router_port import RouterPort
from swarmd.node.serving.balancer import Turnover
from swarmd.node.serving.choosing import HostingServices
from swarmd.node.serving.hosts import Hosts
from swarmd.node.serving.prober import Prober
from swarmd.node.serving.trials import Trials
from swarmd.node.teams.following import TeamsFollowed
from swarmd.node.worker.worker_link import WORKER, Prestarted, Starter
from swarmd.protocol.membership.catalog import AdmittedMember, Catalog
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.membership.invite import SwarmKeys
from swarmd.protocol.understanding import OURS, Understanding
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.messages import Accuse, AnyMessage, ExchangeDigest, Hello, Ping, Pong, Records
from swarmd.report import DaemonParts, Owner
from swarmd.resources import count_processors, measure_memory
from swarmd.train.local_run import RunsServices
from swarmd.train.runs import Runs
from swarmd.usage_ledger import UsageKind, UsageLedger
from swarmd.values import ModelId, PeerId
from swarmd.weights.library import Library

logger = logging.getLogger(__name__)

COUNT_INTERVAL_S = 60  # hours in the books are exact to a minute
GOODBYE_S = 1.0  # to tell others that this peer leaves


@dataclass(frozen=True, slots=True)
class LocalMember:
    """Whose daemon it is: the swarm's keys, this machine's identity and certificate, what is on its disk.

    ``home`` keeps catalog, addresses and the control socket; None: nothing is kept, as in the simulator.
    ``name``: what other members are told that this machine is called.
    """

    keys: SwarmKeys
    identity: Identity
    certificate: tuple[bytes, ...]
    weights: Path
    folders: dict[ModelId, Path] = field(default_factory=dict)
    bootstrap: dict[PeerId, tuple[str, ...]] = field(default_factory=dict)
    home: Home | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class DaemonServices:
    """The services that a daemon runs on: the real ones, or simulated ones, perhaps of another version.

    ``hosts``: the IP addresses where others reach what listens here.
    """

    network: Network
    records: RecordStore
    wall_clock: Callable[[], float]
    rng: random.Random
    start_worker: Starter
    understands: Understanding = OURS
    hosts: tuple[str, ...] = ()
    ways: NatTraversal | None = None
    traffic: Traffic | None = None


class Daemon:
    """One member of the swarm: directory, store, training runs, and what it serves."""

    def __init__(self, member: LocalMember, config: Config, services: DaemonServices, exchange: Exchange) -> None:
        network = services.network
        home = member.home
        self.network = network
        self.exchange = exchange
        steady = steady_clock(services.wall_clock)
        standing = Standing(steady, home.standing_file if home else None)
        self.rpc = Rpc(network, self, standing, exchange.roster.principal)
        self.directory = _directory_of(member, services, exchange, self.rpc, config)
        library = Library(member.weights, member.folders, int(config.disk_limit_gib * 2**30))
        self.books = UsageLedger(home.books_file if home else None)
        self.order = Order(exchange, self.books, network.peer_id)
        self.store = Store(
            self.rpc,
            self.directory.view,
            library,
            config,
            changed=self.directory.announce_soon,
            count=self.books.count,
        )
        pause_file = home.pause_file if home else None
        self.presence = Presence(config.policy, self._rest, pause_file, services.traffic)
        runs_services = RunsServices(
            rpc=self.rpc,
            identity=member.identity,
            directory=self.directory,
            supply=self.store.supply,
            config=config,
            root=home.runs if home else member.weights,
            rng=services.rng,
            share=lambda: self.presence.share.value,
            count=partial(self.books.count, UsageKind.SAMPLES),
        )
        self.runs = Runs(runs_services)
        hosting_services = HostingServices(
            identity=member.identity,
            rpc=self.rpc,
            exchange=exchange,
            directory=self.directory,
            store=self.store,
            config=config,
            start_worker=services.start_worker,
            wall_clock=services.wall_clock,
            steady_clock=steady,
            rng=services.rng,
            turnover=Turnover(steady),
            understands=services.understands,
            presence=self.presence,
            books=self.books,
            order=self.order,
            trials=Trials(self.rpc, exchange, services.rng),
            spill_folder=str(home.folder) if home else "",
        )
        self.hosts = Hosts(hosting_services)
        self.following = TeamsFollowed(config, self.store, self.presence, services.hosts, hosting_services.spill_folder)
        self.prober = Prober(hosting_services, self.hosts)
        self.gateway = _gateway_of(home, config)
        self.reachability = _reachability_of(member, services, self.rpc, self.directory, config)
        self.health = Health(network.peer_id, version("swarmd"), services.wall_clock, exchange.clocks_s)
        parts = DaemonParts(
            services=hosting_services,
            hosts=self.hosts,
            following=self.following,
            runs=self.runs,
            health=self.health,
            prober=self.prober,
            home=home,
            gateway=self.gateway,
            reachability=self.reachability,
        )
        self.owner = Owner(parts, self.stop)
        self._certificate = member.certificate
        self._understands = services.understands
        self._home = home
        self._metrics = config.metrics
        self._name = member.name
        self._policy = ""  # why nothing may work; "" while it may
        self._rng = services.rng
        self.stopping = trio.Event()
        self._hurry = trio.Event()

    # Every task of a daemon is started here, or by a service that is started here. Services come in the order in which
    # they need each other. It ends the other way round: first sessions are taken over elsewhere, then others hear that
    # this peer leaves, and connections end last.
    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until ``stop``."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.rpc.run)
            nursery.start_soon(self._follow_catalog)
            await nursery.start(self.directory.run, self._describe, self.hosts.likely_next)
            await nursery.start(self.store.run, self._uplink, self.runs.find)
            await nursery.start(self.runs.run)
            if self._home is not None:
                await nursery.start(serve_control, self.owner, self._home.socket)
                nursery.start_soon(trim_heap)
            if self._metrics:
                nursery.start_soon(serve_metrics, self.owner.status, self._metrics)
            if self.gateway is not None:
                nursery.start_soon(self.gateway.run)
            if self._home is not None:
                await nursery.start(self.presence.run)
            if self.reachability is not None:
                nursery.start_soon(self.reachability.run)
            await nursery.start(self.following.run)
            await nursery.start(self.hosts.run)
            nursery.start_soon(self.prober.run)
            nursery.start_soon(self.books.keep)
            nursery.start_soon(self.order.run)
            nursery.start_soon(self._count_hours)
            registrar = Registrar(self.exchange, self._admit, self.directory.announce_soon, self._rng)
            nursery.start_soon(registrar.run)
            task_status.started()
            await self.stopping.wait()
            async with trio.open_nursery() as leaving:
                leaving.start_soon(self._cancel_when_hurried, leaving.cancel_scope)
                await self.hosts.leave()
                with trio.move_on_after(GOODBYE_S):
                    await self.directory.announce()
                leaving.cancel_scope.cancel()
            nursery.cancel_scope.cancel()

    def stop(self) -> None:
        """End, once the sessions are taken over elsewhere; called again, at once."""
        if self.stopping.is_set():
            self._hurry.set()
        self.stopping.set()

    async def _count_hours(self) -> None:
        """Note in the books for how long this machine serves."""
        while True:
            await trio.sleep(COUNT_INTERVAL_S)
            if any(hosting.is_online for hosting in self.hosts):
                self.books.count(UsageKind.SECONDS, COUNT_INTERVAL_S)

    def _rest(self, reason: str) -> None:
        """Work for nobody, for a reason of the owner's policy; "" goes on with what this membership is for."""
        self._policy = reason
        rights = self.exchange.roster.pass_of(self._certificate).may
        not_invited = f"this machine's invite is for: {', '.join(rights)}"
        self.hosts.rest(reason or ("" if "serve" in rights else not_invited))
        self.following.rest(reason or ("" if "serve" in rights else not_invited))
        self.runs.rest(reason or ("" if "train" in rights else not_invited))

    async def _cancel_when_hurried(self, scope: trio.CancelScope) -> None:
        await self._hurry.wait()
        scope.cancel()

    # --- the rpc's guest -------------------------------------------------------------------------------------

    def hello(self) -> Hello:
        """Introduce this member to a peer that it meets."""
        return Hello(certificate=self._certificate, agent=f"swarmd {self.health.version}", now=self.health.now())

    def admit(self, peer: PeerId, hello: Hello) -> None:
        """Check a peer's certificate. Raises Refused."""
        self.exchange.admit(peer, hello)

    async def handle(self, channel: Channel, message: AnyMessage, frame: Frame) -> bool:
        """Give a member's message to the service that it is for; False when it is for none. Raises Refused."""
        self.exchange.roster.require_member(channel.peer)
        if self.prober.take(channel.peer, message, frame):
            return True
        if await self.hosts.handle(channel.peer, message, frame, channel):
            return True
        if getattr(message, "run", ""):
            self.exchange.roster.require_member(channel.peer, "train")
        if await self.store.handle(channel, message) or await self.following.handle(channel, message):
            return True
        if await self.runs.handle(channel, message, frame):
            return True
        if isinstance(message, Ping):
            await channel.answer_zeros(Pong(re=message.id), message.want_bytes)
        elif isinstance(message, ExchangeDigest):
            await self.exchange.answer(channel, message, frame)
        elif isinstance(message, Accuse):
            await self.prober.judge(channel, message, frame.payload)
        elif isinstance(message, Records):
            await self.exchange.take(channel, frame)
        else:
            return False
        return True

    def gone(self, peer: PeerId, purpose: Purpose) -> None:
        """Act on the end of the last channel of one purpose to a peer."""
        self.hosts.gone(peer, purpose)
        self.runs.gone(peer)

    async def _follow_catalog(self) -> None:
        """Keep each new catalog, and end the connections of members that it revokes."""
        while True:
            await self.exchange.next_catalog()
            self._save_catalog()
            self._rest(self._policy)
            for peer in self.rpc.peers():
                try:
                    self.exchange.roster.require_member(peer)
                except Refused as error:
                    logger.info("disconnecting %s: %s", peer, error)
                    await self.network.disconnect(peer)

    def _admit(self, arrivals: dict[bytes, AdmittedMember], previous: Catalog) -> bytes | None:
        """Enter newcomers into the catalog, where a founder's key is here."""
        founder = Founder(self._home) if self._home is not None else None
        if founder is None or not founder.is_here:
            return None
        founder.admit(arrivals, previous)
        return founder.membership.catalog_raw()

    def _save_catalog(self) -> None:
        if self._home is not None and self.exchange.book.catalog_raw is not None:
            try:
                MembershipFiles(self._home).save_catalog(self.exchange.book.catalog_raw)
            except SwarmError as error:
                logger.warning("the new catalog is used but not kept: %s", error)

    # --- what this peer says of itself -----------------------------------------------------------------------

    def _uplink(self) -> tuple[float | None, bool]:
        is_decoding = any(deployment.load.n_decoding for deployment in self.hosts.deployments())
        return self.directory.links.up_bytes_per_s, is_decoding

    def _describe(self) -> list[dict[str, Any]]:
        loaded = [deployment.worker.loaded for deployment in self.hosts.deployments()]
        devices = [device for device in loaded if device is not None]
        links = self.directory.links
        self.health.note_clone(self.directory.view())
        peer = {
            "kind": "peer",
            "name": self._name,
            "addresses": self.network.addresses()[:16],
            "version": self.health.version,
            "minor": self._understands.minor,
            "codecs": self._understands.codecs,
            "needs": tuple(sorted(self._understands.needs)),
            "device": devices[0].device if devices else None,
            "device_memory_bytes": devices[0].device_memory_bytes if devices else None,
            "memory_bytes": measure_memory().total_bytes,
            "cores": count_processors(),
            "free_disk_bytes": psutil.disk_usage(str(self._home.folder)).free if self._home else None,
            "up_bytes_per_s": links.up_bytes_per_s,
            "down_bytes_per_s": links.down_bytes_per_s,
            "up_since": self.health.up_since,
            "holds": self.store.donor.holds(),
            "found": self.prober.record_findings(),
            **(self.reachability.record_fields() if self.reachability else {}),
        }
        return [peer, *self.hosts.records(), *self.runs.records()]


async def main(
    home: Home,
    config: Config,
    ready: Callable[[Daemon], None],
    worker: str = WORKER,
) -> None:
    """Run the real daemon in the foreground until it is told to stop; ``worker`` is its module. Raises SwarmError."""
    membership = MembershipFiles(home)
    swarm = membership.swarm()
    manager = ServiceManager()
    may_work = partial(verdict_now, config.policy, home.pause_file)
    with (
        home.lock_for_daemon(),
        closing(Traffic(limits_of(config.policy), home.traffic_file)) as traffic,
        closing(Prestarted(config.serve and may_work(traffic).may_work, worker)) as workers,
    ):
        from swarmd.net.direct import DirectNetwork  # while the worker imports torch
        from swarmd.net.libp2p.host import HostOptions, Libp2pNetwork
        from swarmd.net.libp2p.kademlia import KademliaStore

        exchange = Exchange(swarm.keys, time.time)
        identity = membership.identity()
        catalog_raw = membership.catalog_raw()
        if catalog_raw is not None:
            exchange.merge_catalog_untrusted(catalog_raw)
        options = HostOptions(
            listen=split(config.listen),
            announce=split(config.announce),
            blocked=frozenset(PeerId(peer) for peer in split(config.blocked_peers)),
            certificate=swarm.certificate,
            traffic=traffic,
        )
        libp2p = Libp2pNetwork(identity, swarm.keys.psk, options)
        network = DirectNetwork(libp2p, libp2p.listen_hosts() if config.direct else (), config.direct_port, traffic)
        records = KademliaStore(libp2p, value_validator(exchange, time.time))
        member = LocalMember(
            swarm.keys,
            identity,
            swarm.certificate,
            weights=home.weights,
            folders=ModelFolders(home).read(),
            bootstrap=by_peer(swarm.bootstrap),
            home=home,
            name=choose_member_name(config.name, socket.gethostname()),
        )
        services = DaemonServices(
            network,
            records,
            wall_clock=time.time,
            rng=random.Random(),
            start_worker=workers.start,
            ways=libp2p.ways,
            traffic=traffic,
            hosts=libp2p.listen_hosts(),
        )
        async with libp2p.running(), network.running(), records.running(), trio.open_nursery() as nursery:
            daemon = Daemon(member, config, services, exchange)

            async def live(task_status: TaskStatus[None]) -> None:
                await daemon.run(task_status)
                nursery.cancel_scope.cancel()

            gc.freeze()  # what importing made stays: looking at all of it takes a tenth of a second, in the loop
            await nursery.start(_stop_on_signal, daemon)
            await nursery.start(live)
            ready(daemon)
            manager.ready(f"a member of {swarm.keys.name} as {identity.peer_id}")
            nursery.start_soon(manager.run)
            await daemon.stopping.wait()
            manager.stopping()


def _directory_of(
    member: LocalMember, services: DaemonServices, exchange: Exchange, rpc: Rpc, config: Config
) -> Directory:
    memory_file = member.home.peers_file if member.home else None
    return Directory(
        DirectoryServices(rpc, exchange, services.records, services.rng),
        RecordSigner(member.identity, member.certificate, exchange, services.wall_clock),
        AddressMemory(member.bootstrap, memory_file, member.identity.peer_id),
        is_exchange_on=config.exchange,
    )


def _reachability_of(
    member: LocalMember, services: DaemonServices, rpc: Rpc, directory: Directory, config: Config
) -> Reachability | None:
    """What finds out how this peer is reached; a simulated network needs none."""
    if services.ways is None:
        return None
    return Reachability(
        services.ways,
        rpc,
        directory,
        services.rng,
        offers=config.relay,
        router=_router_port(member) if config.upnp else None,
    )


def _router_port(member: LocalMember) -> RouterPort:
    nonce = hashlib.sha256(f"swarmd port {member.identity.peer_id}".encode()).digest()[:NONCE_BYTES]
    return RouterPort(nonce, member.home.router_file if member.home else None)


def _gateway_of(home: Home | None, config: Config) -> GatewayProcess | None:
    """The gateway that the daemon keeps running, if it is to."""
    if home is None or not config.gateway.on:
        return None
    return GatewayProcess(command(home.folder), config.gateway.listen, home.folder / "gateway.log")


async def _stop_on_signal(daemon: Daemon, task_status: TaskStatus[None]) -> None:
    """Drain and end, also when the terminal is closed or SSH is gone; ``nohup`` says that this means nothing."""
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    with trio.open_signal_receiver(*numbers) as signals:
        task_status.started()
        async for number in signals:
            if number == signal.SIGHUP and daemon.stopping.is_set():
                continue  # a terminal's end comes from its shell and from the kernel: nobody is in a hurry
            logger.info("stopping on %s", signal.Signals(number).name)
            daemon.stop()
