"""The largest logits travel whole, tell the probabilities of all, and are refused where they cannot be right."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmd.errors import RemoteProtocolError
from swarmd.protocol.fields import MOST_LOGITS, MOST_LOGITS_BYTES
from swarmd.wire import top
from swarmd.wire.top import MOST_WITH_LOGITS, Top

VOCABULARY = 1_000


def logits(n: int = 3, vocabulary: int = VOCABULARY, seed: int = 0, spread: float = 4.0) -> torch.Tensor:
    return spread * torch.randn(n, vocabulary, generator=torch.Generator().manual_seed(seed))


def there_and_back(values: torch.Tensor) -> Top:
    return top.unpack_untrusted(top.pack(top.largest(values, MOST_LOGITS)), *values.shape)


@given(st.integers(1, MOST_WITH_LOGITS), st.integers(1, 700), st.integers(0, 2**31), st.floats(0.01, 30.0))
def test_what_came_is_as_it_was_and_probabilities_are_right(n: int, vocabulary: int, seed: int, spread: float) -> None:
    original = logits(n, vocabulary, seed, spread)
    filled = there_and_back(original).filled(vocabulary)
    k = min(MOST_LOGITS, vocabulary)
    values, ids = original.topk(k)
    assert torch.equal(filled.gather(1, ids), values)
    assert torch.equal(filled.argmax(1), original.argmax(1))
    torch.testing.assert_close(filled.log_softmax(1).gather(1, ids), original.log_softmax(1).gather(1, ids))
    rest = filled.scatter(1, ids, -torch.inf)
    assert (rest.amax(1) <= values[:, -1]).all()


def test_the_most_that_fits_is_what_a_header_takes() -> None:
    assert len(top.pack(top.largest(logits(MOST_WITH_LOGITS), MOST_LOGITS))) <= MOST_LOGITS_BYTES
    assert len(top.pack(top.largest(logits(MOST_WITH_LOGITS + 1), MOST_LOGITS))) > MOST_LOGITS_BYTES


def changed(change: str) -> tuple[bytes, int, int]:
    """Logits as no honest server sends them."""
    honest = top.largest(logits(2), MOST_LOGITS)
    values = honest.values.clone()
    ids = honest.ids.clone()
    log_sum = honest.log_sum.clone()
    if change == "not finite":
        values[1, 0] = torch.nan
    elif change == "an endless sum":
        log_sum[0] = torch.inf
    elif change == "rising":
        values = values.flip(1)
    elif change == "more than their sum":
        log_sum[1] = values[1].logsumexp(0) - 1
    elif change == "named twice":
        ids[0, 7] = ids[0, 3]
    elif change == "beyond the vocabulary":
        ids[0, 0] = VOCABULARY
    elif change == "below it":
        ids[0, 0] = -1
    raw = top.pack(Top(values, ids, log_sum))
    return raw[:-4] if change == "cut off" else raw, 3 if change == "of other tokens" else 2, VOCABULARY


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("not finite", "not finite"),
        ("an endless sum", "not finite"),
        ("rising", "do not fall"),
        ("more than their sum", "exceed their sum"),
        ("named twice", "named twice"),
        ("beyond the vocabulary", "beyond the 1000"),
        ("below it", "named twice, or beyond"),
        ("cut off", "expected 256 logits of 2 tokens"),
        ("of other tokens", "expected 256 logits of 3 tokens"),
    ],
)
def test_what_cannot_be_logits_is_refused(change: str, reason: str) -> None:
    with pytest.raises(RemoteProtocolError, match=reason):
        top.unpack_untrusted(*changed(change))


@given(st.binary(max_size=3_000), st.integers(1, MOST_WITH_LOGITS), st.integers(1, 400))
def test_any_bytes_are_logits_or_refused(raw: bytes, n: int, vocabulary: int) -> None:
    k = min(MOST_LOGITS, vocabulary)
    for bytes_of in (raw, (raw * 99)[: n * (8 * k + 4)]):
        with suppress(RemoteProtocolError):
            tops = top.unpack_untrusted(bytes_of, n, vocabulary)
            assert torch.isfinite(tops.filled(vocabulary).softmax(-1)).all()
