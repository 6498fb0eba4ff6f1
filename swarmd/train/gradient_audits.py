"""Computes again what other members gave to a run, and tells when something else comes of it (plan.gradient_audits).

A member looks at one contribution at a time: the state of before is held until it is done, which costs memory and
nobody's wait. Whoever gave something else loses its standing here; the others are told, and compute it themselves, on
the state that the accuser holds for them, before they believe: one of two members signed what is not so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import msgspec
import trio

from swarmd.errors import IntegrityError, RemoteProtocolError, SwarmError
from swarmd.net.tasks import Tasks
from swarmd.plan import gradient_audits
from swarmd.plan.gradient_audits import Came
from swarmd.plan.ledger import Ledger
from swarmd.plan.standing import Fault
from swarmd.protocol import backing
from swarmd.protocol import commit as commits
from swarmd.protocol.backing import Backed, Share
from swarmd.protocol.commit import Commit
from swarmd.protocol.rounds import Contradict
from swarmd.protocol.untrusted import decode
from swarmd.train.codecs import codec_of
from swarmd.train.directions import Directions
from swarmd.train.members import Members
from swarmd.train.recovery import Get
from swarmd.train.robust import clipped
from swarmd.train.source import Again, Source
from swarmd.train.state import RunState, Snapshot, Vector, centre_of
from swarmd.train.sums import squares_of
from swarmd.train.world import News, World, tell
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

LONGEST_S = 600.0  # for one contribution: who would take longer leaves it to others
EVIDENCE_S = 300.0  # that the state of a wrong contribution is held for who wants to see
MAX_ACCUSED = 4  # accusations that wait here; the next are left to others


Held = Snapshot | Mapping[str, Vector]
"""A state of before: as it was held here, or as somebody gave it."""


@dataclass(slots=True)
class Case:
    """One contribution to be computed again. ``accuser``: who asks for it; None: it was drawn here.

    ``pieces``: the states that its draws were computed on, in order, each with the number of its last draw, from 1;
    ``states``: those of them that are here; ``on`` which of them ``again`` computes now.
    """

    peer: PeerId
    share: Share
    commit: Commit
    pieces: tuple[tuple[bytes, int], ...]
    accuser: PeerId | None = None
    states: dict[bytes, Held] = field(default_factory=dict)
    again: Again | None = None
    on: bytes = b""
    done: int = 0
    loss: float = 0.0

    @property
    def is_ready(self) -> bool:
        """Are its states here, and no longer those that are about to change?"""
        held = [self.states.get(root) for root, _ in self.pieces]
        return all(h is not None and not (isinstance(h, Snapshot) and h.is_live) for h in held)


@dataclass(slots=True)
class Counts:
    """For people: contributions that were computed again here, how many samples that took, and how many were wrong."""

    checked: int = 0
    samples: int = 0
    wrong: int = 0


class GradientAudits:
    """See the module. ``backed``: the commit that this peer stood for last, with everybody's shares.

    ``trouble``: what others found in what this machine gave, for people.
    """

    def __init__(
        self,
        world: World,
        ledger: Ledger,
        members: Members,
        news: News,
        backed: Callable[[], Backed | None],
        why_idle: Callable[[], str],
    ) -> None:
        self.counts = Counts()
        self.trouble = ""
        self._world = world
        self._me = world.rpc.network.peer_id
        self._ledger = ledger
        self._recipe = ledger.run.recipe
        self._members = members
        self._news = news
        self._backed = backed
        self._why_idle = why_idle
        self._source: Source | None = None
        self._state: RunState | None = None
        self._get: Get
        self._speed: Callable[[], float] = lambda: 0.0
        self._own: Case | None = None
        self._watched: tuple[PeerId, Snapshot] | None = None  # its next contribution, begun on this state
        self._accused: list[Case] = []
        self._wrong_at: dict[PeerId, int] = {}
        self._evidence: dict[bytes, tuple[Snapshot, float]] = {}
        self._tasks = Tasks()

    async def run(self, source: Source, state: RunState, get: Get, speed: Callable[[], float]) -> None:
        """Own what is fetched and told, until cancelled. ``speed``: samples/s of this peer."""
        self._source, self._state, self._get, self._speed = source, state, get, speed
        async with self._tasks.open():
            await trio.sleep_forever()

    @property
    def why_not(self) -> str:
        """Why nothing is computed again here; "" when it is."""
        if not self._recipe.audit:
            return self._recipe.why_not_audited or "the recipe asks for none"
        return self._source.why_not_again if self._source is not None else "this peer does not compute"

    # --- whom to look at -----------------------------------------------------------------------------------------

    def consider(self, commit: Commit) -> None:
        """A commit is about to be applied: is one of its contributions computed again here?

        Where peers compute on while a round averages, a contribution is begun on the state before: who is to be looked
        at is drawn an update ahead.
        """
        state, backed = self._state, self._backed()
        watched, self._watched = self._watched, None
        if state is None or self.why_not or self._own is not None or backed is None:
            return
        if backed.body != commits.encode(commit):
            return
        shares = {PeerId(c.peer): s for c, s in zip(commit.contributors, backed.shares, strict=True)}
        drawn = self._draw(list(shares))
        if self._recipe.overlaps:
            self._watched = (drawn, state.hold()) if drawn is not None else None
            drawn = watched[0] if watched is not None else None
        share = shares.get(drawn) if drawn is not None else None
        if drawn is None or share is None or not self._is_able(share):
            return
        held = self._watched[1] if self._watched is not None else state.hold()
        case = Case(drawn, share, commit, self._pieces(share, commit))
        case.states[commit.state] = held
        if share.late and watched is not None:
            case.states[case.pieces[0][0]] = watched[1]
        self._own = case

    def _draw(self, contributors: list[PeerId]) -> PeerId | None:
        now = trio.current_time()
        speeds = {m.peer: m.samples_per_s for m in self._members.progress(now)} | {self._me: self._speed()}
        rates = {p: gradient_audits.rate(self._n_right(p), self._recipe.audit) for p in contributors}
        decision = gradient_audits.draw(rates, speeds, self._me, self._world.rng.random())
        logger.debug("%s", decision.reason)
        return decision.action

    def _pieces(self, share: Share, commit: Commit) -> tuple[tuple[bytes, int], ...]:
        """The states that a contribution was computed on: its late draws on that of the commit before."""
        before = self._ledger.sealed[commit.epoch - 2].commit.state if share.late else b""
        late = ((before, share.late),) if share.late else ()
        return (*late, (commit.state, share.n)) if share.late < share.n else late

    def _n_right(self, peer: PeerId) -> int:
        return self._ledger.n_contributions.get(peer, 0) - self._wrong_at.get(peer, 0)

    def _is_able(self, share: Share) -> bool:
        """Can this contribution be computed here, and in a while?"""
        speed = self._speed()
        return speed > 0 and share.n / speed <= LONGEST_S

    # --- what others say -----------------------------------------------------------------------------------------

    def take_untrusted(self, accuser: PeerId, message: Contradict, payload: bytes) -> None:
        """A member says that another's contribution is wrong. Raises RemoteProtocolError for what nobody may say."""
        peer = PeerId(message.peer)
        try:
            share = decode(payload, Share, "a share", IntegrityError)
            commit = self._commit_of(peer, share, message.parent)
            if commit is None:
                return  # not known here
            backing.check_share_untrusted(share, peer, commit.parent, commit.state, commit.average)
        except IntegrityError as error:
            raise RemoteProtocolError(f"evidence against {peer[-8:]} that does not count: {error}") from None
        standing = self._members.standing
        if peer == self._me:
            self.trouble = (
                f"{accuser[-8:]} computed again what this machine gave to update {commit.epoch}, and something else "
                "came of it: if others say so, too, test its memory"
            )
        if peer == self._me or standing.is_shunned(accuser) or standing.is_shunned(peer):
            return
        if any(case.accuser == accuser or case.peer == peer for case in self._accused):
            return
        if self.why_not or not self._is_able(share):
            standing.fault(peer, Fault.FAULTY_NUMBERS, f"its gradients, says {accuser[-8:]}", accuser)
        elif len(self._accused) < MAX_ACCUSED:
            case = Case(peer, share, commit, self._pieces(share, commit), accuser)
            self._accused.append(case)
            self._tasks.start_soon(self._fetch, case)

    def _commit_of(self, peer: PeerId, share: Share, parent: bytes) -> Commit | None:
        """The ledger's commit that counts this share. Raises IntegrityError when it counts something else."""
        sealed = next((s for s in reversed(self._ledger.sealed) if s.commit.parent == parent), None)
        if sealed is None:
            return None
        if share.n < 1 or share.counted(peer) not in sealed.commit.contributors:
            raise IntegrityError("no such contribution is counted")
        return sealed.commit

    async def _fetch(self, case: Case) -> None:
        """Get the states that a contribution was computed on from who found it wrong; their hashes are commits'."""
        state = self._state
        assert state is not None
        assert case.accuser is not None
        try:
            for root in self._roots(case):
                asked = root, (case.accuser,), tuple(state.vectors), state.layout.n_elements
                case.states[root] = await self._get(*asked)
        except SwarmError as error:
            logger.info("%s accuses %s, and shows nothing: %s", case.accuser[-8:], case.peer[-8:], error)
            self._accused.remove(case)
        self._news.notify()

    def _roots(self, case: Case) -> set[bytes]:
        """The states that it takes: also what contributions were clipped round is of the commit's own."""
        return {root for root, _ in case.pieces} | ({case.commit.state} if self._ledger.is_clipped else set())

    # --- computing -----------------------------------------------------------------------------------------------

    async def advance(self) -> int:
        """Compute a micro-batch of what is to be looked at; returns its samples, 0 when there is none. SwarmError."""
        case = self._next()
        if case is None or self._source is None or self._why_idle():
            return 0
        root, upto = next(piece for piece in case.pieces if case.done < piece[1])
        n = min(self._recipe.batch.micro, upto - case.done)
        try:
            if case.again is None or case.on != root:
                await self._world.off_loop(self._go_on_from, case, root)
            assert case.again is not None
            case.loss += await self._source.compute_again(case.again, case.peer, case.share.first + case.done, n)
        except SwarmError:
            self._drop(case)
            raise
        case.done += n
        self.counts.samples += n
        if case.done == case.share.n:
            self._drop(case)
            await self._judge(case)
        return n

    def _next(self) -> Case | None:
        """What others say comes first: they have reason to."""
        waiting = [*self._accused, *([self._own] if self._own is not None else [])]
        return next((case for case in waiting if case.is_ready), None)

    def _drop(self, case: Case) -> None:
        if case is self._own:
            self._own = None
        else:
            self._accused.remove(case)

    def _go_on_from(self, case: Case, root: bytes) -> None:
        """Compute on this state's parameters from here on. In a thread."""
        assert self._source is not None
        parameters = _vector(case.states[root], "parameters")
        if case.again is None:
            case.again = self._source.again(parameters)
        else:
            case.again.parameters[:] = parameters
        case.on = root

    async def _judge(self, case: Case) -> None:
        """It has been computed: is it what its contributor signed?"""
        found, rounding = await self._world.off_loop(self._look_at, case)
        case.again = None
        share = case.share
        said = Came(share.loss, math.sqrt(share.squares), share.sums)
        decision = gradient_audits.is_same(said, found, rounding)
        self.counts.checked += 1
        who, update = case.peer[-8:], case.commit.epoch
        if decision.action:
            logger.info("what %s gave to update %d, computed again: %s", who, update, decision.reason)
            if case.accuser is not None:
                why = f"{who} gave to update {update} what comes of its draws"
                self._members.standing.fault(case.accuser, Fault.FALSE_ACCUSATION, why)
            return
        logger.warning("what %s gave to update %d is wrong: %s", who, update, decision.reason)
        self.counts.wrong += 1
        self._wrong_at[case.peer] = self._ledger.n_contributions.get(case.peer, 0)
        if case.accuser is None:
            await self._tell(case)
        self._members.standing.fault(case.peer, Fault.WRONG_RESULTS, f"its gradients of update {update}")

    def _look_at(self, case: Case) -> tuple[Came, float]:
        """What a contribution comes to along its average's directions, as its codec would have it. In a thread."""
        assert case.again is not None
        codec, total = codec_of(self._recipe), case.again.total
        if self._ledger.is_clipped:
            held, epoch = case.states[case.commit.state], case.commit.epoch
            moments = {name: _vector(held, name) for name in self._recipe.optimizer.moments}
            centre = centre_of(self._recipe, moments, self._ledger.steps_at(epoch - 1))
            total = clipped(total, case.share.n, centre, self._ledger.radius(case.share.n, epoch))
        if not codec.is_plain:
            total = codec.code(total).values
        seed = case.commit.parent + case.commit.average
        sums = Directions(seed, len(total)).of(total, 0)
        return Came(case.loss, math.sqrt(squares_of(total)), sums), 0.0 if codec.is_plain else codec.rounding(total)

    # --- telling -------------------------------------------------------------------------------------------------

    async def _tell(self, case: Case) -> None:
        """Have the others see for themselves, and the contributor know: its machine may be broken."""
        now = trio.current_time()
        self._evidence = {root: (s, until) for root, (s, until) in self._evidence.items() if until > now}
        for root, held in case.states.items():
            if isinstance(held, Snapshot):
                self._evidence[root] = held, now + EVIDENCE_S
        message = Contradict(run=self._ledger.run.id, peer=case.peer, parent=case.commit.parent)
        payload = msgspec.msgpack.encode(case.share)
        async with trio.open_nursery() as nursery:
            for peer in self._members.look(now):
                nursery.start_soon(tell, self._world.rpc, peer, lambda channel: channel.send(message, payload))

    def find(self, wanted: bytes) -> Snapshot | None:
        """A state that is held as evidence."""
        return self._evidence[wanted][0] if wanted in self._evidence else None


def _vector(held: Held, name: str) -> Vector:
    return held.vector(name) if isinstance(held, Snapshot) else held[name]
