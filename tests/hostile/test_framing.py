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

from swarmd.client.sessions.receipts import HopAccount
from swarmd.errors import IntegrityError, RemoteProtocolError
from swarmd.protocol.accounts import evidence, receipt
from swarmd.protocol.accounts.evidence import Evidence
from swarmd.protocol.accounts.receipt import Receipt, Trail
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.wire.arrays import Floats, pack_array
from swarmd.protocol.wire.messages import Edit, Op

SERVER = Identity(bytes([7]) * 32)
WIDTH = 4
Signed = tuple[bytes, bytes]


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
            self._trail.n_computed,
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
