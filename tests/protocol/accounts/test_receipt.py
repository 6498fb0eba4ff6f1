"""Receipts: what a hop signs is what passed, however the tokens came and were cropped again."""

from __future__ import annotations

import contextlib
import random
from unittest.mock import patch

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmd.errors import IntegrityError, RemoteProtocolError
from swarmd.protocol.accounts import evidence, receipt
from swarmd.protocol.accounts.evidence import Evidence
from swarmd.protocol.accounts.receipt import (
    DIGEST_BYTES,
    UNSEEN,
    Receipt,
    Trail,
    digest_before,
    digests_of,
)
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.wire.arrays import pack_array, round_to_dtype, unpack_array_untrusted
from swarmd.protocol.wire.messages import Edit, Op
from swarmd.wire.tensors import pack
from tests.protocol.test_mutated import mutants

SERVER = Identity(bytes([7]) * 32)


def packed(values: torch.Tensor, codec: str = "raw", first: int = 0, mask: torch.Tensor | None = None):  # type: ignore[no-untyped-def]
    b, t, _ = values.shape
    return pack(values, torch.arange(first, first + t, dtype=torch.int32).expand(b, t), mask, codec)


@pytest.mark.parametrize("codec", ["raw", "float16", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("has_mask", [False, True])
def test_a_token_has_one_digest_in_whatever_op_it_came(codec: str, has_mask: bool) -> None:
    values = torch.randn(2, 5, 96, generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.uint8) if has_mask else None
    whole = digests_of(*packed(values, codec, mask=mask))
    alone = b"".join(
        digests_of(*packed(values[:, t : t + 1], codec, t, None if mask is None else mask[:, t : t + 1]))
        for t in range(5)
    )
    assert whole == alone
    assert len({whole[i : i + DIGEST_BYTES] for i in range(0, len(whole), DIGEST_BYTES)}) == 5


def test_values_rows_positions_and_mask_all_count() -> None:
    values = torch.randn(2, 1, 8)
    known = digests_of(*packed(values))
    other = values.clone()
    other[1, 0, 7] += 1
    mask = torch.ones(2, 1, dtype=torch.uint8)
    for changed in (packed(other), packed(values.flip(0)), packed(values, first=1), packed(values, mask=mask)):
        assert digests_of(*changed) != known


Steps = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(0, 5), st.booleans()), max_size=12)


@settings(deadline=None)
@given(Steps, st.booleans())
def test_receipts_one_after_the_other_give_what_the_cache_holds(
    steps: list[tuple[int, int, int, bool]], is_later: bool
) -> None:
    """Each step crops, appends tokens, of which only the last so many leave, and perhaps a receipt is made."""
    least_long = 1 if is_later else receipt.LONG_TOKENS
    with patch.multiple(receipt, LONG_TOKENS=least_long, LONG_TOKEN_BYTES=0):
        follow(Trail(shape=(1, 4), later=lambda work, _: work), steps)


def follow(trail: Trail, steps: list[tuple[int, int, int, bool]]) -> None:
    entered: list[bytes] = []
    left: list[bytes] = []
    known: tuple[bytearray, bytearray] = (bytearray(), bytearray())
    for seq, (crop, n_tokens, n_leaving, has_receipt) in enumerate([*steps, (0, 1, 1, True)], 1):
        crop, n_leaving = min(crop, len(entered)), min(n_leaving, n_tokens)
        values = torch.full((1, max(1, n_tokens), 4), float(seq))
        values[0, :, 1] = torch.arange(values.shape[1])
        meta, payload = packed(values)
        edits = (Edit(crop=crop),) if crop else ()
        trail.enter(Op(seq=seq, edits=edits, tensor=meta if n_tokens else None), payload)
        out_meta, out = packed(values[:, values.shape[1] - n_leaving :] + 0.5) if n_leaving else (None, b"")
        trail.leave(seq, out_meta, out)
        trail.leave(seq, out_meta, out)  # said again
        for digests, more in ((entered, digests_of(meta, payload) if n_tokens else b""), (left, b"")):
            del digests[len(digests) - crop :]
            digests += [more[i : i + DIGEST_BYTES] for i in range(0, len(more), DIGEST_BYTES)]
        seen = digests_of(out_meta, out) if out_meta else b""
        left += [UNSEEN] * (n_tokens - n_leaving)
        left += [seen[i : i + DIGEST_BYTES] for i in range(0, len(seen), DIGEST_BYTES)]
        if has_receipt:
            first, *digests, before = trail.cut()
            assert before == digest_before(*known, first), "it goes on from what was signed before"
            for whole, more in zip(known, digests, strict=True):
                whole[first * DIGEST_BYTES :] = more
            assert known[0] == b"".join(entered)
            assert known[1] == b"".join(left)


def test_what_is_under_way_is_not_signed_yet() -> None:
    trail = Trail(shape=(1, 4))
    meta, payload = packed(torch.randn(1, 3, 4))
    trail.enter(Op(seq=1, tensor=meta), payload)
    trail.leave(1, meta, payload)
    trail.enter(Op(seq=2, edits=(Edit(crop=1),), tensor=meta), payload)
    assert trail.cut()[0] == 0
    assert trail.n_left == 3
    first, entered, _, _ = trail.cut()
    assert (first, len(entered)) == (2, 0), "the last token may be gone already"


def test_reordered_rows_end_the_trail() -> None:
    trail = Trail(shape=(1, 4))
    trail.enter(Op(seq=1, edits=(Edit(rows=(0, 1)),)), b"")
    assert not trail.is_broken
    trail.enter(Op(seq=2, edits=(Edit(rows=(1, 0)),)), b"")
    assert trail.is_broken


def test_a_payload_that_is_not_what_its_header_says_ends_the_trail() -> None:
    meta, payload = packed(torch.randn(1, 3, 4))
    trail = Trail(shape=(1, 4))
    trail.enter(Op(seq=1, tensor=meta), payload[:-1])
    assert trail.is_broken


def signed(**changed: object) -> tuple[bytes, bytes]:
    said = Receipt(
        SERVER.peer_id, "client", bytes(16), "m", 0, 3, 5, 9, 1, "n", False, "", b"", 0, b"e" * 32, b"l" * 32, b""
    )
    return receipt.sign(msgspec.structs.replace(said, **changed), SERVER)


def test_a_receipt_comes_back_as_it_was_signed() -> None:
    assert receipt.read_untrusted(*signed()).left == b"l" * 32


def test_a_receipt_of_somebody_else_or_cut_is_refused() -> None:
    body, signature = signed()
    other = Identity(bytes([8]) * 32)
    for wrong in (
        (body, signature[:-1] + b"x"),
        (body[:-1] + b"x", signature),
        signed(peer=other.peer_id),
        signed(entered=b"e" * 16),
        signed(entered=b"e" * 15, left=b"l" * 15),
        signed(first=2**22 + 1),
    ):
        with pytest.raises(IntegrityError):
            receipt.read_untrusted(*wrong)


def test_changed_receipts_and_evidence_are_refused_and_nothing_else_happens() -> None:
    rng = random.Random(19)
    body, signature = signed()
    meta, payload = packed(torch.randn(1, 2, 4))
    whole = evidence.encode(Evidence(((body, signature),), (meta, payload), (meta, payload)))
    for mutant in mutants(body, rng, 2_000):
        if mutant != body:
            with pytest.raises(IntegrityError):
                receipt.read_untrusted(mutant, signature)
        with contextlib.suppress(IntegrityError):  # changed before it was signed
            receipt.read_untrusted(mutant, SERVER.sign(b"swarmd receipt 1\0", mutant))
    for mutant in mutants(whole, rng, 2_000):
        with pytest.raises(RemoteProtocolError):
            evidence.read_untrusted(memoryview(mutant), SERVER.peer_id)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_arrays_are_packed_as_tensors_are(dtype: str) -> None:
    values = torch.randn(2, 3, 5, generator=torch.Generator().manual_seed(3)).to(getattr(torch, dtype))
    floats = values.float().numpy()
    positions = torch.arange(4, 7, dtype=torch.int32).expand(2, 3)
    assert pack_array(floats, dtype, 4) == pack(values, positions, None)
    meta, payload = pack(values, positions, None)
    assert (unpack_array_untrusted(meta, memoryview(payload)) == floats).all()
    exact = torch.randn(1, 64, 64).numpy()
    assert (round_to_dtype(exact, dtype) == torch.from_numpy(exact).to(values.dtype).float().numpy()).all()
