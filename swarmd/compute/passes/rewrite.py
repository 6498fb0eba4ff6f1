"""Fewer launches in a pass that was written down: what ``cuda.pointwise`` computes at once, and products of the same.

As ``simplify``, these are peepholes on a graph of ATen operators, and know no family.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import accumulate
from typing import Any

import torch
from torch import fx

from swarmd.compute.cuda.pointwise import OPERATORS
from swarmd.compute.passes.simplify import NORM, ROTARY, call, is_pure, matched, put

_aten = torch.ops.aten
GATE = (_aten.mul.Tensor, (_aten.silu.default, "gate"), "up")
PRODUCT = (_aten.mm.default, "rows", (_aten.t.default, "weight"))


def rewrite(module: fx.GraphModule) -> None:
    """Rewrite a graph as ``make_fx`` gives it; ``simplify`` follows."""
    graph = module.graph
    if not is_pure(graph):
        return
    for change in (_norm, _rotate, _gate):
        for node in list(graph.nodes):
            change(node)
        graph.eliminate_dead_code()
    _join(module)
    graph.eliminate_dead_code()


def _norm(node: fx.Node) -> None:
    """A norm with its weight, computed in float32 and rounded before it meets the weight."""
    found = matched(NORM, node)
    if found is None:
        return
    x, unit = found["x"], node
    dtype = x.meta["val"].dtype
    source = x.args[0] if x.target is _aten._to_copy.default else None
    rounded = next(iter(node.users)) if len(node.users) == 1 else None
    if source is not None and rounded is not None and rounded.target is _aten._to_copy.default:
        if rounded.meta["val"].dtype != source.meta["val"].dtype:
            return
        x, unit, dtype = source, rounded, source.meta["val"].dtype
    scaled = next(iter(unit.users)) if len(unit.users) == 1 else None
    if scaled is None or scaled.target is not _aten.mul.Tensor:
        return
    weight = next((part for part in scaled.args if part is not unit), None)
    value = weight.meta["val"] if isinstance(weight, fx.Node) and weight.op == "get_attr" else None
    if value is None or value.dtype != dtype or value.shape != x.meta["val"].shape[-1:]:
        return
    put(scaled, call(scaled, OPERATORS.norm.default, x, weight, float(found["eps"])))


def _rotate(node: fx.Node) -> None:
    found = matched(ROTARY, node)
    if found is None:
        return
    x, half, cos = found["x"], found["half"], found["cos"]
    value, turns = x.meta["val"], cos.meta["val"]
    is_last = found["dim"] in (-1, value.ndim - 1) and value.shape[-1] == 2 * half
    if is_last and value.ndim == 4 and turns.shape == (1, 1, *value.shape[2:]) and value.dtype == turns.dtype:
        put(node, call(node, OPERATORS.rotate.default, x, cos, found["sin"]))


def _gate(node: fx.Node) -> None:
    found = matched(GATE, node)
    if found is not None and found["gate"].meta["val"].shape == found["up"].meta["val"].shape:
        put(node, call(node, OPERATORS.gate.default, found["gate"], found["up"]))


def _join(module: fx.GraphModule) -> None:
    """Products of the same rows are one, with a weight that is all of theirs; theirs are parts of it from now on."""
    alike: dict[Any, list[tuple[fx.Node, fx.Node]]] = defaultdict(list)
    for node in module.graph.nodes:
        found = matched(PRODUCT, node)
        if found is not None and getattr(found["weight"], "op", "") == "get_attr":
            alike[_origin(found["rows"])].append((node, found["weight"]))
    for group in alike.values():
        if len(group) > 1:
            _join_these(module, group)


def _origin(rows: fx.Node) -> tuple[Any, ...]:
    """The same for rows that are the same."""
    return (rows.args[0], repr(rows.args[1])) if rows.target is _aten.view.default else (rows, "")


def _join_these(module: fx.GraphModule, group: list[tuple[fx.Node, fx.Node]]) -> None:
    first, parameters = group[0][0], [getattr(module, str(weight.target)) for _, weight in group]
    whole = _whole(parameters)
    name = f"_joined_{group[0][1].target}"
    module.register_buffer(name, whole)
    with module.graph.inserting_before(first):
        joined = module.graph.get_attr(name)
    out = call(first, _aten.mm.default, first.args[0], call(first, _aten.t.default, joined))
    ends = list(accumulate(map(len, parameters)))
    parts = [
        call(first, _aten.slice.Tensor, out, 1, end - len(p), end) for p, end in zip(parameters, ends, strict=True)
    ]
    for (node, _), part in zip(group, parts, strict=True):
        put(node, part)


def _whole(parameters: list[torch.Tensor]) -> torch.Tensor:
    """One tensor [sum of out, in] that these are parts of from now on, if they were not before."""
    first, n_in = parameters[0], parameters[0].shape[1]
    starts = [0, *accumulate(map(len, parameters))]
    places = [(p.untyped_storage().data_ptr(), p.data_ptr() - first.data_ptr()) for p in parameters]
    there = [(first.untyped_storage().data_ptr(), start * n_in * first.element_size()) for start in starts[:-1]]
    if places == there:
        return first.detach().as_strided((starts[-1], n_in), (n_in, 1))
    whole = torch.cat([p.detach() for p in parameters])
    for parameter, start in zip(parameters, starts, strict=False):
        parameter.data = whole[start : start + len(parameter)]
    return whole
