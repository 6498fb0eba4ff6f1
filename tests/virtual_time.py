"""A program in virtual time: trio's MockClock jumps to the next event, and one seed gives one order of events."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio
import trio._core._run as trio_run
import trio.testing

T = TypeVar("T")


def in_virtual_time(seed: int, program: Callable[..., Awaitable[T]], *arguments: object) -> T:
    """Run an async function to its end."""
    trio_run._ALLOW_DETERMINISTIC_SCHEDULING = True  # type: ignore[attr-defined]
    trio_run._r.seed(seed)
    return trio.run(program, *arguments, clock=trio.testing.MockClock(autojump_threshold=0))
