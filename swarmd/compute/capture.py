"""A pass written down as a straight line of tensor calls, without the modules around them.

A decode step of a small span spends a third of its time between kernels, in Python that decides the same thing every
time. ``capture`` records one pass with torch's own tracer, folds what depends on weights only, and gives back a plain
function. What the tracer cannot follow (control flow that depends on values, as in mixtures of experts) it refuses,
and the span goes on as before; the caller compares results before it relies on a captured pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

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


def capture(run: Pass, hidden: torch.Tensor, positions: torch.Tensor, attention: Attend) -> Pass:
    """Write down what ``run`` does with tensors of these shapes; ``attend`` becomes a call of ``attention``.

    Raises RuntimeError or another exception of the tracer when ``run`` cannot be followed.
    """
    from torch.fx.experimental.proxy_tensor import make_fx  # late: the first token need not wait for the tracer

    _attend_now.append(attention)
    try:
        with torch.no_grad():
            module = make_fx(run)(hidden, positions)
    finally:
        _attend_now.pop()
    constants = _fold(module)
    for node in module.graph.nodes:
        if node.op == "call_function":
            node.target = attention if node.target is torch.ops.swarmd.attend.default else _plain(node)
    straight = type(fx.GraphModule(torch.nn.Module(), module.graph)).forward
    return functools.partial(straight, None, *constants)


def _plain(node: fx.Node) -> Any:
    plain = _PLAIN.get(node.target, node.target)
    return node.target if "out" in node.kwargs else plain


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
