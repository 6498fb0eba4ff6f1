"""A client shows some receipts of an honest server, leaves others out, and has it look wrong: nobody believes it.

The server here computes sums: what leaves it of a token is the sum of all that entered up to it. So what is shown and
accepted can be held against what an honest holder would compute.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import combinations

import msgspec
import numpy as np
import pytest
import torch
import trio
from trio.testing import MockClock

from swarmd.client.sessions.receipts import HopAccount, HopAccounts
from swarmd.compute.cache.pieces import SessionTokens
from swarmd.errors import IntegrityError, RemoteProtocolError
from swarmd.protocol.accounts import evidence, receipt
from swarmd.protocol.accounts.evidence import Evidence
from swarmd.protocol.accounts.receipt import Receipt, Trail
from swarmd.protocol.fields import TensorMeta
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.wire.arrays import Floats, pack_array
from swarmd.protocol.wire.messages import Edit, Op, ReceiptIs, WantReceipt
from swarmd.values import PeerId, Span
from swarmd.wire.tensors import DTYPES, pack
from tests.hostile.kit import KEY, Attacker, served
from tests.sim.swarm import HIDDEN, ToyCache, ToySpan

SERVER = Identity(bytes([7]) * 32)
WIDTH = 4
Signed = tuple[bytes, bytes]


def signed_by(trail: Trail, seq: int = 1) -> Signed:
    """What an honest server signs of one opening."""
    first, entered, left, before = trail.cut()
    about = (SERVER.peer_id, "client", bytes(16), "m", 0, 3, seq, trail.taken.n_computed, 1, "n", False)
    said = Receipt(*about, trail.adapter, trail.tuned, first=first, entered=entered, left=left, before=before)
    return receipt.sign(said, SERVER)


class Session:
    """One session at an honest server, which may be closed and opened again under the same name."""

    def __init__(self, rng: random.Random) -> None:
        self._numbers = np.random.default_rng(rng.getrandbits(32))
        self.receipts: list[tuple[Signed, Floats]] = []  # each with all that had entered when it was signed
        self.account = HopAccount()
        self.reopen()

    def reopen(self) -> None:
        self._trail = Trail(shape=(1, WIDTH))
        self._seq = 0
        self.entered: Floats = np.zeros((1, 0, WIDTH), np.float32)
        self.account = HopAccount()

    def op(self, n_cropped: int, n_tokens: int) -> None:
        """Take back some tokens, and compute others."""
        n_kept = self.entered.shape[1] - n_cropped
        new = self._numbers.standard_normal((1, n_tokens, WIDTH)).astype(np.float32)
        self.entered = np.concatenate([self.entered[:, :n_kept], new], 1)
        self._seq += 1
        meta, payload = pack_array(new, "float32", n_kept)
        edits = (Edit(crop=n_cropped),) if n_cropped else ()
        self._trail.enter(Op(seq=self._seq, edits=edits, tensor=meta), payload)
        self._trail.leave(self._seq, *pack_array(computed(self.entered)[:, n_kept:], "float32", n_kept))

    def repeat(self) -> None:
        self._trail.repeat()

    def sign(self) -> None:
        first, entered, left, before = self._trail.cut()
        about = (
            SERVER.peer_id,
            "client",
            bytes(16),
            "m",
            0,
            3,
            self._seq,
            self._trail.taken.n_computed,
            1,
            "n",
            False,
            "",
            b"",
        )
        said = Receipt(*about, first=first, entered=entered, left=left, before=before)
        signed = receipt.sign(said, SERVER)
        self.receipts.append((signed, self.entered))
        self.account.add(said, *signed)


def computed(entered: Floats) -> Floats:
    return entered.cumsum(1, dtype=np.float32)


def random_session(rng: random.Random) -> Session:
    session = Session(rng)
    for _ in range(rng.randint(2, 7)):
        if rng.random() < 0.2:
            session.reopen()
        session.op(rng.randint(0, min(3, session.entered.shape[1])), rng.randint(1, 4))
        if rng.random() < 0.6:
            session.sign()
    session.sign()
    return session


def shown(receipts: tuple[Signed, ...], entered: Floats, left: Floats) -> memoryview:
    n = entered.shape[1]
    last = pack_array(left[:, -1:], "float32", n - 1)
    return memoryview(evidence.encode(Evidence(receipts, pack_array(entered, "float32", 0), last)))


def pieced_together(chosen: list[tuple[Signed, Floats]]) -> Iterator[tuple[Floats, Floats]]:
    """What some receipts, one after the other, would be of: the tokens that each tells of, and what left."""
    entered, left = (np.zeros((1, 0, WIDTH), np.float32) for _ in range(2))
    for (body, _), whole in chosen:
        first = msgspec.msgpack.decode(body, type=Receipt).first
        entered = np.concatenate([entered[:, :first], whole[:, first:]], 1)
        left = np.concatenate([left[:, :first], computed(whole)[:, first:]], 1)
    if entered.shape[1]:
        yield entered, left


@pytest.mark.parametrize("n_cases", [200, pytest.param(20_000, marks=pytest.mark.prove)])
def test_what_an_honest_client_shows_is_accepted_and_true(n_cases: int) -> None:
    rng = random.Random(1)
    for _ in range(n_cases):
        session = random_session(rng)
        said = evidence.read_untrusted(
            shown(session.account.signed, session.entered, computed(session.entered)), SERVER.peer_id
        )
        assert np.array_equal(said.left, computed(said.entered)[:, -1:])


@pytest.mark.parametrize("n_cases", [100, pytest.param(2_000, marks=pytest.mark.prove)])
def test_receipts_that_leave_something_out_convince_nobody(n_cases: int) -> None:
    """Whatever is accepted is what the server really computed, so that nobody who computes it again finds it wrong."""
    rng, n_framed = random.Random(2), 0
    while n_framed < n_cases:
        session = random_session(rng)
        for size in range(1, len(session.receipts) + 1):
            for chosen in combinations(session.receipts, size):
                for entered, left in pieced_together(list(chosen)):
                    if np.array_equal(left[:, -1:], computed(entered)[:, -1:]):
                        continue
                    n_framed += 1
                    with pytest.raises(RemoteProtocolError, match=r"leaves out|lacks a receipt"):
                        evidence.read_untrusted(shown(tuple(s for s, _ in chosen), entered, left), SERVER.peer_id)


def test_a_receipt_that_does_not_go_on_is_its_servers_fault() -> None:
    """Else a liar could sign so that nobody may show what it signed."""
    session = Session(random.Random(3))
    session.op(0, 3)
    session.sign()
    session.op(0, 2)
    said = Receipt(
        SERVER.peer_id, "client", bytes(16), "m", 0, 3, 2, 5, 1, "n", False, "", b"", 3, b"e" * 32, b"l" * 32, b"other"
    )
    with pytest.raises(IntegrityError, match="does not go on"):
        session.account.add(said, *receipt.sign(said, SERVER))


@pytest.mark.parametrize(("adapter", "tuned"), [("other", b""), ("", b"\1" * 32)])
def test_only_the_first_receipt_is_of_plain_blocks(adapter: str, tuned: bytes) -> None:
    """The session is opened again under its name, now with other parameters: plain blocks compute something else."""
    values = np.ones((1, 2, WIDTH), np.float32)
    receipts = []
    for trail in (Trail(shape=(1, WIDTH)), Trail(shape=(1, WIDTH), adapter=adapter, tuned=tuned)):
        trail.enter(Op(seq=1, tensor=pack_array(values, "float32")[0]), pack_array(values, "float32")[1])
        trail.leave(1, *pack_array(values + 1, "float32"))
        receipts.append(signed_by(trail))
    with pytest.raises(RemoteProtocolError, match="plain blocks"):
        evidence.read_untrusted(shown(tuple(receipts), values, values + 1), SERVER.peer_id)


@pytest.mark.parametrize(
    ("dtype", "codec", "batch", "width"),
    [("bfloat16", "float16", 1, 8), ("float16", "bfloat16", 1, 8), ("float32", "int4", 7, 384)],
)
def test_numbers_that_travelled_in_a_codec_are_not_shown_as_others(
    dtype: str, codec: str, batch: int, width: int
) -> None:
    """They take as many bytes as one row in the hop's own dtype does, and are other numbers."""
    rng = torch.Generator().manual_seed(1)
    entered, left = (torch.randn(batch, 1, width, generator=rng).to(DTYPES[dtype]) for _ in range(2))
    positions, trail = torch.zeros(batch, 1, dtype=torch.int32), Trail(shape=(batch, width))
    meta, came = pack(entered, positions, None, codec)
    trail.enter(Op(seq=1, tensor=meta), came)
    meta, went = pack(left, positions, None, codec)
    trail.leave(1, meta, went)
    as_raw = TensorMeta(1, 1, width, dtype)
    assert meta.codec == codec
    payload = evidence.encode(Evidence((signed_by(trail),), (as_raw, came), (as_raw, went)))
    with pytest.raises(RemoteProtocolError, match="other numbers than the accused signed"):
        evidence.read_untrusted(memoryview(payload), SERVER.peer_id)


def test_a_replay_is_not_taken_for_what_an_op_gave_that_was_refused() -> None:
    """Of history in two parts the second is refused; then all that is kept is sent again, under the same number."""
    values = np.arange(2 * WIDTH, dtype=np.float32).reshape(1, 2, WIDTH)
    trail = Trail(shape=(1, WIDTH))
    for part in range(2):
        meta, payload = pack_array(values + part, "float32", 2 * part)
        edits = (Edit(rows=(0, 1)),) if part else ()  # of more rows than there are, each where it was
        trail.enter(Op(seq=9, edits=edits, tensor=meta, base=(part, 2), silent_through=9), payload)
    trail.leave(9, *pack_array(values, "float32"))
    trail.refuse()
    trail.leave(9, *pack_array(values, "float32"))
    trail.enter(Op(seq=10, tensor=meta), payload)
    first, entered, left, _ = trail.cut()
    assert (first, len(entered)) == (0, 2 * receipt.DIGEST_BYTES)
    assert left == receipt.digests_of(*pack_array(values, "float32"))


def accounted(n_receipts: int, n_tokens: int, *, first: int, step: int) -> HopAccount:
    """What a client keeps of receipts of ``n_tokens`` each, every one ``step`` tokens behind the one before."""
    now = 1_000_000
    accounts = HopAccounts(bytes(16), PeerId("client"), n_receipts * max(1, step) + n_tokens + 1, ("m", "", b""))
    known, place = HopAccount(), (PeerId(SERVER.peer_id), 0)
    for seq in range(1, n_receipts + 1):
        at, digests = first + (seq - 1) * step, bytes([seq % 250]) * 16 * n_tokens
        before = receipt.digest_before(known.inputs, known.outputs, at)
        about = (SERVER.peer_id, "client", bytes(16), "m", 0, 3, seq, 1, now, "n", False, "", b"", at)
        body, signature = receipt.sign(Receipt(*about, digests, digests, before), SERVER)
        known = accounts.take_untrusted(place, 3, body, signature, now)
    return known


def test_a_hop_cannot_fill_its_clients_memory_with_receipts() -> None:
    """Of those that nobody could be shown, for the first is missing, none is kept; of the same tokens, the last."""
    assert accounted(5, 1_000, first=1, step=0)._signed == []
    assert len(accounted(5, 1_000, first=0, step=0).signed) == 1
    n_bytes = 40_000 * 32
    assert not accounted(1 + evidence.MAX_EVIDENCE_BYTES // n_bytes, 40_000, first=0, step=1)._signed


def test_a_hop_that_signed_as_often_as_it_should_in_a_long_session_is_not_at_fault() -> None:
    assert len(accounted(evidence.MAX_RECEIPTS, 1, first=0, step=1).signed) == evidence.MAX_RECEIPTS
    known = accounted(evidence.MAX_RECEIPTS + 2, 1, first=0, step=1)
    assert known.signed == (), "too many to be shown"
    assert known.n_tokens == evidence.MAX_RECEIPTS + 2


def test_a_receipt_that_was_lost_with_a_connection_is_nobodys_fault() -> None:
    """The session goes on with the same hop, which cannot know what came; then it says all of it again."""
    session, place = Session(random.Random(4)), (PeerId(SERVER.peer_id), 0)
    accounts = HopAccounts(bytes(16), PeerId("client"), 100, ("m", "", b""))

    def take() -> HopAccount:
        session.sign()
        return accounts.take_untrusted(place, 3, *session.receipts[-1][0], 1)

    session.op(0, 3)
    assert take().n_tokens == 3
    session.op(0, 2)
    session.sign()  # and it is lost
    accounts.note_disconnected(PeerId(SERVER.peer_id))
    session.op(0, 4)
    assert take().signed == (), "one is missing"
    session.repeat()
    known = take()
    assert len(known.signed) == 1
    session.op(1, 1)
    assert len(take().signed) == 2
    said = evidence.read_untrusted(shown(known.signed, session.entered, computed(session.entered)), SERVER.peer_id)
    assert np.array_equal(said.left, computed(said.entered)[:, -1:])


# --- at a server that is asked -------------------------------------------------------------------------------------


async def signed_at(attacker: Attacker, server: PeerId, start: int) -> Receipt:
    reply, frame = await attacker.rpc.call(server, WantReceipt(session=KEY, start=start))
    assert isinstance(reply, ReceiptIs)
    return receipt.read_untrusted(bytes(frame.payload), reply.signature)


async def put(attacker: Attacker, server: PeerId, start: int, values: Floats) -> bytes:
    """Send one op; returns the digests of its tokens."""
    meta, payload = pack_array(values, "float32")
    channel = await attacker.rpc.channel(server)
    await channel.send(Op(session=KEY, start=start, epoch=1, seq=1, tensor=meta), payload)
    return receipt.digests_of(meta, payload)


def toy(values: Floats, start: int) -> bytes:
    """The digests of what the blocks from ``start`` on make of tokens."""
    hop = Span(start, 4)
    n_tokens = values.shape[1]
    piece = SessionTokens(torch.from_numpy(values), torch.arange(n_tokens)[None], ToyCache(hop), 0)
    (out,) = ToySpan(hop).run([piece], hop)
    return receipt.digests_of(*pack_array(out.numpy(), "float32"))


@pytest.mark.parametrize("n_openings", [1, 2])
async def test_what_a_session_gave_before_it_was_opened_again_is_not_signed_as_what_it_gives(
    virtual_time: MockClock, n_openings: int
) -> None:
    """The worker is still at the first one's op when it is opened again, under the same name and with other tokens."""
    first, other = (np.full((1, 2, HIDDEN), value, np.float32) for value in (0.25, 0.5))
    async with trio.open_nursery() as nursery:
        swarm, server = await served(nursery, 1)
        attacker = Attacker(swarm)
        await attacker.start(nursery)
        swarm.workers[server]._step_s = 2.0
        await attacker.open(server, receipts=True)
        await put(attacker, server, 0, first)
        await trio.sleep(0.5)
        for _ in range(n_openings):
            await attacker.open(server, receipts=True)
        entered = await put(attacker, server, 0, other)
        await trio.sleep(20)
        said = await signed_at(attacker, server, 0)
        assert (said.entered, said.left) == (entered, toy(other, 0))
        nursery.cancel_scope.cancel()


async def test_what_leaves_two_hops_of_one_session_at_the_same_block_is_not_taken_for_each_others(
    virtual_time: MockClock,
) -> None:
    first, other = (np.full((1, 2, HIDDEN), value, np.float32) for value in (0.25, 0.5))
    async with trio.open_nursery() as nursery:
        swarm, server = await served(nursery, 1)
        attacker = Attacker(swarm)
        await attacker.start(nursery)
        await attacker.open(server, receipts=True)
        await attacker.open(server, receipts=True, start=2)
        await put(attacker, server, 0, first)
        entered = await put(attacker, server, 2, other)
        await trio.sleep(5)
        said = await signed_at(attacker, server, 2)
        assert (said.entered, said.left) == (entered, toy(other, 2))
        nursery.cancel_scope.cancel()


async def test_a_hop_that_is_to_inherit_its_cache_says_so_before_it_has(virtual_time: MockClock) -> None:
    """A client that puts it into another epoch meanwhile has the news of its caches passed over, and not the caches."""
    async with trio.open_nursery() as nursery:
        swarm, server = await served(nursery, 1)
        attacker = Attacker(swarm)
        await attacker.start(nursery)
        await attacker.open(server, receipts=True, inherit=attacker.identity.peer_id)
        await put(attacker, server, 0, np.ones((1, 1, HIDDEN), np.float32))
        await trio.sleep(5)
        assert (await signed_at(attacker, server, 0)).is_heir
        nursery.cancel_scope.cancel()
