"""Rows of many sessions through a straight line: the family's own numbers, sooner."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarmd.client.model.traced_pass import trace_ends
from swarmd.compute.model.ends import Ends
from tests import checkpoints

IDS, STARTS = [[5], [7], [319], [5]], [0, 3, 200, 11]
ARITIES = {"bloom": 2, "gpt2": 0}


@pytest.mark.parametrize("family", list(checkpoints.FAMILIES))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_get_the_familys_own_numbers(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    arity = ARITIES.get(family, 0)
    ends = Ends(checkpoints.make(family, tmp_path), dtype)
    line = trace_ends(ends, arity)
    assert line is not None
    entered = ends.embed([*IDS, [5, 6, 7]], [*STARTS, 4])
    hidden = torch.randn(len(IDS), 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    logits = ends.logits(hidden, arity)
    ends.use_line(line)
    assert all(map(torch.equal, ends.embed([*IDS, [5, 6, 7]], [*STARTS, 4]), entered))
    for _ in range(2):
        assert torch.equal(ends.logits(hidden, arity), logits)


def test_blocks_that_return_something_else_do_without_the_line(tmp_path: Path) -> None:
    """A server says what its blocks return: the line was traced for another number of values."""
    ends = Ends(checkpoints.make("bloom", tmp_path), torch.float32)
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    logits = ends.logits(hidden, 2)
    line = trace_ends(ends, 2)
    ends.return_values(0)
    ends.use_line(line)
    for _ in range(2):
        assert torch.equal(ends.logits(hidden, 2), logits)


def test_a_forward_that_looks_at_values_is_not_traced(tmp_path: Path) -> None:
    ends = Ends(checkpoints.make("llama", tmp_path), torch.float32)
    forward = ends.model.forward

    def curious(input_ids: torch.Tensor, **more: torch.Tensor) -> object:
        assert int(input_ids.sum()) >= 0
        return forward(input_ids=input_ids, **more)

    ends.model.forward = curious
    assert trace_ends(ends) is None
    assert ends.embed([[5]], [0])[0].shape == (1, 1, 64)
