"""A pass written down as a straight line of tensor calls, without the modules around them, for any number of tokens.

A decode step of a small span spends a third of its time between kernels, in Python that decides the same thing every
time. ``trace`` records one pass with torch's own tracer; of two passes over different numbers of tokens ``capture``
learns where the number enters, folds what depends on weights only, and gives back a plain function. What the tracer
cannot follow (control flow that depends on values) it refuses, and the span goes on as
before; the caller compares results before it relies on a captured pass.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from swarmd.compute.cuda.availability import trouble
from swarmd.compute.passes.simplify import simplify

Pass = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]

_library: Any = torch.library.Library("swarmd", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("attend(Tensor query, Tensor key, Tensor value, int layer) -> Tensor")
_attend_now: list[Attend] = []  # the one that is being captured


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
    return _attend_now[-1](query, key, value, layer)


_library.impl("attend", _attend, "CompositeExplicitAutograd")

# Plain functions cost half of what the same operators cost when called by their overloads.
_PLAIN: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.view.default: torch.Tensor.view,
    torch.ops.aten._unsafe_view.default: torch.Tensor.view,
    torch.ops.aten._to_copy.default: torch.Tensor.to,
    torch.ops.aten.transpose.int: torch.transpose,
    torch.ops.aten.mean.dim: torch.mean,
    torch.ops.aten.pow.Tensor_Scalar: torch.pow,
    **{getattr(torch.ops.aten, name).Tensor: getattr(torch, name) for name in ("add", "mul", "sub", "div")},
    **{
        getattr(torch.ops.aten, name).default: getattr(torch, name)
        for name in ("mm", "addmm", "rsqrt", "neg", "cat", "cos", "sin", "unsqueeze", "sigmoid", "tanh")
    },
}


def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: int) -> torch.Tensor:
    """Stand for attention in a pass that is being captured."""
    return torch.ops.swarmd.attend(query, key, value, layer)  # type: ignore[no-any-return]


ATTEND = torch.ops.swarmd.attend.default


def trace(run: Pass, hidden: torch.Tensor, positions: torch.Tensor, attention: Attend) -> fx.GraphModule:
    """Write down what ``run`` does with tensors of these shapes; ``attention`` computes what ``attend`` stands for.

    Raises RuntimeError or another exception of the tracer when ``run`` cannot be followed.
    """
    _attend_now.append(attention)
    try:
        module = written_down(run, hidden, positions)
    finally:
        _attend_now.pop()
    if hidden.is_cuda and not trouble(hidden.device):
        from swarmd.compute.passes.rewrite import rewrite  # late: Triton comes with torch where CUDA does

        rewrite(module)
    simplify(module)
    return module


def written_down(run: Pass, first: torch.Tensor, positions: torch.Tensor) -> fx.GraphModule:
    """What ``run`` does, operator by operator. Raises RuntimeError or another exception of the tracer."""
    from torch.fx.experimental.proxy_tensor import make_fx  # late: its import takes long

    with torch.no_grad():
        module: fx.GraphModule = make_fx(run)(first, positions)
    return module


def capture(two: fx.GraphModule, three: fx.GraphModule, calls: Mapping[Any, Callable[..., Any]]) -> Pass:
    """Of a pass over 2 tokens and one over 3, hidden [1, n, d] each, make one for any n.

    Operators in ``calls`` become calls of what these say. Raises RuntimeError when they differ by more than numbers
    that are multiples of n.
    """
    _let_n_enter(two, three)
    constants = _fold(two)
    for node in two.graph.nodes:
        if node.op == "call_function":
            node.target = calls.get(node.target) or _plain(node)
    straight = type(fx.GraphModule(torch.nn.Module(), two.graph)).forward

    def run(hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = straight(None, *constants, hidden.shape[1], hidden, positions)
        return out

    return run


def _let_n_enter(two: fx.GraphModule, three: fx.GraphModule) -> None:
    """Make the number of tokens a leading argument of the first graph, wherever the second says that it counts."""
    pairs = list(zip(two.graph.nodes, three.graph.nodes, strict=False))
    if len(two.graph.nodes) != len(three.graph.nodes) or any(p.target != q.target for p, q in pairs):
        raise RuntimeError("a pass over 3 tokens does other things than one over 2")
    with two.graph.inserting_before(pairs[0][0]):
        n = two.graph.placeholder("n_tokens")

    def merged(first: Any, second: Any, at: fx.Node) -> Any:
        if isinstance(first, (list, tuple)) and len(first) == len(second):
            return type(first)(merged(a, b, at) for a, b in zip(first, second, strict=True))
        if isinstance(first, fx.Node) and isinstance(second, fx.Node):
            if twins.get(second) is not first:
                raise RuntimeError("a pass over 3 tokens takes other results than one over 2")
            return first
        if type(first) is type(second) and first == second:
            return first
        if not (isinstance(first, int) and isinstance(second, int) and 3 * first == 2 * second):
            raise RuntimeError(f"{at.target} takes {first} for 2 tokens and {second} for 3")
        if first == 2:
            return n
        with two.graph.inserting_before(at):
            return two.graph.call_function(operator.mul, (n, first // 2))

    twins: dict[fx.Node, fx.Node] = {}
    for node, other in pairs:
        twins[other] = node
        if node.op == "get_attr":
            if not _same(getattr(two, node.target), getattr(three, node.target)):
                raise RuntimeError("a pass uses constants that depend on the number of tokens")
        else:
            node.args = merged(node.args, other.args, node)
            node.kwargs = {k: merged(v, other.kwargs[k], node) for k, v in node.kwargs.items()}


def _same(first: Any, second: Any) -> bool:
    if first is second or isinstance(first, torch.ScriptObject):  # packed weights, which do not compare
        return type(first) is type(second)
    both = torch.is_tensor(first) and torch.is_tensor(second) and first.shape == second.shape
    return bool(both and first.dtype == second.dtype and torch.equal(first, second))


def _plain(node: fx.Node) -> Any:
    plain = _PLAIN.get(node.target, node.target)
    return node.target if {"out", "layout"} & node.kwargs.keys() else plain  # which plain functions do not take


def _fold(module: fx.GraphModule) -> list[Any]:
    """Compute what depends on weights only, and make it leading arguments of the graph. Returns their values."""
    graph, known = module.graph, dict[fx.Node, Any]()
    for node in graph.nodes:
        if node.op == "get_attr":
            known[node] = getattr(module, str(node.target))
        elif node.op == "call_function" and node.all_input_nodes and all(n in known for n in node.all_input_nodes):
            with torch.no_grad():
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = node.target(*args, **kwargs)
    first = next(iter(graph.nodes))
    constants: list[Any] = []
    for node in [n for n in known if any(user not in known for user in n.users)]:
        with graph.inserting_before(first):
            node.replace_all_uses_with(graph.placeholder(f"constant_{len(constants)}"))
        constants.append(known[node])
    graph.eliminate_dead_code()
    return constants
