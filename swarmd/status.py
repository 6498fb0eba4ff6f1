"""What a daemon says of itself and its swarm: the answers of the control API, structs with units in names.

The OpenAPI file (docs/openapi.json) is made from these by ``openapi``. Each is filled in by the part of the daemon that
knows its values (its ``snapshot``), and gathered in ``report``.
"""

from __future__ import annotations

import msgspec

Blocks = tuple[int, int]  # [start, end)


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """What all answers have in common: they are values."""


# --- hosting ---------------------------------------------------------------------------------------------------


class HopTimes(Status, frozen=True, kw_only=True):
    """What a pass takes at the hop that begins at block ``start``: medians."""

    start: int
    waiting_ms: float
    computing_ms: float


class SessionRow(Status, frozen=True, kw_only=True):
    """One hop of one session that is served here: ops received and finished, and where its outputs go.

    ``times``: of this hop and those before it, as far as the client asks for them.
    """

    session: str
    client: str
    blocks: Blocks
    received: int
    finished: int
    epoch: int
    why: str
    times: tuple[HopTimes, ...] = ()


class ServerStatus(Status, frozen=True, kw_only=True):
    """Sessions through one worker; cache in tokens; reused ones were copied from sessions that begin alike."""

    sessions: int
    free_cache_tokens: int
    total_cache_tokens: int
    tokens_served: int
    tokens_reused: int
    refused: dict[str, int]


class TuningStatus(Status, frozen=True, kw_only=True):
    """Fine-tuning through one worker."""

    lanes: int
    clients: int
    tokens_trained: int


class WorkerStatus(Status, frozen=True, kw_only=True):
    """One worker process: loading, online, failed or down, and why."""

    state: str
    pid: int | None
    restarts: int
    why: str
    batching: str | None
    kernels: str | None
    team: str | None = None
    last_end: str = ""  # why the worker before it ended by itself


class ServingStatus(Status, frozen=True, kw_only=True):
    model: str
    name: str | None
    blocks: Blocks
    why: str


class BalanceStatus(Status, frozen=True, kw_only=True):
    """Why a server moved last, what the last look said, and how often it may still move today."""

    last_move: str | None
    last_look: str
    moves_left: int


class HostingStatus(Status, frozen=True, kw_only=True):
    """What this daemon serves or is to; ``state``: choosing, fetching, loading, online, draining, paused or failed."""

    slot: int
    wanted: str
    state: str
    why: str
    serving: ServingStatus | None
    worker: WorkerStatus | None
    server: ServerStatus | None
    tuning: TuningStatus | None
    balance: BalanceStatus


class FollowingStatus(Status, frozen=True, kw_only=True):
    """A team that another member leads, in which a process of this machine computes slices; ``state`` is for people."""

    leader: str
    model: str
    blocks: tuple[int, int]
    state: str
    pid: int | None


# --- the swarm -------------------------------------------------------------------------------------------------


class FaultRow(Status, frozen=True, kw_only=True):
    """What this daemon has seen of a member's faults of one kind; ``weight`` as decayed until now."""

    kind: str
    count: int
    weight: float


class StandingRow(Status, frozen=True, kw_only=True):
    """What this daemon thinks of a member: ``score`` is 0 for one without faults; ``banned_s`` is left of a ban."""

    score: float
    banned_s: float
    why: str
    faults: tuple[FaultRow, ...]


class ReachStatus(Status, frozen=True, kw_only=True):
    """Whether others can connect to this machine (``state``: unknown, open or closed, as members measured it), and why.

    ``relays`` it is reached through; it ``offers`` to relay for others, and is ``relaying`` so many circuits;
    ``mapped``: the host and port that the router forwards to it since it was asked; ``is_behind_another``: no port of
    that router leads here from outside, because there is another router behind it. ``missing``: addresses that it is to
    listen on and cannot yet, and why.
    """

    state: str
    why: str
    relays: tuple[str, ...]
    offers: bool
    relaying: int
    mapped: str | None = None
    is_behind_another: bool = False
    missing: dict[str, str] = {}


class DownloadRow(Status, frozen=True, kw_only=True):
    """A download under way; ``donors`` gives bytes by peer."""

    model: str
    groups: tuple[Blocks, ...]
    total_bytes: int
    done_bytes: int
    resumed_bytes: int
    bytes_per_s: float
    left_s: float | None
    donors: dict[str, int]
    waiting_for: str


class HereStatus(Status, frozen=True, kw_only=True):
    """What this machine has of a model, and how the last attempt to fetch more ended."""

    here: bool
    blocks_here: tuple[Blocks, ...]
    folder: str | None
    pulling: bool
    failure: str | None
    exit_code: int


class HereAnswer(HereStatus, frozen=True, kw_only=True):
    model: str


class ModelRow(HereStatus, frozen=True, kw_only=True):
    """One model of the catalog: how many servers hold each block, what nobody holds and who could take it.

    ``gap_chance_within_hour`` is None before anybody left.
    """

    name: str
    model: str
    blocks: int
    coverage: tuple[int, ...]
    missing: tuple[Blocks, ...]
    help: str
    target: int
    lowest: int
    gap_chance_within_hour: float | None


class DirectoryStatus(Status, frozen=True, kw_only=True):
    """``is_indexed``: has the index (the DHT) taken and found records; None: not tried yet. ``index`` says more.

    ``alone_s``: for so long no other member has been known; None: some are.
    """

    known_peers: int
    last_exchange_s: float | None
    reason: str
    is_indexed: bool | None = None
    index: str = ""
    alone_s: float | None = None


class HealthRow(Status, frozen=True, kw_only=True):
    """Something that was looked at: kind is one of ``plan.owner.health.Kind``.

    ``is_fine`` None: that cannot be said; ``remedy``: what to do.
    """

    kind: str
    is_fine: bool | None
    text: str
    remedy: str = ""


class GatewayStatus(Status, frozen=True, kw_only=True):
    """The gateway that the daemon keeps running: "starting", "running" or "ended", and why."""

    state: str
    why: str
    listen: str
    pid: int | None
    restarts: int


class PolicyStatus(Status, frozen=True, kw_only=True):
    """May this machine work for others, why (not), and when time changes that (seconds since 1970).

    ``month_bytes`` went to others and came from them beyond the home this month; limits of 0 are none.
    """

    may_work: bool
    why: str
    changes_at: float | None
    month_bytes: int = 0
    month_limit_bytes: int = 0
    up_bytes_per_s: float = 0.0
    down_bytes_per_s: float = 0.0


class DaemonStatus(Status, frozen=True, kw_only=True):
    """``serving``, ``worker``, ``server``, ``training`` and ``balance`` are those of the first of ``hosting``.

    ``name`` is what others are told that this machine is called.
    """

    swarm: str
    peer: str
    version: str
    uptime_s: float
    addresses: tuple[str, ...]
    members: int
    directory: DirectoryStatus
    hosting: tuple[HostingStatus, ...]
    serving: ServingStatus | None
    worker: WorkerStatus | None
    cannot_serve: str
    downloads: tuple[DownloadRow, ...]
    server: ServerStatus | None
    training: TuningStatus | None
    models: tuple[ModelRow, ...]
    balance: BalanceStatus | None
    memory_mib: float
    gateway: GatewayStatus | None = None
    policy: PolicyStatus | None = None
    reach: ReachStatus | None = None
    health: tuple[HealthRow, ...] = ()
    name: str = ""
    following: tuple[FollowingStatus, ...] = ()


class ProbeRow(Status, frozen=True, kw_only=True):
    """What this machine found of another's blocks, by computing the same."""

    peer: str
    is_right: bool
    why: str


class ChainRow(Status, frozen=True, kw_only=True):
    """A chain for a model with its expected cost of a token, and the best rejected one; ``error``: there is none.

    ``readers`` can read the text that passes through them. ``layout``: where else than between any two layers the model
    can be cut, and what travels beside hidden states, where anything does and the manifest is here.
    """

    cost_ms: float | None
    hops: tuple[str, ...] = ()
    readers: tuple[str, ...] = ()
    rejected: ChainRow | None = None
    error: str | None = None
    layout: str = ""


class WhyAnswer(Status, frozen=True, kw_only=True):
    placement: str
    balance: str
    worker: str
    hosting: tuple[HostingStatus, ...]
    sessions: tuple[SessionRow, ...]
    chains: dict[str, ChainRow]
    standing: dict[str, StandingRow] = {}
    probes: tuple[ProbeRow, ...] = ()


# --- answers of single routes ----------------------------------------------------------------------------------


class SessionsAnswer(Status, frozen=True, kw_only=True):
    sessions: tuple[SessionRow, ...]


class ModelsAnswer(Status, frozen=True, kw_only=True):
    models: tuple[ModelRow, ...]


class DownloadsAnswer(Status, frozen=True, kw_only=True):
    downloads: tuple[DownloadRow, ...]


class AddressesAnswer(Status, frozen=True, kw_only=True):
    addresses: dict[str, tuple[str, ...]]


class PingAnswer(Status, frozen=True, kw_only=True):
    """``way``: as in PeerRow."""

    peer: str
    round_trip_ms: float | None
    error: str | None
    way: str | None = None


class PullAnswer(Status, frozen=True, kw_only=True):
    model: str


class RemoveAnswer(Status, frozen=True, kw_only=True):
    freed_bytes: int


class MeetAnswer(Status, frozen=True, kw_only=True):
    """Members whose addresses were given, and who of them answered there."""

    tried: tuple[str, ...]
    answered: tuple[str, ...]


class ReloadAnswer(Status, frozen=True, kw_only=True):
    catalog_version: int


class DrainAnswer(Status, frozen=True, kw_only=True):
    draining: bool
    sessions: int


class PauseAnswer(Status, frozen=True, kw_only=True):
    sessions: int
    policy: PolicyStatus


class ResumeAnswer(Status, frozen=True, kw_only=True):
    serving: bool
    policy: PolicyStatus | None = None


class DownAnswer(Status, frozen=True, kw_only=True):
    stopping: bool


class RefusalAnswer(Status, frozen=True, kw_only=True):
    """Status 409: why not, and the exit code for the command line."""

    error: str
    exit_code: int
