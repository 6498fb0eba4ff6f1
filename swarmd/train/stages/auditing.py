"""Computes again what another holder of a stage adds in an update, and tells when something else comes of it.

Whom a holder watches is its own draw (plan.trust.gradient_audits), made an update ahead. Drivers tell it of each
micro-batch that the other one has added; of a driver the holders of the first and the last stage of blocks tell another
one (train.stages.witnessing). It fetches what that took from where the other one had it from, its rows from the run's
data, and what the other one says has come of it. So each result is compared and, once a commit says what it has given
to the round, the sum of all its gradients.

Nobody else can compute it again once it is over. So what one holder finds is one word, however often it finds it, here
and elsewhere; who hears of it watches the same peer next, and after the words of two it is left out, by all at nearly
the same time: a stage whose holders leave out different ones makes no more commits.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec
import numpy as np
import trio

from swarmd.errors import Code, IntegrityError, PeerError, Refused, SwarmError
from swarmd.net.tasks import Tasks
from swarmd.plan.trust import gradient_audits
from swarmd.plan.trust.equality import bound_of_codec, is_equal
from swarmd.plan.trust.gradient_audits import LOSS_BOUND, RecheckResult
from swarmd.plan.trust.judge import AuditVerdict
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.fields import Message
from swarmd.protocol.runs import backing
from swarmd.protocol.runs import commit as commits
from swarmd.protocol.runs.backing import ContributionShare
from swarmd.protocol.runs.commit import Commit, DrawRange
from swarmd.protocol.runs.recipe import CHECKED, ENDS
from swarmd.protocol.untrusted import decode
from swarmd.protocol.wire.rounds import Contradict
from swarmd.protocol.wire.stages import RECEIPT, Direction, SignedPass, StageCopy, StageWatch
from swarmd.protocol.wire.worker import StageErrors, StageInputs
from swarmd.train.gradients.accusations import require_counted
from swarmd.train.gradients.gradient_audits import GradientAudits
from swarmd.train.gradients.recheck import result_of
from swarmd.train.stages.computing import StageComputing, Stale
from swarmd.train.stages.holding import Lacking, StageHolder, StagePorts
from swarmd.train.stages.micro_batches import KeptMicroBatch
from swarmd.train.stages.signatures import require_signed
from swarmd.train.store import recovery
from swarmd.train.store.member_services import MemberServices
from swarmd.train.store.members import Members
from swarmd.train.store.services import tell_peer
from swarmd.train.vectors.work import join_ranges
from swarmd.values import Decision, PeerId

logger = logging.getLogger(__name__)

FINISH_S = 20.0  # that the next state waits for what is still to be computed on this one
MOST_BYTES = 256 * 2**20  # of what waits to be computed again
LEAST_COPIES = 4  # of which nothing is shown: one message may be lost, so many are not
N_HEARD = 256  # accusations that are not listened to again
N_RECENT = 64  # updates whose commits are kept, to show others who contributed to them


@dataclass(slots=True)
class HolderWatch:
    """Whom this peer watches in one update, and what has come of it: of ``n`` samples, of those ``draws``.

    ``wrong`` says what is; ``lacking`` why the sum cannot be compared. ``halves``: what one of two holders has told
    of a driver's micro-batches, by their first draw, and ``losses`` what the driver says that they come to. Of
    ``n_shown`` of ``n_to_show`` the watched peer has shown what came of them, or signed a receipt; ``seen`` were told.
    """

    peer: PeerId
    update: int
    draws: list[DrawRange] = field(default_factory=list)
    n: int = 0
    loss: float = 0.0
    wrong: str = ""
    lacking: str = ""
    n_waiting: int = 0
    waiting_bytes: int = 0
    halves: dict[int, StageInputs] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    n_to_show: int = 0
    n_shown: int = 0
    seen: set[tuple[str, int, str, str]] = field(default_factory=set)


# At commit k, which makes the state of update k:
#
#     who was watched in update k - 1    its share of commit k is compared with what was added up here
#     who is watched in update k         was drawn at commit k - 1; drivers send copies
#     who will be in update k + 1        is drawn now, and drivers are told
class StageAudits:
    """See the module. ``audits``: rates, findings and accusations, as in any run; ``stages``: who holds which."""

    def __init__(
        self,
        services: MemberServices,
        computing: StageComputing,
        holder: StageHolder,
        audits: GradientAudits,
        ports: StagePorts,
        stages: dict[int, Members],
        tasks: Tasks,
    ) -> None:
        self._services = services
        self._run = services.chronicle.run
        self._recipe = self._run.recipe
        self._rpc = services.trainer.rpc
        self._computing = computing
        self._holder = holder
        self._audits = audits
        self._ports = ports
        self._stages = stages
        self._tasks = tasks
        self._watches: list[HolderWatch] = []
        self._suspected: PeerId | None = None
        self._was_suspected = False
        self._counted: dict[PeerId, tuple[Commit, ContributionShare]] = {}  # the latest of each
        self._turn = trio.Lock()  # one sum is added to at a time
        self._heard: deque[tuple[PeerId, PeerId, bytes]] = deque(maxlen=N_HEARD)

    def consider_commit(self, commit: Commit) -> None:
        """Judge who was watched, by a commit that is about to be applied, and draw who is watched next."""
        if not self._recipe.audit:
            return
        shares = self._audits.shares_of(commit)
        if self._services.me in shares:  # else others would not believe what it shows
            recent = {peer: known for peer, known in self._counted.items() if known[0].epoch > commit.epoch - N_RECENT}
            self._counted = {**recent, **{peer: (commit, share) for peer, share in shares.items()}}
        for watch in self._watches:
            if watch.update == commit.epoch - 1:
                self._tasks.start_soon(self._conclude, watch, commit, shares.get(watch.peer))
        self._watches = [watch for watch in self._watches if watch.update >= commit.epoch]
        drawn = self._audits.draw_contributor(shares)
        if self._suspected in shares and not self._was_suspected:  # every second time at most: an accuser may lie
            drawn = self._suspected
        self._was_suspected = drawn == self._suspected is not None
        self._suspected = None
        if drawn is not None:
            watch = HolderWatch(drawn, commit.epoch + 1)
            self._watches.append(watch)
            self._tasks.start_soon(self._tell_watched, watch)

    def suspect(self, peer: PeerId) -> None:
        """Watch next whom another holder of the stage has found wrong."""
        if peer != self._services.me:
            self._suspected = peer

    def forget_watched(self) -> None:
        """Forget who is watched: the state here does not follow from the one before."""
        self._watches = []

    @property
    def _tellers(self) -> list[Members]:
        """Who can tell what holders of this stage add: drivers, or of those the first and the last stage of blocks."""
        if self._run.stage != ENDS:
            return [self._stages[ENDS]]
        return [self._stages[stage] for stage in sorted({1, len(self._stages) - 1})]

    async def _tell_watched(self, watch: HolderWatch) -> None:
        """Tell those that can tell of it whom this peer watches."""
        assert self._run.stage is not None
        async with trio.open_nursery() as nursery:
            for members in self._tellers:
                message = StageWatch(run=members.run, stage=self._run.stage, peer=watch.peer, update=watch.update)
                local = self._ports.find_local(members.run)
                if local is not None and local.take_watch is not None:
                    local.take_watch(self._services.me, message)
                self._send(nursery, members, message)

    def _send(self, nursery: trio.Nursery, members: Members, message: Message, payload: bytes = b"") -> None:
        for peer in members.look(trio.current_time()):
            nursery.start_soon(tell_peer, self._rpc, peer, lambda channel: channel.send(message, payload))

    # --- what it added, again ----------------------------------------------------------------------------------

    async def take_copy(self, message: StageCopy) -> None:
        """Fetch what a pass took and what came of it, to compute it again. Raises Refused or Lacking."""
        watch = next((w for w in self._watches if (w.peer, w.update) == (message.peer, message.update)), None)
        if watch is None:
            raise Refused(Code.NOT_HELD, "nobody computes that again here")
        named = (message.driver, message.first, message.source, message.gradient_source)
        if named in watch.seen:
            raise Refused(Code.MALFORMED, "that was told before")
        watch.seen.add(named)
        if sum(w.waiting_bytes for w in self._watches) > MOST_BYTES:
            raise Refused(Code.NO_CAPACITY, "too much waits here to be computed again")
        batch = KeptMicroBatch(message.driver, message.first, message.n, message.update)
        try:
            whole: StageInputs | None
            if self._run.stage != ENDS:
                whole = await self._fetch_of_holder(watch, batch, message)
                watch.waiting_bytes += _size_of(whole)
            else:
                half = await self._fetch_of_driver(watch, batch, message)
                watch.waiting_bytes += _size_of(half)
                whole = self._join_halves(watch, batch.first, half)
        except (IntegrityError, SwarmError) as error:
            raise error if isinstance(error, Refused) else Refused(Code.MALFORMED, str(error)) from None
        if whole is not None:
            watch.n_waiting += 1
            self._tasks.start_soon(self._check, watch, batch, whole)

    async def _fetch_of_holder(self, watch: HolderWatch, batch: KeptMicroBatch, message: StageCopy) -> StageInputs:
        """Fetch what a holder of blocks has had from others, and what it gave.

        Raises Lacking, or Refused where its driver names something else here than it has signed for it.
        """
        signed = await self._fetch_given(batch, message, "signed")
        with suppress(IntegrityError):  # what says nothing excuses nothing
            shown = decode(signed, SignedPass, "what a driver has signed", IntegrityError)
            self._require_same(message, shown)
        forward = await self._fetch_given(batch, message, "forward", message.forward_digest)
        backward = await self._fetch_given(batch, message, "backward", message.backward_digest)
        watch.n_to_show += 1
        watch.n_shown += bool(backward)
        return StageInputs(
            message.n,
            b"",
            await self._holder.fetch_entered(batch, message),
            await self._holder.fetch_gradient(batch, message),
            forward,
            backward,
        )

    def _require_same(self, message: StageCopy, signed: SignedPass) -> None:
        """Check that a driver has given a holder nothing else than it says here. Raises Refused.

        What the holder shows counts only if the driver has signed it: else it may have made it up.
        """
        shown = (
            (signed.signature, signed.source_digest, message.source_digest, 0.0, b""),
            (
                signed.gradient_signature,
                signed.gradient_digest,
                message.gradient_digest,
                signed.loss,
                signed.left_digest,
            ),
        )
        for signature, there, here, loss, of in shown:
            if not signature or there == here:
                continue
            with suppress(IntegrityError):
                require_signed(message, self._run.id, signature, there, loss, of)
                why = f"it names other inputs to {self._services.me[-8:]} than it has signed for {message.peer[-8:]}"
                self._rpc.standing.fault(PeerId(message.driver), Fault.UNACCOUNTED, why)
                raise Refused(Code.MALFORMED, why)

    async def _fetch_given(
        self, batch: KeptMicroBatch, message: StageCopy, direction: Direction, digest: bytes = b""
    ) -> bytes:
        """Fetch what a holder has; b"" where that is gone, or it does not show what it gave to others."""
        if not digest and direction != "signed":
            return b""
        assert self._run.stage is not None
        try:
            return await self._holder.fetch(batch, self._run.stage, PeerId(message.peer), direction, digest)
        except Lacking:
            return b""

    async def _fetch_of_driver(self, watch: HolderWatch, batch: KeptMicroBatch, message: StageCopy) -> StageInputs:
        """Fetch what a driver gave to a holder of the first stage of blocks, and had from it; and so of the last.

        Raises Lacking, or Refused where the driver has not signed that.
        """
        first, last = 1, len(self._stages) - 1
        entered = returned = left = gradient = b""
        try:
            if message.gradient_source:
                run, given = self._stages[first].run, message.forward_digest
                require_signed(message, run, message.signature, given)
                watch.n_to_show += message.is_over
                if message.receipt:
                    require_signed(message, run, message.receipt, message.gradient_digest, of=RECEIPT)
                    watch.n_shown += 1
                else:
                    watch.lacking = f"it has signed no receipt for draws from {message.first}"
                source = PeerId(message.gradient_source)
                entered = await self._holder.fetch(batch, first, source, "entered", given)
                gradient = await self._holder.fetch(batch, first, source, "backward", message.gradient_digest)
            if message.source:
                run, given = self._stages[last].run, message.backward_digest
                require_signed(message, run, message.gradient_signature, given, message.loss, message.source_digest)
                watch.losses[message.first] = message.loss
                source = PeerId(message.source)
                returned = await self._holder.fetch(batch, last, source, "returned", given)
                left = await self._holder.fetch(batch, last, source, "forward", message.source_digest)
        except IntegrityError as error:
            raise Refused(Code.MALFORMED, str(error)) from None
        rows = await self._ports.data.read(message.driver, message.first, message.n)
        return StageInputs(message.n, rows.tobytes(), left, gradient, entered, returned)

    def _join_halves(self, watch: HolderWatch, first: int, half: StageInputs) -> StageInputs | None:
        """Join what two holders tell of a driver's micro-batch; None while one is missing."""
        other = watch.halves.pop(first, StageInputs())
        fields = ("forward", "backward", "given_forward", "given_backward")
        values = {name: getattr(half, name) or getattr(other, name) for name in fields}
        joined = msgspec.structs.replace(half, **values)
        if all(values.values()):
            return joined
        watch.halves[first] = joined
        return None

    async def _check(self, watch: HolderWatch, batch: KeptMicroBatch, inputs: StageInputs) -> None:
        try:
            while (self._computing.update or 0) < watch.update:
                await self._services.news.wait()
            async with self._turn:
                loss, errors = await self._computing.check(batch, inputs, is_fresh=not watch.n)
            self._note(watch, batch, errors)
            watch.loss += loss
            said = watch.losses.get(batch.first, loss)
            if abs(said - loss) > LOSS_BOUND * abs(loss):
                watch.wrong = f"it says a loss of {said:.4g} of draws from {batch.first}, which is {loss:.4g}"
        except (Stale, SwarmError) as error:
            watch.lacking = f"draws from {batch.first} could not be computed again: {error}"
        finally:
            watch.n_waiting -= 1
            watch.waiting_bytes -= _size_of(inputs)
            self._services.news.notify()

    def _note(self, watch: HolderWatch, batch: KeptMicroBatch, errors: StageErrors) -> None:
        """Note what came of a micro-batch that was computed again."""
        watch.n += batch.n
        watch.draws.append(DrawRange(batch.driver, batch.first, batch.n))
        self._audits.counts.samples += batch.n
        bound = bound_of_codec(self._recipe.activations)
        for direction, of_tokens in (("forward", errors.forward), ("backward", errors.backward)):
            if of_tokens:
                decision = is_equal(np.array(of_tokens, np.float32), bound)
                if not decision.action:
                    watch.wrong = f"what goes {direction} of draws from {batch.first}: {decision.reason}"

    async def finish(self) -> None:
        """Wait until what was copied of the state here is computed, before there is another one."""
        with trio.move_on_after(FINISH_S):
            while any(watch.n_waiting and watch.update == self._computing.update for watch in self._watches):
                await self._services.news.wait()

    # --- what follows ------------------------------------------------------------------------------------------

    async def _conclude(self, watch: HolderWatch, commit: Commit, share: ContributionShare | None) -> None:
        """Compare what was added up here with what was given to the round, and do what follows."""
        async with self._turn:
            comparison = await self._compare(watch, commit, share)
        if comparison is None:
            return
        ruling = self._audits.rule(watch.peer, commit, comparison, fault=Fault.FAULTY_NUMBERS)
        if ruling.verdict is AuditVerdict.WRONG and watch.peer in self._counted:
            await self._tell_others(watch.peer, *self._counted[watch.peer])
        self._audits.charge(ruling, commit, self._services.me)

    async def _tell_others(self, peer: PeerId, commit: Commit, share: ContributionShare) -> None:
        """Tell holders of this stage, and who works with them, of a wrong one, and of a commit that counts it and this.

        It need not be wrong in that commit: it may have been left out of later ones.
        """
        await self._audits.accusations.tell_members(peer, commit, share, {})
        payload = msgspec.msgpack.encode(share)
        listening = [members for stage, members in self._stages.items() if (stage == ENDS) != (self._run.stage == ENDS)]
        async with trio.open_nursery() as nursery:
            for members in listening:
                message = Contradict(
                    run=members.run, peer=peer, parent=commit.parent, stage=self._run.stage, update=commit.epoch
                )
                self._send(nursery, members, message, payload)

    async def _compare(
        self, watch: HolderWatch, commit: Commit, share: ContributionShare | None
    ) -> Decision[bool | None] | None:
        """Compare what there is to compare; None where that is nothing."""
        if watch.wrong:
            return Decision(False, watch.wrong)
        if not watch.n:
            return None
        why_not = watch.lacking or ("it gave nothing" if share is None else "")
        if share is not None and share.draws != join_ranges(watch.draws):
            why_not = why_not or "it gave other draws than were seen"
        if share is not None and watch.n_to_show >= LEAST_COPIES and not watch.n_shown:
            what = "signed a receipt for" if self._run.stage == ENDS else "shown what has come of"
            return Decision(False, f"it has {what} none of {watch.n_to_show} micro-batches")
        if self._recipe.overlaps:
            return Decision(True, f"{watch.n} samples; a sum of two states is not compared")
        if why_not or share is None:
            self._audits.look_again(watch.peer)
            return Decision(True, f"{watch.n} samples; their sum was not compared: {why_not}")
        total = self._ports.source.vector(CHECKED)
        loss = watch.loss if self._run.stage == ENDS else share.loss  # which drivers have told it
        recomputed, rounding = await self._services.trainer.off_loop(result_of, self._recipe, commit, total, loss)
        signed = RecheckResult(share.loss, math.sqrt(share.squares), share.sums)
        return gradient_audits.is_same(signed, recomputed, rounding)

    # --- what holders of other stages say -----------------------------------------------------------------------

    async def hear(self, accuser: PeerId, message: Contradict, payload: bytes) -> None:
        """Take the word of a holder of another stage, or of a driver, that another one gives what is wrong.

        Both have contributed to the commit that it names; the words of two count (Fault.FAULTY_NUMBERS).
        """
        peer = PeerId(message.peer)
        standing = self._rpc.standing
        heard = (accuser, peer, message.parent)  # each commit once
        if heard in self._heard or message.stage not in self._stages or standing.is_shunned(accuser):
            return
        self._heard.append(heard)
        part = self._run.in_stage(message.stage)
        try:
            share = decode(payload, ContributionShare, "a share", IntegrityError)
            raws = await recovery.fetch_commits(self._rpc, accuser, part.id, message.update - 1)
            if not raws:
                raise IntegrityError("no such commit is shown")
            sets = self._services.chronicle.order.sets_of(self._recipe)
            commit = commits.read_untrusted(raws[0], sets).commit
            if (commit.run, commit.parent) != (part.genesis, message.parent):
                raise IntegrityError("another commit than it names is shown")
            require_counted(commit, peer, share, accuser)
            backing.check_share_untrusted(share, peer, commit.parent, commit.state, commit.average)
        except IntegrityError as error:
            standing.fault(accuser, Fault.FORGED, f"it accuses {peer[-8:]}: {error}")
        except PeerError as error:
            logger.info("%s does not show the commit: %s", accuser[-8:], error)
        else:
            standing.fault(peer, Fault.FAULTY_NUMBERS, f"its passes, says {accuser[-8:]}", accuser)


def _size_of(inputs: StageInputs) -> int:
    return len(inputs.forward) + len(inputs.backward) + len(inputs.given_forward) + len(inputs.given_backward)
