"""A team in one process: members are threads, each with its own slices, that wait for each other at every sum."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path
from typing import TypeVar

import torch

from swarmd.compute.passes.span import LoadedSpan, LoadOptions
from swarmd.compute.teams.sliced_span import SlicedSpan
from swarmd.values import Span

T = TypeVar("T")
WAIT_S = 60.0  # for another member, which computes some milliseconds
PLAIN = LoadOptions(has_plain_layers=True)


class ThreadTeam:
    """Members of these weights, each of which has loaded its slices of a span."""

    def __init__(self, folder: Path, span: Span, weights: Sequence[float], options: LoadOptions = PLAIN) -> None:
        self._barrier = threading.Barrier(len(weights))
        self._parts: list[torch.Tensor | None] = [None] * len(weights)
        self.members = []
        for member in range(len(weights)):
            sums = _Member(self, member)
            self.members.append(
                SlicedSpan(folder, span, torch.float32, options, weights=tuple(weights), member=member, sums=sums)
            )

    def add(self, member: int, part: torch.Tensor) -> torch.Tensor:
        self._parts[member] = part
        self._barrier.wait(WAIT_S)
        total = reduce(torch.add, [each for each in self._parts if each is not None])
        self._barrier.wait(WAIT_S)
        return total

    def run(self, compute: Callable[[LoadedSpan], T]) -> list[T]:
        """What each member computes, all at once. Raises what the first of them raised."""
        results: dict[int, T] = {}
        errors: list[Exception] = []

        def work(member: int) -> None:
            try:
                results[member] = compute(self.members[member])
            except threading.BrokenBarrierError:
                pass  # another member raised
            except Exception as error:  # noqa: BLE001 - a family fails with anything; it is raised below
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=work, args=(member,)) for member in range(len(self.members))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return [results[member] for member in range(len(self.members))]


class _Member:
    def __init__(self, team: ThreadTeam, member: int) -> None:
        self._team = team
        self._member = member

    def begin(self) -> int:
        return 0

    def align(self, n_given: int) -> None: ...

    def add(self, part: torch.Tensor) -> torch.Tensor:
        return self._team.add(self._member, part)
