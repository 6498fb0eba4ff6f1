"""Nothing is met with silence: what a peer asks and nobody handles is refused at once, and held against nobody."""

from __future__ import annotations

import msgspec
import pytest
import trio
from trio.testing import MockClock

from swarmd.errors import Code, Refused
from swarmd.net.standing import Standing
from swarmd.protocol.fields import Message
from swarmd.protocol.wire import frames, messages, rounds, tuning, worker
from swarmd.protocol.wire.messages import Hello, Inherited, ManifestIs, Progress, Suspect, Unknown, WantManifest
from tests.hostile.test_peers import KEY, scene

AT_ONCE_S = 1.0


class Newer(Message, tag="want_horoscope", frozen=True):
    """A request of a version to come."""

    id: int = 0
    sign: str = "libra"


@pytest.mark.parametrize(
    ("request_of", "code"),
    [
        (rounds.WantRun(run="f" * 64), Code.NOT_HERE),
        (rounds.JoinRound(run="f" * 64), Code.NOT_HERE),
        (WantManifest(model="f" * 64), Code.NOT_HERE),
        (WantManifest(model="no hash"), Code.NOT_HERE),
        (Newer(), Code.UNSUPPORTED),
        (worker.LoadAdapter(adapter="a" * 64), Code.UNSUPPORTED),
        (tuning.PutTuned(version=b"v", start=0, end=4, model="f" * 64), Code.NOT_SERVING),
    ],
    ids=["a run", "a round of a run", "a model", "a model by no hash", "a later version", "a worker's", "parameters"],
)
async def test_a_request_that_nobody_handles_is_refused_at_once(
    virtual_time: MockClock, request_of: object, code: Code
) -> None:
    async with scene() as s:
        begun = trio.current_time()
        with pytest.raises(Refused) as caught:
            await s.attacker.rpc.call(s.server, request_of)  # type: ignore[arg-type]
        assert caught.value.code is code
        assert trio.current_time() - begun < AT_ONCE_S
        assert _standing(s).count(s.attacker.identity.peer_id) == 0, "it is no fault to ask"


async def test_what_daemon_and_worker_say_comes_from_no_peer(virtual_time: MockClock) -> None:
    """A member's LoadSpan was accepted in silence before."""
    async with scene() as s:
        channel = await s.attacker.rpc.channel(s.server)
        local_kinds = [kind for kind in _kinds(worker.WorkerMessage) if kind.__module__ == worker.__name__]
        assert len(local_kinds) == 25
        for kind in local_kinds:
            assert kind.__struct_config__.tag not in messages.TAGS
            await channel.send(kind())
        assert await s.attacker.codes_for(s.server, worker.Done(session=KEY)) == [Code.UNSUPPORTED]
        assert channel.is_open
        await s.victim_is_well()


async def test_what_only_tells_and_comes_late_is_met_with_nothing(virtual_time: MockClock) -> None:
    async with scene() as s:
        for late in (Progress(session=KEY), Suspect(session=KEY), Inherited(session=KEY), ManifestIs(re=7)):
            assert await s.attacker.codes_for(s.server, late) == []


async def test_a_client_refuses_what_it_does_not_handle(virtual_time: MockClock) -> None:
    async with scene() as s:
        client = s.victim._swarm.rpc.network.peer_id
        begun = trio.current_time()
        daemon = s.swarm.daemons[s.server][0]
        with pytest.raises(Refused) as caught:
            await daemon.rpc.call(client, rounds.WantRun(run="f" * 64))
        assert caught.value.code is Code.NOT_HERE
        assert trio.current_time() - begun < AT_ONCE_S


async def test_another_frame_version_ends_the_channel_and_nobodys_standing(virtual_time: MockClock) -> None:
    async with scene() as s:
        for _ in range(8):
            channel = await s.attacker.rpc.channel(s.server)
            await channel.stream.send(b"\2" + frames.encode(messages.encode(Hello()))[1:])
            await trio.sleep(1)
            assert not channel.is_open
        assert _standing(s).allows(s.attacker.identity.peer_id)


async def test_malformed_bytes_again_and_again_get_a_ban_that_grows_and_ends(virtual_time: MockClock) -> None:
    async with scene() as s:
        standing = _standing(s)
        attacker = s.attacker.identity.peer_id
        for _ in range(5):
            channel = await s.attacker.rpc.channel(s.server)
            await channel.stream.send(b"\xff" * 64)
            await trio.sleep(0.5)
        left_s = standing.ban_left_s(attacker)
        assert 50 < left_s <= 60
        assert s.swarm.daemons[s.server][0].rpc.find_channel(attacker) is None, "connections of who is banned end"
        with pytest.raises(Refused, match="is banned for") as caught:
            await s.attacker.rpc.channel(s.server)
        assert caught.value.code is Code.BANNED
        await trio.sleep(left_s + 1)
        assert (await s.attacker.rpc.channel(s.server)).is_open
        for _ in range(5):
            channel = await s.attacker.rpc.channel(s.server)
            await channel.stream.send(b"\xff" * 64)
            await trio.sleep(0.5)
        assert 110 < standing.ban_left_s(attacker) <= 120


def test_a_message_of_a_later_version_is_told_from_noise() -> None:
    newer = msgspec.msgpack.encode({"t": "teleport", "id": 3, "where": [1, 2], "session": KEY})
    read = messages.decode_untrusted(newer)
    assert read == Unknown("teleport", id=3, session=KEY)


def _kinds(union: object) -> tuple[type[Message], ...]:
    from typing import get_args

    return get_args(union)


def _standing(s: object) -> Standing:
    return s.swarm.daemons[s.server][0].rpc.standing  # type: ignore[attr-defined,no-any-return]
