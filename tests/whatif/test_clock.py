"""Virtual time goes from event to event."""

from __future__ import annotations

from swarmd.whatif.clock import VirtualClock


def test_events_happen_in_order_and_those_called_off_do_not() -> None:
    clock = VirtualClock()
    seen: list[str] = []
    clock.plan(2, lambda: seen.append(f"second at {clock.now}"))
    clock.plan(1, lambda: seen.append("first"))
    clock.plan(2, lambda: seen.append("third"))
    clock.call_off(clock.plan(1.5, lambda: seen.append("never")))
    clock.plan(5, lambda: seen.append("too late"))
    clock.run(5)
    assert seen == ["first", "second at 2", "third"]
    assert clock.now == 5


def test_an_event_may_plan_another_one_that_is_not_in_the_past() -> None:
    clock = VirtualClock()
    seen: list[float] = []
    clock.plan(3, lambda: clock.plan(1, lambda: seen.append(clock.now)) and None)
    clock.run(10)
    assert seen == [3]
