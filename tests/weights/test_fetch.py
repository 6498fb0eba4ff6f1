"""Downloads from donors that are slow, dead, stalled or liars; donors are played, the disk is real, time is virtual."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from swarmd.errors import Code, PeerTimeout, Refused, SwarmUnavailable, Unreachable
from swarmd.net.pace import Pace
from swarmd.net.standing import Standing
from swarmd.protocol.models import manifest as manifests
from swarmd.protocol.wire.messages import ChunksAre, ManifestIs, WantManifest
from swarmd.values import PeerId
from swarmd.weights import folder as files
from swarmd.weights.donor import read_piece
from swarmd.weights.fetch import Fetch, fetch_manifest
from swarmd.weights.folder import ModelFolder
from tests.weights.conftest import N_BLOCKS

pytestmark = pytest.mark.usefixtures("threads_inline")
MBIT = 1e6 / 8
ALL = frozenset(range(N_BLOCKS + 1))
A = PeerId("donor-a")
B = PeerId("donor-b")
C = PeerId("donor-c")


class PlayedDonor:
    """A donor with an uplink. ``spoil`` makes of each answer what its character sends."""

    def __init__(self, folder: ModelFolder, mbit: float, groups: frozenset[int] = ALL) -> None:
        self.folder = folder
        self.groups = groups
        self.rate = mbit * MBIT
        self.sent_bytes = 0
        self.dies_after_bytes: float = float("inf")
        self.stalls_after_bytes: float = float("inf")
        self.spoil: Callable[[bytes], bytes] = lambda data: data
        self._line = trio.Lock()

    async def give(self, message: Any) -> Any:
        if isinstance(message, WantManifest):
            return ManifestIs(re=1), self.spoil(manifests.encode(self.folder.manifest))
        if not all(self.folder.groups[i] in self.groups for i, _ in message.refs):
            raise Refused(Code.NOT_HELD, "not here")
        data = read_piece(self.folder, message.refs)
        async with self._line:
            if self.sent_bytes + len(data) > self.stalls_after_bytes:
                await trio.sleep_forever()
            if self.sent_bytes + len(data) > self.dies_after_bytes:
                raise Unreachable("it died")
            await trio.sleep(len(data) / self.rate)
            self.sent_bytes += len(data)
        return ChunksAre(re=1), self.spoil(data)


class PlayedRpc:
    def __init__(self, donors: dict[PeerId, PlayedDonor]) -> None:
        self.donors = donors
        self.standing = Standing()

    async def call(self, peer: PeerId, request: Any, timeout_s: float, purpose: str) -> Any:
        assert purpose == "weights"
        with trio.move_on_after(timeout_s):
            message, payload = await self.donors[peer].give(request)
            return message, SimpleNamespace(payload=memoryview(payload))
        raise PeerTimeout("no answer")


def fetch_of(rpc: PlayedRpc, target: ModelFolder, groups: frozenset[int] = ALL) -> Fetch:
    def offered() -> dict[PeerId, frozenset[int]]:
        return {peer: donor.groups for peer, donor in rpc.donors.items()}

    return Fetch(rpc, target, groups, offered, Pace(lambda: None))  # type: ignore[arg-type]


@pytest.fixture
def target(full_model: ModelFolder, tmp_path: Path) -> ModelFolder:
    return files.create(tmp_path / "store", full_model.manifest)


async def test_two_donors_share_the_work_by_their_speed(
    virtual_time: MockClock, full_model: ModelFolder, target: ModelFolder
) -> None:
    rpc = PlayedRpc({A: PlayedDonor(full_model, 50), B: PlayedDonor(full_model, 25)})
    fetch = fetch_of(rpc, target)
    begun = trio.current_time()
    await fetch.run()
    assert target.held == ALL
    assert not target.damaged()
    ideal_s = full_model.n_bytes(ALL) / (75 * MBIT)
    assert trio.current_time() - begun < ideal_s / 0.75
    given_bytes = fetch.progress().given_bytes
    assert given_bytes[A] > 1.3 * given_bytes[B] > 0


async def test_a_liar_loses_standing_and_the_rest_goes_on(
    virtual_time: MockClock, full_model: ModelFolder, target: ModelFolder
) -> None:
    liar = PlayedDonor(full_model, 500)
    liar.spoil = lambda data: data[:-1] + bytes([data[-1] ^ 1])
    rpc = PlayedRpc({A: liar, B: PlayedDonor(full_model, 50)})
    await fetch_of(rpc, target).run()
    assert rpc.standing.count(A) >= 1
    assert not rpc.standing.count(B)
    assert target.held == ALL
    assert not target.damaged()


@pytest.mark.parametrize("failure", ["dies_after_bytes", "stalls_after_bytes"])
async def test_a_donor_that_dies_or_stalls_half_way_costs_no_verified_byte(
    virtual_time: MockClock, full_model: ModelFolder, target: ModelFolder, failure: str
) -> None:
    lost = PlayedDonor(full_model, 50)
    setattr(lost, failure, 9e6)
    rpc = PlayedRpc({A: lost, B: PlayedDonor(full_model, 50)})
    fetch = fetch_of(rpc, target)
    begun = trio.current_time()
    await fetch.run()
    assert target.held == ALL
    assert trio.current_time() - begun < 1.5 * full_model.n_bytes(ALL) / (50 * MBIT), "nobody waited for it"
    sent = sum(donor.sent_bytes for donor in rpc.donors.values())
    assert sent <= full_model.n_bytes(ALL) + 3 * 4 * 2**20, "what had come was not asked for again"


async def test_one_byte_short_is_a_lie(virtual_time: MockClock, full_model: ModelFolder, target: ModelFolder) -> None:
    short = PlayedDonor(full_model, 500)
    short.spoil = lambda data: data[:-1]
    rpc = PlayedRpc({A: short, B: PlayedDonor(full_model, 50)})
    await fetch_of(rpc, target).run()
    assert rpc.standing.count(A) >= 1
    assert target.held == ALL


async def test_groups_come_from_whoever_holds_them(
    virtual_time: MockClock, full_model: ModelFolder, target: ModelFolder
) -> None:
    donors = {
        A: PlayedDonor(full_model, 50, frozenset({0, 1})),
        B: PlayedDonor(full_model, 50, frozenset({1, 2, N_BLOCKS})),
        C: PlayedDonor(full_model, 50, frozenset({3})),
    }
    rpc = PlayedRpc(donors)
    await fetch_of(rpc, target).run()
    assert target.held == ALL
    assert not rpc.standing.shunned()


async def test_what_nobody_holds_is_named_and_the_rest_is_kept(
    virtual_time: MockClock, full_model: ModelFolder, target: ModelFolder
) -> None:
    rpc = PlayedRpc({A: PlayedDonor(full_model, 50, frozenset({0, 1}))})
    with pytest.raises(SwarmUnavailable, match=r"nobody who is up holds groups \[2,5\) .* are verified and kept"):
        with trio.fail_after(600):
            await fetch_of(rpc, target).run()
    assert target.held == {0, 1}
    rpc.donors[A] = PlayedDonor(full_model, 50)
    second = fetch_of(rpc, target)
    await second.run()
    assert rpc.donors[A].sent_bytes == full_model.n_bytes({2, 3, 4}), "the rest only"


async def test_a_download_that_was_cut_off_goes_on(
    virtual_time: MockClock, full_model: ModelFolder, target: ModelFolder
) -> None:
    rpc = PlayedRpc({A: PlayedDonor(full_model, 50)})
    with trio.move_on_after(2.0):
        await fetch_of(rpc, target).run()
    first = rpc.donors[A].sent_bytes
    assert 0 < first < full_model.n_bytes(ALL)
    second = fetch_of(rpc, ModelFolder(target.folder, full_model.manifest))
    await second.run()
    assert rpc.donors[A].sent_bytes <= full_model.n_bytes(ALL) + 2 * 4 * 2**20, "only what was under way came twice"
    assert second.progress().resumed_bytes > 0 or target.held


async def test_a_manifest_is_taken_from_who_tells_the_truth(virtual_time: MockClock, full_model: ModelFolder) -> None:
    liar = PlayedDonor(full_model, 50)
    liar.spoil = lambda data: data[:-1] + b"x"
    rpc = PlayedRpc({A: liar, B: PlayedDonor(full_model, 50)})
    manifest = await fetch_manifest(rpc, full_model.model, [A, B])  # type: ignore[arg-type]
    assert manifest == full_model.manifest
    assert (rpc.standing.count(A), rpc.standing.count(B)) == (1, 0)
    with pytest.raises(SwarmUnavailable, match="lies: a manifest that is not"):
        await fetch_manifest(rpc, full_model.model, [A])  # type: ignore[arg-type]


async def test_a_group_is_put_in_place_once_though_its_last_pieces_come_together(
    virtual_time: MockClock, full_model: ModelFolder, target: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    finished: list[int] = []
    finish = files.GroupDownload.finish

    def counted(part: files.GroupDownload) -> None:
        finished.append(part.group)
        finish(part)

    monkeypatch.setattr(files.GroupDownload, "finish", counted)
    rpc = PlayedRpc({peer: PlayedDonor(full_model, 100) for peer in (A, B, C)})
    await fetch_of(rpc, target).run()
    assert sorted(finished) == sorted(ALL)


@pytest.mark.parametrize("first_bytes", [0, 1], ids=["never gave", "gave once"])
async def test_silent_donors_yield_to_one_that_gives(
    virtual_time: MockClock, full_model: ModelFolder, target: ModelFolder, first_bytes: int
) -> None:
    """A crowd accepts every request and answers none, before the only honest one in any order."""
    honest = PeerId("z-honest")
    donors = {PeerId(f"silent-{i:02}"): PlayedDonor(full_model, 100) for i in range(20)}
    for donor in donors.values():
        donor.stalls_after_bytes = first_bytes * full_model.n_bytes(ALL) / 40
    donors[honest] = PlayedDonor(full_model, 100)
    rpc = PlayedRpc(donors)
    begun = trio.current_time()
    assert await fetch_manifest(rpc, target.model, donors) == full_model.manifest  # type: ignore[arg-type]
    fetch = fetch_of(rpc, target)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fetch.run)
        while not donors[honest].sent_bytes:
            await trio.sleep(0.1)
        assert trio.current_time() - begun < 10
    assert target.held == ALL
    assert trio.current_time() - begun < 30


async def test_a_manifest_of_silent_donors_comes_from_the_next(
    virtual_time: MockClock, full_model: ModelFolder
) -> None:
    class Silent(PlayedDonor):
        async def give(self, message: Any) -> Any:
            await trio.sleep_forever()

    donors: dict[PeerId, PlayedDonor] = {PeerId(f"silent-{i}"): Silent(full_model, 1) for i in range(4)}
    donors[PeerId("z-honest")] = PlayedDonor(full_model, 100)
    begun = trio.current_time()
    assert await fetch_manifest(PlayedRpc(donors), full_model.model, donors) == full_model.manifest  # type: ignore[arg-type]
    assert trio.current_time() - begun < 10
