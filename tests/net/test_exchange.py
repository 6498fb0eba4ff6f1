"""What a member believes of others after a silence that was its own."""

from __future__ import annotations

from typing import Any

import pytest
from trio.testing import MockClock

from swarmd.net.exchange import STALL_S, Exchange
from swarmd.node.members.record_signer import RecordSigner
from swarmd.protocol.membership.beats import BEATS_KEPT
from swarmd.protocol.membership.identity import Identity, certify
from swarmd.protocol.membership.invite import SwarmKeys

FOUNDER, MEMBER = Identity(b"f" * 32), Identity(b"m" * 32)
KEYS = SwarmKeys("sim", FOUNDER.public_key, b"\0" * 32)
EPOCH_S, YEAR_S = 1_700_000_000, 31_536_000
PEER: dict[str, Any] = {"kind": "peer", "addresses": ("/ip4/1.2.3.4/tcp/1",)}
BEAT_S = 20


class Listener:
    """Somebody who has just heard of a member, and the clock of both."""

    def __init__(self) -> None:
        self.now = float(EPOCH_S)
        certificate = (certify(FOUNDER, MEMBER.public_key, "member", EPOCH_S + YEAR_S),)
        self._signer = RecordSigner(MEMBER, certificate, Exchange(KEYS, lambda: self.now), lambda: self.now)
        self.exchange = Exchange(KEYS, lambda: self.now)

    def meet(self) -> None:
        for raw in self._signer.renew([PEER], 2, True).news:
            assert self.exchange.merge_untrusted(raw)

    def pass_s(self, seconds: float) -> bool:
        """Look at what there is every few seconds; is the member believed in at the end?"""
        for _ in range(round(seconds / 5)):
            self.now += 5
            self.exchange.view()
        return self.is_believed()

    def is_believed(self) -> bool:
        return MEMBER.peer_id in self.exchange.view().peers

    def hear(self) -> None:
        assert self.exchange.book.take_beats_untrusted(self._signer.current([PEER])[1], self.now)


@pytest.fixture
def listener(virtual_time: MockClock) -> Listener:
    return Listener()


@pytest.mark.parametrize("asleep_s", [300.0, 1_800.0])
async def test_who_was_asleep_believes_in_the_others_until_it_could_have_heard(
    listener: Listener, asleep_s: float
) -> None:
    listener.meet()
    assert listener.pass_s(BEAT_S)
    listener.now += asleep_s
    assert listener.is_believed()
    assert listener.pass_s(BEAT_S)
    listener.hear()
    assert listener.pass_s(2 * BEAT_S)
    assert not listener.pass_s(BEAT_S), "from then on as ever"


async def test_who_is_gone_when_one_wakes_up_is_believed_in_no_longer_than_before(listener: Listener) -> None:
    listener.meet()
    listener.now += 600.0
    assert not listener.pass_s(BEATS_KEPT * BEAT_S)


async def test_who_looks_is_not_excused(listener: Listener) -> None:
    listener.meet()
    assert listener.pass_s(2 * BEAT_S)
    listener.now += STALL_S
    assert not listener.is_believed()


async def test_a_clock_that_is_set_back_does_not_keep_the_dead(listener: Listener) -> None:
    listener.meet()
    listener.now -= 100 * 86_400
    assert listener.is_believed()
    assert not listener.pass_s(BEATS_KEPT * BEAT_S)
