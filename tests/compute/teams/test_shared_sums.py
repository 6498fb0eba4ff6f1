"""Sums through shared memory: of real processes, to the bit the same at each, and said when one is killed."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import pytest
import torch

from swarmd.compute.teams.shared_sums import PART_NUMBERS, SharedSums, TeamBroken, make_shared

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="memory files are Linux's")
N_MEMBERS = 3
SHAPES = ((1, 1, 576), (1, 7, 64), (3,), (2, PART_NUMBERS // 2 + 5), (1,)) * 20


def part_of(member: int, number: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    rng = torch.Generator().manual_seed(1_000 * member + number)
    return torch.randn(SHAPES[number % len(SHAPES)], generator=rng).to(dtype)


def forked(work: Callable[[], None]) -> int:
    """Run this in a process of its own; returns its id."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    finally:
        os._exit(1)


def has_ended(child: int) -> bool:
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_member_has_the_sum_of_all_to_the_bit(dtype: torch.dtype) -> None:
    number = make_shared(N_MEMBERS)

    def check(member: int, is_whole: Callable[[], bool]) -> None:
        sums = SharedSums(number, member, N_MEMBERS, is_whole)
        for n in range(len(SHAPES)):
            first, *others = (part_of(each, n, dtype).float() for each in range(N_MEMBERS))
            for other in others:
                first = first + other
            assert torch.equal(sums.add(part_of(member, n, dtype)), first.to(dtype))

    children = [forked(lambda m=member: check(m, lambda: True)) for member in range(1, N_MEMBERS)]
    check(0, lambda: not any(map(has_ended, children)))
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0]
    os.close(number)


def test_a_member_that_is_killed_ends_the_sum() -> None:
    number = make_shared(2)
    child = forked(lambda: signal.pause())
    sums = SharedSums(number, 0, 2, lambda: not has_ended(child))
    os.kill(child, signal.SIGKILL)
    with pytest.raises(TeamBroken, match="a member of the team is gone"):
        sums.add(torch.ones(4))
    os.waitpid(child, 0)
    os.close(number)
