"""Codecs: what they make of numbers, how far that is from them, and what they refuse to read."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest

from swarmd.errors import RemoteProtocolError
from swarmd.protocol.runs.recipe import Parts, Recipe
from swarmd.train.vectors.codecs import BLOCK, Codec, codec_of
from swarmd.train.vectors.coded_sums import read_reduced, reduce_contributions
from swarmd.train.vectors.directions import Directions
from swarmd.train.vectors.state import Vector

CODECS = ["none", "float16", "int8", "topk", "powersgd", "significance"]
N = 5 * BLOCK + 77


def codec(name: str, dtype: str = "float32", **parts: object) -> Codec:
    return codec_of(Recipe("a", "m", "d", parts=Parts(codec=name, **parts), precision=dtype))  # type: ignore[arg-type]


def numbers(n: int = N, seed: int = 0, dtype: str = "float32") -> Vector:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(n) * np.exp(rng.standard_normal(n))).astype(dtype)


def error(found: Vector, wanted: Vector) -> float:
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", CODECS)
def test_what_is_read_is_what_it_stands_for(name: str, dtype: str) -> None:
    """Whole, and in pieces that are cut at blocks."""
    using, vector = codec(name, dtype), numbers(2 * 65_536 + 99, dtype=dtype)
    least = np.abs(numbers(len(vector), 9, dtype)) * 4
    coded = using.code(vector, least)
    assert coded.values.dtype == vector.dtype
    edges = [0, 65_536, 131_072, len(vector)]
    for start, end in [(0, len(vector)), *pairwise(edges)]:
        payload = bytes(coded.payload(start, end))
        assert np.array_equal(using.read(payload, end - start)[0], coded.values[start:end])
    assert bytes(using.code(vector, least).payload(0, 65_536)) == bytes(coded.payload(0, 65_536))
    if name != "significance":
        assert len(coded.payload(0, len(vector))) == using.n_bytes(len(vector))


@pytest.mark.parametrize(
    ("name", "at_most", "ratio"),
    [("float16", 3e-4, 1.99), ("int8", 0.03, 3.9), ("topk", 0.9, 186.0), ("powersgd", 0.99, 63.0)],
)
def test_error_and_ratio(name: str, at_most: float, ratio: float) -> None:
    using, vector = codec(name), numbers(1 << 18)
    assert error(using.code(vector).values, vector) < at_most
    assert vector.nbytes / using.n_bytes(len(vector)) > ratio


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("scale", [0.0, 1e-30, 1e12])
def test_size_of_the_numbers_does_not_matter(name: str, scale: float) -> None:
    using, vector = codec(name), numbers(BLOCK) * np.float32(scale)
    found = using.code(vector).values
    assert np.isfinite(found).all()
    assert np.linalg.norm(found - vector) <= np.linalg.norm(vector)


def test_topk_keeps_the_largest() -> None:
    vector = np.zeros(BLOCK, np.float32)
    vector[[5, 17, BLOCK - 1]] = 3.0, -1.0, 2.0
    found = codec("topk", keep=16).code(vector).values
    assert set(np.nonzero(found)[0]) >= {5, 17, BLOCK - 1}
    assert found[5] > 0 > found[17]
    kept = codec("topk", keep=512).code(numbers(BLOCK)).values
    assert set(np.nonzero(kept)[0]) == set(np.argsort(np.abs(numbers(BLOCK)))[-512:])


def test_low_rank_is_exact_where_it_can_be() -> None:
    rng = np.random.default_rng(1)
    square = (rng.standard_normal((256, 2)) @ rng.standard_normal((2, 256))).astype(np.float32).reshape(-1)
    assert error(codec("powersgd", rank=2).code(square).values, square) < 2e-3


def test_significance_is_what_exceeds_its_least() -> None:
    vector, least = numbers(), np.abs(numbers(seed=1))
    found = codec("significance").code(vector, least).values
    is_there = found != 0
    assert (is_there | (np.abs(vector) <= least)).all()
    assert is_there[np.abs(vector) <= least].sum() <= -(-N // BLOCK), "only the largest of a block besides"
    nothing = codec("significance").code(vector, np.full_like(vector, np.inf)).values
    assert (nothing != 0).sum() == -(-N // BLOCK)


@pytest.mark.parametrize("name", CODECS)
def test_average_is_the_same_wherever_it_is_made(name: str) -> None:
    using, n_samples = codec(name), 7
    coded = [using.code(numbers(seed=i)) for i in range(3)]
    given = [(c.values, c.payload(0, N)) for c in coded]
    average = np.empty(N, np.float32)
    payload = bytes(reduce_contributions(using, given, n_samples, average))
    assert np.array_equal(read_reduced(using, payload, N, 3, n_samples), average)
    exact = sum(c.values.astype(np.float64) for c in coded) / n_samples
    assert error(average, exact) < {"int8": 0.03, "float16": 3e-4}.get(name, 1e-6)


@pytest.mark.parametrize("name", ["float16", "int8"])
def test_rounding_is_within_what_is_granted(name: str) -> None:
    """Along random directions, and the grant is small beside the average."""
    using, exact = codec(name), numbers()
    rounded = using.code(exact).values
    granted = using.rounding(rounded)
    moved = [Directions(bytes([i]), N).project(rounded - exact, 0) for i in range(50)]
    assert np.abs(moved).max() < granted < 0.2 * np.linalg.norm(exact)
    assert np.abs(moved).max() > granted / 20, "it is no more than it has to be"


@pytest.mark.parametrize("name", CODECS)
def test_other_lengths_are_refused(name: str) -> None:
    using = codec(name)
    payload = bytes(using.code(numbers(BLOCK)).payload(0, BLOCK))
    for wrong in (payload[:-1], payload + b"\0", b""):
        with pytest.raises(RemoteProtocolError):
            using.read(wrong, BLOCK)
    with pytest.raises(RemoteProtocolError):
        using.read(payload, BLOCK, 2)


@pytest.mark.parametrize("name", ["float16", "int8", "topk", "powersgd", "significance"])
def test_any_bytes_are_numbers_or_refused(name: str) -> None:
    rng, using = np.random.default_rng(3), codec(name)
    length = len(using.code(numbers(BLOCK)).payload(0, BLOCK))
    for _ in range(50):
        try:
            assert len(using.read(rng.bytes(length), BLOCK)[0]) == BLOCK
        except RemoteProtocolError:
            continue
