"""A card that is none: tensors of a device of their own, computed by the CPU, which refuse what a card refuses.

A product of tensors here and there is an error, and whatever has the host wait for the card is counted. So code for
cards is tried where there is none; its kernels are not, nor is anything's speed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

NAME = "privateuseone"  # of torch's, for devices that others add
COPIES = ("aten::to", "aten::_to_copy", "aten::copy_")
# beside copies to the host
WAITS = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
    "aten::masked_select",
)


class _OnCard(torch.Tensor):
    """Says that it is on the card; ``held`` is what it is."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> _OnCard:
        layout = {"strides": held.stride(), "dtype": held.dtype, "device": torch.device(NAME, 0)}
        return torch.Tensor._make_wrapper_subclass(cls, held.shape, **layout)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    @classmethod
    def __torch_dispatch__(cls, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(f"{operation} on a fake card outside of fake_card()")


class FakeCard(TorchDispatchMode):
    """Computes for ``device``. ``n_waits``: how often the host waited; ``failure`` is what operations there raise."""

    def __init__(self) -> None:
        super().__init__()
        self.device = torch.device(NAME, 0)
        self.n_waits = 0
        self.n_operations = 0
        self.failure: Exception | None = None

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = operation._schema.name
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        there = [isinstance(tensor, _OnCard) for tensor in tensors]
        wanted = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.device)]
        goes_there = wanted[0].type == NAME if wanted else any(there)
        if name == "aten::copy_":
            goes_there = there[0]
        if any(there) or goes_there:
            self._count(name, tensors, there, goes_there)
        out = operation(*tree_map(_take_held, args), **tree_map(_take_held, kwargs))
        if name == "aten::copy_":
            return args[0]
        if not goes_there:
            return out
        return tree_map(lambda leaf: _OnCard(leaf) if isinstance(leaf, torch.Tensor) else leaf, out)

    def _count(self, name: str, tensors: list[torch.Tensor], there: list[bool], goes_there: bool) -> None:
        if self.failure is not None:
            raise self.failure
        self.n_operations += 1
        is_apart = any(not t and tensor.ndim for tensor, t in zip(tensors, there, strict=True))
        if name not in COPIES and is_apart:
            raise RuntimeError(f"{name}: expected all tensors on the card, got some that are not")
        self.n_waits += any(there) and (not goes_there or name in WAITS)


def _take_held(leaf: Any) -> Any:
    """What the CPU computes with in place of tensors on the card, and of the card."""
    if isinstance(leaf, torch.device) and leaf.type == NAME:
        return torch.device("cpu")
    return leaf.held if isinstance(leaf, _OnCard) else leaf


class _Module:
    """What torch asks of a device's module."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        pass


@contextmanager
def fake_card() -> Iterator[FakeCard]:
    """Within, this thread has one."""
    with pytest.MonkeyPatch.context() as patch, FakeCard() as card:
        patch.setitem(sys.modules, f"torch.{NAME}", _Module)
        patch.setattr(torch, NAME, _Module, raising=False)
        yield card
