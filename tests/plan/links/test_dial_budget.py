"""An address that many peers are said to be at is dialled seldom; who was met there, as often as need be."""

from __future__ import annotations

import pytest

from swarmd.plan.links.dial_budget import HOST_AGAIN_S, MAX_REMEMBERED, OF_HOST, OF_PLACE, PLACE_AGAIN_S, DialBudget

VICTIM = "/ip4/192.88.99.7/tcp/443"


def n_dials(budget: DialBudget, addresses: list[str], seconds: float) -> int:
    """Dials that a hundred invented peers bring about, each tried twice a second."""
    n = 0
    for tick in range(int(2 * seconds)):
        for number in range(100):
            address = addresses[number % len(addresses)]
            n += budget.take(f"{address}/p2p/P{number}", f"P{number}", tick / 2) == 0
    return n


@pytest.mark.parametrize(
    ("addresses", "most"),
    [
        ([VICTIM], OF_PLACE + 20 / PLACE_AGAIN_S),
        ([f"/ip4/192.88.99.7/tcp/{port}" for port in range(100)], OF_HOST + 20 / HOST_AGAIN_S),
        ([f"/ip6/2600:1::{n}/tcp/1" for n in range(1, 100)], OF_HOST + 20 / HOST_AGAIN_S),
        ([f"/dns4/a{n}.victim.example/tcp/1" for n in range(100)], OF_HOST + 20 / HOST_AGAIN_S),
        (["/ip4/10.0.0.7/tcp/22"], OF_PLACE + 20 / PLACE_AGAIN_S),
    ],
    ids=["one port", "all ports", "a network", "names", "a neighbour"],
)
def test_a_hundred_invented_peers_bring_few_dials_to_one_victim(addresses: list[str], most: float) -> None:
    assert n_dials(DialBudget(), addresses, 20) <= most


def test_who_was_met_there_is_dialled_as_often_as_need_be_whoever_else_is_said_to_be_there() -> None:
    budget = DialBudget()
    assert budget.take(VICTIM, "honest", 0.0) == 0
    budget.met(VICTIM, "honest")
    n_dials(budget, [VICTIM], 5)
    assert all(budget.take(VICTIM, "honest", 5.0) == 0 for _ in range(100))
    assert budget.take(VICTIM, "P1", 5.0) > 0


def test_dials_that_meet_who_was_sought_cost_nothing() -> None:
    budget = DialBudget()
    for number in range(100):
        address = f"/ip4/192.88.99.7/tcp/{number}"
        assert budget.take(address, f"P{number}", 0.0) == 0
        budget.met(address, f"P{number}")


def test_a_place_is_dialled_again_when_it_says_so() -> None:
    budget, now = DialBudget(), 0.0
    while not (wait_s := budget.take(VICTIM, "P", now)):
        pass
    assert budget.take(VICTIM, "P", now + wait_s - 0.1) > 0
    assert budget.take(VICTIM, "P", now + wait_s) == 0


def test_many_peers_of_one_machine_find_each_other() -> None:
    budget = DialBudget()
    assert all(budget.take(f"/ip4/127.0.0.1/tcp/{port}", f"P{port}", 0.0) == 0 for port in range(1, 100))


def test_what_is_remembered_is_bounded() -> None:
    budget = DialBudget()
    for number in range(2 * MAX_REMEMBERED):
        address = f"/ip4/10.{number >> 16}.{number >> 8 & 255}.{number & 255}/tcp/1"
        budget.take(address, "P", 0.0)
        budget.met(address, "P")
    assert len(budget._budgets) <= MAX_REMEMBERED
    assert len(budget._met) <= MAX_REMEMBERED
