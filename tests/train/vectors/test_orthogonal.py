"""A matrix becomes the nearest orthogonal one, and to the same bits in whatever order its products are added up."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from swarmd.compute.runs import inner_steps
from swarmd.train.vectors.orthogonal import multiply_exactly, orthogonalise


@pytest.mark.parametrize("shape", [(16, 40), (40, 16), (24, 30), (1, 9), (9, 1)])
def test_singular_values_come_to_about_one_and_vectors_stay(shape: tuple[int, int]) -> None:
    matrix = np.random.default_rng(0).standard_normal(shape)
    left, values, right = np.linalg.svd(orthogonalise(matrix), full_matrices=False)
    assert 0.65 < values.min() <= values.max() < 1.25
    _, _, expected = np.linalg.svd(matrix, full_matrices=False)
    nearest = np.linalg.svd(matrix, full_matrices=False)[0] @ expected
    assert np.vdot(left @ right, nearest) > 0.99 * min(shape)


@pytest.mark.parametrize("k", [2, 1_000, 8_193])
def test_a_product_is_the_same_in_every_order(k: int) -> None:
    rng = np.random.default_rng(0)
    left, right = rng.standard_normal((5, k)), 1e-20 * rng.standard_normal((k, 7))
    product = multiply_exactly(left, right)
    for _ in range(5):
        order = rng.permutation(k)
        assert np.array_equal(multiply_exactly(left[:, order], right[order]), product)
    assert np.array_equal(multiply_exactly(right.T, left.T).T, product)
    error = np.abs(product - left @ right).max() / np.abs(left @ right).max()
    assert error < 1e-5
    assert k < 1_000 or not np.array_equal(left[:, order] @ right[order], left @ right), "as it is not by itself"


def test_a_last_bit_stays_a_last_bit() -> None:
    rng = np.random.default_rng(0)
    matrix = rng.standard_normal((64, 96)).astype(np.float32)
    other = matrix * (1 + 1e-7 * rng.standard_normal(matrix.shape)).astype(np.float32)
    difference = np.abs(orthogonalise(other) - orthogonalise(matrix)).max() / np.abs(orthogonalise(matrix)).max()
    assert 0 < difference < 1e-4


def test_nothing_is_turned_into_nothing() -> None:
    assert not orthogonalise(np.zeros((3, 4))).any()
    assert not inner_steps.orthogonalise(torch.zeros(2, 3, 4)).any()


def test_a_peers_own_steps_turn_alike() -> None:
    matrices = np.random.default_rng(0).standard_normal((3, 30, 20))
    ours = np.stack([orthogonalise(matrix) for matrix in matrices])
    theirs = inner_steps.orthogonalise(torch.tensor(matrices)).numpy()
    assert np.abs(ours - theirs).max() < 1e-5
