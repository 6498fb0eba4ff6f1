"""The states of a hosting, without anything that is served: what is told it, what it shows, and when a turn ends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.plan.chains.hosting import BlockLimit, HostingLifecycle, HostingState, Placement, ServingPause
from swarmd.values import ModelId, Span

BLOCKS = Placement(ModelId("m"), Span(0, 4), "nobody else holds them")
OTHERS = Placement(ModelId("m"), Span(4, 8), "moved: these are rarer")


@pytest.fixture
def loading() -> HostingLifecycle:
    """One that has chosen blocks, and loads them."""
    lifecycle = HostingLifecycle()
    assert lifecycle.begin_turn()
    lifecycle.choose(BLOCKS)
    lifecycle.deploy(BLOCKS)
    return lifecycle


def test_a_turn_goes_from_choosing_to_online_and_says_why() -> None:
    lifecycle = HostingLifecycle()
    assert lifecycle.begin_turn()
    lifecycle.choose(BLOCKS)
    assert (lifecycle.state, lifecycle.why) == (HostingState.FETCHING, "nobody else holds them")
    assert lifecycle.coming == BLOCKS, "others are told what it will hold"
    lifecycle.deploy(BLOCKS)
    assert lifecycle.why == "loading blocks [0,4)"
    assert not lifecycle.follow_worker("online", "loaded", 4)
    assert lifecycle.state is HostingState.ONLINE
    lifecycle.drain(2)
    assert (lifecycle.state, lifecycle.why) == (HostingState.DRAINING, "2 sessions to be taken over elsewhere")


def test_a_wait_for_a_model_is_news_once() -> None:
    lifecycle = HostingLifecycle()
    assert lifecycle.wait_for_model("waiting for the catalog")
    assert not lifecycle.wait_for_model("waiting for the catalog")
    assert lifecycle.state is HostingState.CHOOSING


def test_a_pause_before_anything_is_deployed_shows_at_once() -> None:
    lifecycle = HostingLifecycle()
    lifecycle.choose(BLOCKS)
    assert lifecycle.pause(ServingPause.DRAIN, "drained", is_deployed=False), "what is under way is given up"
    assert (lifecycle.state, lifecycle.why) == (HostingState.PAUSED, "drained")
    assert not lifecycle.begin_turn()


def test_a_pause_of_what_is_deployed_ends_the_turn_and_shows_after_the_drain(loading: HostingLifecycle) -> None:
    loading.follow_worker("online", "loaded", 4)
    assert loading.pause(ServingPause.POLICY, "its owner plays", is_deployed=True)
    assert loading.state is HostingState.ONLINE
    assert not loading.pause(ServingPause.POLICY, "its owner still plays", is_deployed=True), "the same pause again"
    loading.drain(0)
    loading.end_turn()
    assert not loading.begin_turn()
    assert (loading.state, loading.why) == (HostingState.PAUSED, "its owner still plays")


def test_it_serves_again_once_the_last_pause_is_over() -> None:
    lifecycle = HostingLifecycle()
    for pause in ServingPause:
        lifecycle.pause(pause, f"because of {pause}", is_deployed=False)
    assert lifecycle.resume(ServingPause.DRAIN)
    assert not lifecycle.begin_turn()
    assert lifecycle.why == "because of policy"
    assert lifecycle.resume(ServingPause.POLICY)
    assert lifecycle.begin_turn()


def test_to_resume_what_goes_on_ends_no_turn(loading: HostingLifecycle) -> None:
    assert not loading.resume(ServingPause.DRAIN)


def test_a_move_is_for_the_next_turn_and_for_that_one_only(loading: HostingLifecycle) -> None:
    assert loading.move(OTHERS)
    loading.drain(0)
    assert loading.take_move() == OTHERS
    assert loading.take_move() is None


def test_a_failure_forgets_what_was_to_be_served() -> None:
    lifecycle = HostingLifecycle()
    lifecycle.choose(BLOCKS)
    lifecycle.move(OTHERS)
    lifecycle.fail("the disk is full")
    assert (lifecycle.state, lifecycle.why) == (HostingState.FAILED, "the disk is full")
    assert lifecycle.coming is None
    assert lifecycle.take_move() is None
    assert lifecycle.begin_turn(), "it tries again"


@pytest.mark.parametrize(("n_loaded", "most", "ends"), [(8, 4, True), (3, 1, True), (1, 0, False), (0, 0, False)])
def test_a_worker_that_cannot_load_gets_half_the_blocks_where_they_are_not_given(
    loading: HostingLifecycle, n_loaded: int, most: int, ends: bool
) -> None:
    assert loading.follow_worker("failed", "no memory", n_loaded) is ends
    assert loading.limit == (BlockLimit(most, f"not {n_loaded}, since no memory") if ends else BlockLimit())
    assert loading.state is HostingState.FAILED


def test_a_model_that_cannot_be_loaded_is_left_where_another_may_be_served(loading: HostingLifecycle) -> None:
    assert loading.follow_worker("failed", "no memory", 4, may_leave=True)
    assert not loading.unfit, "fewer blocks are tried first"
    assert loading.follow_worker("failed", "no memory", 1, may_leave=True)
    assert loading.unfit == {BLOCKS.model: "no memory"}
    assert loading.limit == BlockLimit(), "another model's blocks may be smaller"


def test_a_worker_that_ended_is_loading_again(loading: HostingLifecycle) -> None:
    loading.follow_worker("online", "loaded", 4)
    assert not loading.follow_worker("down", "the worker ended: killed", 4)
    assert (loading.state, loading.why) == (HostingState.LOADING, "the worker ended: killed")


def test_while_it_drains_its_worker_changes_nothing_that_is_shown(loading: HostingLifecycle) -> None:
    loading.drain(1)
    loading.follow_worker("online", "loaded", 4)
    assert loading.state is HostingState.DRAINING


@pytest.mark.parametrize(
    ("worker_state", "is_online", "announced"),
    [("online", True, "online"), ("down", False, "joining"), ("failed", False, "draining")],
)
def test_blocks_that_cannot_be_loaded_are_promised_to_nobody(
    loading: HostingLifecycle, worker_state: str, is_online: bool, announced: str
) -> None:
    loading.follow_worker(worker_state, "as it fares", 0)
    assert loading.announced_state(is_online) == announced
    loading.drain(0)
    assert loading.announced_state(is_online) == "draining"


WISHES = st.sampled_from(["drain", "policy", "resume drain", "resume policy", "move", "online", "down", "failed"])


@given(st.lists(st.tuples(st.integers(0, 3), WISHES), max_size=40))
def test_whatever_is_wished_meanwhile_no_turn_begins_during_a_pause_and_none_is_stuck(
    wishes: list[tuple[int, str]],
) -> None:
    """Wishes come at any step of a turn: before blocks are chosen, while they are fetched, served, or drained."""
    lifecycle = HostingLifecycle()
    paused: set[str] = set()

    def wish(step: int) -> bool:
        is_deployed = step >= 2
        ends = False
        while wishes and wishes[0][0] == step:
            _, what = wishes.pop(0)
            if what in ("drain", "policy"):
                ends |= lifecycle.pause(ServingPause(what), what, is_deployed)
                paused.add(what)
            elif what.startswith("resume"):
                ends |= lifecycle.resume(ServingPause(what.split()[1]))
                paused.discard(what.split()[1])
            elif is_deployed and what == "move":
                ends |= lifecycle.move(OTHERS)
            elif is_deployed:
                ends |= lifecycle.follow_worker(what, what, 4)
        return ends

    for _ in range(40):
        assert lifecycle.begin_turn() is not bool(paused)
        if paused:
            assert lifecycle.state is HostingState.PAUSED
            wish(0)
            continue
        if wish(0):
            continue
        placement = lifecycle.take_move() or BLOCKS
        lifecycle.choose(placement)
        if not wish(1):
            lifecycle.deploy(placement)
            wish(2)
            lifecycle.drain(0)
            wish(3)
        lifecycle.end_turn()
        assert lifecycle.coming is None
