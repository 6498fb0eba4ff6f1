"""The client's own part of a step as a traced pass: embedding, the swarm, norm and head, and nothing else.

A family's forward takes longer to decide what to do with one token than it takes to do it: masks, rotary positions and
layers on servers do not matter here. So it is traced with torch's tracer, as servers' passes are. The traced pass is
used only where it gives the very numbers that the forward gives.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from swarmd.compute.model.skeleton import Stub
from swarmd.compute.passes import traced
from swarmd.compute.runs.expert_balance import FLAG
from swarmd.protocol.models.configuration import PACKED

if TYPE_CHECKING:
    from swarmd.compute.model.ends import Ends
    from swarmd.compute.model.packed_model import PackedCausalLM

logger = logging.getLogger(__name__)

REMOTE = 0  # number of the hole where the swarm is called
HEAD = 1  # number of the hole where the head is computed
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
    """Within, these functions are called at a line's holes in this thread."""
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

    ``enter`` is the part up to the swarm: ids and positions [1, n] to hidden states [1, n, d].
    """

    def __init__(
        self,
        model: Any,
        line: traced.Pass,
        enter: traced.Pass,
        constants: Sequence[torch.Tensor],
        head: Call,
    ) -> None:
        self.enter = enter
        self._model = model
        self._line = line
        self._head = head
        self._constants = constants
        self._known = self._fingerprint()

    def compute(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        remote: Call,
    ) -> torch.Tensor:
        """ids and positions [1, n] to logits [1, n, vocabulary]; ``remote`` is what the swarm does."""
        with _bind_calls(remote, self._head):
            return self._line(ids, positions)

    @property
    def is_current(self) -> bool:
        """Is the model what it was when this was written down?"""
        return not self._model.training and self._fingerprint() == self._known

    def _fingerprint(self) -> list[Any]:
        """The modules, what hangs on them, and where constants lie and how often they were changed."""
        modules = [module for module in self._model.modules() if not isinstance(module, Stub)]
        hooks = sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in modules)
        weights = [(weight.data_ptr(), weight._version) for weight in self._constants]
        return [*map(id, modules), hooks, vars(self._model).get("forward"), *weights]


class StraightPass:
    """What a ``TracedPass`` is, of a model whose forward is that line and nothing else: nothing is traced."""

    is_current = True

    def __init__(self, model: PackedCausalLM, head: Call) -> None:
        self._embed = model.get_input_embeddings()
        self._head = head

    def enter(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Ids and positions [1, n] to hidden states [1, n, d]."""
        hidden: torch.Tensor = self._embed(ids)
        return hidden

    def compute(self, ids: torch.Tensor, positions: torch.Tensor, remote: Call) -> torch.Tensor:
        """As ``TracedPass.compute``."""
        logits: torch.Tensor = self._head(remote(self._embed(ids)))
        return logits


StepPass = TracedPass | StraightPass
"""The client's part of a step, without the family's forward."""


# The family's forward runs once under torch's tracer with two holes in it. At the first hole the hidden states go to
# the swarm, at the second the head is computed. What is between is written down as a straight line of operations:
#
#     ids, positions -> embedding -> [hole REMOTE: the swarm] -> norm -> [hole HEAD] -> logits
#
# Two lengths are traced, because a number in the graph that differs between them is a length and not a constant. A
# line counts only if it gives bit for bit what the forward gives, for several lengths. It holds constants by reference,
# so ``TracedPass.is_current`` compares where they lie, how often they were changed, and which hooks the modules have.
def trace_model(
    model: Any,
    layers: Sequence[Any],
    cache_name: str,
    head: Call,
) -> StepPass | None:
    """Trace the client's part of a model's step; None where no line can be had. ``layers`` are all its stubs.

    ``head`` computes what the model's own head does. The part up to the swarm is traced by itself, too.
    """
    if model.config.model_type == PACKED:
        return StraightPass(model, head)
    family = type(model).forward.__get__(model)
    parameters = inspect.signature(type(model).forward).parameters
    no_routers = {FLAG: False} if FLAG in parameters else {}
    takes_positions = "position_ids" in parameters

    def run(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        cache = model.new_cache()
        cache.n_tokens = N_PAST
        arguments = {cache_name: cache, **no_routers}
        if takes_positions:
            arguments["position_ids"] = positions
        logits: torch.Tensor = family(input_ids=ids, use_cache=True, **arguments).logits
        return logits

    try:
        return _trace_parts(model, layers[0], run, head)
    except Exception as failure:  # noqa: BLE001 - a tracer fails in many ways, and all of them mean the same
        logger.info("steps go through the family's own forward: %s", failure)
        return None


def _trace_parts(model: Any, first_layer: Any, run: traced.Pass, head: Call) -> TracedPass:
    """Trace a forward, and by itself its part up to ``first_layer``. Raises whatever the tracer does."""
    own = model.get_output_embeddings()

    def enter(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        captured: list[torch.Tensor] = []

        def pass_on(hidden: torch.Tensor) -> torch.Tensor:
            captured.append(hidden)
            return hidden

        with _replace_method(first_layer, "call", pass_on):
            run(ids, positions)
        return captured[0]

    own_head = type(own).forward.__get__(own)
    remote_hole = _replace_method(first_layer, "call", _make_hole(REMOTE))
    head_hole = _replace_method(own, "forward", _make_hole(HEAD))
    with torch.no_grad(), remote_hole, head_hole, _bind_calls(torch.clone, own_head):
        line, constants = _trace_function(run)
        entry, entry_constants = _trace_function(enter)
    return TracedPass(model, line, entry, [*constants, *entry_constants], head)


def trace_ends(ends: Ends, arity: int = 0) -> TracedPass | None:
    """Trace both ends of a model that rows of many sessions share, whose layers return so many values.

    A line is of tokens [1, n]: those of n rows go through it as n tokens of one. None where no line can be had, or it
    gives other numbers than the rows' own forward.
    """
    if ends.model.config.model_type == PACKED:
        return None
    ends.return_values(arity)
    failures = []
    for with_mask in (True, False):  # most look at values where they are given no mask, some where they are
        try:
            line = _trace_ends(ends, with_mask)
            _compare_with_rows(ends, line)
            return line
        except Exception as failure:  # noqa: BLE001 - a tracer fails in many ways, and all of them mean the same
            failures.append(str(failure))
    logger.info("rows go through the family's own forward: %s", "; ".join(failures))
    return None


def _trace_ends(ends: Ends, with_mask: bool) -> TracedPass:
    def run(ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        n = ids.shape[1]
        mask = {"attention_mask": torch.ones(1, 1, n, n, dtype=torch.bool)} if with_mask else {}
        logits: torch.Tensor = ends.model(input_ids=ids, position_ids=positions, use_cache=False, **mask).logits
        return logits

    return _trace_parts(ends.model, ends.remote, run, ends.model.get_output_embeddings())


def _compare_with_rows(ends: Ends, line: TracedPass) -> None:
    """Raise RuntimeError where a line does not give the very numbers that rows of one token each get."""
    for n in CHECKED:
        ids, positions = _example_inputs(n)
        rows = torch.cat(ends.embed([[token] for token in ids[0].tolist()], positions[0].tolist()))[:, 0]
        entered = line.enter(ids, positions)[0]
        hidden = torch.randn(rows.shape, generator=torch.Generator().manual_seed(n)).to(rows)
        logits = line.compute(ids, positions, partial(_answer, hidden.unsqueeze(0)))[0]
        if not torch.equal(entered, rows) or not torch.equal(logits.float(), ends.logits(hidden, ends.arity)):
            raise RuntimeError("the line gives other numbers than rows of one token")


def _answer(hidden: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """What a swarm does that has answered already."""
    return hidden


def _make_hole(which: int) -> Call:
    return lambda hidden: torch.ops.swarmd_client.call(hidden, which)


def _trace_function(run: traced.Pass) -> tuple[traced.Pass, list[torch.Tensor]]:
    """Trace a function; returns the line and its constants. Raises RuntimeError where it gives other numbers."""
    two = traced.written_down(run, *_example_inputs(2))
    three = traced.written_down(run, *_example_inputs(3))
    for module in (two, three):
        module.graph.eliminate_dead_code()
    constants = [getattr(two, str(node.target)) for node in two.graph.nodes if node.op == "get_attr"]
    line = traced.capture(two, three, {torch.ops.swarmd_client.call.default: _call})
    for n in CHECKED:
        ids, positions = _example_inputs(n)
        if not torch.equal(run(ids, positions), line(ids, positions)):
            raise RuntimeError("the line gives other numbers")
    return line, constants


def _example_inputs(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and positions [1, n]; the positions go on from N_PAST."""
    ids = torch.arange(3, 3 + n).unsqueeze(0)
    positions = torch.arange(N_PAST, N_PAST + n).unsqueeze(0)
    return ids, positions
