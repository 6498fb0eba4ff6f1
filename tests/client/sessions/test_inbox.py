"""What peers say counts only from whom, and in the epoch, that it is due from; and what follows from it."""

from __future__ import annotations

import math

import pytest
import torch
from trio.testing import MockClock

from swarmd.client.links.link import HopLink, SessionOptions
from swarmd.client.sessions.chain import MOST_LOSSES, Chain
from swarmd.client.sessions.inbox import AnswerArrival, HopDeparture, InboxAction, OpForward, SessionInbox
from swarmd.client.sessions.step_state import OpInFlight, OpsInFlight, WrongChains
from swarmd.errors import CacheExhausted, Code
from swarmd.plan.chains.routing import Hop
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.messages import Leaving, Message, Op, Progress, Refusal, Suspect
from swarmd.values import PeerId, Span
from swarmd.wire.history import SentOp
from swarmd.wire.tensors import pack
from tests.client.sessions.test_chain import MODEL, A, B, C, PlayedSwarm

STRANGER = PeerId("stranger")
N_BLOCKS = 6
EPOCH = 3


class Desk:
    """The inbox of a session through a, b and c, with one op under way, and its first nine answered."""

    def __init__(self, hidden: float = 1.0) -> None:
        self.swarm = PlayedSwarm()
        self.chain = Chain(self.swarm, SessionOptions(MODEL, N_BLOCKS, 1, 100))
        self.chain.links = [HopLink(Hop(peer, Span(2 * i, 2 * i + 2))) for i, peer in enumerate((A, B, C))]
        self.chain.epoch = EPOCH
        self.chain.position.seq = 10
        self.chain.position.answered = 9
        self.ops = OpsInFlight()
        sent = SentOp(10, (), torch.full((1, 1, 8), hidden), torch.zeros(1, 1, dtype=torch.int32), None)
        self.ops.add(OpInFlight(sent), now=0.0)
        self.wrong_chains = WrongChains()
        self._inbox = SessionInbox(self.swarm, self.chain, self.ops, self.wrong_chains)

    def receive(self, peer: PeerId, message: Message, payload: bytes = b"", now: float = 1.0) -> InboxAction | None:
        (frame,) = FrameDecoder().feed_untrusted(messages.encode_frame(message, payload))
        decoded = messages.decode_untrusted(frame.header)
        return self._inbox.receive_untrusted(peer, decoded, frame, now)

    def answer(self, peer: PeerId = C, value: float = 2.0, seq: int = 10, n_tokens: int = 1) -> InboxAction | None:
        hidden = torch.full((1, n_tokens, 8), value)
        meta, payload = pack(hidden, torch.zeros(1, n_tokens, dtype=torch.int32), None, "raw")
        op = Op(session=self.chain.key, start=N_BLOCKS, epoch=EPOCH, seq=seq, tensor=meta)
        return self.receive(peer, op, payload)

    def refuse(self, peer: PeerId, start: int, code: Code, epoch: int = EPOCH) -> None:
        refusal = Refusal(code=code.value, message="no", session=self.chain.key, start=start, epoch=epoch, seq=10)
        self.receive(peer, refusal)

    @property
    def lost(self) -> list[str]:
        return [str(link.hop.peer) for link in self.chain.links if link.is_lost]

    @property
    def blamed(self) -> list[str]:
        return [str(peer) for peer, _ in self.chain.statistics.blamed]


@pytest.fixture
async def desk(virtual_time: MockClock) -> Desk:
    return Desk()


async def test_an_answer_of_the_last_hop_counts(desk: Desk) -> None:
    assert desk.answer() == AnswerArrival(10)
    assert desk.chain.position.answered == 10
    answer = desk.ops.take_answer(10)
    assert answer is not None
    assert torch.equal(answer.hidden, torch.full((1, 1, 8), 2.0))


async def test_an_answer_to_a_void_op_needs_no_tokens_and_is_kept_for_nobody(desk: Desk) -> None:
    desk.ops.void(10, 10)
    assert desk.receive(C, Op(desk.chain.key, N_BLOCKS, EPOCH, seq=10, absent=1)) == AnswerArrival(10)
    assert desk.chain.position.answered == 10
    assert desk.chain.trouble is None
    assert desk.ops.take_answer(10) is None


@pytest.mark.parametrize(("peer", "seq"), [(B, 10), (STRANGER, 10), (C, 9), (C, 11)])
async def test_other_answers_do_not(desk: Desk, peer: PeerId, seq: int) -> None:
    assert desk.answer(peer, seq=seq) is None
    assert desk.chain.position.answered == 9
    assert not desk.lost


async def test_an_op_is_passed_on_for_the_hop_before_and_for_nobody_else(desk: Desk) -> None:
    op = Op(session=desk.chain.key, start=4, epoch=EPOCH, seq=10)
    forward = desk.receive(B, op)
    assert isinstance(forward, OpForward)
    assert (forward.index, forward.seq) == (2, 10)
    for peer in (A, C, STRANGER):
        assert desk.receive(peer, op) is None
    old = Op(session=desk.chain.key, start=4, epoch=EPOCH - 1, seq=10)
    assert desk.receive(B, old) is None, "of an older epoch"


async def test_numbers_that_are_not_finite_cost_the_last_hop(desk: Desk) -> None:
    assert desk.answer(value=float("nan")) is None
    assert desk.lost == ["c"]
    assert not desk.swarm.standing.count(C, Fault.FAULTY_NUMBERS), "it may be the model's fault"


async def test_who_gave_them_is_at_fault_once_there_is_a_right_answer(desk: Desk) -> None:
    desk.answer(value=float("nan"))
    desk.answer()
    assert desk.swarm.standing.count(C, Fault.FAULTY_NUMBERS) == 1


async def test_another_number_of_tokens_may_be_any_hops_doing(desk: Desk) -> None:
    assert desk.answer(n_tokens=2) is None
    assert desk.lost == ["a", "b", "c"]
    assert not desk.blamed


async def test_progress_is_a_sign_of_life_of_the_hop_itself(desk: Desk) -> None:
    link = desk.chain.links[1]
    link.watch.on_sent(10, 0.0)
    progress = Progress(session=desk.chain.key, start=2, epoch=EPOCH, finished=9)
    desk.receive(A, progress, now=5.0)
    assert link.watch.heard_at == 0.0
    desk.receive(B, progress, now=5.0)
    assert link.watch.heard_at == 5.0


async def test_a_hop_suspects_the_next_one_and_no_other(desk: Desk) -> None:
    suspicion = Suspect(session=desk.chain.key, start=4, epoch=EPOCH, seq=10, reason="silent")
    desk.receive(A, suspicion)
    assert not desk.lost
    desk.receive(B, suspicion)
    assert desk.lost == ["c"]
    assert desk.blamed == ["c"]


async def test_a_hop_that_leaves_says_so_once(desk: Desk) -> None:
    leaving = Leaving(session=desk.chain.key, start=2, epoch=EPOCH)
    assert desk.receive(A, leaving) is None
    assert desk.receive(B, leaving) == HopDeparture(desk.chain.links[1])
    assert desk.chain.trouble == "[2,4) on b stops serving"
    assert desk.receive(B, leaving) is None


@pytest.mark.parametrize(
    ("code", "lost"),
    [(Code.NO_SESSION, ["b"]), (Code.SESSION_LOST, ["b"]), (Code.OP_GAP, [])],
)
async def test_a_hop_that_lost_its_caches_is_blamed_for_nothing(desk: Desk, code: Code, lost: list[str]) -> None:
    desk.refuse(B, 2, code)
    assert desk.lost == lost
    assert desk.chain.trouble
    assert not desk.blamed


async def test_who_loses_its_caches_again_and_again_without_an_answer_is_asked_no_more(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that always fails there, say: its hop would be opened again for ever."""
    left_out: list[tuple[PeerId, float]] = []
    monkeypatch.setattr(desk.chain.routes, "back_off", lambda peer, for_s: left_out.append((peer, for_s)))
    link = desk.chain.links[1]

    def lose(n: int) -> None:
        for _ in range(n):
            link.is_lost = False  # as it is after a repair
            desk.refuse(B, 2, Code.SESSION_LOST)
            desk.refuse(B, 2, Code.NO_SESSION)  # of another op, of the same loss

    lose(MOST_LOSSES - 1)
    assert not left_out
    desk.answer()
    lose(MOST_LOSSES - 1)
    assert not left_out, "an answer between"
    lose(1)
    assert left_out == [(B, math.inf)]
    assert not desk.blamed


@pytest.mark.parametrize(("peer", "epoch"), [(C, EPOCH), (STRANGER, EPOCH), (B, EPOCH - 1)])
async def test_refusals_of_others_and_of_older_epochs_cost_nothing(desk: Desk, peer: PeerId, epoch: int) -> None:
    desk.refuse(peer, 2, Code.NO_SESSION, epoch)
    assert desk.chain.trouble is None


async def test_who_refuses_what_it_was_given_costs_the_giver_and_begins_anew(desk: Desk) -> None:
    desk.refuse(B, 2, Code.NOT_FINITE)
    assert desk.lost == ["a", "b"]
    assert desk.blamed == ["a"]


async def test_a_first_hop_that_refuses_finite_numbers_is_wrong_itself(desk: Desk) -> None:
    desk.refuse(A, 0, Code.NOT_FINITE)
    assert desk.blamed == ["a"]


async def test_numbers_of_the_client_that_are_not_finite_end_the_step(virtual_time: MockClock) -> None:
    desk = Desk(hidden=float("nan"))
    desk.refuse(A, 0, Code.NOT_FINITE)
    assert not desk.blamed
    assert desk.wrong_chains.failure is not None


async def test_a_cache_that_is_full_ends_the_step(desk: Desk) -> None:
    desk.refuse(B, 2, Code.TOO_LONG)
    assert isinstance(desk.wrong_chains.failure, CacheExhausted)
