"""A traced pass: a straight line of tensor calls, without the modules around them, for any number of tokens.

A decode step of a small span spends a third of its time between kernels, in Python that decides the same thing every
time. ``trace`` records one pass with torch's own tracer. From two passes over different numbers of tokens ``capture``
learns where the number enters, folds what depends on weights only, and returns a plain function. The tracer refuses
what it cannot follow (control flow that depends on values), and the span goes on as before. The caller compares results
before it relies on a captured pass.

    trace of 2 tokens   view(x, [1, 2, 9, 64])   slice(y, 0, 6)  ...
    trace of 3 tokens   view(x, [1, 3, 9, 64])   slice(y, 0, 9)  ...
    captured            view(x, [1, n, 9, 64])   slice(y, 0, n * 3)
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from swarmd.compute.cuda.availability import trouble
from swarmd.compute.passes.simplify import is_pure, simplify

logger = logging.getLogger(__name__)

Pass = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor]

_library: Any = torch.library.Library("swarmd", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("attend(Tensor query, Tensor key, Tensor value, int layer) -> Tensor")
_captured_attention: list[Attend] = []  # that of the pass that is being captured


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    return _captured_attention[-1](query, key, value, layer)


_library.impl("attend", _attend, "CompositeExplicitAutograd")

# Plain functions cost half of what the same operators cost when called by their overloads.
_PLAIN: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.view.default: torch.Tensor.reshape,  # what ``attend`` stood for may have other strides
    torch.ops.aten._unsafe_view.default: torch.Tensor.reshape,
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


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    layer: int,
) -> torch.Tensor:
    """Stand for attention in a pass that is being captured."""
    return torch.ops.swarmd.attend(query, key, value, layer)  # type: ignore[no-any-return]


ATTEND = torch.ops.swarmd.attend.default


def trace(
    run: Pass,
    hidden: torch.Tensor,
    positions: torch.Tensor,
    attention: Attend,
) -> fx.GraphModule:
    """Record the operators of ``run`` for tensors of these shapes; ``attention`` computes what ``attend`` stands for.

    Raises RuntimeError or another exception of the tracer when ``run`` cannot be followed.
    """
    _captured_attention.append(attention)
    try:
        module = written_down(run, hidden, positions)
    finally:
        _captured_attention.pop()
    if hidden.is_cuda and not trouble(hidden.device):
        from swarmd.compute.passes.rewrite import rewrite  # late: Triton comes with torch where CUDA does

        rewrite(module)
    simplify(module)
    return module


def written_down(run: Pass, first: torch.Tensor, positions: torch.Tensor) -> fx.GraphModule:
    """Record ``run``, operator by operator; without writes to tensors, where it can be had.

    Raises RuntimeError or another exception of the tracer.
    """
    from torch._guards import TracingContext, tracing  # late: these imports take long
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    # The tracer notes the shape of every result by a mode of fake tensors. Where it finds none it makes one for each
    # result, with a copy of the call stack: half of the time that tracing takes.
    one_mode = tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True)))
    with torch.no_grad(), one_mode:
        module: fx.GraphModule = make_fx(run)(first, positions)
        if not is_pure(module.graph):
            try:
                module = make_fx(torch.func.functionalize(run))(first, positions)
            except torch.AcceleratorError:
                raise  # nothing will be computed by this process any more
            except Exception as failure:  # noqa: BLE001 - many ways to fail, and what was recorded is right as well
                logger.info("a pass that writes to its tensors stays as it is: %s", str(failure)[:200])
    return module


def capture(
    two: fx.GraphModule,
    three: fx.GraphModule,
    calls: Mapping[Any, Callable[..., Any]],
) -> Pass:
    """Make a pass for any n from one over 2 tokens and one over 3, hidden [1, n, d] each.

    Operators in ``calls`` are replaced by these functions. Raises RuntimeError when both passes differ by more than
    numbers that are multiples of n.
    """
    _insert_n_tokens(two, three)
    constants = _fold_constants(two)
    for node in two.graph.nodes:
        if node.op == "call_function":
            node.target = calls.get(node.target) or _plain_function(node)
    forward = type(fx.GraphModule(torch.nn.Module(), two.graph)).forward

    def run(hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = forward(None, *constants, hidden.shape[1], hidden, positions)
        return out

    return run


# Both graphs must have the same operators in the same order. Then each argument is looked at:
#
#     the same node, or the same value           stays
#     2 and 3                                    is n
#     2 m and 3 m                                is n * m
#     anything else                              cannot be captured
#
# A number that does not depend on n, but is 2 in one pass and 3 in the other by chance, would be taken for n. That is
# why the caller compares results for other numbers of tokens.
def _insert_n_tokens(two: fx.GraphModule, three: fx.GraphModule) -> None:
    """Make the number of tokens a leading argument of the first graph, wherever the second says that it counts."""
    pairs = list(zip(two.graph.nodes, three.graph.nodes, strict=False))
    has_same_length = len(two.graph.nodes) == len(three.graph.nodes)
    if not has_same_length or any(p.target != q.target for p, q in pairs):
        raise RuntimeError("a pass over 3 tokens does other things than one over 2")
    with two.graph.inserting_before(pairs[0][0]):
        n = two.graph.placeholder("n_tokens")
    nodes_of_two: dict[fx.Node, fx.Node] = {}  # by those of three

    def merge(first: Any, second: Any, user: fx.Node) -> Any:
        if isinstance(first, (list, tuple)) and len(first) == len(second):
            return type(first)(merge(a, b, user) for a, b in zip(first, second, strict=True))
        if isinstance(first, fx.Node) and isinstance(second, fx.Node):
            if nodes_of_two.get(second) is not first:
                raise RuntimeError("a pass over 3 tokens takes other results than one over 2")
            return first
        if type(first) is type(second) and first == second:
            return first
        if not (isinstance(first, int) and isinstance(second, int) and 3 * first == 2 * second):
            raise RuntimeError(f"{user.target} takes {first} for 2 tokens and {second} for 3")
        if first == 2:
            return n
        with two.graph.inserting_before(user):
            return two.graph.call_function(operator.mul, (n, first // 2))

    for node, node_of_three in pairs:
        nodes_of_two[node_of_three] = node
        if node.op == "get_attr":
            if not _is_same_constant(getattr(two, node.target), getattr(three, node.target)):
                raise RuntimeError("a pass uses constants that depend on the number of tokens")
        else:
            node.args = merge(node.args, node_of_three.args, node)
            node.kwargs = {k: merge(v, node_of_three.kwargs[k], node) for k, v in node.kwargs.items()}


def _is_same_constant(first: Any, second: Any) -> bool:
    if first is second or isinstance(first, torch.ScriptObject):  # packed weights, which do not compare
        return type(first) is type(second)
    if not (torch.is_tensor(first) and torch.is_tensor(second)):
        return False
    return first.shape == second.shape and first.dtype == second.dtype and torch.equal(first, second)


def _plain_function(node: fx.Node) -> Any:
    if {"out", "layout"} & node.kwargs.keys():  # plain functions do not take them
        return node.target
    return _PLAIN.get(node.target, node.target)


def _fold_constants(module: fx.GraphModule) -> list[Any]:
    """Compute what depends on weights only, and make it leading arguments of the graph. Returns their values."""
    graph = module.graph
    values: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        inputs = node.all_input_nodes
        if node.op == "get_attr":
            values[node] = getattr(module, str(node.target))
        elif node.op == "call_function" and inputs and all(n in values for n in inputs):
            with torch.no_grad():
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                values[node] = node.target(*args, **kwargs)
    first = next(iter(graph.nodes))
    constants: list[Any] = []
    # Only values with a user that is no constant itself are arguments; the others were on the way to these.
    for node in [n for n in values if any(user not in values for user in n.users)]:
        with graph.inserting_before(first):
            node.replace_all_uses_with(graph.placeholder(f"constant_{len(constants)}"))
        constants.append(values[node])
    graph.eliminate_dead_code()
    return constants
