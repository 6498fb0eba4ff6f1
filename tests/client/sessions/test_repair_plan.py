"""Which step of a repair follows from what is known of the hops, and why."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.client.links.link import HopLink, Position
from swarmd.client.sessions.repair_plan import (
    PATIENCE_S,
    CacheMove,
    HistoryReplay,
    HopReplacement,
    NeighbourUpdate,
    RepairEnd,
    RepairPlan,
    RepairStep,
    ReplayGap,
    RouteGap,
    StuckHopRemoval,
    fill_gaps,
    find_gaps,
    find_stuck,
    plan_replay,
)
from swarmd.plan.chains.routing import Hop
from swarmd.values import PeerId, Span

N_BLOCKS = 6
NEW = None


def link(peer: str, start: int, received: int | None, is_lost: bool = False, is_leaving: bool = False) -> HopLink:
    """A hop of two blocks."""
    hop = Hop(PeerId(peer), Span(start, start + 2))
    return HopLink(hop, received=received, is_lost=is_lost, is_leaving=is_leaving)


def chain(*received: int | None) -> list[HopLink]:
    """Hops a, b, c ... which have come to these ops."""
    return [link("abc"[index], 2 * index, op) for index, op in enumerate(received)]


def plan_for(links: list[HopLink], is_stuck: bool = False) -> RepairPlan:
    plan = RepairPlan(tuple(str(known.hop) for known in links), "b is silent", is_stuck, now=100.0)
    plan.begin_attempt()
    return plan


def replays(links: list[HopLink], position: Position) -> list[HistoryReplay]:
    """All replays of one attempt, in order, each of which succeeds."""
    plan = plan_for(links)
    plan.on_neighbours_known(links)
    steps = []
    while not isinstance(step := plan.next_step(links, position, N_BLOCKS).action, RepairEnd):
        assert isinstance(step, HistoryReplay)
        steps.append(step)
        plan.on_replayed(step, 1, 0)
    return steps


# --- which step comes next -------------------------------------------------------------------------------------


def test_a_repair_moves_caches_then_replaces_lost_hops_then_tells_neighbours_then_replays() -> None:
    leaving = link("a", 0, 4, is_leaving=True)
    lost = link("b", 2, 4, is_lost=True)
    last = link("c", 4, 3)
    links = [leaving, lost, last]
    plan = plan_for(links)
    position = Position(seq=4, answered=3)
    steps: list[RepairStep] = []

    def take() -> RepairStep:
        steps.append(plan.next_step(links, position, N_BLOCKS).action)
        return steps[-1]

    assert take() == CacheMove(leaving)
    links[0] = link("d", 0, 4)
    plan.on_moved(leaving)
    assert take() == HopReplacement((lost,), (RouteGap(Span(2, 4), PeerId("d")),))
    plan.on_lost([lost])
    links[:] = fill_gaps(links, [[Hop(PeerId("e"), Span(2, 4))]])
    assert take() == NeighbourUpdate(new=(1,), surviving=(0, 2))
    plan.on_neighbours_known(links)
    replay = take()
    assert replay == HistoryReplay(1, ReplayGap(have=None, silent_through=3, end=4))
    assert isinstance(replay, HistoryReplay)
    plan.on_replayed(replay, n_ops=4, n_tokens=9)
    assert take() == RepairEnd()
    repair = plan.summarise(("d", "e", "c"), now=101.5)
    assert repair.handed_over == (str(leaving.hop),)
    assert repair.lost == (str(lost.hop),)
    assert (repair.replayed_ops, repair.replayed_tokens, repair.stall_s) == (4, 9, 1.5)
    assert not repair.from_client, "a hop before the lost one was alive"


def test_a_hop_that_cannot_hand_over_is_replaced() -> None:
    links = chain(4, 4)
    links[1].is_leaving = True
    plan = plan_for(links)
    assert plan.next_step(links, Position(4, 4), 4).action == CacheMove(links[1])
    links[1].is_lost = True
    assert isinstance(plan.next_step(links, Position(4, 4), 4).action, HopReplacement)


def test_a_chain_that_is_whole_is_told_of_its_epoch_and_no_more() -> None:
    links = chain(4, 4, 4)
    plan = plan_for(links)
    assert plan.next_step(links, Position(4, 4), N_BLOCKS).action == NeighbourUpdate(new=(), surviving=(0, 1, 2))
    plan.on_neighbours_known(links)
    assert plan.next_step(links, Position(4, 4), N_BLOCKS).action == RepairEnd()


def test_another_attempt_begins_with_the_neighbours_again() -> None:
    links = chain(4, NEW, 3)
    plan = plan_for(links)
    plan.on_neighbours_known(links)
    assert isinstance(plan.next_step(links, Position(4, 3), N_BLOCKS).action, HistoryReplay)
    plan.begin_attempt()
    assert isinstance(plan.next_step(links, Position(4, 3), N_BLOCKS).action, NeighbourUpdate)


def test_of_hops_that_are_busy_for_ever_the_last_that_has_everything_is_removed_once() -> None:
    links = chain(4, 4, 3)
    plan = plan_for(links, is_stuck=True)
    position = Position(4, 3)
    assert isinstance(plan.next_step(links, position, N_BLOCKS).action, NeighbourUpdate)
    plan.on_neighbours_known(links)
    assert plan.next_step(links, position, N_BLOCKS).action == StuckHopRemoval(links[1])
    plan.on_stuck_removed()
    assert isinstance(plan.next_step(links, position, N_BLOCKS).action, HistoryReplay)


@pytest.mark.parametrize(
    ("received", "place"),
    [((4, 3, 3), 0), ((4, 4, 3), 1), ((4, 4, 4), 2), ((3, 3, 3), 0)],
)
def test_the_stuck_hop_has_everything_and_the_next_one_has_not(received: tuple[int, ...], place: int) -> None:
    links = chain(*received)
    assert find_stuck(links, Position(4, 3)) is links[place]


def test_every_decision_says_whom_it_concerns() -> None:
    links = chain(4, NEW, 3)
    plan = plan_for(links)
    plan.on_neighbours_known(links)
    reason = plan.next_step(links, Position(4, 3), N_BLOCKS).reason
    assert reason == "[0,2) on a replays its whole history: [2,4) on b has no caches"


def test_a_repair_is_overdue_after_its_patience() -> None:
    plan = plan_for(chain(4))
    assert not plan.is_overdue(100.0 + PATIENCE_S)
    assert plan.is_overdue(100.1 + PATIENCE_S)


# --- gaps in the chain -----------------------------------------------------------------------------------------


def test_neighbouring_lost_hops_leave_one_gap_behind_the_hop_before_them() -> None:
    links = [link("a", 0, 4), link("b", 2, 4, is_lost=True), link("c", 4, 4, is_lost=True), link("d", 6, 4)]
    assert find_gaps(links) == (RouteGap(Span(2, 6), PeerId("a")),)


def test_a_first_gap_is_behind_the_client() -> None:
    links = [link("a", 0, 4, is_lost=True), link("b", 2, 4), link("c", 4, 4, is_lost=True)]
    assert find_gaps(links) == (RouteGap(Span(0, 2), None), RouteGap(Span(4, 6), PeerId("b")))


def test_each_gap_is_filled_in_its_place_and_one_server_makes_one_hop() -> None:
    links = [link("a", 0, 4, is_lost=True), link("b", 2, 4), link("c", 4, 4, is_lost=True)]
    d = PeerId("d")
    filled = fill_gaps(links, [[Hop(d, Span(0, 1)), Hop(d, Span(1, 2))], [Hop(d, Span(4, 6))]])
    assert [(known.hop.peer, known.hop.span) for known in filled] == [
        ("d", Span(0, 2)),
        ("b", Span(2, 4)),
        ("d", Span(4, 6)),
    ]
    assert [known.received for known in filled] == [NEW, 4, NEW]


def test_two_workers_of_one_server_stay_two_hops() -> None:
    lost = [link("a", 0, 4, is_lost=True)]
    d = PeerId("d")
    assert len(fill_gaps(lost, [[Hop(d, Span(0, 1), slot=0), Hop(d, Span(1, 2), slot=1)]])) == 2


# --- what is replayed to whom ----------------------------------------------------------------------------------


def test_a_new_hop_gets_all_silent_up_to_what_the_next_one_has() -> None:
    assert replays(chain(9, NEW, 7), Position(seq=9, answered=7)) == [HistoryReplay(1, ReplayGap(None, 7, 4))]


def test_new_neighbours_get_all_from_the_survivor_before_them_and_pass_it_on() -> None:
    assert replays(chain(9, NEW, NEW), Position(9, 7)) == [HistoryReplay(1, ReplayGap(None, 7, 6))]


def test_a_new_first_hop_is_fed_by_the_client() -> None:
    assert replays(chain(NEW, 9, 7), Position(9, 7)) == [
        HistoryReplay(2, ReplayGap(7, 0, 0)),
        HistoryReplay(0, ReplayGap(None, 9, 2)),
    ]


def test_the_last_pair_comes_first_and_an_answer_that_was_lost_is_given_again() -> None:
    assert replays(chain(9, 8, 8), Position(9, 7)) == [
        HistoryReplay(3, ReplayGap(7, 0, 0)),
        HistoryReplay(1, ReplayGap(8, 0, 0)),
    ]


def test_what_a_hop_has_is_not_sent_to_it_again() -> None:
    links = chain(9, 9, 9)
    assert all(plan_replay(links, receiver, Position(9, 9), N_BLOCKS) is None for receiver in range(4))


class ReplayedChain:
    """What hops have and the client gets, as replays of one attempt pass through; op by op."""

    def __init__(self, received: list[int | None], position: Position) -> None:
        self.links = [link("abcdef"[index], 2 * index, op) for index, op in enumerate(received)]
        self.n_blocks = 2 * len(received)
        self.has = [op or 0 for op in received]
        self.position = position
        self.answers: list[int] = []

    def replay(self, step: HistoryReplay) -> None:
        """Have the sender send all that it has and the receiver lacks."""
        n_sent = self.position.seq if step.receiver == 0 else self.has[step.receiver - 1]
        for op in range((step.gap.have or 0) + 1, n_sent + 1):
            self._compute(step.receiver, op, end=step.gap.end if op <= step.gap.silent_through else None)

    def _compute(self, index: int, op: int, end: int | None) -> None:
        """A hop computes an op and passes it on, if it is silent up to block ``end`` only."""
        if end is not None and 2 * index >= end:
            return
        if index == len(self.links):
            self.answers.append(op)
            return
        assert op == self.has[index] + 1, "each once, and in order"
        self.has[index] = op
        self._compute(index + 1, op, end)


@given(st.data())
def test_every_hop_computes_what_it_lacks_once_and_the_client_gets_no_answer_twice(data: st.DataObject) -> None:
    n_sent = data.draw(st.integers(1, 6))
    n_answered = data.draw(st.integers(0, n_sent))
    ops = st.lists(st.integers(n_answered, n_sent), min_size=1, max_size=5)
    survivors = sorted(data.draw(ops), reverse=True)  # none has more than the one before it
    received = [NEW if data.draw(st.booleans()) else op for op in survivors]
    position = Position(n_sent, n_answered)
    chain = ReplayedChain(received, position)
    plan = plan_for(chain.links)
    plan.on_neighbours_known(chain.links)
    while not isinstance(step := plan.next_step(chain.links, position, chain.n_blocks).action, RepairEnd):
        assert isinstance(step, HistoryReplay)
        chain.replay(step)
        plan.on_replayed(step, 1, 0)
    assert chain.has == [n_sent] * len(received)
    assert chain.answers == list(range(n_answered + 1, n_sent + 1))
