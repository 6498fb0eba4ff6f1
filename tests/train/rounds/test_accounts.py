"""Sums along random directions find what is no mean, however it is hidden."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmd.protocol.runs.backing import TOLERANCE, ContributionShare, is_sum_right
from swarmd.protocol.wire.rounds import Group, GroupMember, GroupPart
from swarmd.train.rounds.accounts import Flow, account_for_average, project_contribution
from swarmd.train.vectors.codecs import Codec
from swarmd.train.vectors.directions import BLOCK, Directions
from swarmd.train.vectors.state import Vector
from swarmd.train.vectors.sums import write_average
from swarmd.values import PeerId

N = 3 * BLOCK + 17
ME = PeerId("m0")
FIRST = (2.2500707471157027, 0.4287063937848092, 0.13234870856218706, 0.9779205482032111)


def group(n_members: int, n: int, dtype: str) -> Group:
    cuts = [n * i // n_members for i in range(n_members + 1)]
    return Group(
        parent=b"p" * 32,
        n_elements=n,
        dtype=dtype,
        members=tuple(GroupMember(f"m{i}", 0, 4, True) for i in range(n_members)),
        parts=tuple(GroupPart(i, cuts[i], cuts[i + 1]) for i in range(n_members)),
    )


def along(of: Group, digest: bytes) -> Directions:
    return Directions(of.parent + digest, of.n_elements)


def shares_of(vectors: list[Vector], of: Group, digest: bytes) -> tuple[ContributionShare, ...]:
    found = []
    for vector in vectors:
        gave = project_contribution(along(of, digest), vector)
        found.append(ContributionShare(0, 4, 1.0, gave.squares, gave.sums))
    return tuple(found)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [1, 240, N])
def test_shares_of_a_mean_add_up(dtype: str, n: int) -> None:
    rng = np.random.default_rng(n)
    vectors: list[Vector] = [(rng.standard_normal(n) * 10.0**i).astype(dtype) for i in range(-3, 3)]
    average: Vector = np.empty(n, dtype)
    write_average(vectors, average, 4 * len(vectors))
    of = group(min(len(vectors), n), n, dtype)
    half = n // 2
    flow = Flow({ME: [(half, vectors[0][half:])]}, {PeerId("m1"): [(0, vectors[0][:half])]}, {}, {})
    account = account_for_average(of, along(of, b"d" * 32), average, (ME, vectors[0]), flow, Codec(dtype))
    assert is_sum_right(shares_of(vectors, of, b"d" * 32), account.average)
    given = project_contribution(along(of, b"d" * 32), vectors[0])
    assert account.contribution is not None
    assert account.contribution.squares == given.squares
    size = float(np.linalg.norm(vectors[0].astype("float64")))
    np.testing.assert_allclose(account.contribution.sums, given.sums, atol=TOLERANCE * size)


@settings(max_examples=60)
@given(
    at=st.integers(0, N - 1),
    other=st.integers(0, N - 1),
    by=st.sampled_from([0.02, -0.02, 1.0]),
    seed=st.integers(0, 9),
)
def test_an_average_that_is_off_does_not_add_up(at: int, other: int, by: float, seed: int) -> None:
    """By a fiftieth of its size, in one element or moved from one to another: sums that stay as they were."""
    rng = np.random.default_rng(seed)
    vectors: list[Vector] = [rng.standard_normal(N).astype("float32") for _ in range(3)]
    average: Vector = np.empty(N, "float32")
    write_average(vectors, average, 12)
    lie = by * float(np.linalg.norm(average))
    average[at] += lie
    if other != at:
        average[other] -= lie
    of = group(3, N, "float32")
    digest = bytes([seed]) * 32
    account = account_for_average(of, along(of, digest), average, None, Flow({}, {}, {}, {}), Codec("float32"))
    assert not is_sum_right(shares_of(vectors, of, digest), account.average)


def test_directions_are_the_same_everywhere_and_other_for_each_average() -> None:
    """Their numbers are part of the protocol: peers with another numpy must come to the same."""
    ones = np.ones(5, "float64")
    first, again, other = (Directions(seed, 5).project(ones, 0) for seed in (b"a", b"a", b"b"))
    assert first == again != other
    np.testing.assert_allclose(first, FIRST, rtol=1e-12)
    halves = Directions(b"a", 5)
    np.testing.assert_allclose(np.add(halves.project(ones[:2], 0), halves.project(ones[2:], 2)), first, rtol=1e-12)
