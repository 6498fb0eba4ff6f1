"""The client's own part of a step as a straight line: embedding, the swarm, norm and head, without what is around them.

A family's forward takes longer to decide what to do with one token than it takes to do it: masks, rotary positions and
layers that are elsewhere do not matter here. Written down with torch's tracer, as servers' passes are (``capture``),
and taken only where it gives the very numbers that the forward gives.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from swarmd.compute.model.skeleton import Stub
from swarmd.compute.passes import traced
from swarmd.compute.runs.expert_balance import FLAG

logger = logging.getLogger(__name__)

REMOTE, HEAD = range(2)  # what is called from within a line
CHECKED = (1, 2, 5)  # tokens of passes that have to give the same
N_PAST = 7  # tokens of the session that they belong to
Call = Callable[[torch.Tensor], torch.Tensor]

_library: Any = torch.library.Library("swarmd_client", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("call(Tensor x, int which) -> Tensor")
_calls = threading.local()  # ``functions``: what REMOTE and HEAD are in this thread


def _call(hidden: torch.Tensor, which: int) -> torch.Tensor:
    out: torch.Tensor = _calls.functions[which](hidden)
    return out


_library.impl("call", _call, "CompositeExplicitAutograd")


@contextmanager
def _bind_calls(remote: Call, head: Call) -> Iterator[None]:
    _calls.functions = remote, head
    try:
        yield
    finally:
        del _calls.functions


@contextmanager
def _replace_method(owner: Any, name: str, function: Call) -> Iterator[None]:
    """Within, a method of one object is this function."""
    original = vars(owner).get(name)
    setattr(owner, name, function)
    try:
        yield
    finally:
        delattr(owner, name)
        if original is not None:
            setattr(owner, name, original)


class TracedPass:
    """See the module. ``trace_model`` makes one.

    ``enter`` is the line up to the swarm: ids and positions [1, n] to hidden states [1, n, d].
    """

    def __init__(
        self, model: Any, line: traced.Pass, enter: traced.Pass | None, constants: Sequence[torch.Tensor]
    ) -> None:
        self._model, self._line, self._head = model, line, model.get_output_embeddings()
        self.enter, self._constants = enter, constants
        self._known = self._fingerprint()

    def compute(self, ids: torch.Tensor, positions: torch.Tensor, remote: Call) -> torch.Tensor:
        """ids and positions [1, n] to logits [1, n, vocabulary]; ``remote`` is what the swarm does."""
        with _bind_calls(remote, self._head):
            return self._line(ids, positions)

    @property
    def holds(self) -> bool:
        """Is the model what it was when this was written down?"""
        return not self._model.training and self._fingerprint() == self._known

    def _fingerprint(self) -> list[Any]:
        """The modules, what hangs on them, and where constants lie and how often they were changed."""
        modules = [module for module in self._model.modules() if not isinstance(module, Stub)]
        hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)
        weights = [(weight.data_ptr(), weight._version) for weight in self._constants]
        return [*map(id, modules), hooks, vars(self._model).get("forward"), *weights]


def trace_model(model: Any, layers: Sequence[Any], cache_name: str, enters: bool = False) -> TracedPass | None:
    """The line of a client's model, by its family's forward; None where there is none. ``layers`` are all its stubs.

    ``enters``: its beginning by itself is wanted, too.
    """
    family, head = type(model).forward.__get__(model), model.get_output_embeddings()
    parameters = inspect.signature(type(model).forward).parameters
    no_routers = {FLAG: False} if FLAG in parameters else {}
    takes_positions = "position_ids" in parameters

    def run(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cache = model.new_cache()
        cache.n_tokens = N_PAST
        arguments = {cache_name: cache, **no_routers, **({"position_ids": positions} if takes_positions else {})}
        logits: torch.Tensor = family(input_ids=ids, use_cache=True, **arguments).logits
        return logits

    def enter(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        captured: list[torch.Tensor] = []

        def pass_on(hidden: torch.Tensor) -> torch.Tensor:
            captured.append(hidden)
            return hidden

        with _replace_method(layers[0], "call", pass_on):
            run(ids, positions)
        return captured[0]

    try:
        own_head = type(head).forward.__get__(head)
        holes = [
            _replace_method(owner, name, _make_hole(n))
            for owner, name, n in ((layers[0], "call", REMOTE), (head, "forward", HEAD))
        ]
        with torch.no_grad(), holes[0], holes[1], _bind_calls(torch.clone, own_head):
            traced, constants = _trace(run)
            entering, entry_constants = _trace(enter) if enters else (None, [])
    except Exception as failure:  # noqa: BLE001 - a tracer fails in many ways, and all of them mean the same
        logger.info("steps go through the family's own forward: %s", failure)
        return None
    return TracedPass(model, traced, entering, [*constants, *entry_constants])


def _make_hole(which: int) -> Call:
    return lambda hidden: torch.ops.swarmd_client.call(hidden, which)


def _trace(run: traced.Pass) -> tuple[traced.Pass, list[torch.Tensor]]:
    """A function as a line, and the constants in it. Raises RuntimeError where the line gives other numbers."""
    two, three = (traced.written_down(run, *_example(n)) for n in (2, 3))
    for module in (two, three):
        module.graph.eliminate_dead_code()
    constants = [getattr(two, str(node.target)) for node in two.graph.nodes if node.op == "get_attr"]
    line = traced.capture(two, three, {torch.ops.swarmd_client.call.default: _call})
    if not all(torch.equal(run(*_example(n)), line(*_example(n))) for n in CHECKED):
        raise RuntimeError("the line gives other numbers")
    return line, constants


def _example(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(3, 3 + n).unsqueeze(0), torch.arange(N_PAST, N_PAST + n).unsqueeze(0)
