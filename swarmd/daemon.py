"""The composition root: the only place that wires a daemon's parts together. It decides nothing by itself.

``Daemon`` takes its world as arguments (network, rendezvous, clock, randomness, how workers start), so that the
simulator and the tests run the same program; ``main`` gives it the real one.
"""

from __future__ import annotations

import logging
import random
import signal
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import trio

from swarmd import status
from swarmd.config import Config, split
from swarmd.errors import Code, ConfigError, PeerError, Refused, SwarmError
from swarmd.home import Home, by_peer
from swarmd.net.api import Network, Purpose, RecordStore, TaskStatus
from swarmd.net.exchange import Exchange
from swarmd.net.rpc import Channel, Rpc
from swarmd.node.balancer import Balancer, holder_of
from swarmd.node.control import serve_control
from swarmd.node.directory import Directory, value_sequence
from swarmd.node.lanes import Lanes
from swarmd.node.server import Server
from swarmd.node.store import Store
from swarmd.node.worker_link import Prestarted, Starter, WorkerLink
from swarmd.plan.admission import CacheLedger
from swarmd.plan.memory import blocks_bytes, blocks_that_fit
from swarmd.plan.placement import choose_span
from swarmd.protocol.frames import Frame
from swarmd.protocol.identity import Identity
from swarmd.protocol.invite import SwarmKeys
from swarmd.protocol.messages import AnyMessage, ExchangeDigest, Hello, Loaded, LoadSpan, Ping, Pong, Records
from swarmd.protocol.tensors import ITEM_BYTES
from swarmd.train.runs import Runs
from swarmd.values import Decision, ModelId, PeerId, Span

logger = logging.getLogger(__name__)

FIRST_LOOK_S = 4.0
ROUND_TRIPS_IN_RECORD = 8
DRAIN_S = 15.0
LANES_DRAIN_S = 2.0
GOODBYE_S = 1.0
RETRY_S = 5.0


class Daemon:
    """One member of the swarm: directory, and a server with its worker when it serves."""

    def __init__(
        self,
        keys: SwarmKeys,
        identity: Identity,
        certificate: tuple[bytes, ...],
        config: Config,
        folders: dict[ModelId, Path],
        weights: Path,
        network: Network,
        store: RecordStore,
        wall_clock: Callable[[], float],
        rng: random.Random,
        start_worker: Starter,
        exchange: Exchange,
        bootstrap: dict[PeerId, tuple[str, ...]],
        home: Home | None = None,
    ) -> None:
        self.network = network
        self.exchange = exchange
        self.rpc = Rpc(network, self)
        peers_file = home.peers_file if home else None
        told = (bootstrap, peers_file, config.exchange)
        self.directory = Directory(identity, certificate, network, self.rpc, store, exchange, wall_clock, rng, *told)
        self.directory.describe_with(self._describe, self._likely_next)
        self.server: Server | None = None
        self.lanes: Lanes | None = None
        self.worker: WorkerLink | None = None
        self.placement: Decision[Span] | None = None
        self._certificate = certificate
        self._config = config
        self.store = Store(
            self.rpc,
            self.directory.view,
            weights,
            folders,
            config,
            self._groups_in_use,
            lambda: self.directory.links.up_bytes_per_s,
            lambda: self.server is not None and self.server.n_decoding() > 0,
        )
        self.store.supply.on_change = self.directory.announce_soon
        runs = home.runs if home else weights
        self.runs = Runs(self.rpc, identity, self.directory, self.store.supply, config, runs, rng)
        self.store.donor.find = self.runs.find
        self._start_worker = start_worker
        self._home = home
        self._announced_free = -1
        self._announced_load = 0
        self._catalog_changed = trio.Event()
        exchange.on_catalog = lambda: self._catalog_changed.set()
        self._stopping = trio.Event()
        self._hurry = trio.Event()
        self._is_drained = False
        self._left_span: list[dict[str, Any]] = []
        self._joining: tuple[ModelId, Span] | None = None
        self._at_most = 0  # blocks; lower once a worker could not load as many
        self.cannot_serve = ""
        self._changed_mind = trio.Event()
        self._next_placement: Decision[Span] | None = None
        self.balancer = Balancer(
            self.directory.view, network.peer_id, wall_clock, rng, config.balance_interval_s, self._move
        )
        self._up_since = int(wall_clock())
        self._started_at = trio.current_time()

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until ``stop``."""
        async with trio.open_nursery() as nursery:
            await nursery.start(self.rpc.run)
            nursery.start_soon(self._follow_catalog)
            await nursery.start(self.directory.run)
            await nursery.start(self.store.run)
            await nursery.start(self.runs.run)
            if self._home is not None:
                await nursery.start(serve_control, self, self._home.socket)
            if self._config.serve:
                nursery.start_soon(self._serve)
                if self._config.balance:
                    nursery.start_soon(self.balancer.run)
            task_status.started()
            await self._stopping.wait()
            async with trio.open_nursery() as last:
                last.start_soon(self._cancel_when_hurried, last.cancel_scope)
                await self._drain()
                with trio.move_on_after(GOODBYE_S):
                    await self.directory.announce()
                last.cancel_scope.cancel()
            nursery.cancel_scope.cancel()

    async def _cancel_when_hurried(self, scope: trio.CancelScope) -> None:
        await self._hurry.wait()
        scope.cancel()

    async def _serve(self) -> None:
        """Serve one span after the other: a move or a drain ends one."""
        model, n_blocks = await self._choose_model()
        if self._config.span is not None and self._config.span.end > n_blocks:
            raise ConfigError(f"--blocks {self._config.blocks} exceeds the model's {n_blocks} blocks")
        while True:
            while self._is_drained:
                self._changed_mind = trio.Event()
                await self._changed_mind.wait()
            try:
                self.placement = self._next_placement or await self._choose_span(model)
                self._next_placement, self._changed_mind = None, trio.Event()
                self._joining = model, self.placement.action
                self.directory.announce_soon()
                folder = await self.store.supply.ensure(model, self.placement.action.blocks())
            except SwarmError as error:  # a disk that is full, or nobody who gives the weights: it may get better
                logger.warning("cannot serve yet: %s", error)
                self.cannot_serve, self._joining = str(error), None
                self.directory.announce_soon()
                await trio.sleep(RETRY_S)
                continue
            self.cannot_serve = ""
            logger.info("serving %s", self.placement.reason)
            await self._serve_span(model, self.placement.action, folder.folder)

    async def _serve_span(self, model: ModelId, span: Span, folder: Path) -> None:
        """Serve until somebody changes their mind; then have the sessions taken over elsewhere."""
        ledger = CacheLedger(self._config.cache_tokens)
        supply = self.store.supply
        self.server = Server(self.rpc, self.exchange, model, span, self._config.dtype, ledger, supply)
        self.server.on_change = self._on_server_change
        request = LoadSpan(
            path=str(folder),
            model=model,
            start=span.start,
            end=span.end,
            dtype=self._config.dtype,
            quantize=self._config.quantize,
            threads=self._config.threads,
            history_bytes=self._config.history_mib << 20,
            training_bytes=self._config.training_mib << 20,
            training_share=self._config.training_share,
            spill_folder=str(self._home.folder) if self._home else "",
        )
        self.worker = WorkerLink(self._start_worker, request, self._on_worker_frame, self._on_worker_change)
        self.server.use(self.worker)
        self.lanes = Lanes(self.rpc, self.exchange, self.server, self.worker, request.training_bytes)
        async with trio.open_nursery() as nursery:
            await nursery.start(self.server.run)
            await nursery.start(self.lanes.run)
            await nursery.start(self.worker.run)
            await self._changed_mind.wait()
            await self._drain()
            nursery.cancel_scope.cancel()
        self.server = self.worker = self.lanes = self._joining = None
        self.directory.announce_soon()

    async def _drain(self) -> None:
        """Have live sessions taken over by other holders, or replayed by their clients, within a bounded time."""
        if self.server is None:
            return
        self.directory.announce_soon()  # as draining: the server says so from here on
        left = await self.server.drain(DRAIN_S)
        if self.lanes is not None:
            await self.lanes.drain(LANES_DRAIN_S)
        logger.info("drained: %s", f"{left} hops were not taken over in {DRAIN_S:.0f} s" if left else "no session left")

    async def _move(self, placement: Decision[Span]) -> bool:
        """Serve other blocks, once they are here: what is served now is served meanwhile. False if they do not come."""
        if self.server is None:
            return False
        logger.info("moving: %s", placement.reason)
        try:
            await self.store.supply.ensure(self.server.model, placement.action.blocks())
        except SwarmError as error:
            logger.warning("not moving: %s", error)
            return False
        self._next_placement = placement
        self._changed_mind.set()
        return True

    async def _choose_model(self) -> tuple[ModelId, int]:
        """Wait until the catalog lists the model asked for, or any: then the least covered, rather one that is here."""
        while True:
            view = self.directory.view()
            if self._config.model:
                found = view.model_named(self._config.model)
                if found is not None:
                    return found
            elif view.catalog.models:
                listed = [(ModelId(m), n) for m, n in view.catalog.models.values()]
                return min(listed, key=lambda c: (min(view.coverage(*c)), c[0] not in self.store.library.folders))
            await trio.sleep(0.5)

    async def _choose_span(self, model: ModelId) -> Decision[Span]:
        if self._config.span is not None:
            return Decision(self._config.span, f"blocks {self._config.span}, as --blocks says")
        with trio.move_on_after(FIRST_LOOK_S):  # see who else is there before choosing
            while len(self.directory.view().peers) < 2:
                await trio.sleep(0.2)
        manifest = await self.store.supply.manifest(model)
        n_blocks, blocks = manifest.n_blocks, blocks_bytes(manifest, self._config.dtype, self._config.quantize)
        n_fit = blocks_that_fit(psutil.virtual_memory().available, blocks)
        n_fit = min(n_fit, self._config.max_blocks or n_fit, self._at_most or n_fit)
        spans = [s for s in self.directory.view().spans if s.model == model and s.state != "draining"]
        holders = [holder_of(s) for s in spans if s.end <= n_blocks and s.peer != self.network.peer_id]
        speeds = [h.blocks_per_s for h in holders] or [1.0]
        return choose_span(holders, n_blocks, n_fit, statistics.median(speeds))  # its own is not measured yet

    # --- the rpc's guest -------------------------------------------------------------------------------------

    def hello(self) -> Hello:
        return Hello(certificate=self._certificate, agent=f"swarmd {version('swarmd')}")

    def admit(self, peer: PeerId, hello: Hello) -> None:
        self.exchange.admit(peer, hello)

    async def handle(self, channel: Channel, message: AnyMessage, frame: Frame) -> None:
        self.exchange.require_member(channel.peer)
        if self.lanes is not None and await self.lanes.handle(channel.peer, message, frame, channel):
            return
        if self.server is not None and await self.server.handle(channel.peer, message, frame, channel):
            return
        if await self.store.handle(channel, message) or await self.runs.handle(channel, message, frame):
            return
        if isinstance(message, Ping):
            await channel.send(Pong(re=message.id), bytes(message.want_bytes))
        elif isinstance(message, ExchangeDigest):
            await self.exchange.answer(channel, message, frame)
        elif isinstance(message, Records):
            self.exchange.merge_body_untrusted(frame.payload)
        elif getattr(message, "session", None) is not None:
            raise Refused(Code.NOT_SERVING, "this peer serves no blocks", 5.0)

    async def _follow_catalog(self) -> None:
        """Keep each new catalog, and end the connections of members that it revokes."""
        while True:
            await self._catalog_changed.wait()
            self._catalog_changed = trio.Event()
            self._save_catalog()
            for peer in self.rpc.peers():
                try:
                    self.exchange.require_member(peer)
                except Refused as error:
                    logger.info("disconnecting %s: %s", peer, error)
                    await self.network.disconnect(peer)

    def gone(self, peer: PeerId, purpose: Purpose) -> None:
        if self.server is not None and purpose == "interactive":
            self.server.peer_gone(peer)
        if self.lanes is not None and purpose == "training":
            self.lanes.peer_gone(peer)
        self.runs.gone(peer)

    # --- what this peer says of itself -----------------------------------------------------------------------

    def _describe(self) -> list[dict[str, Any]]:
        return [*self._describe_serving(), *self.runs.records()]

    def _describe_serving(self) -> list[dict[str, Any]]:
        loaded = self.worker.loaded if self.worker else None
        links = self.directory.links
        peer = {
            "kind": "peer",
            "addresses": self.network.addresses()[:16],
            "version": version("swarmd"),
            "device": loaded.device if loaded else None,
            "device_memory_bytes": loaded.device_memory_bytes if loaded else None,
            "memory_bytes": psutil.virtual_memory().total,
            "cores": psutil.cpu_count(),
            "free_disk_bytes": psutil.disk_usage(str(self._home.folder)).free if self._home else None,
            "up_bytes_per_s": links.up_bytes_per_s,
            "down_bytes_per_s": links.down_bytes_per_s,
            "up_since": self._up_since,
            "holds": self.store.donor.holds(),
        }
        if self.server is None or self.worker is None or self.placement is None:
            if self._joining is None:
                return [peer, *self._left_span]  # else its last record would be believed until it expires
            model, blocks = self._joining
            common = {"model": model, "start": blocks.start, "end": blocks.end, "dtype": self._config.dtype}
            return [peer, {"kind": "span", "state": "joining", **common}]
        likely = self._likely_next()
        nearest = sorted(links.round_trip_s.items(), key=lambda pair: (pair[0] not in likely, pair[1]))
        span = {
            "kind": "span",
            "model": self.server.model,
            "start": self.server.span.start,
            "end": self.server.span.end,
            "state": self._span_state(self.server, self.worker),
            "dtype": self._config.dtype,
            "numerics": loaded.numerics if loaded else "",
            "quantize": self._config.quantize,
            "quantization_error": loaded.quantization_error if loaded else None,
            "decode_tokens_per_s": loaded.speed.decode_tokens_per_s if loaded else None,
            "prefill_tokens_per_s": loaded.speed.prefill_tokens_per_s if loaded else None,
            "batch_tokens_per_s": loaded.speed.batch_tokens_per_s if loaded else {},
            "n_decoding": self.server.n_decoding(),
            "moves_left": self.balancer.moves_left if self._config.balance and self._config.span is None else 0,
            "free_cache_tokens": self.server.ledger.free_tokens,
            "training_bytes": self._config.training_mib << 20,
            "training_share": self._config.training_share,
            "round_trip_ms": {p: 1000 * s for p, s in nearest[:ROUND_TRIPS_IN_RECORD]},
        }
        self._left_span = [{**span, "state": "draining"}]
        return [peer, span]

    @staticmethod
    def _span_state(server: Server, worker: WorkerLink) -> str:
        """Blocks that cannot be loaded are promised to nobody: others then fill the gap."""
        if worker.is_online and not server.is_draining:
            return "online"
        return "draining" if server.is_draining or worker.snapshot().state == "failed" else "joining"

    def _likely_next(self) -> set[PeerId]:
        """Who serves the block after this server's last, or the one before its first: the links that chains need."""
        if self.server is None:
            return set()
        model, span = self.server.model, self.server.span
        wanted = {span.end, span.start - 1}
        spans = self.directory.view().spans
        return {PeerId(s.peer) for s in spans if s.model == model and any(s.start <= b < s.end for b in wanted)}

    async def _on_worker_frame(self, message: AnyMessage, frame: Frame, more: bool) -> None:
        assert self.server is not None
        assert self.lanes is not None
        if not await self.lanes.on_worker_frame(message, frame):
            await self.server.on_worker_frame(message, frame, more)

    async def _on_worker_change(self) -> None:
        if self.server is None or self.worker is None:
            return
        is_too_much = self.worker.snapshot().state == "failed" and self._config.span is None
        if is_too_much and len(self.server.span) > 1:  # a device may have less memory than the machine
            self._at_most = len(self.server.span) // 2
            self._changed_mind.set()
        if self.worker.loaded is not None:
            self.server.ledger.total_tokens = self._tokens_that_fit(self.worker.loaded)
        await self.server.on_worker_change()
        if self.lanes is not None:
            await self.lanes.on_worker_change()
        self._announced_free = self.server.ledger.free_tokens
        self.directory.announce_soon()

    def _tokens_that_fit(self, loaded: Loaded) -> int:
        """Cache tokens that may be promised: what the settings say, if half of the free memory can hold them."""
        free = loaded.device_memory_bytes or psutil.virtual_memory().available
        per_token = loaded.cache_bytes_per_token + ITEM_BYTES[self._config.dtype] * loaded.hidden  # history too
        return min(self._config.cache_tokens, free // 2 // max(1, per_token))

    def _on_server_change(self) -> None:
        if self.server is None:
            return
        free, announced = self.server.ledger.free_tokens, self._announced_free
        load, said = self.server.n_decoding(), self._announced_load
        if abs(free - announced) > 0.2 * self.server.ledger.total_tokens or abs(load - said) > max(1, 0.2 * said):
            self._announced_free, self._announced_load = free, load
            self.directory.announce_soon()

    # --- the control API -------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        view = self.directory.view()
        server = asdict(self.server.snapshot()) if self.server else None
        worker = self.worker.snapshot() if self.worker else None
        if server is not None:
            server["sessions"] = len(server["sessions"])
        return {
            "swarm": self.exchange.keys.name,
            "peer": self.network.peer_id,
            "version": version("swarmd"),
            "uptime_s": round(trio.current_time() - self._started_at, 1),
            "addresses": list(self.network.addresses()),
            "members": len(view.peers),
            "directory": asdict(self.directory.snapshot()),
            "serving": None
            if self.placement is None or self.server is None
            else {
                "model": self.server.model,
                "name": status.name_of(view.catalog, self.server.model),
                "blocks": [self.placement.action.start, self.placement.action.end],
                "why": self.placement.reason,
            },
            "worker": None
            if worker is None
            else {
                "state": worker.state,
                "pid": worker.pid,
                "restarts": worker.restarts,
                "why": worker.reason,
                "batching": worker.loaded.batching if worker.loaded else None,
            },
            "cannot_serve": self.cannot_serve,
            "downloads": self.downloads(),
            "server": server,
            "training": asdict(self.lanes.snapshot()) if self.lanes else None,
            "models": self.models(),
            "balance": asdict(self.balancer.snapshot()),
            "memory_mib": round(psutil.Process().memory_info().rss / 2**20, 1),
        }

    def peers(self) -> list[dict[str, Any]]:
        return status.peers(self.directory.view(), self.network.peer_id, self.directory.links.round_trip_s)

    def sessions(self) -> list[dict[str, Any]]:
        return [] if self.server is None else status.sessions(self.server.snapshot())

    def models(self) -> list[dict[str, Any]]:
        return status.models(self.directory.view(), self.store.here, self.balancer.risk)

    def downloads(self) -> list[dict[str, Any]]:
        return self.store.downloads()

    def here(self, model: str) -> dict[str, Any]:
        return {"model": self._hash_of(model), **self.store.here(self._hash_of(model))}

    def pull(self, model: str, blocks: str) -> dict[str, Any]:
        """Begin to fetch a model, or some of its blocks and what is around them."""
        found = self._hash_of(model)
        self.store.pull(found, Span.parse(blocks) if blocks else None)
        return {"model": found}

    def remove(self, model: str) -> dict[str, Any]:
        """Delete what was fetched of a model."""
        n_bytes = self.store.remove(self._hash_of(model))
        self.directory.announce_soon()
        return {"freed_bytes": n_bytes}

    def _hash_of(self, name: str) -> ModelId:
        return self.directory.view().catalog.hash_of(name)

    def _groups_in_use(self) -> dict[ModelId, frozenset[int]]:
        return {} if self._joining is None else {self._joining[0]: frozenset(self._joining[1].blocks())}

    def why(self, model: str) -> dict[str, Any]:
        """Explain this daemon's own blocks, and the chain it would choose for a model."""
        return {
            "placement": self.placement.reason if self.placement else "this daemon serves no blocks",
            "balance": self.balancer.snapshot().last_look,
            "worker": self.worker.snapshot().reason if self.worker else "no worker",
            "sessions": self.sessions(),
            "chains": status.chains(
                self.directory.view(), self.network.peer_id, self.directory.links.round_trip_s, model
            ),
        }

    def addresses(self) -> dict[str, Any]:
        book = self.directory.address_book()
        own = {self.network.peer_id: self.network.addresses()}
        return {"addresses": {p: list(a) for p, a in {**own, **book}.items()}}

    async def ping(self, peer: str) -> dict[str, Any]:
        view = self.directory.view()
        matches = [p for p in view.peers if p.endswith(peer)] if peer else []
        if len(matches) != 1:
            raise ConfigError(f"{len(matches)} known peers have an id that ends in {peer!r}: see swarmd peers")
        try:
            return {
                "peer": matches[0],
                "round_trip_ms": status.ms(await self.directory.ping(matches[0])),
                "error": None,
            }
        except PeerError as error:
            return {"peer": matches[0], "round_trip_ms": None, "error": str(error)}

    def reload(self) -> dict[str, Any]:
        """Take over a catalog and models that the command line changed."""
        if self._home is not None:
            self.store.library.look(self._home.folders())
            raw = self._home.catalog_raw()
            if raw is not None:
                self.exchange.merge_catalog_untrusted(raw)
            self.directory.announce_soon()
        return {"catalog_version": self.exchange.book.catalog.version}

    def drain(self) -> dict[str, Any]:
        """Stop serving; the daemon stays a member and goes on when told to resume."""
        if self.server is None:
            raise ConfigError("this daemon serves no blocks: there is nothing to drain")
        n_sessions = len(self.server.snapshot().sessions)
        self._is_drained = True
        self._changed_mind.set()
        return {"draining": True, "sessions": n_sessions}

    def resume(self) -> dict[str, Any]:
        """Serve again after a drain."""
        if not self._config.serve:
            raise ConfigError("this daemon was started with --no-serve: start it without")
        if self._is_drained:
            self._is_drained = False
            self._changed_mind.set()
        return {"serving": True}

    def stop(self) -> None:
        """End, once the sessions are taken over elsewhere; called again, at once."""
        if self._stopping.is_set():
            self._hurry.set()
        self._stopping.set()

    def _save_catalog(self) -> None:
        if self._home is not None and self.exchange.book.catalog_raw is not None:
            try:
                self._home.save_catalog(self.exchange.book.catalog_raw)
            except ConfigError as error:
                logger.warning("the new catalog is used but not kept: %s", error)


async def main(home: Home, config: Config, ready: Callable[[Daemon], None]) -> None:
    """Run the real daemon in the foreground until it is told to stop. Raises SwarmError."""
    swarm = home.swarm()
    with home.locked(), closing(Prestarted(config.serve)) as workers:
        from swarmd.net.direct import DirectNetwork  # while the worker imports torch
        from swarmd.net.libp2p.host import Libp2pNetwork
        from swarmd.net.libp2p.kademlia import KademliaStore

        exchange, identity = Exchange(swarm.keys, time.time), home.identity()
        if (raw := home.catalog_raw()) is not None:
            exchange.merge_catalog_untrusted(raw)
        blocked = frozenset(PeerId(p) for p in split(config.blocked_peers))
        libp2p = Libp2pNetwork(identity, swarm.keys.psk, split(config.listen), split(config.announce), blocked)
        network = DirectNetwork(libp2p, libp2p.listen_hosts() if config.direct else (), config.direct_port)
        store = KademliaStore(libp2p, value_sequence(exchange, time.time))
        async with libp2p.running(), network.running(), store.running(), trio.open_nursery() as nursery:
            daemon = Daemon(
                swarm.keys,
                identity,
                swarm.certificate,
                config,
                home.folders(),
                home.weights,
                network,
                store,
                time.time,
                random.Random(),
                workers.start,
                exchange,
                by_peer(swarm.bootstrap),
                home,
            )
            nursery.start_soon(_stop_on_signal, daemon)
            ready(daemon)
            await daemon.run()
            nursery.cancel_scope.cancel()


async def _stop_on_signal(daemon: Daemon) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        async for number in signals:
            logger.info("stopping on %s", signal.Signals(number).name)
            daemon.stop()
