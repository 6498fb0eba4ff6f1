"""What this machine computes for teams that others lead: slices of their blocks, each team in a process of its own.

Its owner names the leaders (``follow`` in config.toml). A leader's daemon asks for a seat; it is refused until the
blocks are here, then a process is started that the leader's worker dials.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import trio

from swarmd.config import MAX_HOSTED, Config, split
from swarmd.errors import Code, Refused, RemoteProtocolError, SwarmError
from swarmd.net.api import TaskStatus
from swarmd.net.rpc import Channel
from swarmd.net.tasks import Tasks
from swarmd.node.machine.presence import Presence
from swarmd.node.machine.store import Store
from swarmd.node.worker.worker_link import SubprocessWorker, WorkerLost, WorkerProcess
from swarmd.plan.chains.memory import WORKSPACE_BYTES
from swarmd.protocol.wire import messages, worker
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.teams import JoinTeam, SeatIs
from swarmd.protocol.wire.tickets import DialTicket
from swarmd.protocol.wire.worker import Ending, Followed, FollowTeam, LoadSpan, Seated
from swarmd.resources import measure_memory
from swarmd.status import FollowingStatus
from swarmd.values import ModelId, PeerId, Span

logger = logging.getLogger(__name__)

FOLLOWER = "swarmd.compute.teams.far_follower"
MOST_TEAMS = 4  # that this machine follows in at once, each in a process
REFUSED_FOR_S = 5.0  # why it cannot follow is told to a leader who asks again so soon
COMING_S = 0.5  # after which a leader asks again for a seat that is being made

Team = tuple[PeerId, ModelId, Span]
"""Who leads it, and what it computes."""


@dataclass(slots=True)
class TeamPlace:
    """This machine's part in one team; ``scope`` ends it. ``is_told``: its leader has heard of the seat."""

    slot: int
    text: str
    ticket: DialTicket | None = None
    is_told: bool = False
    pid: int | None = None
    refusal: Refused | None = None
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)


#     JoinTeam -> a leader that the owner named? -> a membership begins: fetch, start, seated
#                 asked again meanwhile: refused with COMING_S; then the seat is told, once
#     asked again after that: the team begins anew, so the process of the one before ends
#
# The process ends by itself when its leader's link does.
class TeamsFollowed:
    """See the module. ``hosts``: where workers of other machines dial this one's."""

    def __init__(
        self,
        config: Config,
        store: Store,
        presence: Presence,
        hosts: Sequence[str],
        spill_folder: str,
        start: Callable[[str], WorkerProcess] = SubprocessWorker,
    ) -> None:
        self._leaders = split(config.follow)
        self._threads = config.threads
        self._store = store
        self._presence = presence
        self._hosts = tuple(hosts)
        self._spill_folder = spill_folder
        self._start = start
        self._tasks = Tasks()
        self._teams: dict[Team, TeamPlace] = {}
        self._slots = itertools.count(MAX_HOSTED)  # of the store, none twice: one before may still be on its way out
        self._why_not = ""

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Own the processes until cancelled."""
        async with self._tasks.open():
            task_status.started()
            await trio.sleep_forever()

    def rest(self, reason: str) -> None:
        """Follow nobody, for a reason of the owner's; "" follows again whoever asks."""
        self._why_not = reason
        if reason:
            for membership in self._teams.values():
                membership.scope.cancel()

    async def handle(self, channel: Channel, message: object) -> bool:
        """Answer a leader that asks for a seat; False for any other message. Raises Refused."""
        if not isinstance(message, JoinTeam):
            return False
        if channel.peer not in self._leaders:
            raise Refused(Code.REFUSED, f'its owner has not said follow = "{channel.peer}"')
        if self._why_not:
            raise Refused(Code.NOT_SERVING, self._why_not)
        if message.start >= message.end:
            raise Refused(Code.BAD_SHAPE, f"no blocks [{message.start},{message.end})")
        team = (channel.peer, ModelId(message.model), Span(message.start, message.end))
        membership = self._teams.get(team)
        if membership is None or membership.is_told:
            membership = self._begin(team, message.hold_bytes)
        if membership.refusal is not None:
            del self._teams[team]
            raise membership.refusal
        if membership.ticket is None:
            raise Refused(Code.NOT_SERVING, membership.text, COMING_S)
        membership.is_told = True
        await channel.send(SeatIs(membership.ticket, message.id))
        return True

    def _begin(self, team: Team, hold_bytes: int) -> TeamPlace:
        """Begin, or begin anew, to follow. Raises Refused."""
        before = self._teams.pop(team, None)
        if before is not None:
            before.scope.cancel()
        if sum(membership.refusal is None for membership in self._teams.values()) >= MOST_TEAMS:
            raise Refused(Code.NO_CAPACITY, f"it follows in {MOST_TEAMS} teams")
        membership = self._teams[team] = TeamPlace(next(self._slots), "it fetches the blocks")
        self._tasks.start_soon(self._follow, team, membership, hold_bytes)
        return membership

    async def _follow(self, team: Team, membership: TeamPlace, hold_bytes: int) -> None:
        """Have the blocks here, and a process that follows, until that ends."""
        with membership.scope:
            try:
                request = await self._prepare(team, membership, hold_bytes)
                await self._run_process(request, membership)
            except SwarmError as error:
                membership.refusal = error if isinstance(error, Refused) else Refused(Code.NOT_HELD, str(error))
            finally:
                self._store.release(membership.slot)
            if membership.refusal is not None:
                await trio.sleep(REFUSED_FOR_S)  # till its leader has asked
        if self._teams.get(team) is membership:
            del self._teams[team]

    async def _prepare(self, team: Team, membership: TeamPlace, hold_bytes: int) -> FollowTeam:
        """What its process is asked, once the blocks are on the disk. Raises SwarmError."""
        _, model, span = team
        supply = self._store.supply
        n_blocks = (await supply.manifest(model)).n_blocks
        if span.end > n_blocks:
            raise Refused(Code.BAD_SHAPE, f"blocks {span} of {n_blocks}")
        groups = frozenset(span.blocks())
        self._store.hold(membership.slot, model, groups)
        folder = (await supply.ensure(model, groups)).folder
        free_bytes = max(0, measure_memory().free_bytes - self._presence.kept_bytes)
        needed_bytes = hold_bytes + WORKSPACE_BYTES
        if needed_bytes > free_bytes:
            room = (
                f"its slices take {needed_bytes / 2**30:.2f} GiB, with room to work; {free_bytes / 2**30:.2f} are free"
            )
            raise Refused(Code.NO_CAPACITY, room)
        load = LoadSpan(
            path=str(folder),
            model=model,
            start=span.start,
            end=span.end,
            threads=self._threads,
            leave_free_bytes=self._presence.kept_bytes,
            spill_folder=self._spill_folder,
        )
        return FollowTeam(load, self._hosts)

    async def _run_process(self, request: FollowTeam, membership: TeamPlace) -> None:
        """Run a process to its end. Raises Refused where that comes before others could dial it."""
        membership.text = "its process starts"
        process = self._start(FOLLOWER)
        membership.pid = process.pid
        last_words = "it was killed"
        try:
            await process.send(messages.encode_frame(request))
            decoder = FrameDecoder()
            async for data in process.received():
                for frame in decoder.feed_untrusted(data):
                    message = worker.decode(frame.header)
                    if isinstance(message, Seated):
                        membership.ticket = message.ticket
                        membership.text = "it waits for the others"
                    elif isinstance(message, Followed):
                        membership.text = message.text
                        logger.info("%s", message.text)
                    elif isinstance(message, Ending):
                        last_words = message.reason
        except (WorkerLost, RemoteProtocolError) as error:
            last_words = str(error)
        finally:
            status = process.kill().status
        if not membership.is_told:
            raise Refused(Code.NOT_SERVING, f"its process has ended: {last_words}")
        if status:
            logger.warning("a member of a team ended: %s", last_words)

    def snapshot(self) -> tuple[FollowingStatus, ...]:
        return tuple(
            FollowingStatus(
                leader=leader, model=model, blocks=(span.start, span.end), state=membership.text, pid=membership.pid
            )
            for (leader, model, span), membership in self._teams.items()
        )
