"""Getting up to date: commits first, then the averages that were missed or a snapshot, from several donors at once.

Everything that is fetched is named by its hash: averages by the commits that anchors signed, a snapshot by what most
donors say and, at the next round, by a commit. The bytes travel as weights do (weights.fetch), resumable.
"""

from __future__ import annotations

import logging
import shutil
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path

import msgspec
import trio

from swarmd.errors import Code, IntegrityError, PeerError, Refused, RemoteProtocolError, SwarmUnavailable
from swarmd.net.pace import Pace
from swarmd.net.rpc import Channel, Rpc
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.runs.recovery import DonorOffer
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.models.manifest import Manifest
from swarmd.protocol.runs.recipe import Run, read_order_untrusted, read_run_untrusted
from swarmd.protocol.untrusted import decode
from swarmd.protocol.wire.rounds import Commits, RunIs, StateIs, WantCommits, WantRun, WantState
from swarmd.train.store.disk import read_vectors
from swarmd.train.vectors.state import DTYPES, RunState, Vector
from swarmd.values import ModelId, PeerId, RunId
from swarmd.weights import folder as folders
from swarmd.weights.fetch import Fetch, fetch_manifest

logger = logging.getLogger(__name__)

COMMITS_TIMEOUT_S = 8.0  # up to 8 MiB of commits
STATE_TIMEOUT_S = 20.0  # a manifest of the state, and a copy to be made first
RUN_TIMEOUT_S = 10.0  # recipe and orders: some kB
ASK_AGAIN_S = 8.0  # records and addresses cross a swarm within it
MAX_DONORS = 8  # of many: as few as can give a state well
MAX_REPLY_BYTES = 8 * 2**20  # of commits in one answer; the rest is asked for again
MAX_SNAPSHOTS = 2  # each is a copy of the whole state, made as it changes
SNAPSHOT_LEASE_S = 30.0  # who fetches asks more often than that
SHORT_LEASE_S = 4.0  # where others wait for theirs

Vectors = dict[str, Vector]
Get = Callable[[bytes, tuple[PeerId, ...], tuple[str, ...], int], Awaitable[Vectors]]
"""Fetches the vectors that a hash names from donors; their names and length are known. Raises SwarmUnavailable."""


def make_getter(
    rpc: Rpc,
    folder: Path,
    dtype: str,
    pace: Pace,
) -> Get:
    """Make the real ``Get``: through a folder, so that a restart goes on where it was."""

    async def get_vectors(
        digest: bytes,
        donors: tuple[PeerId, ...],
        names: tuple[str, ...],
        n_elements: int,
    ) -> Vectors:
        what = "snapshot" if len(names) > 1 else "average"
        manifest = await fetch_manifest(rpc, ModelId(digest.hex()), donors)
        _check_manifest(manifest, dtype, n_elements, names)
        path = await fetch_file(rpc, folder, manifest, donors, pace, what)
        vectors = await trio.to_thread.run_sync(read_vectors, path, dtype, n_elements, names)
        await trio.to_thread.run_sync(partial(shutil.rmtree, folder, ignore_errors=True))
        return vectors

    return get_vectors


async def fetch_file(
    rpc: Rpc, folder: Path, manifest: Manifest, donors: Iterable[PeerId], pace: Pace, what: str
) -> Path:
    """Fetch a state or an average into a folder, where it is not there already; returns its file.

    Raises SwarmUnavailable.
    """
    target = await trio.to_thread.run_sync(folders.create, folder, manifest)
    if 0 not in target.held:
        offers = {peer: frozenset({0}) for peer in donors}
        fetch = Fetch(rpc, target, {0}, lambda: offers, pace)
        await fetch.run()
        logger.info("%s: %s", what, fetch.progress())
    return target.folder / "head.safetensors"


def _check_manifest(
    manifest: Manifest,
    dtype: str,
    n_elements: int,
    names: tuple[str, ...],
) -> None:
    """Refuse what is no state of this run before a byte of it is fetched. Raises SwarmUnavailable."""
    expected = [(name, DTYPES[dtype], (n_elements,)) for name in sorted(names)]
    offered = [(t.name, t.dtype, t.shape) for t in manifest.tensors]
    if offered != expected or manifest.files:
        raise SwarmUnavailable("what the donors offer is no state of this run")


async def ask_run(
    rpc: Rpc,
    view: Callable[[], SwarmView],
    run_id: RunId,
) -> tuple[Run, bytes]:
    """Have a member tell what a run is, and its owner's latest order (or b""). Raises SwarmUnavailable.

    A member's addresses may come a moment after the word of its run: all are asked again for ``ASK_AGAIN_S``.
    """
    reasons: dict[str, str] = {}
    deadline = trio.current_time() + ASK_AGAIN_S
    while True:
        for record in view().in_run(run_id):
            peer = PeerId(record.peer)
            peer_record = view().peers.get(peer)
            rpc.network.learn(peer, peer_record.addresses if peer_record else ())
            try:
                return await _ask_run(rpc, peer, RunId(record.run), run_id)
            except IntegrityError as error:
                rpc.standing.fault(peer, Fault.FORGED, str(error))
                reasons[peer] = f"{peer[-8:]} lies about the run: {error}"
            except PeerError as error:
                reasons[peer] = f"{peer[-8:]}: {error}"
        if trio.current_time() > deadline:
            why = "; ".join(reasons.values()) or "no live member is known"
            raise SwarmUnavailable(f"nobody who takes part in that run answers ({why}): try again later")
        await trio.sleep(ASK_AGAIN_S / 10)


async def _ask_run(rpc: Rpc, peer: PeerId, ledger: RunId, run_id: RunId) -> tuple[Run, bytes]:
    """Ask who keeps a ledger of a run, its own or that of a stage. Raises PeerError, and IntegrityError for a lie."""
    reply, frame = await rpc.call(peer, WantRun(run=ledger), timeout_s=RUN_TIMEOUT_S, purpose="bulk")
    if not isinstance(reply, RunIs):
        raise RemoteProtocolError(f"expected a run, got {type(reply).__name__}")
    raw, order = decode(frame.payload, tuple[bytes, bytes], "a run")
    run = read_run_untrusted(raw)
    if run.id != run_id:
        raise IntegrityError("another run than was asked for")
    if order:
        read_order_untrusted(order, run)
    return run, order


async def fetch_commits(
    rpc: Rpc,
    peer: PeerId,
    run: str,
    epoch: int,
) -> list[bytes]:
    """Ask a peer for the commits after an update, not verified yet. Raises PeerError."""
    request = WantCommits(run=run, after=epoch)
    reply, frame = await rpc.call(peer, request, timeout_s=COMMITS_TIMEOUT_S, purpose="bulk")
    if not isinstance(reply, Commits):
        raise RemoteProtocolError(f"expected commits, got {type(reply).__name__}")
    return decode(frame.payload, list[bytes], "a list of commits")


def choose_donors(peers: Iterable[PeerId]) -> list[PeerId]:
    """Choose whom to ask, of many: as few as can give a state well, and always the same."""
    return sorted(peers)[:MAX_DONORS]


async def ask_states(
    rpc: Rpc,
    peers: Iterable[PeerId],
    run: str,
) -> dict[PeerId, DonorOffer]:
    """Have donors keep their present state; returns who keeps what."""
    offers: dict[PeerId, DonorOffer] = {}

    async def ask_donor(peer: PeerId) -> None:
        try:
            reply, _ = await rpc.call(peer, WantState(run=run), timeout_s=STATE_TIMEOUT_S, purpose="bulk")
            if isinstance(reply, StateIs) and len(reply.state) == 32:
                offers[peer] = DonorOffer(reply.epoch, reply.state, 0)
        except PeerError as error:
            logger.info("%s keeps no state for us: %s", peer[-8:], error)

    async with trio.open_nursery() as nursery:
        for peer in choose_donors(peers):
            nursery.start_soon(ask_donor, peer)
    return offers


class StateDonors:
    """The donor's side: snapshots that are kept for a while, and averages, both by hash."""

    def __init__(self) -> None:
        self._renewed: dict[bytes, tuple[int, float]] = {}

    def freeze(self, state: RunState, now: float) -> DonorOffer:
        """Keep the present state for somebody. Raises Refused when too many are fetched at the moment."""
        lease_s = SNAPSHOT_LEASE_S if len(state.snapshots) < MAX_SNAPSHOTS else SHORT_LEASE_S
        self.expire(state, now, lease_s)
        if state.root not in state.snapshots and len(state.snapshots) >= MAX_SNAPSHOTS:
            raise Refused(Code.NO_CAPACITY, f"{MAX_SNAPSHOTS} snapshots are being fetched already", SHORT_LEASE_S)
        snapshot = state.freeze()
        self._renewed[state.root] = (snapshot.n_reads, now)
        return DonorOffer(state.epoch, state.root, len(state.averages))

    def expire(self, state: RunState, now: float, lease_s: float = SNAPSHOT_LEASE_S) -> None:
        """Let go of snapshots that nobody has read for a while."""
        for root, snapshot in list(state.snapshots.items()):
            n_reads, since = self._renewed.setdefault(root, (snapshot.n_reads, now))
            if snapshot.n_reads != n_reads:
                self._renewed[root] = (snapshot.n_reads, now)
            elif now - since > lease_s:
                state.thaw(root)
                self._renewed.pop(root, None)


async def send_commits(
    channel: Channel,
    run: str,
    raws: Iterable[bytes],
    re: int = 0,
) -> None:
    """Send commits in order, as many as fit one frame. Raises PeerError."""
    body: list[bytes] = []
    size = 0
    for raw in raws:
        size += len(raw) + 8
        if size > MAX_REPLY_BYTES:
            break
        body.append(raw)
    send = channel.answer if re else channel.send
    await send(Commits(re=re, run=run), msgspec.msgpack.encode(body))
