"""Fewer launches in a traced pass: what ``cuda.pointwise`` computes at once, and products of the same rows.

As ``simplify``, these are peepholes on a graph of ATen operators, and know no family.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from swarmd.compute.cuda.experts import torch_waits
from swarmd.compute.cuda.pointwise import OPERATORS
from swarmd.compute.passes.simplify import NORM, ROTARY, call, is_pure, match, put

_aten = torch.ops.aten
GATE = (_aten.mul.Tensor, (_aten.silu.default, "gate"), "up")
GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")  # by name: it may not be there
PRODUCT = (_aten.mm.default, "rows", (_aten.t.default, "weight"))


def rewrite(module: fx.GraphModule) -> None:
    """Rewrite a graph as ``make_fx`` gives it; ``simplify`` follows."""
    graph = module.graph
    if not is_pure(graph):
        return
    for change in (_norm, _rotate, _gate, _grouped):
        for node in list(graph.nodes):
            change(node)
        graph.eliminate_dead_code()
    _join(module)
    graph.eliminate_dead_code()


def _only_user(node: fx.Node) -> fx.Node | None:
    return next(iter(node.users)) if len(node.users) == 1 else None


# Families write a norm in two ways, and both give the one operator:
#
#     float32:    x ----------------------> norm ----------------> * weight
#     16 bits:    source -- to float32 ---> norm -- to 16 bits --> * weight
def _norm(node: fx.Node) -> None:
    """Join a norm with its weight; it is computed in float32 and rounded before the weight comes."""
    names = match(NORM, node)
    if names is None:
        return
    x = names["x"]
    normed = node
    source = x.args[0] if x.target is _aten._to_copy.default else None
    rounded = _only_user(node)
    if source is not None and rounded is not None and rounded.target is _aten._to_copy.default:
        if rounded.meta["val"].dtype != source.meta["val"].dtype:
            return
        x = source
        normed = rounded
    weighted = _only_user(normed)
    if weighted is None or weighted.target is not _aten.mul.Tensor:
        return
    weight = next((argument for argument in weighted.args if argument is not normed), None)
    if not isinstance(weight, fx.Node) or weight.op != "get_attr":
        return
    value = weight.meta["val"]
    rows = x.meta["val"]
    if value.dtype != rows.dtype or value.shape != rows.shape[-1:]:
        return
    put(weighted, call(weighted, OPERATORS.norm.default, x, weight, float(names["eps"])))


def _rotate(node: fx.Node) -> None:
    names = match(ROTARY, node)
    if names is None:
        return
    x = names["x"]
    cos = names["cos"]
    value = x.meta["val"]
    cosines = cos.meta["val"]
    if names["dim"] not in (-1, value.ndim - 1) or value.shape[-1] != 2 * names["half"]:
        return
    if value.ndim != 4 or value.dtype != cosines.dtype:
        return
    if cosines.shape == (1, 1, *value.shape[2:]):
        put(node, call(node, OPERATORS.rotate.default, x, cos, names["sin"]))


def _gate(node: fx.Node) -> None:
    names = match(GATE, node)
    if names is None:
        return
    if names["gate"].meta["val"].shape == names["up"].meta["val"].shape:
        put(node, call(node, OPERATORS.gate.default, names["gate"], names["up"]))


def _grouped(node: fx.Node) -> None:
    """Keep the host out of a product of rows with the experts that they chose, where torch asks it."""
    if node.op != "call_function" or str(node.target) not in GROUPED:
        return
    arguments = (*node.args, *node.kwargs.values())  # rows, weights, ends of the groups; more are a bias and a type
    given = [argument for argument in arguments if isinstance(argument, fx.Node)]
    if len(given) != 3 or any(argument is not None and argument not in given for argument in arguments):
        return
    rows, weights = (argument.meta["val"] for argument in given[:2])
    if rows.ndim == 2 and weights.ndim == 3 and torch_waits(rows.device, rows.dtype):
        put(node, call(node, OPERATORS.grouped.default, *given))


# Queries, keys and values are products of the same rows, and so are gate and up:
#
#     rows * Wq, rows * Wk, rows * Wv    ->    out = rows * | Wq |      out[:, :q], out[:, q : q + k], ...
#                                                           | Wk |
#                                                           | Wv |
#
# One product of more rows fills a card better than three. The joined weight takes no more memory, since the three
# become views of it.
def _join(module: fx.GraphModule) -> None:
    """Join products of the same rows to one, with a joined weight of which theirs are parts from now on."""
    groups: dict[Any, list[tuple[fx.Node, fx.Node]]] = defaultdict(list)
    for node in module.graph.nodes:
        names = match(PRODUCT, node)
        if names is not None and getattr(names["weight"], "op", "") == "get_attr":
            groups[_rows_key(names["rows"])].append((node, names["weight"]))
    for group in groups.values():
        if len(group) > 1:
            _join_group(module, group)


def _rows_key(rows: fx.Node) -> tuple[Any, ...]:
    """Make a key that is equal for equal rows: each product has a view of its own of the same tensor."""
    if rows.target is _aten.view.default:
        return (rows.args[0], repr(rows.args[1]))
    return (rows, "")


def _join_group(
    module: fx.GraphModule,
    group: list[tuple[fx.Node, fx.Node]],
) -> None:
    first, first_weight = group[0]
    parameters = [getattr(module, str(weight.target)) for _, weight in group]
    name = f"_joined_{first_weight.target}"
    module.register_buffer(name, _joined_weight(parameters))
    with module.graph.inserting_before(first):
        joined = module.graph.get_attr(name)
    transposed = call(first, _aten.t.default, joined)
    out = call(first, _aten.mm.default, first.args[0], transposed)
    ends = list(accumulate(map(len, parameters)))
    columns = []
    for parameter, end in zip(parameters, ends, strict=True):
        columns.append(call(first, _aten.slice.Tensor, out, 1, end - len(parameter), end))
    for (node, _), part in zip(group, columns, strict=True):
        put(node, part)


def _joined_weight(parameters: list[torch.Tensor]) -> torch.Tensor:
    """Make one tensor [sum of out, in] of which these are parts from now on, if they were not before."""
    first = parameters[0]
    n_in = first.shape[1]
    starts = [0, *accumulate(map(len, parameters))]
    places = [(p.untyped_storage().data_ptr(), p.data_ptr() - first.data_ptr()) for p in parameters]
    storage = first.untyped_storage().data_ptr()
    joined_places = [(storage, start * n_in * first.element_size()) for start in starts[:-1]]
    if places == joined_places:
        return first.detach().as_strided((starts[-1], n_in), (n_in, 1))
    joined = torch.cat([p.detach() for p in parameters])
    for parameter, start in zip(parameters, starts, strict=False):
        parameter.data = joined[start : start + len(parameter)]
    return joined
