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


def there_and_back(of: torch.Tensor) -> Top:
    return top.unpack_untrusted(top.pack(top.largest(of, MOST_LOGITS)), *of.shape)


@given(st.integers(1, MOST_WITH_LOGITS), st.integers(1, 700), st.integers(0, 2**31), st.floats(0.01, 30.0))
def test_what_came_is_as_it_was_and_probabilities_are_right(n: int, vocabulary: int, seed: int, spread: float) -> None:
    whole = logits(n, vocabulary, seed, spread)
    filled = there_and_back(whole).filled(vocabulary)
    k = min(MOST_LOGITS, vocabulary)
    values, ids = whole.topk(k)
    assert torch.equal(filled.gather(1, ids), values)
    assert torch.equal(filled.argmax(1), whole.argmax(1))
    torch.testing.assert_close(filled.log_softmax(1).gather(1, ids), whole.log_softmax(1).gather(1, ids))
    others = filled.scatter(1, ids, -torch.inf)
    assert (others.amax(1) <= values[:, -1]).all()


def test_the_most_that_fits_is_what_a_header_takes() -> None:
    assert len(top.pack(top.largest(logits(MOST_WITH_LOGITS), MOST_LOGITS))) <= MOST_LOGITS_BYTES
    assert len(top.pack(top.largest(logits(MOST_WITH_LOGITS + 1), MOST_LOGITS))) > MOST_LOGITS_BYTES


def changed(what: str) -> tuple[bytes, int, int]:
    """Logits as no honest server sends them."""
    of = top.largest(logits(2), MOST_LOGITS)
    values, ids, log_sum = of.values.clone(), of.ids.clone(), of.log_sum.clone()
    if what == "not finite":
        values[1, 0] = torch.nan
    elif what == "an endless sum":
        log_sum[0] = torch.inf
    elif what == "rising":
        values = values.flip(1)
    elif what == "more than their sum":
        log_sum[1] = values[1].logsumexp(0) - 1
    elif what == "named twice":
        ids[0, 7] = ids[0, 3]
    elif what == "beyond the vocabulary":
        ids[0, 0] = VOCABULARY
    elif what == "below it":
        ids[0, 0] = -1
    raw = top.pack(Top(values, ids, log_sum))
    return raw[:-4] if what == "cut off" else raw, 3 if what == "of other tokens" else 2, VOCABULARY


@pytest.mark.parametrize(
    ("what", "why"),
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
def test_what_cannot_be_logits_is_refused(what: str, why: str) -> None:
    with pytest.raises(RemoteProtocolError, match=why):
        top.unpack_untrusted(*changed(what))


@given(st.binary(max_size=3_000), st.integers(1, MOST_WITH_LOGITS), st.integers(1, 400))
def test_any_bytes_are_logits_or_refused(raw: bytes, n: int, vocabulary: int) -> None:
    k = min(MOST_LOGITS, vocabulary)
    for bytes_of in (raw, (raw * 99)[: n * (8 * k + 4)]):
        with suppress(RemoteProtocolError):
            found = top.unpack_untrusted(bytes_of, n, vocabulary)
            assert torch.isfinite(found.filled(vocabulary).softmax(-1)).all()
