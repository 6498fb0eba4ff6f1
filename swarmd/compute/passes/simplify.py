"""Fewer operators in a traced pass: each costs 1 to 15 microseconds before it computes anything.

Peepholes on a graph of ATen operators. None knows a family, only how all of them write the same few things. The new
graph gives the same numbers but for the last bits of norms.
"""

from __future__ import annotations

import math
import operator
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten
_END = torch.iinfo(torch.int64).max  # of a slice that goes on to the end

# A pattern is (operator, arguments), a name that stands for anything (the same each time), or a literal. Written as a
# tree, NORM is x * rsqrt(mean(x**2) + eps):
#
#     mul ---- "x"
#        \---- rsqrt -- add ---- mean of the last dimension -- pow ---- "x"
#                          \---- "eps"                            \---- 2
_MEAN_SQUARE = (_aten.mean.dim, (_aten.pow.Tensor_Scalar, "x", 2), [-1], True)
NORM = (_aten.mul.Tensor, "x", (_aten.rsqrt.default, (_aten.add.Tensor, _MEAN_SQUARE, "eps")))
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
    """Does no call write to its arguments?"""
    operators = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    return not any(operator._schema.is_mutable for operator in operators)


def match(
    pattern: Any,
    value: Any,
    n_users: int = 0,
) -> dict[str, Any] | None:
    """Return what the names in a pattern stand for; None when it does not fit.

    Nodes within the pattern have one user each: a peephole replaces them, and nobody else may need their results.
    """
    if isinstance(pattern, str):
        return {pattern: value}
    if isinstance(pattern, tuple):
        is_call = isinstance(value, fx.Node) and value.target is pattern[0] and not value.kwargs
        if not is_call or len(value.args) != len(pattern) - 1:
            return None
        if n_users and len(value.users) != n_users:
            return None
        pairs = list(zip(pattern[1:], value.args, strict=True))
    elif isinstance(pattern, list) and isinstance(value, list) and len(pattern) == len(value):
        pairs = list(zip(pattern, value, strict=True))
    else:
        return {} if type(pattern) is type(value) and pattern == value else None
    names: dict[str, Any] = {}
    for inner_pattern, argument in pairs:
        inner_names = match(inner_pattern, argument, 1)
        if inner_names is None:
            return None
        if any(names[name] is not node for name, node in inner_names.items() if name in names):
            return None
        names |= inner_names
    return names


def call(node: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Insert a new call just before a node."""
    with node.graph.inserting_before(node):
        return node.graph.call_function(target, args)


def put(node: fx.Node, new: fx.Node) -> None:
    """Replace a node by a new one."""
    new.meta = node.meta
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def _constant(
    module: fx.GraphModule,
    node: fx.Node,
    name: str,
    value: torch.Tensor,
) -> fx.Node:
    """Insert a tensor that a graph needs; ``name`` stands for its value, and is written once."""
    name = f"_{name}_{value.dtype}_{value.device}".replace(".", "_").replace(":", "_")
    module.register_buffer(name, value)
    with node.graph.inserting_before(node):
        return node.graph.get_attr(name)


def _view_of_view(module: fx.GraphModule, node: fx.Node) -> None:
    outer = match((_aten.view.default, "inner", "shape"), node)
    if outer is None:
        return
    inner = match((_aten.view.default, "x", "inner_shape"), outer["inner"])
    if inner is not None:
        node.args = (inner["x"], outer["shape"])


def _norm(module: fx.GraphModule, node: fx.Node) -> None:
    """Compute a norm by one reduction, and no mean.

    x * rsqrt(mean(x**2) + eps) = sqrt(d) * x / hypot(|x|, sqrt(d * eps)), where |x| is the length of a row of d.
    """
    names = match(NORM, node)
    if names is None:
        return
    x = names["x"]
    eps = names["eps"]
    value = x.meta["val"]
    width = value.shape[-1]
    shortest = torch.tensor(math.sqrt(width * eps), dtype=value.dtype, device=value.device)
    floor = _constant(module, node, f"floor_{width}_{eps}", shortest)
    length = call(node, torch.linalg.vector_norm, x, 2, -1, True)
    divisor = call(node, torch.hypot, length, floor)
    unit_vector = call(node, _aten.div.Tensor, x, divisor)
    unit_vector.meta = x.meta
    put(node, call(node, _aten.mul.Tensor, unit_vector, math.sqrt(width)))


def _scaled_twice(module: fx.GraphModule, node: fx.Node) -> None:
    """Multiply a factor into the weight, which is a constant, instead of into each activation."""
    names = match(SCALED_TWICE, node)
    if names is None:
        return
    weight = names["weight"]
    scale = names["scale"]
    if not isinstance(scale, float) or getattr(weight, "op", "") != "get_attr":
        return
    if weight.meta["val"].dtype == names["y"].meta["val"].dtype:  # else it would be rounded more
        scaled_weight = call(node, _aten.mul.Tensor, weight, scale)
        put(node, call(node, _aten.mul.Tensor, scaled_weight, names["y"]))


def _rotary(module: fx.GraphModule, node: fx.Node) -> None:
    """Exchange halves by a roll, and move the sign of the negated one to the sine, which all layers share.

    x * cos + cat(-x2, x1) * sin = x * cos + roll(x, half) * (signs * sin), with signs -1 and 1 for the halves.
    """
    names = match(ROTARY, node)
    if names is None:
        return
    x = names["x"]
    half = names["half"]
    value = x.meta["val"]
    if names["dim"] not in (-1, value.ndim - 1) or value.shape[-1] != 2 * half:
        return
    signs = torch.ones(2 * half, dtype=value.dtype, device=value.device)
    signs[:half] = -1.0
    signs_node = _constant(module, node, f"signs_{half}", signs)
    sine = call(node, _aten.mul.Tensor, names["sin"], signs_node)
    rolled = call(node, torch.roll, x, half, -1)
    by_sine = call(node, _aten.mul.Tensor, rolled, sine)
    by_cosine = call(node, _aten.mul.Tensor, x, names["cos"])
    put(node, call(node, _aten.add.Tensor, by_cosine, by_sine))


def _share(graph: fx.Graph) -> None:
    """Compute once what is computed again from the same arguments."""
    first_nodes: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "get_attr" and not _is_deterministic(node.target):
            continue
        key = (node.target, repr(node.args), repr(node.kwargs))  # nodes are written as their names
        if key in first_nodes:
            node.replace_all_uses_with(first_nodes[key])
            graph.erase_node(node)
        else:
            first_nodes[key] = node


def _is_deterministic(target: Any) -> bool:
    is_known = isinstance(target, torch._ops.OpOverload) and target.namespace != "swarmd"
    return is_known and torch.Tag.nondeterministic_seeded not in target.tags


def _slice(node: fx.Node) -> None:
    """Use Python's own slicing, which costs half of the operator's."""
    names = match((_aten.slice.Tensor, "x", "dim", "start", "end"), node)
    if names is not None and names["dim"] >= 0:
        end = None if names["end"] == _END else names["end"]
        index = (*(slice(None),) * names["dim"], slice(names["start"], end))
        put(node, call(node, operator.getitem, names["x"], index))
