"""One peer's part in one run: computes, joins rounds, applies what was committed, catches up, and gives to others.

What to do is decided by ``plan.progress`` from what all members say; this file does it. State changes only here:
the ledger grows by verified commits, and the vectors follow it.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import msgspec
import trio

from swarmd.errors import Code, ConfigError, IntegrityError, PeerError, Refused, RemoteProtocolError, SwarmError
from swarmd.net.api import TaskStatus
from swarmd.net.rpc import Channel, Rpc
from swarmd.plan import progress
from swarmd.plan.arrivals import Arrivals
from swarmd.plan.ledger import Ledger
from swarmd.plan.progress import Action, Progress
from swarmd.plan.recovery import Offer, choose_way, restorable
from swarmd.plan.view import SwarmView
from swarmd.protocol import commit as commits
from swarmd.protocol import manifest as manifests
from swarmd.protocol import rounds
from swarmd.protocol.commit import Commit
from swarmd.protocol.fields import Message
from swarmd.protocol.frames import Frame
from swarmd.protocol.identity import Identity
from swarmd.protocol.messages import AnyMessage
from swarmd.protocol.recipe import Run, RunOrder, read_order_untrusted
from swarmd.protocol.rounds import Beat, Group, JoinRound, Pulse
from swarmd.protocol.untrusted import decode
from swarmd.train import recovery
from swarmd.train.anchor import Anchor
from swarmd.train.disk import RunFolder, read_vectors
from swarmd.train.leader import Leader, Outcome, RoundFailed, RoundTimes, Timing, TooEarly
from swarmd.train.members import Members
from swarmd.train.recovery import Get, Givers
from swarmd.train.round import OffLoop, Round
from swarmd.train.source import Source, SourceLost
from swarmd.train.state import Average, Layout, RunState, Snapshot, Vector, clip_factor, describe_average
from swarmd.values import PeerId, RunId

logger = logging.getLogger(__name__)

LOOK_INTERVAL_S = 0.25
TELL_TIMEOUT_S = 3.0
CALL_TIMEOUT_S = 4.0
HOUSEKEEPING_S = 2.0
RESTORE_AFTER_S = 30.0
RETRY_S = 1.0
SMOOTHING = 0.3
NEWS_AT = 0.2  # of its last announced speed: a change that others should know


@dataclass(frozen=True, slots=True)
class World:
    """What a trainer is given: the network, who it is, what it sees of the swarm, how it leaves the event loop."""

    rpc: Rpc
    identity: Identity
    view: Callable[[], SwarmView]
    announce: Callable[[], None]
    off_loop: OffLoop[Any]
    rng: random.Random
    links: Callable[[], tuple[float | None, float | None]]
    can_be_dialled: Callable[[], bool]


@dataclass(slots=True)
class Gathered:
    """What this peer has computed since the last commit: a sum of gradients, and the draws in it."""

    first: int = 0
    n: int = 0
    loss: float = 0.0
    vector: Vector | None = None


@dataclass(slots=True)
class Counters:
    """What became of this peer's work."""

    samples_counted: int = 0
    samples_wasted: int = 0
    rounds_led: int = 0
    rounds_failed: int = 0
    catch_ups: int = 0
    last_round: RoundTimes | None = None
    last_times_s: dict[str, float] = field(default_factory=dict)


class Trainer:
    """See the module. ``role`` is train, reduce or anchor; only the first has a ``source``."""

    def __init__(
        self,
        world: World,
        run: Run,
        role: str,
        source: Source | None,
        folder: RunFolder | None,
        get: Callable[[Layout], Get],
    ) -> None:
        self.run_id: RunId = run.id
        self.run_spec = run
        self.role = role
        self.ledger = Ledger(run)
        self.order = RunOrder(run.id, 0)
        self.order_raw = b""
        self.state: RunState | None = None
        self.counters = Counters()
        self.why = "starting"
        self.trouble = ""
        self.samples_per_s = 0.0
        self._world = world
        self.me = world.rpc.network.peer_id
        self._source = source
        self._folder = folder
        self._make_get = get
        self._get: Get
        self.members = Members(run.id, self.me, world.view)
        self._anchor: Anchor | None = None
        self._givers = Givers()
        self.timing = Timing()
        self.pulses = Arrivals(least_s=2.0, first_s=5.0)
        self._batches = Arrivals(least_s=1.0, first_s=60.0)
        self.gathered = Gathered()
        self._is_computing = False
        self._may_compute = False
        self._is_paused = False
        self._leader: Leader | None = None
        self._followed: PeerId | None = None
        self._pulsed_at = 0.0
        self._retry_at = 0.0
        self._round: Round | None = None
        self._round_scope = trio.CancelScope()
        self._averages: dict[bytes, Vector] = {}
        self._news = trio.Event()
        self._writing = trio.Lock()
        self._announced_rate = 0.0
        self._behind_since: float | None = None
        self._mistrusted = False
        self._nursery: trio.Nursery

    # --- life --------------------------------------------------------------------------------------------------

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Take part until cancelled. Raises SwarmError when this peer cannot."""
        await self._recall()
        async with trio.open_nursery() as self._nursery:
            task_status.started()
            if self._source is not None:
                self.why = "loading the model"
                layout, parameters = await self._source.open()
                self._get = self._make_get(layout)
                self.state = RunState(self.run_spec, layout, parameters, 3 * layout.n_bytes)
                await self._off_loop(self.state.measure)
                await self._resume_from_disk(self.state)
                self._nursery.start_soon(self._compute)
            self._nursery.start_soon(self._keep_house)
            self._world.announce()
            while True:
                await self._step()

    async def _recall(self) -> None:
        """Read ledger, order and promises from the disk."""
        acceptor = None
        if self._folder is not None:
            if raw := self._folder.order():
                self.take_order_untrusted(raw)
            for raw in await self._off_loop(lambda: list(self._folder.commits())):  # type: ignore[union-attr]
                self.ledger.add(commits.read_untrusted(raw, self._anchor_sets()))
            acceptor = self._folder.acceptor()
        if self.me in self.order.anchors_of(self.run_spec.recipe):
            self._anchor = Anchor(self.ledger, self._world.identity, acceptor, self._folder, self._off_loop)
            self._anchor.order = self.order

    async def _resume_from_disk(self, state: RunState) -> None:
        """Begin with the newest checkpoint that is what it says."""
        for saved in self._folder.saved() if self._folder is not None else ():
            if saved.epoch > self.ledger.epoch or self.ledger.digest_at(saved.epoch) != saved.head:
                logger.warning("%s is of no commit that is known here", saved.path)
                continue
            try:
                names = tuple(state.vectors)
                vectors = await self._off_loop(
                    read_vectors, saved.path, state.layout.dtype, state.layout.n_elements, names
                )
            except ConfigError as error:
                logger.warning("leaving out a checkpoint: %s", error)
                continue
            state.replace(vectors)
            await self._off_loop(state.move_to, saved.epoch, saved.head, saved.steps)
            if state.root == saved.root:
                logger.info("going on from the checkpoint of update %d", saved.epoch)
                return
            logger.warning("%s is damaged: its digest is another", saved.path)
            raise ConfigError(f"{saved.path} is damaged: delete it, and the state comes from peers")

    async def _step(self) -> None:
        """Look, decide, act, once."""
        news = self._news
        if finished := self.is_over():
            self.why = finished
            await self._hold()
        elif self.state is None:
            await self._reduce_or_watch()
        elif self.state.epoch < self.ledger.epoch or self._mistrusted:
            await self._advance(self.state)
        else:
            decision = self._decide(self.state)
            self.why = decision.reason
            if decision.action is Action.CATCH_UP:
                await self._sync(self._ahead())
            elif decision.action is Action.JOIN_ROUND:
                await self._take_part(self.ledger.head)
            else:
                self._let_compute()
        if news is self._news:
            with trio.move_on_after(LOOK_INTERVAL_S):
                await news.wait()

    def links(self) -> tuple[float | None, float | None]:
        """This peer's measured bytes/s, up and down."""
        return self._world.links()

    def can_be_dialled(self) -> bool:
        return self._world.can_be_dialled()

    def is_over(self) -> str:
        if self.order.state == "stopped":
            return "the run's owner has stopped it"
        if self._is_paused:
            return "paused here"
        return self.ledger.finished()

    def _decide(self, state: RunState) -> Any:
        others = self.members.progress(trio.current_time())
        me = Progress(
            self.me, state.epoch, state.head, self.gathered.n, self.samples_per_s if self._is_computing else 0
        )
        decision = progress.decide(me, others, self.run_spec.recipe.batch.target)
        is_called = self._leader is not None and self._leader.parent == state.head
        if decision.action is Action.CONTINUE and is_called:
            return type(decision)(Action.JOIN_ROUND, "others have begun the round")
        if decision.action is Action.JOIN_ROUND and trio.current_time() < self._retry_at and not is_called:
            return type(decision)(Action.CONTINUE, "fewer samples were there than forecast")
        return decision

    # --- computing ---------------------------------------------------------------------------------------------

    async def _compute(self) -> None:
        """Gather gradients, one micro-batch after the other, while nothing else holds the vectors."""
        assert self._source is not None
        assert self.state is not None
        micro = self.run_spec.recipe.batch.micro
        while True:
            while not self._may_compute:
                await self._news.wait()
            head, gathered, begun = self.state.head, self.gathered, trio.current_time()
            if not gathered.n:
                gathered.first = self.ledger.next_draw.get(self.me, 0)
            self._is_computing = True
            try:
                done = await self._source.compute(gathered.first + gathered.n, micro, is_fresh=not gathered.n)
            except SourceLost as error:
                self.trouble = str(error)
                logger.warning("%s", error)
                await trio.sleep(RETRY_S)
                continue
            finally:
                self._is_computing = False
                self._notify()
            took_s = max(trio.current_time() - begun, 1e-6)
            self._batches.add(took_s)
            rate = micro / took_s
            self.samples_per_s += (rate - self.samples_per_s) * (SMOOTHING if self.samples_per_s else 1.0)
            if gathered is not self.gathered or head != self.state.head:
                continue  # it came too late, and was computed on what is no longer the state
            gathered.n, gathered.loss, gathered.vector = gathered.n + micro, gathered.loss + done.loss, done.gathered
            if abs(self.samples_per_s - self._announced_rate) > NEWS_AT * self._announced_rate:
                self._announced_rate = self.samples_per_s
                self._world.announce()

    async def _hold(self) -> None:
        """Let nothing new be computed; a micro-batch under way is waited for as long as such ones take."""
        self._may_compute = False
        with trio.move_on_after(self._batches.limit_s()):
            while self._is_computing:
                await self._news.wait()

    def _let_compute(self) -> None:
        if not self._may_compute:
            self._may_compute = True
            self._notify()

    def _begin_anew(self, commit: Commit | None) -> None:
        """What was gathered is counted, or can no longer be."""
        old, self.gathered = self.gathered, Gathered()
        counted = commit is not None and any(
            c.peer == self.me and (c.first, c.n) == (old.first, old.n) for c in commit.contributors
        )
        if counted:
            self.counters.samples_counted += old.n
        else:
            self.counters.samples_wasted += old.n

    # --- rounds ------------------------------------------------------------------------------------------------

    async def _take_part(self, parent: bytes) -> None:
        """Join the round after ``parent``, under one leader after the other, until it is committed."""
        await self._hold()
        begun = trio.current_time()
        while self.ledger.head == parent and trio.current_time() >= self._retry_at and not self.is_over():
            leader = self._choose_leader(parent)
            if leader == self.me or self._leader is not None:
                await self._lead()
            else:
                await self._follow(leader, parent)
        self.counters.last_times_s["round"] = trio.current_time() - begun

    def _choose_leader(self, parent: bytes) -> PeerId:
        """The first by the rule that all follow. Without any candidate, everybody gets another chance."""
        able = self.members.leaders(parent, trio.current_time())
        mine = [self.me] if self._world.can_be_dialled() and self.state is not None else []
        order = progress.leader_order(parent, [*able, *mine])
        if not order:
            self.members.forgive()
        return order[0] if order else self.me

    async def _lead(self) -> None:
        """Lead the round to its end. Members are told what came of it."""
        assert self.state is not None
        leader = self._leader = self._leader or self._new_leader()
        leader.join(self.me, self._joining(0))
        self._followed = self.me
        try:
            outcome = await leader.lead()
        except* Refused as group:
            logger.info("the anchors know more: %s", group.exceptions[0])
            await self._sync([*self.order.anchors_of(self.run_spec.recipe), *self.members.look(trio.current_time())])
        except* TooEarly as group:
            self.why = str(group.exceptions[0])
            await self._call_off(leader)
        except* RoundFailed as group:
            self.counters.rounds_failed += 1
            logger.warning("this round failed: %s", group.exceptions[0])
        else:
            self.counters.rounds_led += 1
            await self._finish(leader, outcome)
        finally:
            if self._leader is leader:
                self._leader = None

    async def _finish(self, leader: Leader, outcome: Outcome) -> None:
        """A majority has signed: everybody may know."""
        self.counters.last_round = outcome.times
        await self._take_commits([outcome.raw])
        everybody = {
            *leader.joined,
            *self.order.anchors_of(self.run_spec.recipe),
            *self.members.look(trio.current_time()),
        }
        for peer in everybody - {self.me}:
            self._nursery.start_soon(self._tell_commits, peer, [outcome.raw])

    async def _call_off(self, leader: Leader) -> None:
        """Fewer samples are there than were forecast: all go on computing for as long as the rest takes."""
        n = sum(j.n for j in leader.joined.values())
        rate = sum(m.samples_per_s for m in self.members.progress(trio.current_time())) + self.samples_per_s
        lacking = max(0, self.run_spec.recipe.batch.target - n)
        wait_s = min(30.0, max(0.2, lacking / rate if rate else 1.0))
        self._retry_at = trio.current_time() + wait_s
        pulse = Pulse(run=self.run_id, parent=leader.parent, retry_ms=int(1000 * wait_s))
        for peer in leader.joined:
            if peer != self.me:
                self._nursery.start_soon(self._tell, peer, pulse)

    def _new_leader(self) -> Leader:
        return Leader(
            self.me,
            self.ledger,
            self.order,
            self.timing,
            self._world.rng,
            self._tell,
            lambda: self.members.at(self.ledger.head, trio.current_time()),
            self._ask_anchor,
            self._clip,
        )

    async def _follow(self, leader: PeerId, parent: bytes) -> None:
        """Join under another peer; returns when that is over, whatever came of it."""
        try:
            self._followed = leader
            self._pulsed_at = trio.current_time()
            await self._world.rpc.call(leader, self._joining, timeout_s=CALL_TIMEOUT_S, purpose="bulk")
        except Refused as error:
            self.why = f"{leader[-8:]} leads and refuses: {error}"
            if error.code in (Code.STALE_EPOCH, Code.NUMERICS_DIFFER):
                await self._sync([leader])
            elif error.code is not Code.NO_CAPACITY:
                self.members.suspect(leader, trio.current_time())
            await self._wait_news(error.retry_after_s or LOOK_INTERVAL_S)
            return
        except PeerError as error:
            logger.info("%s should lead and does not answer: %s", leader[-8:], error)
            self.members.suspect(leader, trio.current_time())
            return
        while self.ledger.head == parent and self._followed == leader and self._leader is None:
            silent_s = trio.current_time() - self._pulsed_at
            if silent_s > self.pulses.limit_s():
                logger.info("the leader %s gives no sign of life for %.1f s", leader[-8:], silent_s)
                self.members.suspect(leader, trio.current_time())
                return
            if trio.current_time() < self._retry_at:
                return
            await self._wait_news(LOOK_INTERVAL_S)

    def _joining(self, call_id: int) -> JoinRound:
        up, down = self._world.links()
        state, gathered = self.state, self.gathered
        return JoinRound(
            id=call_id,
            run=self.run_id,
            parent=self.ledger.head,
            state=state.root if state else b"",
            first=gathered.first,
            n=gathered.n,
            loss=gathered.loss,
            n_elements=state.layout.n_elements if state else 0,
            dtype=state.layout.dtype if state else "float32",
            receives=state is not None,
            can_reduce=self._world.can_be_dialled(),
            up_bytes_per_s=up,
            down_bytes_per_s=down,
        )

    async def _reduce_or_watch(self) -> None:
        """What a peer without a model does: reduce for others when a round is near, keep the ledger."""
        now = trio.current_time()
        self._world.rpc.network.peer_id  # noqa: B018
        ahead = [p for p, r in self.members.look(now).items() if r.epoch > self.ledger.epoch]
        if ahead:
            await self._sync(ahead)
        self.why = "keeps the ledger and signs" if self.role == "anchor" else "waits for a round to reduce in"
        if self.role != "reduce" or now < self._retry_at:
            return
        total = progress.forecast(self.members.progress(now), self.ledger.head, self.run_spec.recipe.batch.target)
        leaders = progress.leader_order(self.ledger.head, self.members.leaders(self.ledger.head, now))
        if total.left_s == 0.0 and leaders:
            await self._follow(leaders[0], self.ledger.head)

    async def _take_group(self, peer: PeerId, group: Group) -> None:
        """The leader that this peer follows has formed, or changed, the group."""
        if peer != self._followed or group.parent != self.ledger.head:
            return
        if self._round is not None and self._round.group.round == group.round:
            self._round.change(group)
            return
        mine = next((m for m in group.members if m.peer == self.me), None)
        fits = mine is not None and (mine.first, mine.n) == (self.gathered.first, self.gathered.n)
        if mine is None or (mine.n and not fits):
            return
        self._end_round()
        vector = self.gathered.vector if mine.n else None
        digest = partial(_digest_of, self.run_spec, group.parent)
        self._round = Round(self._world.rpc, group, vector, digest, self._off_loop)
        self._round_scope = trio.CancelScope()
        self._nursery.start_soon(self._live_round, self._round, self._round_scope, peer)
        self._notify()

    async def _live_round(self, live: Round, scope: trio.CancelScope, leader: PeerId) -> None:
        async def beat(message: Beat) -> None:
            if message.result and live.average is not None:
                self._averages[message.result] = live.average
            await self._tell(leader, message)

        with scope:
            await live.run(beat)

    def _end_round(self) -> None:
        self._round_scope.cancel()
        self._round = None

    def _clip(self, average: bytes) -> float:
        limit = self.run_spec.recipe.optimizer.clip_norm
        values = self._averages.get(average)
        return clip_factor(values, limit) if values is not None else 1.0

    # --- commits and state -------------------------------------------------------------------------------------

    async def _take_commits(self, raws: Iterable[bytes]) -> bool:
        """Add what follows the ledger's head; False when something is missing in between. Raises IntegrityError."""
        async with self._writing:
            for raw in raws:
                sealed = commits.read_untrusted(raw, self._anchor_sets())
                if sealed.commit.epoch > self.ledger.epoch + 1:
                    return False
                if self.ledger.add(sealed):
                    if self._folder is not None:
                        await self._off_loop(self._folder.append_commit, raw)
                    self._notify()
        return True

    async def _advance(self, state: RunState) -> None:
        """Follow the ledger: with the average of the round that this peer was in, else with what others give."""
        await self._hold()
        self._end_round()
        if self._mistrusted or not await self._apply_next(state):
            self.counters.catch_ups += 1
            begun = trio.current_time()
            try:
                await self._catch_up(state)
            except SwarmError as error:
                self.why = f"cannot catch up yet: {error}"
                await trio.sleep(RETRY_S)
                return
            self.counters.last_times_s["catch_up"] = trio.current_time() - begun
        if state.epoch == self.ledger.epoch:
            self._behind_since = None
            self._averages.clear()
            self._world.announce()
            self._save_now_and_then(state)

    async def _apply_next(self, state: RunState) -> bool:
        """Apply the commit after the state's, if its average is here. A state that others do not have is given up."""
        commit = self.ledger.sealed[state.epoch].commit
        if commit.restores:
            if commit.restores != state.head:
                return False
            self._begin_anew(commit)
            await self._off_loop(state.move_to, commit.epoch, self.ledger.digest_at(commit.epoch), state.steps)
            return True
        average = self._averages.pop(commit.average, None)
        if average is None:
            return False
        if commit.state != state.root:
            logger.warning("the state here is another than that of update %d: fetching it anew", state.epoch)
            self._mistrusted = True
            return False
        await self._apply(state, commit, average)
        return True

    async def _apply(self, state: RunState, commit: Commit, average: Vector) -> None:
        self._begin_anew(commit)
        digest = self.ledger.digest_at(commit.epoch)
        await self._off_loop(state.apply, commit, digest, average, self.ledger.steps_at(commit.epoch))

    async def _catch_up(self, state: RunState) -> None:
        """Fetch what is missing. Raises SwarmUnavailable when nobody gives it yet."""
        self._begin_anew(None)
        others = self.members.look(trio.current_time())
        offers = {
            p: Offer(r.state_epoch, r.state, r.n_averages) for p, r in others.items() if r.state_epoch is not None
        }
        mine = None if self._mistrusted else state.epoch
        newest = self.ledger.epoch
        way = choose_way(mine, newest, offers, state.layout.n_bytes, state.n_bytes)
        self.why = way.reason
        if way.action is not None and not way.action.state:
            await self._replay(state, way.action.donors, way.action.epoch)
            return
        if way.action is None:
            await self._restore_if_lost(state, others)
            return
        asked = await recovery.ask_states(self._world.rpc, way.action.donors, self.run_id)
        asked = {p: o for p, o in asked.items() if o.epoch <= self.ledger.epoch}
        chosen = choose_way(mine, newest, asked, state.layout.n_bytes, 0)
        if chosen.action is None:
            self.why = chosen.reason
            await trio.sleep(RETRY_S)
            return
        logger.info("fetching %s", chosen.reason)
        vectors = await self._get(chosen.action.state, chosen.action.donors, tuple(state.vectors))
        epoch = chosen.action.epoch
        state.replace(vectors)
        await self._off_loop(state.move_to, epoch, self.ledger.digest_at(epoch), self.ledger.steps_at(epoch))
        self._mistrusted = state.root != chosen.action.state

    async def _replay(self, state: RunState, donors: tuple[PeerId, ...], newest: int) -> None:
        """Apply the averages that were missed, one after the other."""
        while state.epoch < newest:
            commit = self.ledger.sealed[state.epoch].commit
            if commit.restores:
                if not await self._apply_next(state):
                    self._mistrusted = True
                    return
                continue
            average = await self._get(commit.average, donors, ("average",))
            if commit.state != state.root:
                self._mistrusted = True
                return
            await self._apply(state, commit, average["average"])

    async def _restore_if_lost(self, state: RunState, others: dict[PeerId, Any]) -> None:
        """Where nobody alive has the newest state, the newest that somebody has is where the run goes on."""
        now = trio.current_time()
        self._behind_since = self._behind_since or now
        known = {p: r.state_epoch for p, r in others.items() if r.state_epoch is not None} | {self.me: state.epoch}
        best = restorable(self.ledger.epoch, list(known.values()))
        if best is None or now - self._behind_since < RESTORE_AFTER_S:
            await trio.sleep(RETRY_S)
            return
        holders = [p for p, epoch in known.items() if epoch == best]
        if progress.leader_order(self.ledger.head, holders)[0] != self.me:
            await trio.sleep(RETRY_S)
            return
        logger.warning("nobody has the state of update %d: going back to %d", self.ledger.epoch, best)
        commit = Commit(
            run=self.run_spec.genesis,
            epoch=self.ledger.epoch + 1,
            parent=self.ledger.head,
            generation=self.order.generation,
            contributors=(),
            average=b"",
            state=state.root,
            learning_rate=0.0,
            restores=state.head,
        )
        leader = self._new_leader()
        await self._finish(leader, Outcome(await leader.restore(commits.encode(commit)), None))

    async def _sync(self, peers: Iterable[PeerId]) -> None:
        """Ask for commits that are missing here. What does not verify costs whoever sent it standing."""
        for peer in dict.fromkeys(peers):
            if peer == self.me:
                continue
            before = self.ledger.epoch
            try:
                raws = await recovery.fetch_commits(self._world.rpc, peer, self.run_id, before)
                await self._take_commits(raws)
            except IntegrityError as error:
                self._world.rpc.faults[peer] += 1
                logger.warning("commits of %s do not count: %s", peer[-8:], error)
                self.members.suspect(peer, trio.current_time())
            except PeerError as error:
                logger.info("no commits from %s: %s", peer[-8:], error)
                self.members.suspect(peer, trio.current_time())
            if self.ledger.epoch > before:
                return
        await self._wait_news(LOOK_INTERVAL_S)

    def _ahead(self) -> list[PeerId]:
        records = self.members.look(trio.current_time())
        peers = [p for p, r in records.items() if r.epoch >= self.ledger.epoch and r.head != self.ledger.head]
        for peer in peers:  # who has nothing to show for it is believed no longer, until it says something new
            if records[peer].epoch == self.ledger.epoch:
                self.members.suspect(peer, trio.current_time())
        return peers

    def _save_now_and_then(self, state: RunState) -> None:
        every = self.run_spec.recipe.checkpoints.every
        if self._folder is not None and (state.epoch % every == 0 or self.ledger.finished()):
            self._nursery.start_soon(self.save)

    async def save(self) -> str:
        """Write the state to this disk; returns where. Training goes on meanwhile."""
        if self.state is None or self._folder is None:
            raise ConfigError("this peer holds no state of the run")
        snapshot = self.state.freeze()
        keep = self.run_spec.recipe.checkpoints.keep
        return str(await self._off_loop(self._folder.save, snapshot, keep))

    # --- what others ask ---------------------------------------------------------------------------------------

    async def handle(self, channel: Channel, message: AnyMessage, frame: Frame) -> None:
        """Answer what is about this run. Raises Refused or RemoteProtocolError."""
        peer = channel.peer
        if isinstance(message, rounds.Contribution | rounds.Reduced):
            await self._take_numbers(peer, message, frame.payload)
        elif isinstance(message, Beat):
            if self._leader is not None:
                self._leader.beat(peer, message)
        elif isinstance(message, Group):
            await self._take_group(peer, message)
        elif isinstance(message, Pulse):
            self._take_pulse(peer, message)
        elif isinstance(message, JoinRound):
            self._take_join(peer, message)
            await channel.send(rounds.Joined(re=message.id))
        elif isinstance(message, rounds.WantRun):
            payload = msgspec.msgpack.encode((self.run_spec.raw, self.order_raw))
            await channel.send(rounds.RunIs(re=message.id), payload)
        elif isinstance(message, rounds.WantCommits):
            wanted = self.ledger.sealed[message.after :]
            await recovery.send_commits(channel, self.run_id, (s.raw for s in wanted), message.id)
        elif isinstance(message, rounds.Commits):
            await self._take_news(peer, frame)
        elif isinstance(message, rounds.WantState):
            await channel.send(self._keep_state(message))
        elif isinstance(message, rounds.Prepare | rounds.Propose):
            answer, body = await self._be_anchor(message, bytes(frame.payload))
            await channel.send(answer, body)

    def find(self, wanted: bytes) -> Snapshot | Average | None:
        """What of this run's state a hash names here."""
        return self._givers.find(self.state, wanted) if self.state is not None else None

    def gone(self, peer: PeerId) -> None:
        """Every connection of one kind to a peer has ended."""
        if self._leader is not None:
            self._leader.gone(peer)
        if self._followed == peer:
            self.members.suspect(peer, trio.current_time())
            self._followed = None
            self._notify()

    def take_order_untrusted(self, raw: bytes) -> bool:
        """Take what the run's owner says, if it is newer. Raises IntegrityError."""
        order = read_order_untrusted(raw, self.run_spec)
        if order.sequence <= self.order.sequence:
            return False
        self.order, self.order_raw = order, raw
        if self._anchor is not None:
            self._anchor.order = order
        self._notify()
        return True

    def pause(self, is_paused: bool) -> None:
        """The owner of this machine wants it back, or gives it again."""
        self._is_paused = is_paused
        if is_paused:
            self._may_compute = False
        self._notify()

    async def _take_numbers(
        self, peer: PeerId, message: rounds.Contribution | rounds.Reduced, payload: memoryview
    ) -> None:
        with trio.move_on_after(CALL_TIMEOUT_S):  # the leader's word may be on its way by another channel
            while self._round is None or self._round.group.round != message.round:
                if self.ledger.finished():
                    return
                await self._news.wait()
        live = self._round
        if live is None or live.group.round != message.round:
            return
        if isinstance(message, rounds.Contribution):
            await live.take_contribution(peer, message, payload)
        else:
            await live.take_reduced(peer, message, payload)

    def _take_pulse(self, peer: PeerId, message: Pulse) -> None:
        if peer != self._followed or message.parent != self.ledger.head:
            return
        now = trio.current_time()
        self.pulses.add(now - self._pulsed_at)
        self._pulsed_at = now
        if message.retry_ms is not None:
            self._retry_at = now + min(60.0, message.retry_ms / 1000)
        else:
            self.why = f"in a round that {peer[-8:]} leads; it waits for {message.waits_for}"
        self._notify()

    def _take_join(self, peer: PeerId, message: JoinRound) -> None:
        if self.state is None or self.state.epoch != self.ledger.epoch or self.is_over():
            raise Refused(Code.NO_CAPACITY, "this peer cannot lead now", 0.5)
        if message.parent != self.ledger.head:
            if any(message.parent == self.ledger.digest_at(e) for e in range(self.ledger.epoch)):
                raise Refused(Code.STALE_EPOCH, f"commit {self.ledger.epoch} is known here: ask for it")
            self._nursery.start_soon(self._sync, [peer])
            raise Refused(Code.NOT_HELD, "that commit is not known here", 0.5)
        if self._followed not in (None, self.me) and self._leader is None and self._round is not None:
            raise Refused(Code.STRANGER, f"{self._followed} leads this round")
        if self._leader is None:
            self._leader = self._new_leader()
        self._leader.join(peer, message)
        self._notify()

    async def _take_news(self, peer: PeerId, frame: Frame) -> None:
        try:
            if not await self._take_commits(decode(frame.payload, list[bytes], "a list of commits")):
                self._nursery.start_soon(self._sync, [peer])
        except IntegrityError as error:
            raise RemoteProtocolError(f"commits that do not count: {error}") from None

    def _keep_state(self, message: rounds.WantState) -> rounds.StateIs:
        if self.state is None or self.state.epoch != self.ledger.epoch:
            raise Refused(Code.NOT_HELD, "this peer is not up to date itself", 2.0)
        offer = self._givers.freeze(self.state, trio.current_time())
        return rounds.StateIs(re=message.id, epoch=offer.epoch, state=offer.state)

    # --- anchors -----------------------------------------------------------------------------------------------

    async def _be_anchor(self, message: rounds.Prepare | rounds.Propose, body: bytes) -> tuple[Message, bytes]:
        if self._anchor is None:
            raise Refused(Code.REFUSED, "this peer is no anchor of the run")
        if isinstance(message, rounds.Prepare):
            return await self._anchor.prepare(message)
        return await self._anchor.propose(message, body), b""

    async def _ask_anchor(
        self, anchor: PeerId, request: Callable[[int], Message], payload: bytes
    ) -> tuple[Message, bytes]:
        """Ask one anchor; one that lacks commits is given them first. Raises PeerError."""
        for attempt in range(2):
            try:
                if anchor == self.me:
                    asked = request(0)
                    assert isinstance(asked, rounds.Prepare | rounds.Propose)
                    return await self._be_anchor(asked, payload)
                reply, frame = await self._world.rpc.call(anchor, request, payload, CALL_TIMEOUT_S, "bulk")
                return reply, bytes(frame.payload)
            except Refused as error:
                if error.code is not Code.NOT_HELD or attempt:
                    raise
                raws = await recovery.fetch_commits(self._world.rpc, anchor, self.run_id, self.ledger.epoch)
                if raws:
                    await self._take_commits(raws)
                    raise Refused(Code.STALE_EPOCH, "the anchor knows more commits") from None
                await self._tell_commits(anchor, [s.raw for s in self.ledger.sealed])
        raise Refused(Code.NOT_HELD, "the anchor does not take the commits that it lacks")

    def _anchor_sets(self) -> dict[int, tuple[PeerId, ...]]:
        """The anchors of each generation that is known."""
        first = tuple(PeerId(a) for a in self.run_spec.recipe.anchors)
        return {0: first, self.order.generation: self.order.anchors_of(self.run_spec.recipe)}

    # --- small things ------------------------------------------------------------------------------------------

    async def _tell(self, peer: PeerId, message: Message) -> None:
        """Bring a message to a member, this peer included; one that cannot be reached is not told."""
        if peer == self.me:
            if isinstance(message, Group):
                await self._take_group(peer, message)
            elif isinstance(message, Beat) and self._leader is not None:
                self._leader.beat(peer, message)
            return
        try:
            with trio.fail_after(TELL_TIMEOUT_S):
                channel = await self._world.rpc.channel(peer, "bulk")
                await channel.send(message)
        except (PeerError, trio.TooSlowError) as error:
            logger.debug("%s was not told: %s", peer[-8:], error)

    async def _tell_commits(self, peer: PeerId, raws: list[bytes]) -> None:
        try:
            with trio.fail_after(TELL_TIMEOUT_S):
                channel = await self._world.rpc.channel(peer, "bulk")
                await recovery.send_commits(channel, self.run_id, raws)
        except (PeerError, trio.TooSlowError) as error:
            logger.debug("%s was not told of a commit: %s", peer[-8:], error)

    async def _keep_house(self) -> None:
        while True:
            await trio.sleep(HOUSEKEEPING_S)
            if self.state is not None:
                self._givers.expire(self.state, trio.current_time())
            for record in self.members.look(trio.current_time()).values():
                if record.order and record.order != self.order_raw:
                    try:
                        if self.take_order_untrusted(record.order) and self._folder is not None:
                            await self._off_loop(self._folder.keep_order, record.order)
                            self._world.announce()
                    except IntegrityError as error:
                        logger.warning("an order that %s passes on does not count: %s", record.peer[-8:], error)

    async def _wait_news(self, longest_s: float) -> None:
        news = self._news
        with trio.move_on_after(longest_s):
            await news.wait()

    async def _off_loop(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await self._world.off_loop(function, *arguments)

    def _notify(self) -> None:
        self._news.set()
        self._news = trio.Event()

    # --- what it says of itself --------------------------------------------------------------------------------

    def record(self) -> dict[str, Any]:
        """This peer's RunRecord, without what all records share."""
        state = self.state
        return {
            "kind": "run",
            "run": self.run_id,
            "name": self.run_spec.recipe.name,
            "role": self.role,
            "status": self.why[:200],
            "epoch": self.ledger.epoch,
            "head": self.ledger.head,
            "state_epoch": state.epoch if state else None,
            "state": state.root if state else b"",
            "n_averages": len(state.averages) if state else 0,
            "n_samples": self.gathered.n,
            "samples_per_s": 0.0 if self.is_over() else self.samples_per_s,
            "can_be_dialled": self._world.can_be_dialled(),
            "order": self.order_raw,
        }


def _digest_of(run: Run, parent: bytes, average: Vector) -> bytes:
    return bytes.fromhex(manifests.model_id(describe_average(run, parent, average)))
