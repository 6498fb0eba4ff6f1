"""Some of the mutated messages of ``mutations``, in every CI run."""

from __future__ import annotations

import pytest
import trio
from trio.testing import MockClock

from tests.hostile.mutations import against_a_run, against_a_server


@pytest.mark.parametrize("seed", [1, 2])
async def test_mutated_messages_harm_no_session(virtual_time: MockClock, seed: int) -> None:
    with trio.fail_after(100_000):
        became = await against_a_server(seed, 250)
    assert became["sent"] == 250


async def test_mutated_messages_harm_no_run(virtual_time: MockClock) -> None:
    with trio.fail_after(100_000):
        became = await against_a_run(3, 250)
    assert became["sent"] == 250
