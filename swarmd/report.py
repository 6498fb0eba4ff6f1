"""What the owner of this machine may ask its daemon, and what it answers: the control API's other side.

Nothing is decided here: each answer is gathered from the parts that know it (``status`` has the structs).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import msgspec
import psutil
import trio

import swarmd.status as answers
from swarmd.config import LONGEST_PAUSE_S, load, parse_span
from swarmd.errors import ConfigError, NoRoute, PeerError
from swarmd.home.membership import MembershipFiles, by_peer
from swarmd.home.models import ModelFolders
from swarmd.home.paths import Home
from swarmd.member_status import PeerRow, PeersAnswer, SpanRow, WaitingRow
from swarmd.node.machine.gateway_process import GatewayProcess
from swarmd.node.machine.health import Health
from swarmd.node.members.reachability import Reachability
from swarmd.node.serving.choosing import HostingServices
from swarmd.node.serving.hosts import Hosts
from swarmd.node.serving.prober import Prober
from swarmd.node.teams.following import TeamsFollowed
from swarmd.plan.chains.placement import find_rescues
from swarmd.plan.chains.routing import Route, RouteQuery, best_alternative, best_route, gather_trips
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.owner.health import WorkerLife
from swarmd.protocol.membership.records import SpanRecord
from swarmd.status import ChainRow
from swarmd.train.runs import Runs
from swarmd.values import ModelId, PeerId, Span


@dataclass(frozen=True, slots=True)
class DaemonParts:
    """The parts of a daemon that know the answers. None: it has no such part."""

    services: HostingServices
    hosts: Hosts
    following: TeamsFollowed
    runs: Runs
    health: Health
    prober: Prober
    home: Home | None
    gateway: GatewayProcess | None
    reachability: Reachability | None


class Owner:
    """See the module. ``stop`` ends the daemon."""

    def __init__(self, parts: DaemonParts, stop: Callable[[], None]) -> None:
        services = parts.services
        self.runs = parts.runs
        self.stop = stop
        self._services = services
        self._directory = services.directory
        self._store = services.store
        self._hosts = parts.hosts
        self._following = parts.following
        self._home = parts.home
        self._gateway = parts.gateway
        self._presence = services.presence
        self._reachability = parts.reachability
        self._health = parts.health
        self._prober = parts.prober
        self._started_at = trio.current_time()

    # --- reading ---------------------------------------------------------------------------------------------

    def status(self) -> answers.DaemonStatus:
        """Everything that ``swarmd status`` shows."""
        hosting = self._hosts.snapshot()
        view = self._directory.view()
        own_record = view.peers.get(self._services.me)
        first = hosting[0] if hosting else None
        return answers.DaemonStatus(
            swarm=self._services.exchange.keys.name,
            peer=self._services.me,
            version=self._health.version,
            uptime_s=round(trio.current_time() - self._started_at, 1),
            addresses=tuple(self._services.rpc.network.addresses()),
            members=len(view.peers),
            directory=self._directory.snapshot(),
            hosting=hosting,
            serving=first.serving if first else None,
            worker=first.worker if first else None,
            cannot_serve=first.why if first and first.state == "failed" and not first.serving else "",
            downloads=self._store.downloads(),
            server=first.server if first else None,
            training=first.tuning if first else None,
            models=self.models().models,
            balance=first.balance if first else None,
            memory_mib=round(psutil.Process().memory_info().rss / 2**20, 1),
            gateway=self._gateway.snapshot() if self._gateway else None,
            policy=self._presence.snapshot(),
            reach=self._reachability.snapshot() if self._reachability else None,
            health=self._health_rows(view),
            name=own_record.name if own_record else "",
            following=self._following.snapshot(),
        )

    def _sessions(self) -> tuple[answers.SessionRow, ...]:
        """One row for each hop that is served here."""
        return tuple(row for deployment in self._hosts.deployments() for row in deployment.server.sessions.rows())

    def _health_rows(self, view: SwarmView) -> tuple[answers.HealthRow, ...]:
        links = [deployment.worker.snapshot() for deployment in self._hosts.deployments()]
        devices = [link.loaded.device for link in links if link.loaded is not None]
        workers = [WorkerLife(link.state == "online", link.restarts, link.last_end) for link in links]
        free_bytes = psutil.disk_usage(str(self._home.folder)).free if self._home else None
        missing = self._reachability.snapshot().missing if self._reachability else {}
        n_losing = self._directory.probes.n_losing_large()
        return self._health.snapshot(view, self._directory.snapshot(), free_bytes, devices, workers, missing, n_losing)

    def peers(self) -> PeersAnswer:
        """One row for each member that is known, with what it serves."""
        view = self._directory.view()
        trips = self._directory.links.round_trip_s
        findings: Counter[tuple[str, bool]] = Counter()
        for record in view.peers.values():
            findings.update((finding.peer, finding.is_right) for finding in record.found)
        rows = []
        for peer, record in sorted(view.peers.items()):
            balance = self._services.order.balance(peer)
            peer_pass = self._services.exchange.roster.pass_of(record.certificate)
            rows.append(
                PeerRow(
                    peer=peer,
                    is_self=peer == self._services.me,
                    addresses=tuple(record.addresses),
                    version=record.version,
                    protocol=record.minor,
                    codecs=record.codecs,
                    device=record.device,
                    device_memory_bytes=record.device_memory_bytes,
                    memory_bytes=record.memory_bytes,
                    cores=record.cores,
                    free_disk_bytes=record.free_disk_bytes,
                    up_bytes_per_s=record.up_bytes_per_s,
                    down_bytes_per_s=record.down_bytes_per_s,
                    round_trip_ms=ms(trips.get(peer)),
                    spans=_span_rows(view, peer),
                    reach=record.reach or "unknown",
                    way=self._services.rpc.network.way_to(peer),
                    standing=self._services.rpc.standing.row(peer),
                    voucher=self._services.exchange.roster.invite_of(peer).hex(),
                    may=peer_pass.may,
                    ends_at=peer_pass.ends_at,
                    gave=balance.gave_us,
                    took=balance.took,
                    found_right=findings[peer, True],
                    found_wrong=findings[peer, False],
                    name=record.name,
                )
            )
        now = self._services.wall_clock()
        waiting = tuple(
            WaitingRow(peer=peer, voucher=invite.hex(), knocked_s=round(now - knocked_at, 1))
            for peer, (invite, knocked_at) in self._services.exchange.roster.admission.waiting.items()
        )
        return PeersAnswer(peers=tuple(rows), waiting=waiting)

    def sessions(self) -> answers.SessionsAnswer:
        """One row for each hop that is served here."""
        return answers.SessionsAnswer(sessions=self._sessions())

    def models(self) -> answers.ModelsAnswer:
        """One row for each model of the catalog: who serves its blocks, how safe they are, what could be done."""
        view = self._directory.view()
        possible_rescues = find_rescues(view.spans, view.catalog.models, view.is_given)
        help_for = {rescue.model: str(rescue) for rescue in possible_rescues}
        rows = []
        for name, (model, n_blocks) in sorted(view.catalog.models.items()):
            known = ModelId(model)
            missing = view.missing(known, n_blocks)
            risk = self._services.turnover.risk(view, known, n_blocks)
            rows.append(
                answers.ModelRow(
                    name=name,
                    model=model,
                    blocks=n_blocks,
                    coverage=tuple(view.coverage(known, n_blocks)),
                    missing=tuple((span.start, span.end) for span in missing),
                    help=help_for.get(known, ""),
                    target=risk.target,
                    lowest=risk.lowest,
                    gap_chance_within_hour=risk.gap_chance_within_hour,
                    **msgspec.structs.asdict(self._store.here(known)),
                )
            )
        return answers.ModelsAnswer(models=tuple(rows))

    def why(self, model: str) -> answers.WhyAnswer:
        """Explain what is served here, and the chain that would be chosen for a model (or each). Raises ConfigError.

        ``model`` may be the beginning of a session's id as well: then only that is explained.
        """
        hosting = self._hosts.snapshot()
        sessions = self._sessions()
        is_session = bool(model) and self._directory.view().model_named(model) is None
        named = tuple(row for row in sessions if is_session and row.session.startswith(model))
        first = hosting[0] if hosting else None
        serving = first.serving if first else None
        idle = f"{first.state}: {first.why}" if first else "this daemon serves no blocks"
        return answers.WhyAnswer(
            placement=serving.why if serving else idle,
            balance=first.balance.last_look if first else "this daemon serves no blocks",
            worker=first.worker.why if first and first.worker else "no worker",
            hosting=hosting,
            sessions=named or sessions,
            chains={} if named else self._chains(model),
            standing=self._services.rpc.standing.rows(),
            probes=self._prober.snapshot(),
        )

    def _chains(self, model: str) -> dict[str, ChainRow]:
        view = self._directory.view()
        me = self._services.me
        half_trips_s = {peer: trip_s / 2 for peer, trip_s in self._directory.links.round_trip_s.items()}
        rows = {}
        for name in [model] if model else sorted(view.catalog.models):
            model_entry = view.model_named(name)
            if model_entry is None:
                listed = ", ".join(view.catalog.models) or "none yet"
                raise ConfigError(f"the catalog has no model {name!r}; it has: {listed}")
            model_id, n_blocks = model_entry
            layout = self._store.describe_layout(model_id)
            spans = view.serving(model_id)
            all_blocks = Span(0, n_blocks)
            trips = gather_trips(spans, me, half_trips_s)
            now = self._services.wall_clock()
            query = RouteQuery(spans, all_blocks, me, trips, now=now, client_point=self._directory.locate())
            try:
                route = best_route(query)
                rejected = best_alternative(route, query)
                row = _chain_row(route, spans, _chain_row(rejected, spans) if rejected else None)
            except NoRoute as error:
                row = ChainRow(cost_ms=None, error=str(error))
            rows[name] = msgspec.structs.replace(row, layout=layout)
        return rows

    def addresses(self) -> answers.AddressesAnswer:
        """Addresses to give to newcomers, this machine's first."""
        own_addresses = self._services.rpc.network.addresses()
        book = {self._services.me: own_addresses, **self._directory.rendezvous.address_book()}
        addresses = {str(peer): tuple(listed) for peer, listed in book.items()}
        return answers.AddressesAnswer(addresses=addresses)

    def downloads(self) -> answers.DownloadsAnswer:
        """Downloads under way."""
        return answers.DownloadsAnswer(downloads=self._store.downloads())

    def here(self, model: str) -> answers.HereAnswer:
        """What this machine has of a model. Raises ConfigError for a name that the catalog does not list."""
        model_id = self._hash_of(model)
        store_status = msgspec.structs.asdict(self._store.here(model_id))
        return answers.HereAnswer(model=model_id, **store_status)

    async def ping(self, peer: str) -> answers.PingAnswer:
        """Measure a round trip to the peer whose id ends so. Raises ConfigError."""
        peer_id = self._directory.view().peer_ending(peer)
        try:
            trip_ms = ms(await self._directory.probes.ping(peer_id))
            path = self._services.rpc.network.way_to(peer_id)
            return answers.PingAnswer(peer=peer_id, round_trip_ms=trip_ms, error=None, way=path)
        except PeerError as error:
            return answers.PingAnswer(peer=peer_id, round_trip_ms=None, error=str(error))

    # --- doing -----------------------------------------------------------------------------------------------

    async def meet(self, addresses: str) -> answers.MeetAnswer:
        """Take more ways to members (multiaddrs, comma-separated), and try them at once."""
        given = by_peer(tuple(addresses.split(",")))
        answered = await self._directory.meet(given)
        return answers.MeetAnswer(tried=tuple(given), answered=answered)

    def pull(self, model: str, blocks: str) -> answers.PullAnswer:
        """Begin to fetch a model, or some of its blocks and what is around them."""
        model_id = self._hash_of(model)
        self._store.pull(model_id, parse_span(blocks) if blocks else None)
        return answers.PullAnswer(model=model_id)

    def remove(self, model: str) -> answers.RemoveAnswer:
        """Delete what was fetched of a model."""
        n_bytes = self._store.remove(self._hash_of(model))
        self._directory.announce_soon()
        return answers.RemoveAnswer(freed_bytes=n_bytes)

    async def reload(self) -> answers.ReloadAnswer:
        """Take over a catalog, models and rules that the command line changed. Raises ConfigError."""
        if self._home is not None:
            self._store.library.look(ModelFolders(self._home).read())
            raw = MembershipFiles(self._home).catalog_raw()
            if raw is not None:
                self._services.exchange.merge_catalog_untrusted(raw)
            self._directory.announce_soon()
            await self._presence.follow(load(self._home.folder).policy)
        return answers.ReloadAnswer(catalog_version=self._services.exchange.book.catalog.version)

    def drain(self, model: str) -> answers.DrainAnswer:
        """Stop serving; the daemon stays a member and goes on when told to resume."""
        return answers.DrainAnswer(draining=True, sessions=self._hosts.drain(model))

    def pause(self, seconds: str) -> answers.PauseAnswer:
        """Stop at once, for so long ("": until ``resume``). Raises ConfigError."""
        presence = self._presence
        n_sessions = len(self._sessions())
        if seconds and not (seconds.isdecimal() and 0 < int(seconds) <= LONGEST_PAUSE_S):
            raise ConfigError(f"a pause takes 1 to {LONGEST_PAUSE_S} seconds, not {seconds!r}")
        presence.pause(int(seconds) if seconds else None)
        return answers.PauseAnswer(sessions=n_sessions, policy=presence.snapshot())

    def resume(self, model: str) -> answers.ResumeAnswer:
        """Serve again after a drain; without a model, after a pause too."""
        was_paused = self._presence.is_paused and not model
        if was_paused:
            self._presence.resume()
        if list(self._hosts) or not was_paused:
            self._hosts.resume(model)
        policy = self._presence.snapshot()
        return answers.ResumeAnswer(serving=policy.may_work, policy=policy)

    def _hash_of(self, name: str) -> ModelId:
        return self._directory.view().catalog.hash_of(name)


def _span_rows(view: SwarmView, peer: PeerId) -> tuple[SpanRow, ...]:
    return tuple(
        SpanRow(
            model=view.catalog.name_of(s.model) or s.model,
            blocks=(s.start, s.end),
            head=s.head,
            state=s.state,
            decode_tokens_per_s=s.decode_tokens_per_s,
            prefill_tokens_per_s=s.prefill_tokens_per_s,
            free_cache_tokens=s.free_cache_tokens,
            training_bytes=s.training_bytes,
            training_share=s.training_share,
        )
        for s in view.spans
        if s.peer == peer
    )


def _chain_row(route: Route, spans: Iterable[SpanRecord], rejected: ChainRow | None = None) -> ChainRow:
    teams = {(span.peer, span.slot): span.team for span in spans}
    readers = tuple(dict.fromkeys(r for hop in route.hops for r in (hop.peer, *teams.get((hop.peer, hop.slot), ()))))
    return ChainRow(
        cost_ms=ms(route.cost_s),
        hops=tuple(route.why),
        readers=readers,
        rejected=rejected,
    )


def ms(seconds: float | None) -> float | None:
    """Milliseconds to two places, for people."""
    return None if seconds is None else round(1000 * seconds, 2)
