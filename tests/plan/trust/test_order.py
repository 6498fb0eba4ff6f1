"""Who gets how much of what is short, in each of a swarm's orders; nobody gets nothing."""

from __future__ import annotations

import pytest

from swarmd.errors import Refused
from swarmd.plan.chains.batching import ReadyOp, Speed, choose_pass
from swarmd.plan.chains.cache_admission import CacheLedger
from swarmd.plan.trust.order import GRACE, LEAST, MOST, Balance, member_weight
from swarmd.protocol.membership.catalog import Catalog
from swarmd.protocol.membership.identity import Identity, Membership

FOUNDER, INVITE, MEMBER = (Identity(bytes([n]) * 32).public_key for n in (1, 2, 3))
WHO = Membership(Identity(bytes([3]) * 32).peer_id, "member", (FOUNDER, INVITE, MEMBER), 10**9)


def weighs(order: str, balance: Balance = Balance(), is_own: bool = False, **favours: int) -> float:
    by_key = {{"invite": INVITE, "member": MEMBER}[name]: times for name, times in favours.items()}
    return member_weight(Catalog(order=order, favours=by_key), WHO, balance, is_own)


@pytest.mark.parametrize("order", ["equal", "an order of a later version"])
def test_equal_and_what_is_not_known_is_for_everybody_alike(order: str) -> None:
    assert weighs(order, Balance(10**12, 0), True, member=9) == 1.0


def test_by_giving_who_gave_weighs_more_and_who_only_takes_never_nothing() -> None:
    assert weighs("giving") == 1.0, "a newcomer is even"
    assert weighs("giving", Balance(0, GRACE // 100)) > 0.98, "and a little is for nothing"
    assert weighs("giving", Balance(0, 10**12)) == LEAST > 0
    assert weighs("giving", Balance(10**12, 0)) == MOST
    assert 1 < weighs("giving", Balance(3 * GRACE, GRACE)) < MOST
    assert weighs("giving", Balance(0, 10**12), is_own=True) == MOST, "it is their machine"


def test_by_key_the_largest_favour_of_member_or_invite_counts() -> None:
    assert weighs("key") == 1.0
    assert weighs("key", invite=3) == 3.0
    assert weighs("key", invite=3, member=5) == 5.0


def test_cache_goes_by_weight_where_it_is_short_and_who_has_little_keeps_that() -> None:
    ledger = CacheLedger(10_000)
    for number in range(4):
        ledger.reserve((b"rider", number), b"rider", 1_200, number, weight=LEAST)
        ledger.use((b"rider", number), 1_200, number)
    ledger.reserve((b"other", 0), b"other", 4_800, 5.0)
    ledger.use((b"other", 0), 4_800, 5.0)
    ending = ledger.reserve((b"giver", 0), b"giver", 4_500, 100.0, weight=MOST)
    assert ending, "it takes from those beyond their share"
    assert {key[0] for key in ending} <= {b"rider", b"other"}
    assert ledger.reserve((b"late", 9), b"late rider", 2_000, 101.0, weight=LEAST) == [], "what nobody uses yet"
    ledger.use((b"giver", 0), 4_500, 102.0)
    with pytest.raises(Refused, match="a fair share is"):
        ledger.reserve((b"later", 9), b"later rider", 3_000, 103.0, weight=LEAST)


def test_turns_go_by_what_was_given_over_weight() -> None:
    """A worker that charges by weight: of prefills that wait, the heavy client's get four times the tokens."""
    weights, served, got = {b"rider": LEAST, b"even": 1.0}, dict.fromkeys((b"rider", b"even"), 0.0), dict[bytes, int]()
    for turn in range(400):
        ready = [ReadyOp((c, 0), c, 1, 10_000, turn, can_share=False) for c in weights]
        for share in choose_pass(ready, served, Speed(0.01, 0.001)).action:
            client = share.key[0]
            served[client] += share.t / weights[client]
            got[client] = got.get(client, 0) + share.t
    assert got[b"even"] == pytest.approx(4 * got[b"rider"], rel=0.05)
