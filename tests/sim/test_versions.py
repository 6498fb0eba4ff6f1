"""Old and new versions share a swarm: a codec, need or message is used between those that announce it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch
import trio
from trio.testing import MockClock

from swarmd.client.links.ops import StepInput
from swarmd.errors import SwarmError
from swarmd.protocol.membership import records
from swarmd.protocol.understanding import BEATS, OURS, Understanding, understanding_of
from swarmd.values import Span
from tests.protocol.test_untrusted import KEYS, MEMBER, peer_record
from tests.sim.swarm import HIDDEN, Reference, SimSwarm

OLD = Understanding(0, ("raw", "float16"), OURS.needs - {"exact"})
LATER = Understanding(OURS.minor + 1, (*OURS.codecs, "int4x"), OURS.needs | {"telepathy"})


@pytest.mark.parametrize("changes", [{"codec": "int8"}, {"codec": "raw", "grade": "exact"}], ids=str)
async def test_what_is_new_is_used_with_those_who_announce_it(virtual_time: MockClock, changes: dict[str, Any]) -> None:
    with trio.fail_after(300):
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery, 4, seed=3)
            old = await swarm.add(Span(0, 4), understands=OLD)
            new = await swarm.add(Span(0, 4), understands=LATER, name="anna")
            while min(swarm.coverage()) < 2:
                await trio.sleep(0.5)
            client = await swarm.client()
            while len(client.view().serving(swarm.model)) < 2:
                await trio.sleep(0.5)
                await client.refresh()
            announced = {peer: understanding_of(record) for peer, record in client.view().peers.items()}
            assert announced == {old: OLD, new: LATER}
            assert [client.view().peers[peer].name for peer in (old, new)] == ["", "anna"]
            for _ in range(4):
                session = await client.open_session(replace(swarm.terms(100), **changes))
                assert {link.hop.peer for link in session.chain.links} == {new}
                hidden = torch.ones(1, 1, HIDDEN)
                out = await session.step(StepInput(hidden, torch.zeros(1, 1, dtype=torch.int32)))
                assert out is not None
                torch.testing.assert_close(out, Reference(4).step(hidden), atol=0.02, rtol=0.02)
                await client.close_session(session)
            swarm.crash(new)
            with pytest.raises(SwarmError):
                await client.open_session(replace(swarm.terms(100), **changes))
            plain = await client.open_session(swarm.terms(100))
            assert {link.hop.peer for link in plain.chain.links} == {old}, "what all know goes everywhere"
            nursery.cancel_scope.cancel()


def test_a_record_of_a_later_version_is_read_and_one_of_an_earlier_is_taken_at_its_word() -> None:
    record = peer_record(minor=9, codecs=(*OURS.codecs, "int4x"), needs=("telepathy",))
    later = {**msgspec.msgpack.decode(msgspec.msgpack.encode(record)), "aura": "violet"}
    body = msgspec.msgpack.encode(later)
    raw = msgspec.msgpack.encode(records.Envelope(body, MEMBER.sign(b"swarmd record 1\0", body)))
    read = records.read_untrusted(raw, KEYS.founder_key, 120).record
    assert isinstance(read, records.PeerRecord)
    assert understanding_of(read).knows("int4x", frozenset({"telepathy"}))
    common = {"peer": "p", "sequence": 1, "issued_at": 0, "expires_at": 1, "certificate": ()}
    earlier = msgspec.convert({"kind": "peer", **common}, records.PeerRecord)
    assert understanding_of(earlier).minor == 0
    assert understanding_of(earlier).knows("int8", frozenset({"exact", "tuned"}))


async def test_with_a_member_that_knows_no_beats_all_announce_as_it_does(virtual_time: MockClock) -> None:
    with trio.fail_after(900):
        async with trio.open_nursery() as nursery:
            swarm = SimSwarm(nursery, 4, seed=5)
            for _ in range(3):
                await swarm.add(Span(0, 4))
            assert await settle(swarm) == {True}, "beats prove all"
            old = await swarm.add(Span(0, 4), understands=replace(OURS, minor=BEATS - 1))
            assert await settle(swarm) == {False}
            swarm.crash(old)
            assert await settle(swarm) == {True}, "it is gone, and they are as before"
            nursery.cancel_scope.cancel()


async def settle(swarm: SimSwarm) -> set[bool]:
    """Wait until all know who is there, and for a minute more; are records proved by beats?"""
    while not swarm.views_agree():
        await trio.sleep(1)
    await trio.sleep(60)
    assert swarm.views_agree()
    books = [daemon.exchange.book for daemon, _, _ in swarm.daemons.values()]
    return {entry.life is not None for book in books for entry in book.entries.values()}
