"""What a client weighs follows the catalog, and this machine's own books."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from swarmd.net.exchange import Exchange
from swarmd.node.members.order import LOOK_INTERVAL_S, Order
from swarmd.plan.trust.order import GRACE, LEAST, MOST, Balance
from swarmd.protocol.accounts import usage_receipt
from swarmd.protocol.accounts.usage_receipt import SignedUsageReceipt, UsageReceipt
from swarmd.protocol.membership.catalog import AdmittedMember, Catalog, sign_catalog
from swarmd.protocol.membership.identity import Identity, Membership, certify
from swarmd.protocol.membership.invite import SwarmKeys
from swarmd.protocol.wire.messages import Hello
from swarmd.usage_ledger import UsageLedger
from swarmd.values import PeerId

ME, GIVER, RIDER = (Identity(bytes([n]) * 32) for n in (1, 2, 3))


def between(giver: Identity, taker: Identity, n_tokens: int) -> tuple[UsageReceipt, SignedUsageReceipt]:
    bill = UsageReceipt(giver.peer_id, taker.peer_id, b"s" * 16, "m", 0, 10, n_tokens, 1_000)
    body, giver_signature = usage_receipt.sign_offer(bill, giver)
    return bill, SignedUsageReceipt(body, giver_signature, usage_receipt.sign_acceptance(body, taker))


@pytest.mark.parametrize("order", ["equal", "giving"])
async def test_servers_favour_who_computed_for_their_owner(order: str, tmp_path: Path, virtual_time: Any) -> None:
    books = UsageLedger(tmp_path / "books.db")
    books.add(*between(GIVER, ME, GRACE), b"invite of the giver")
    books.add(*between(ME, RIDER, GRACE), b"invite of the rider")
    books.save()
    vouchers = {
        ME.peer_id: b"own",
        GIVER.peer_id: b"invite of the giver",
        RIDER.peer_id: b"invite of the rider",
    }
    roster = SimpleNamespace(
        met={p: Membership(p, "member", (b"f", v), 10**9) for p, v in vouchers.items()},
        voucher_of=lambda peer: vouchers[peer],
        n_sharing=lambda peer: 1,
    )
    exchange: Any = SimpleNamespace(
        roster=roster,
        book=SimpleNamespace(catalog=Catalog(order=order)),
        now=lambda: 2_000.0,
    )
    member_order = Order(exchange, books, ME.peer_id)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(member_order.run)
        await trio.sleep(LOOK_INTERVAL_S / 2)
        nursery.cancel_scope.cancel()
    weights = [member_order.weight(identity.peer_id) for identity in (ME, GIVER, RIDER)]
    assert weights == ([MOST, MOST, LEAST] if order == "giving" else [1.0, 1.0, 1.0])
    assert member_order.weight(PeerId("somebody")) == 1.0


@pytest.mark.parametrize("n_signed", [0, GRACE // 10, 2 * GRACE])
async def test_who_signs_no_bill_has_taken_all_the_same(n_signed: int, tmp_path: Path, virtual_time: Any) -> None:
    """Else it would ride free: nobody can make a client sign."""
    books = UsageLedger(tmp_path / "books.db")
    books.serve(b"invite of the rider", 10 * GRACE)
    books.serve(b"own", 10 * GRACE)
    if n_signed:
        books.add(*between(ME, RIDER, n_signed), b"invite of the rider")
    books.save()
    vouchers = {ME.peer_id: b"own", RIDER.peer_id: b"invite of the rider"}
    exchange: Any = SimpleNamespace(roster=SimpleNamespace(voucher_of=lambda peer: vouchers[peer]), now=lambda: 2_000.0)
    member_order = Order(exchange, books, ME.peer_id)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(member_order.run)
        await trio.sleep(LOOK_INTERVAL_S / 2)
        nursery.cancel_scope.cancel()
    assert member_order.balance(RIDER.peer_id) == Balance(took=max(10 * GRACE, 10 * n_signed))
    assert member_order.balance(ME.peer_id) == Balance()


def test_however_many_come_by_one_invite_they_share_what_one_gets() -> None:
    """But for who was admitted for good, and whoever came by an invite of his own."""
    founder, leaked, personal = (Identity(bytes([n]) * 32) for n in (4, 5, 6))
    exchange = Exchange(SwarmKeys("ours", founder.public_key, bytes(32)), lambda: 100.0)
    guests = [(leaked, Identity(bytes([n]) * 32)) for n in range(10, 15)]
    guests.append((personal, Identity(bytes([20]) * 32)))
    for invite, guest in guests:
        invite_link = certify(founder, invite.public_key, "invite", 900)
        member_link = certify(invite, guest.public_key, "member", 900)
        exchange.roster.admit(guest.peer_id, Hello(certificate=(invite_link, member_link)))
    admitted = {guests[0][1].public_key: AdmittedMember(900, leaked.public_key)}
    exchange.merge_catalog_untrusted(sign_catalog(Catalog(version=1, admitted=admitted), founder))
    order = Order(exchange, UsageLedger(None), founder.peer_id)
    assert [order.weight(guest.peer_id) for _, guest in guests] == [1, *[0.25] * 4, 1]
