"""What follows when a micro-batch fails, and where its backward goes, without any server."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from swarmd.client.links.client_parameters import TunedParameters
from swarmd.client.tuning.lane_failure import LaneFailed
from swarmd.client.tuning.lane_pass import MicroBatch
from swarmd.client.tuning.retries import MAX_FINAL, PATIENCE_S, Retries, Retry
from swarmd.client.tuning.ticket import ForwardTicket, OtherHolders
from swarmd.errors import NoRoute, SwarmUnavailable


def test_the_first_failure_is_tried_again_at_once_and_the_next_after_news() -> None:
    retries = Retries()
    assert retries.on_failure(LaneFailed("one died"), 5.0) is Retry.AT_ONCE
    assert retries.on_failure(LaneFailed("another died"), 6.0) is Retry.AFTER_NEWS
    assert Retries().on_failure(NoRoute("nobody"), 5.0) is Retry.AFTER_NEWS


def test_patience_ends_with_the_last_reason_that_a_lane_gave() -> None:
    retries = Retries()
    retries.on_failure(LaneFailed("it died"), 5.0)
    retries.on_failure(NoRoute("nobody"), 5.0 + PATIENCE_S)
    with pytest.raises(SwarmUnavailable, match="no chain computes this micro-batch: it died"):
        retries.on_failure(NoRoute("nobody"), 5.1 + PATIENCE_S)


def test_where_there_never_was_a_route_that_is_the_reason() -> None:
    retries = Retries()
    retries.on_failure(NoRoute("nobody"), 0.0)
    with pytest.raises(NoRoute, match="nobody"):
        retries.on_failure(NoRoute("nobody"), PATIENCE_S + 1)


def test_what_any_server_would_refuse_is_not_tried_for_long() -> None:
    retries = Retries()
    for _ in range(MAX_FINAL - 1):
        retries.on_failure(LaneFailed("too long", is_final=True), 0.0)
    with pytest.raises(SwarmUnavailable, match="too long"):
        retries.on_failure(LaneFailed("too long", is_final=True), 0.0)


def lane(*live: int) -> Any:
    return SimpleNamespace(live=set(live), is_open=True)


def ticket(of_lane: Any, seq: int) -> ForwardTicket:
    hidden = torch.zeros(1, 1, 1)
    batch = MicroBatch(hidden, torch.zeros(1, 1).int(), None, TunedParameters({}, {}), keep=True)
    return ForwardTicket(batch, hidden, of_lane, seq, OtherHolders())


def test_a_gradient_is_asked_for_once_and_then_the_micro_batch_goes_forward_again() -> None:
    first, second = lane(1), lane(7)
    forwarded = ticket(first, 1)
    assert forwarded.is_held
    assert forwarded.take_seq() == 1
    assert not forwarded.is_held, "whatever comes of it, this number is used up"
    forwarded.move_to(ticket(second, 7))
    assert forwarded.is_held
    assert forwarded.was_resent
    assert second.live == {7}, "its hops hold it for this ticket now"


def test_a_lane_that_is_over_holds_nothing_and_a_ticket_that_is_dropped_settles_its_number() -> None:
    its_lane = lane(1)
    forwarded = ticket(its_lane, 1)
    its_lane.is_open = False
    assert not forwarded.is_held
    del forwarded
    assert its_lane.live == set()
