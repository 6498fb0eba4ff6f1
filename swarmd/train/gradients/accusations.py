"""Who says that another's contribution to a run is wrong shows the state that it was computed on: both sides of that.

Nothing is believed: what others say becomes a case that is computed here (train.gradients.gradient_audits). An accuser
must have contributed to the same commit, shows what it promises within a bounded time, and is heard once about each
contribution.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping

import msgspec
import trio

from swarmd.errors import IntegrityError, RemoteProtocolError, SwarmError
from swarmd.net.tasks import Tasks
from swarmd.plan.runs.ledger import Ledger
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.runs import backing
from swarmd.protocol.runs.backing import ContributionShare
from swarmd.protocol.runs.commit import Commit
from swarmd.protocol.untrusted import decode
from swarmd.protocol.wire.rounds import Contradict
from swarmd.train.gradients.recheck import Held, Recheck, open_recheck
from swarmd.train.store.members import Members
from swarmd.train.store.recovery import Get
from swarmd.train.store.services import TrainerServices, Wakeups, tell_peer
from swarmd.train.vectors.state import RunState, Snapshot
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

EVIDENCE_S = 300.0  # that the states of a wrong contribution are held for who wants to see
MAX_EVIDENCE = 4  # states at a time, each with its moments; the newest are kept
MAX_CASES = 4  # accusations that wait here, each with a state; the next are left to others
N_ACCUSATIONS_REMEMBERED = 256  # accusations that are not listened to again


class Accusations:
    """See the module. ``cases`` are those of others; ``trouble`` is what was found in what this machine gave."""

    def __init__(
        self,
        services: TrainerServices,
        ledger: Ledger,
        members: Members,
        news: Wakeups,
    ) -> None:
        self.cases: list[Recheck] = []
        self.trouble = ""
        self._services = services
        self._me = services.rpc.network.peer_id
        self._ledger = ledger
        self._members = members
        self._news = news
        self._state: RunState | None = None
        self._get: Callable[[str], Get]
        self._evidence: dict[bytes, tuple[Snapshot, float]] = {}
        self._heard: deque[tuple[PeerId, PeerId, bytes]] = deque(maxlen=N_ACCUSATIONS_REMEMBERED)
        self._tasks = Tasks()

    async def run(self, state: RunState, get: Callable[[str], Get]) -> None:
        """Own what is fetched, until cancelled. ``get``: what fetches into a folder of this name."""
        self._state = state
        self._get = get
        async with self._tasks.open():
            await trio.sleep_forever()

    # --- what others say -----------------------------------------------------------------------------------------
    #
    # An accusation costs an honest member time and memory, and a liar nothing, unless it is bounded:
    #
    #     both contributed to one commit      who gave nothing accuses nobody
    #     each contribution once              said again it is not heard
    #     one case at a time per accuser, MAX_CASES in all
    #     the accuser shows the states        within EVIDENCE_S, or loses standing itself; their hashes are commits'
    #     computed here, and not wrong        a false accusation costs the accuser its standing

    def take_untrusted(
        self,
        accuser: PeerId,
        message: Contradict,
        payload: bytes,
        may_compute: bool,
    ) -> bool:
        """Take a member's word that another's contribution is wrong; does it count?

        Raises RemoteProtocolError for what none may say. Where it cannot be computed here the words of two count
        (Fault.FAULTY_NUMBERS).
        """
        peer = PeerId(message.peer)
        standing = self._members.standing
        try:
            share = decode(payload, ContributionShare, "a share", IntegrityError)
            commit = self._commit_of(peer, share, accuser, message.parent)
            if commit is None:
                return False  # not known here
            backing.check_share_untrusted(share, peer, commit.parent, commit.state, commit.average)
        except IntegrityError as error:
            raise RemoteProtocolError(f"evidence against {peer[-8:]} that does not count: {error}") from None
        accusation = accuser, peer, message.parent
        if accusation in self._heard or standing.is_shunned(accuser) or standing.is_shunned(peer):
            return False
        self._heard.append(accusation)
        if peer == self._me:
            self.trouble = (
                f"{accuser[-8:]} computed again what this machine gave to update {commit.epoch}, and something else "
                "came of it: if others say so, too, test its memory"
            )
        elif not may_compute or self._state is None:
            standing.fault(peer, Fault.FAULTY_NUMBERS, f"its gradients, says {accuser[-8:]}", accuser)
        elif len(self.cases) < MAX_CASES and all(case.accuser != accuser for case in self.cases):
            case = open_recheck(self._ledger, peer, share, commit, accuser)
            self.cases.append(case)
            self._tasks.start_soon(self._fetch_states, case, accuser, self._state)
        return True

    def _commit_of(
        self,
        peer: PeerId,
        share: ContributionShare,
        accuser: PeerId,
        parent: bytes,
    ) -> Commit | None:
        """Find the ledger's commit that counts this share. Raises IntegrityError when it counts something else."""
        following = (s for s in reversed(self._ledger.sealed) if s.commit.parent == parent)
        sealed = next(following, None)
        if sealed is None:
            return None
        require_counted(sealed.commit, peer, share, accuser)
        return sealed.commit

    async def _fetch_states(self, case: Recheck, accuser: PeerId, state: RunState) -> None:
        """Get the states that a contribution was computed on from who found it wrong; their hashes are commits'."""
        why = "it takes too long"
        get = self._get(f"evidence-{accuser[-8:]}")
        with trio.move_on_after(EVIDENCE_S):
            try:
                for root in sorted(case.roots):
                    case.states[root] = await get(
                        root,
                        (accuser,),
                        tuple(state.vectors),
                        state.layout.n_elements,
                    )
            except SwarmError as error:
                why = str(error)
        if not case.is_ready:
            self.drop(case)
            self._members.standing.fault(accuser, Fault.UNACCOUNTED, f"it accuses {case.peer[-8:]}: {why}")
        self._news.notify()

    def drop(self, case: Recheck) -> None:
        """Forget a case that is decided, or cannot be."""
        if case in self.cases:
            self.cases.remove(case)

    # --- what is said here ---------------------------------------------------------------------------------------

    async def tell_members(
        self, peer: PeerId, commit: Commit, share: ContributionShare, states: Mapping[bytes, Held]
    ) -> None:
        """Have the others see for themselves, and the contributor know: its machine may be broken."""
        until = trio.current_time() + EVIDENCE_S
        evidence = dict(self._evidence)
        for root, state in states.items():
            if isinstance(state, Snapshot):
                evidence[root] = (state, until)
        self._evidence = dict(list(evidence.items())[-MAX_EVIDENCE:])
        message = Contradict(
            run=self._ledger.run.id,
            peer=peer,
            parent=commit.parent,
        )
        payload = msgspec.msgpack.encode(share)
        async with trio.open_nursery() as nursery:
            for member in self._members.look(trio.current_time()):
                nursery.start_soon(
                    tell_peer,
                    self._services.rpc,
                    member,
                    lambda channel: channel.send(message, payload),
                )

    def find(self, root: bytes) -> Snapshot | None:
        """Find a state that is held as evidence."""
        return self._evidence[root][0] if root in self._evidence else None

    def expire(self) -> None:
        """Let go of evidence that everybody has had time to see."""
        now = trio.current_time()
        expired = [root for root, (_, until) in self._evidence.items() if until <= now]
        for root in expired:
            del self._evidence[root]


def require_counted(commit: Commit, peer: PeerId, share: ContributionShare, accuser: PeerId) -> None:
    """Check that a commit counts this share, and something of who says that it is wrong. Raises IntegrityError."""
    peers = [c.peer for c in commit.contributors]
    if peer not in peers or accuser not in peers or accuser == peer:
        raise IntegrityError("both must have contributed")
    place = peers.index(peer)
    late = commit.late[place] if commit.late else 0
    anew = commit.anew[place] if commit.anew else False
    is_counted = share.n >= 1 and share.counted(peer) == commit.contributors[place]
    if not is_counted or (share.late, share.anew) != (late, anew):
        raise IntegrityError("no such contribution is counted")
