"""A beginning that sessions share: the same attention and the same caches as with one of their own, in less memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from swarmd.compute.cache.kvcache import SHARED_TOKENS, EightBitLayer, SlabLayer
from swarmd.compute.cache.shared_prefix import AttentionRow, attend

HEADS = 2
GROUPS = 3
D = 16


def some(n: int, heads: int = HEADS) -> torch.Tensor:
    return torch.randn(1, heads, n, D)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_attention_over_both_parts(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    prefix = (some(40).to(dtype), some(40).to(dtype))
    other_prefix = (some(25).to(dtype), some(25).to(dtype))
    rows = []
    expected = []
    for beginning, n_past, t in ((prefix, 0, 1), (prefix, 7, 1), (other_prefix, 3, 5), (prefix, 0, 4)):
        suffix = some(n_past + t).to(dtype), some(n_past + t).to(dtype)
        query = some(t, HEADS * GROUPS).to(dtype)
        mask = torch.ones(t, n_past + t, dtype=torch.bool).tril(n_past)[None, None] if t > 1 else None
        rows.append(AttentionRow(query, beginning, suffix, mask))
        keys, values = (torch.cat(pair, 2).repeat_interleave(GROUPS, 1) for pair in zip(beginning, suffix, strict=True))
        n_first = beginning[0].shape[2]
        full_mask = None if mask is None else functional.pad(mask, (n_first, 0), value=True)
        out = functional.scaled_dot_product_attention(query, keys, values, attn_mask=full_mask, scale=0.3)
        expected.append(out.transpose(1, 2))
    for actual, reference in zip(attend(rows, 0.3), expected, strict=True):
        assert actual.shape == reference.shape
        assert torch.allclose(actual, reference, atol=1e-5 if dtype == torch.float32 else 0.03)


N = SHARED_TOKENS + 50


Make = Callable[[int], SlabLayer]


@pytest.fixture(params=[SlabLayer, lambda n: EightBitLayer(n, torch.float32)], ids=["whole", "8 bits"])
def make(request: pytest.FixtureRequest) -> Make:
    kind: Make = request.param
    return kind


def filled(make: Make) -> SlabLayer:
    layer = make(4 * N)
    layer.update(some(N), some(N))
    return layer


def kept(make: Make, states: torch.Tensor) -> torch.Tensor:
    """What such a layer makes of it."""
    return make(N).update(states, states)[0]


def test_it_lies_in_memory_once_and_reads_as_before(make: Make) -> None:
    donor = filled(make)
    keys = donor.keys.clone()
    values = donor.values.clone()
    first = make(4 * N)
    second = make(4 * N)
    first.take_over(donor, 0, N - 10, True)
    second.take_over(donor, 0, N - 20, True)
    assert first.prefix is not None
    assert second.prefix is not None
    assert donor.prefix is not None
    assert len({layer.prefix[0].data_ptr() for layer in (donor, first, second) if layer.prefix}) == 1
    assert (donor.get_seq_length(), first.get_seq_length(), second.get_seq_length()) == (N, N - 10, N - 20)
    assert torch.equal(first.keys, keys[:, :, : N - 10])
    assert first.prefix is None, "whoever looks at all of it has it for itself"
    assert torch.equal(donor.keys, keys)
    assert torch.equal(donor.values, values)
    assert torch.equal(second.values, values[:, :, : N - 20])


def test_what_one_does_with_it_the_others_do_not_see(make: Make) -> None:
    donor = filled(make)
    keys = donor.keys.clone()
    heir = make(4 * N)
    heir.take_over(donor, 0, N - 10, True)
    new = some(3), some(3)
    beginning, suffix = heir.append_behind(*new)
    assert beginning[0].shape[2] == N - 10
    assert torch.equal(suffix[0], kept(make, new[0]))
    donor.crop(-30)
    donor.append_behind(some(5), some(5))
    heir.crop(-1)
    assert heir.get_seq_length() == N - 8
    assert torch.equal(heir.keys, torch.cat([keys[:, :, : N - 10], kept(make, new[0])[:, :, :2]], 2))
    third = make(4 * N)
    third.take_over(donor, 0, N - 40, True)
    third.crop(-60)
    third.append_behind(*new)
    assert torch.equal(third.keys, torch.cat([keys[:, :, : N - 100], kept(make, new[0])], 2))


def test_a_longer_beginning_is_shared_anew_and_a_short_one_copied(make: Make) -> None:
    donor = filled(make)
    first = make(4 * N)
    second = make(4 * N)
    third = make(4 * N)
    first.take_over(donor, 0, N - 10, True)
    first.append_behind(some(40), some(40))
    second.take_over(first, 0, N + 20, True)
    assert second.prefix is not None
    assert torch.equal(second.keys, first.keys[:, :, : N + 20])
    third.take_over(donor, 0, SHARED_TOKENS - 1, True)
    assert third.prefix is None
    assert torch.equal(third.keys, donor.keys[:, :, : SHARED_TOKENS - 1])


def test_op_by_op_it_becomes_one_beginning(make: Make) -> None:
    donor = filled(make)
    heir = make(4 * N)
    for start, end in ((0, 100), (100, 280), (280, N - 10)):
        heir.take_over(donor, start, end, True)
        assert heir.get_seq_length() == end
    assert (heir.n_shared, donor.n_shared) == (N - 10, N), "it gave all that it had, once"
    assert torch.equal(heir.values, donor.values[:, :, : N - 10])


def test_a_short_session_keeps_no_long_one_in_memory(make: Make) -> None:
    donor = filled(make)
    short = make(N - 20)
    long = make(4 * N)
    short.take_over(donor, 0, SHARED_TOKENS, True)
    assert short.prefix is None, "it did not reserve so much"
    assert torch.equal(short.keys, donor.keys[:, :, :SHARED_TOKENS])
    long.take_over(donor, 0, N, True)
    long.crop(-N + 10)
    assert long.prefix is not None
    assert long.prefix[0].untyped_storage().nbytes() == 10 * long.stored[0][0, :, 0].nbytes


def test_layers_that_may_not_share_copy(make: Make) -> None:
    donor = filled(make)
    heir = make(4 * N)
    heir.take_over(donor, 0, N - 10, False)
    assert (heir.n_shared, donor.n_shared) == (0, 0)
    assert torch.equal(heir.keys, donor.keys[:, :, : N - 10])
