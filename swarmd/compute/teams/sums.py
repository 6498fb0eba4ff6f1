"""Sections of a sliced model joined to their like at other members: what enters is everyone's, what leaves is added up.

Backwards it is the other way round: gradients of what enters are added up, those of what leaves are everyone's.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from swarmd.compute.model.slicing import Slicing
from swarmd.errors import SwarmError


class TeamBroken(SwarmError):
    """A member of the team is gone: its part of a sum will never come."""


class PassGivenUp(RuntimeError):
    """The leader computes something else: the pass has failed there."""


OF_ONE_PASS = 1 << 32  # numbers of sums; each pass begins at a multiple, so that what one before has left is seen


def next_pass(n_given: int) -> int:
    """What numbers of sums in the pass after this one begin behind."""
    return (n_given // OF_ONE_PASS + 1) * OF_ONE_PASS


class Adding(Protocol):
    """How members of a team add up what each of them has. All have to take part, in the same order of sums."""

    def begin(self) -> int:
        """Begin a pass, at the leader; returns what members have to ``align`` to."""

    def align(self, n_given: int) -> None:
        """Begin the pass that the leader has begun: one that failed may have ended anywhere."""

    def add(self, part: torch.Tensor) -> torch.Tensor:
        """The sum over members, to the bit the same at each. Raises TeamBroken when one of them is gone."""


def join(model: nn.Module, slicing: Slicing, team: Adding) -> None:
    """Have the sections of a member's model enter and leave by the team's sums."""
    for name in slicing.sections:
        section = model.get_submodule(name)
        section.register_forward_pre_hook(lambda _, args, kwargs: _enter(args, kwargs, team), with_kwargs=True)
        section.register_forward_hook(lambda _, args, out: _leave(out, team))


def share(value: Any, team: Adding) -> Any:
    """The same value; its gradient is the sum of what members have, where it is a tensor that has one."""
    has_gradient = torch.is_tensor(value) and value.is_floating_point() and value.requires_grad
    return _Entering.apply(value, team) if has_gradient else value  # type: ignore[no-untyped-call]


def _enter(args: tuple[Any, ...], kwargs: dict[str, Any], team: Adding) -> tuple[tuple[Any, ...], dict[str, Any]]:
    shared = {name: share(value, team) for name, value in kwargs.items()}
    return tuple(share(value, team) for value in args), shared


def _leave(out: Any, team: Adding) -> Any:
    if isinstance(out, tuple):
        return (_Leaving.apply(out[0], team), *out[1:])  # type: ignore[no-untyped-call]
    return _Leaving.apply(out, team)  # type: ignore[no-untyped-call]


class _Entering(torch.autograd.Function):
    """What is everyone's; its gradient is the sum of what members have."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, team: Adding) -> torch.Tensor:
        ctx.team = team
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.team.add(gradient), None


class _Leaving(torch.autograd.Function):
    """A sum of what members have; its gradient is everyone's."""

    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, team: Adding) -> torch.Tensor:
        return team.add(part)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None
