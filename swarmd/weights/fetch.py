"""Gets groups of a model from several donors at once, verified, resumable, at a bounded pace.

``plan.links.download`` says what to ask whom for; here is who waits, who writes and who is believed. A donor that sends
other bytes than the manifest's is not asked again and loses standing; one that stalls, refuses or leaves costs a
repetition of what it was asked for; what was verified stays on disk whatever happens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

import trio

from swarmd.errors import (
    Code,
    IntegrityError,
    PeerError,
    Refused,
    RemoteProtocolError,
    SwarmError,
    SwarmUnavailable,
    first_error,
)
from swarmd.net.pace import Pace
from swarmd.net.rpc import Rpc
from swarmd.plan.links.download import ChunkRequest, Download, cut_pieces
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.models import manifest as manifests
from swarmd.protocol.models.manifest import Manifest
from swarmd.protocol.wire.messages import ChunksAre, ManifestIs, WantChunks, WantManifest
from swarmd.values import ModelId, PeerId, Span, ranges
from swarmd.weights.folder import GroupDownload, ModelFolder
from swarmd.weights.hub import HUB, Hub

logger = logging.getLogger(__name__)

MAX_DONORS = 8  # at the same time: what is under way is in memory
WINDOW = 2  # requests under way at each donor: its link is never idle, and little waits for a slow one at the end
LOOK_INTERVAL_S = 0.5  # new donors, and those that are silent
STALL_S = 120.0  # for the first piece of a donor whose speed is not known: 4 MiB at 0.3 Mbit/s
LEFT_OUT_S = 2.0  # after a first failure, twice as long after each other one
LONGEST_LEFT_OUT_S = 60.0  # a donor that failed is tried again after at most that
PATIENCE_S = 180.0  # nobody has given a byte for so long: say so
MANIFEST_TIMEOUT_S = 20.0  # 15 MiB on a slow link
SILENT_S = 2.0  # of a donor of a manifest: the next one is asked beside it
YIELD_S = 3.0  # who has given nothing for so long yields to a donor that waits; twice as long the next time

LACKS = (Code.NOT_HELD, Code.NOT_HERE)  # refusals that say that a donor has it no more

Donors = Callable[[], dict[PeerId, frozenset[int]]]
"""Who holds which groups at present; may change from call to call."""


@dataclass(frozen=True, slots=True)
class DownloadProgress:
    """How far a download is. ``given_bytes`` by donor; ``resumed_bytes`` were on disk, verified, when it began."""

    model: ModelId
    groups: tuple[Span, ...]
    total_bytes: int
    done_bytes: int
    resumed_bytes: int
    bytes_per_s: float
    given_bytes: dict[PeerId, int]
    waiting_for: str = ""

    def __str__(self) -> str:
        donors = ", ".join(f"{n / 1e6:.1f} MB from {peer[-8:]}" for peer, n in sorted(self.given_bytes.items()))
        on_disk = f"{self.resumed_bytes / 1e6:.1f} MB were here; " if self.resumed_bytes else ""
        rate = f"{self.done_bytes / 1e6:.1f} MB at {self.bytes_per_s / 1e6:.2f} MB/s"
        return f"{rate}: {on_disk}{donors or 'nothing to fetch'}"

    @property
    def left_s(self) -> float | None:
        """How long it will take at this speed; None while nothing is known of that."""
        remaining_bytes = self.total_bytes - self.done_bytes
        return remaining_bytes / self.bytes_per_s if self.bytes_per_s else None


async def fetch_manifest(
    rpc: Rpc,
    model: ModelId,
    donors: Iterable[PeerId],
) -> Manifest:
    """Ask one donor after the other, and the next one beside it while it is silent.

    Raises SwarmUnavailable when none gives the true one.
    """
    reasons: list[str] = []
    received: list[Manifest] = []

    async def ask(
        donor: PeerId,
        failed: trio.Event,
        everybody: trio.CancelScope,
    ) -> None:
        try:
            received.append(await _fetch_manifest_from(rpc, model, donor))
            everybody.cancel()
        except IntegrityError as error:
            rpc.standing.fault(donor, Fault.BAD_CHUNK, str(error))
            reasons.append(f"{donor[-8:]} lies: {error}")
        except PeerError as error:
            reasons.append(f"{donor[-8:]}: {error}")
        failed.set()

    async with trio.open_nursery() as nursery:
        for donor in donors:
            failed = trio.Event()
            nursery.start_soon(ask, donor, failed, nursery.cancel_scope)
            with trio.move_on_after(SILENT_S):
                await failed.wait()
    if received:
        return received[0]
    raise SwarmUnavailable(f"nobody gives the manifest of {model[:12]}: {'; '.join(reasons) or 'no live donor'}")


async def _fetch_manifest_from(rpc: Rpc, model: ModelId, donor: PeerId) -> Manifest:
    """Ask one donor. Raises PeerError or IntegrityError."""
    reply, frame = await rpc.call(
        donor,
        WantManifest(model=model),
        timeout_s=MANIFEST_TIMEOUT_S,
        purpose="weights",
    )
    if not isinstance(reply, ManifestIs):
        raise RemoteProtocolError(f"expected a manifest, got {type(reply).__name__}")
    return await trio.to_thread.run_sync(manifests.read_untrusted, bytes(frame.payload), model)


@dataclass(slots=True)
class DonorTurn:
    """Since when a donor has given nothing in its turn, and how often that was too long."""

    since: float = 0.0
    n_yielded: int = 0


# One loop that supervises, and WINDOW tasks for each of at most MAX_DONORS donors:
#
#     supervise: who holds what? --> Download (plan): offers, leaves
#     donor's task: next_piece --> pace --> ask --> length, sha256 of each chunk --> .part file --> arrived
#
# What donors could do, and what it costs: send other bytes (a fault in their standing, not asked again), stall (what
# was asked for is asked of others, and their turn goes to a donor that waits), refuse (that group is not theirs any
# more). Nothing is written that was not verified, and what is written stays: a download goes on where it was.
class Fetch:
    """One download of some groups into one folder."""

    def __init__(
        self,
        rpc: Rpc,
        target: ModelFolder,
        groups: Iterable[int],
        donors: Donors,
        pace: Pace,
        hub: Hub | None = None,
    ) -> None:
        self.groups = frozenset(groups) - target.held
        self._rpc = rpc
        self._target = target
        self._donors = donors
        self._pace = pace
        self._download = Download([])
        self._parts: dict[int, GroupDownload] = {}
        self._unfinished: dict[int, GroupDownload] = {}  # each is put in place once
        self._given: dict[PeerId, int] = {}
        self._turns: dict[PeerId, DonorTurn] = {}
        self._hub = hub
        self._resumed_bytes = 0
        self._done_bytes = 0
        self._total_bytes = target.n_bytes(self.groups)
        self._began_at = self._fed_at = 0.0
        self._waiting_for = "looking at what is on disk"
        self._news = trio.Event()

    def progress(self) -> DownloadProgress:
        """Return how far it is now."""
        elapsed = max(trio.current_time() - self._began_at, 1e-6) if self._began_at else 0.0
        rate = (self._done_bytes - self._resumed_bytes) / elapsed if elapsed else 0.0
        return DownloadProgress(
            self._target.model,
            tuple(ranges(self.groups)),
            self._total_bytes,
            self._done_bytes,
            self._resumed_bytes,
            rate,
            dict(self._given),
            self._waiting_for,
        )

    async def run(self) -> None:
        """Return when every group is in place.

        Raises ConfigError from the disk, and SwarmUnavailable when nobody has given anything for ``PATIENCE_S``; what
        is verified stays.
        """
        await self._look_at_disk()
        self._began_at = self._fed_at = trio.current_time()
        failure: BaseException | None = None
        try:
            async with trio.open_nursery() as nursery:
                await self._supervise(nursery)
                nursery.cancel_scope.cancel()
        except* SwarmError as errors:
            failure = first_error(errors)
        if failure is not None:
            raise failure
        for part in self._unfinished.values():
            await trio.to_thread.run_sync(part.finish)
        self._waiting_for = ""

    async def _supervise(self, nursery: trio.Nursery) -> None:
        """Use every donor that holds something which is missing, from the moment that this is known."""
        serving: dict[PeerId, trio.CancelScope] = {}
        while not self._download.is_done:
            now = trio.current_time()
            offers = self._usable_donors()
            for peer in self._beyond_room(offers, serving.keys(), now):
                del offers[peer]
            for peer in [p for p in serving if p not in offers]:
                serving.pop(peer).cancel()
                self._download.leaves(peer)
            for peer, groups in offers.items():
                self._download.offers(peer, groups & self.groups, now)
                if peer not in serving:
                    serving[peer] = trio.CancelScope()
                    nursery.start_soon(self._use_donor, peer, serving[peer])
            self._check_patience(now)
            news = self._news
            with trio.move_on_after(LOOK_INTERVAL_S):
                await news.wait()

    def _usable_donors(self) -> dict[PeerId, frozenset[int]]:
        """Return the donors that may be asked; where there is none, those that failed, unless they lied."""
        holders = self._donors()
        standing = self._rpc.standing
        allowed = {peer: groups for peer, groups in holders.items() if standing.allows(peer)}
        if allowed:
            return allowed
        honest = {peer: groups for peer, groups in holders.items() if not standing.is_shunned(peer)}
        return {peer: groups for peer, groups in honest.items() if standing.allows(peer, True)}

    def _beyond_room(
        self,
        offers: Iterable[PeerId],
        serving: Collection[PeerId],
        now: float,
    ) -> list[PeerId]:
        """Return donors that there is no room for: first those that gave nothing in their turn, then the newest."""

        def rank(peer: PeerId) -> tuple[int, bool, int]:
            turn = self._turns.setdefault(peer, DonorTurn())
            if peer in serving and now - turn.since > YIELD_S * 2**turn.n_yielded:
                turn.n_yielded += 1
            elif peer not in serving:
                turn.since = now
            return turn.n_yielded, peer not in serving, -self._given.get(peer, 0)

        return sorted(offers, key=rank)[MAX_DONORS:]

    async def _look_at_disk(self) -> None:
        """Find out what is verified already, and plan the rest."""
        pieces: list[ChunkRequest] = []
        for group in sorted(self.groups):
            part = self._parts[group] = GroupDownload(self._target, group)
            await trio.to_thread.run_sync(part.begin)
            verified_bytes = part.n_bytes - sum(part.missing.values())
            self._resumed_bytes += verified_bytes
            self._done_bytes += verified_bytes
            pieces += cut_pieces(group, part.missing.items())
            if part.missing:
                self._unfinished[group] = part
            else:
                await trio.to_thread.run_sync(part.finish)
        self._download = Download(pieces)
        self._waiting_for = ""

    async def _use_donor(self, peer: PeerId, scope: trio.CancelScope) -> None:
        """Ask a donor, WINDOW requests at a time, until it is given up."""
        with scope:
            async with trio.open_nursery() as nursery:
                for _ in range(WINDOW):
                    nursery.start_soon(self._ask_for_more, peer)

    async def _ask_for_more(self, peer: PeerId) -> None:
        """Ask a donor for one piece after the other; its errors are accounted to it here."""
        while not self._download.is_done and peer in self._download.givers:
            news = self._news
            piece = self._download.next_piece(peer, trio.current_time()).action
            if piece is None:
                with trio.move_on_after(LOOK_INTERVAL_S):
                    await news.wait()
                continue
            await self._pace.take(piece.n_bytes)
            try:
                await self._fetch_piece(peer, piece)
            except IntegrityError as error:
                self._rpc.standing.fault(peer, Fault.BAD_CHUNK, str(error))
                self._give_up(peer, f"lies: {error}")
            except Refused as error:
                logger.info("%s does not give group %d: %s", peer, piece.group, error)
                self._download.failed(peer, piece, holds_group=error.code not in LACKS)
                await trio.sleep(LOOK_INTERVAL_S)
            except PeerError as error:
                self._rpc.standing.leave_out(peer, str(error), LEFT_OUT_S, LONGEST_LEFT_OUT_S)
                self._give_up(peer, str(error))

    async def _fetch_piece(self, peer: PeerId, piece: ChunkRequest) -> None:
        """Ask for a piece, check it and write it. Raises PeerError or IntegrityError."""
        if peer == HUB and self._hub is not None:
            payload = memoryview(await self._read_from_hub(self._hub, piece))
        else:
            timeout_s = self._patience_s(peer)
            reply, frame = await self._rpc.call(
                peer,
                WantChunks(model=self._target.model, refs=piece.refs),
                timeout_s=timeout_s,
                purpose="weights",
            )
            payload = frame.payload if isinstance(reply, ChunksAre) else memoryview(b"")
        if len(payload) != piece.n_bytes:
            raise IntegrityError(f"expected {piece.n_bytes} B of chunks, got {len(payload)} B")
        part = self._parts[piece.group]
        written = 0
        offset = 0
        try:
            for ref in piece.refs:
                size = part.chunk_bytes(ref)
                if ref in part.missing:
                    await trio.to_thread.run_sync(part.put, ref, payload[offset : offset + size])
                    written += size
                offset += size
        finally:
            self._done_bytes += written
        self._given[peer] = self._given.get(peer, 0) + piece.n_bytes
        self._rpc.standing.did_well(peer)
        self._fed_at = trio.current_time()
        self._turns[peer] = DonorTurn(self._fed_at)
        with trio.CancelScope(shield=True):  # its donor may be given up meanwhile
            self._download.arrived(peer, piece, self._fed_at)
            if not part.missing and self._unfinished.pop(piece.group, None) is not None:
                await trio.to_thread.run_sync(part.finish)
        self._notify_tasks()

    @staticmethod
    async def _read_from_hub(hub: Hub, piece: ChunkRequest) -> bytes:
        return await trio.to_thread.run_sync(hub.read_piece, piece.refs, abandon_on_cancel=True)  # type: ignore[call-arg]

    def _patience_s(self, peer: PeerId) -> float:
        """Return a time that is enough for all that this donor was asked for at a quarter of its speed."""
        giver = self._download.givers.get(peer)
        if giver is None or not giver.bytes_per_s:
            return STALL_S
        asked_bytes = sum(request.n_bytes for request in giver.asked_at)
        return max(STALL_S / 3, 4 * asked_bytes / giver.bytes_per_s)

    def _give_up(self, peer: PeerId, reason: str) -> None:
        logger.warning("doing without the donor %s: %s", peer, reason)
        self._download.leaves(peer)
        self._notify_tasks()

    def _check_patience(self, now: float) -> None:
        """Note what is waited for. Raises SwarmUnavailable when nothing has come for too long."""
        missing = self._download.without_donor()
        listed = ", ".join(str(s) for s in ranges(set(missing)))
        self._waiting_for = f"nobody who is up holds groups {listed}" if missing else ""
        if now - self._fed_at > PATIENCE_S:
            verified = f"{self._done_bytes} of {self._total_bytes} B are verified and kept"
            reason = self._waiting_for or "no donor gives anything"
            raise SwarmUnavailable(f"{reason} for {PATIENCE_S:.0f} s; {verified}: try again when a holder is up")

    def _notify_tasks(self) -> None:
        self._news.set()
        self._news = trio.Event()
