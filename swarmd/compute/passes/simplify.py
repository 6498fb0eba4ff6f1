"""Fewer operators in a pass that was written down: each costs 1 to 15 microseconds before it computes anything.

Peepholes on a graph of ATen operators. None knows a family, only how all of them write the same few things; what they
leave gives the same numbers but for the last bits of norms.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_END = torch.iinfo(torch.int64).max  # of a slice that goes on to the end

# A pattern is (operator, arguments), a name that stands for anything (the same each time), or a literal.
NORM = (
    _aten.mul.Tensor,
    "x",
    (_aten.rsqrt.default, (_aten.add.Tensor, (_aten.mean.dim, (_aten.pow.Tensor_Scalar, "x", 2), [-1], True), "eps")),
)
SCALED_TWICE = (_aten.mul.Tensor, "weight", (_aten.mul.Tensor, "y", "scale"))
ROTARY = (
    _aten.add.Tensor,
    (_aten.mul.Tensor, "x", "cos"),
    (
        _aten.mul.Tensor,
        (
            _aten.cat.default,
            [
                (_aten.neg.default, (_aten.slice.Tensor, "x", "dim", "half", _END)),
                (_aten.slice.Tensor, "x", "dim", 0, "half"),
            ],
            -1,
        ),
        "sin",
    ),
)


def simplify(module: fx.GraphModule) -> None:
    """Rewrite a graph as ``make_fx`` gives it, if it ``is_pure``."""
    graph = module.graph
    if not is_pure(graph):
        return
    for rewrite in (_view_of_view, _norm, _scaled_twice, _rotary):
        for node in list(graph.nodes):
            rewrite(module, node)
        graph.eliminate_dead_code()
    _share(graph)
    for node in list(graph.nodes):
        _slice(node)
    graph.eliminate_dead_code()


def is_pure(graph: fx.Graph) -> bool:
    """Does no call write to what it is given?"""
    called = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return not any(target._schema.is_mutable for target in called)


def matched(pattern: Any, value: Any, n_users: int = 0) -> dict[str, Any] | None:
    """What the names in a pattern stand for; None when it does not fit. What is within may have no other users."""
    if isinstance(pattern, str):
        return {pattern: value}
    if isinstance(pattern, tuple):
        fits = isinstance(value, fx.Node) and value.target is pattern[0] and not value.kwargs
        if not fits or (n_users and len(value.users) != n_users) or len(value.args) != len(pattern) - 1:
            return None
        pairs = list(zip(pattern[1:], value.args, strict=True))
    elif isinstance(pattern, list) and isinstance(value, list) and len(pattern) == len(value):
        pairs = list(zip(pattern, value, strict=True))
    else:
        return {} if type(pattern) is type(value) and pattern == value else None
    found: dict[str, Any] = {}
    for inner, part in pairs:
        more = matched(inner, part, 1)
        if more is None or any(found.get(name, what) is not what for name, what in more.items() if name in found):
            return None
        found |= more
    return found


def call(node: fx.Node, target: Any, *args: Any) -> fx.Node:
    """A new call just before a node."""
    with node.graph.inserting_before(node):
        return node.graph.call_function(target, args)


def put(node: fx.Node, new: fx.Node) -> None:
    """Let a new node take an old one's place."""
    new.meta = node.meta
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _constant(module: fx.GraphModule, node: fx.Node, name: str, value: torch.Tensor) -> fx.Node:
    """A tensor that a graph needs; ``name`` stands for its value, and is written once."""
    name = f"_{name}_{value.dtype}_{value.device}".replace(".", "_").replace(":", "_")
    module.register_buffer(name, value)
    with node.graph.inserting_before(node):
        return node.graph.get_attr(name)


def _view_of_view(module: fx.GraphModule, node: fx.Node) -> None:
    outer = matched((_aten.view.default, "inner", "shape"), node)
    inner = outer and matched((_aten.view.default, "x", "through"), outer["inner"])
    if outer and inner:
        node.args = (inner["x"], outer["shape"])


def _norm(module: fx.GraphModule, node: fx.Node) -> None:
    """x * rsqrt(mean(x**2) + eps) is sqrt(d) * x / hypot(|x|, sqrt(d * eps)): one reduction, and no mean."""
    found = matched(NORM, node)
    if found is None:
        return
    x, eps = found["x"], found["eps"]
    value = x.meta["val"]
    width = value.shape[-1]
    least = torch.tensor(math.sqrt(width * eps), dtype=value.dtype, device=value.device)
    floor = _constant(module, node, f"floor_{width}_{eps}", least)
    length = call(node, torch.linalg.vector_norm, x, 2, -1, True)
    unit = call(node, _aten.div.Tensor, x, call(node, torch.hypot, length, floor))
    unit.meta = x.meta
    put(node, call(node, _aten.mul.Tensor, unit, math.sqrt(width)))


def _scaled_twice(module: fx.GraphModule, node: fx.Node) -> None:
    """A weight takes a factor in, once and for all."""
    found = matched(SCALED_TWICE, node)
    if found is None or not isinstance(found["scale"], float) or getattr(found["weight"], "op", "") != "get_attr":
        return
    if found["weight"].meta["val"].dtype == found["y"].meta["val"].dtype:  # else it would be rounded more
        weight = call(node, _aten.mul.Tensor, found["weight"], found["scale"])
        put(node, call(node, _aten.mul.Tensor, weight, found["y"]))


def _rotary(module: fx.GraphModule, node: fx.Node) -> None:
    """Halves that change places, one of them negated: a roll, and the sign is the sine's."""
    found = matched(ROTARY, node)
    if found is None:
        return
    x, half = found["x"], found["half"]
    value = x.meta["val"]
    if found["dim"] not in (-1, value.ndim - 1) or value.shape[-1] != 2 * half:
        return
    signs = torch.ones(2 * half, dtype=value.dtype, device=value.device)
    signs[:half] = -1.0
    sine = call(node, _aten.mul.Tensor, found["sin"], _constant(module, node, f"signs_{half}", signs))
    rolled = call(node, torch.roll, x, half, -1)
    turned = call(node, _aten.mul.Tensor, rolled, sine)
    straight = call(node, _aten.mul.Tensor, x, found["cos"])
    put(node, call(node, _aten.add.Tensor, straight, turned))


def _share(graph: fx.Graph) -> None:
    """Compute once what is computed again from the same."""
    known: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "get_attr" and not _always_gives_the_same(node.target):
            continue
        key = (node.target, repr(node.args), repr(node.kwargs))  # nodes are written as their names
        if key in known:
            node.replace_all_uses_with(known[key])
            graph.erase_node(node)
        else:
            known[key] = node


def _always_gives_the_same(target: Any) -> bool:
    is_known = isinstance(target, torch._ops.OpOverload) and target.namespace != "swarmd"
    return is_known and torch.Tag.nondeterministic_seeded not in target.tags


def _slice(node: fx.Node) -> None:
    """Python's own slicing costs half of the operator's."""
    found = matched((_aten.slice.Tensor, "x", "dim", "start", "end"), node)
    if found is not None and found["dim"] >= 0:
        end = None if found["end"] == _END else found["end"]
        index = (*(slice(None),) * found["dim"], slice(found["start"], end))
        put(node, call(node, operator.getitem, found["x"], index))
