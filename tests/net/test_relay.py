"""Shares of a relay: what one member, one sponsor and all together may have."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from swarmd.net.api import Relayed
from swarmd.net.libp2p import relay
from swarmd.net.libp2p.relay import RelayShares
from swarmd.values import PeerId

SERVER = PeerId("server")
MEMBER = Relayed(b"an invite", may_reserve=True)
CLIENT = Relayed(b"an invite", may_reserve=False)
OTHER = Relayed(b"another", may_reserve=True)


def test_a_circuit_leads_to_who_holds_a_reservation_and_while_it_does() -> None:
    shares = RelayShares()
    assert "no reservation here" in shares.why_no_circuit(PeerId("a"), MEMBER, SERVER)
    with shares.reservation(SERVER, OTHER.sponsor):
        assert not shares.why_no_circuit(PeerId("a"), MEMBER, SERVER)
    assert "no reservation here" in shares.why_no_circuit(PeerId("a"), MEMBER, SERVER)


def test_identities_of_one_sponsor_share_its_circuits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_CIRCUITS_OF_SPONSOR", 2)
    shares = RelayShares()
    with ExitStack() as held:
        held.enter_context(shares.reservation(SERVER, OTHER.sponsor))
        for name in "ab":
            held.enter_context(shares.circuit(PeerId(name), MEMBER.sponsor))
        assert shares.n_circuits == 2
        assert "2 of your sponsor" in shares.why_no_circuit(PeerId("c"), MEMBER, SERVER)
        assert not shares.why_no_circuit(PeerId("d"), OTHER, SERVER)
    assert not shares.n_circuits


def test_one_member_gets_no_more_than_its_circuits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_CIRCUITS_OF_PEER", 1)
    shares = RelayShares()
    with shares.reservation(SERVER, OTHER.sponsor), shares.circuit(PeerId("a"), MEMBER.sponsor):
        assert "1 circuits of yours" in shares.why_no_circuit(PeerId("a"), MEMBER, SERVER)
        assert not shares.why_no_circuit(PeerId("b"), MEMBER, SERVER)


def test_reservations_are_for_members_and_leave_room_for_other_sponsors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_RESERVATIONS_OF_SPONSOR", 1)
    shares = RelayShares()
    assert "only members get reservations" in shares.why_no_reservation(PeerId("a"), CLIENT)
    with shares.reservation(SERVER, MEMBER.sponsor):
        assert "which is their share" in shares.why_no_reservation(PeerId("a"), MEMBER)
        assert not shares.why_no_reservation(PeerId("a"), OTHER)
        assert not shares.why_no_reservation(SERVER, MEMBER), "who has one may renew it"
    assert not shares.why_no_reservation(PeerId("a"), MEMBER)


def test_a_relay_that_is_full_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "MAX_RESERVATIONS", 1)
    shares = RelayShares()
    with shares.reservation(SERVER, OTHER.sponsor):
        assert shares.why_no_reservation(PeerId("a"), MEMBER) == "1 members have reservations here"
