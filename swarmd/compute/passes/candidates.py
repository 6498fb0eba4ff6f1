"""The candidates among execution backends: how each is built for some blocks, and what it has to show before its use.

To add a backend, write its class with the face of ``backend.Backend``, a candidate here that builds it, and a line in
``all_candidates``. ``backend_selection`` does the rest: it makes small steps of what a plan asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from swarmd.compute.compiled.build import NotFused, compiled_folder
from swarmd.compute.cuda.availability import trouble
from swarmd.compute.passes import precompile
from swarmd.compute.passes.backend import MAX_TRACED_TOKENS, Backend, BackendTable, TracedBackend
from swarmd.compute.passes.backend_trial import CHECKED, Trial
from swarmd.compute.passes.fused import TIMED, BlockLayout, FusedShape, assemble, common_format, format_of, lay_out
from swarmd.compute.passes.ragged import RaggedAttention
from swarmd.values import Span

if TYPE_CHECKING:
    from swarmd.compute.passes.graphs import GraphedPass

BETWEEN = 3  # tokens of a pass for which nothing was recorded: it takes what was for more
MUCH = 0.6  # of the time of the pass itself: a traced pass takes two thirds of it or more
FUSED_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.01}  # with 30 blocks half of it is seen
TRACER_ERRORS: tuple[type[Exception], ...] = (Exception,)  # a tracer, a recorder: many ways to fail, one meaning
MORE_IS_KEPT = "its layers keep more than plain keys and values"


@dataclass(frozen=True, slots=True)
class TrialSubject:
    """What is to become fast: the blocks of a span, hops of one block of each kind, and a part that no cache holds."""

    span: Span
    blocks: Sequence[nn.Module]
    kinds: Sequence[Span]
    sample: Span
    ragged: RaggedAttention
    shape: FusedShape | None  # if a fused kernel may compute these blocks
    device: torch.device
    compute_dtype: torch.dtype
    traced_tolerance: float
    timing_key: tuple[object, ...]  # all that timings depend on, beside the machine
    cache_folder: Path
    on_block: Callable[[], None]


@dataclass(frozen=True, slots=True)
class BackendCheck:
    """Passes of these sizes through a hop that have to give what the family's own pass gives."""

    stage: str
    hop: Span
    sizes: Sequence[int] = CHECKED
    is_far: bool = False  # at the last positions that the model knows, not at the first


@dataclass(frozen=True, slots=True)
class TrialPlan:
    """What a candidate has to show, in this order.

    It is checked on parts of the span; timed in ``timed_hop`` against the family's own pass, size after size (None: it
    is taken without), and where it is not much faster against ``rival``; built for the whole span, in ``parts`` first;
    and checked there.
    """

    tolerance: float  # relative
    sizes: Sequence[int]  # new tokens of passes, ascending; it is taken for no more than the last
    checks: Sequence[BackendCheck] = ()
    timed_hop: Span | None = None
    rival: Candidate | None = None
    rival_from: float = 0.0  # of the pass's time: from there on the rival is timed too
    remembered_as: tuple[object, ...] | None = None  # what timings depend on; None: they are not remembered
    parts: Sequence[Span] = ()
    final_sizes: Sequence[int] = ()


class Candidate(Protocol):
    """A backend that is not known yet to be right and fast for these blocks."""

    @property
    def name(self) -> str:
        """What it is called in reasons."""

    @property
    def is_told(self) -> bool:
        """Do operators read of it?"""

    @property
    def stage(self) -> str:
        """What ``prepare`` does, for those who read steps."""

    @property
    def errors(self) -> tuple[type[Exception], ...]:
        """What it raises where it cannot be built."""

    @property
    def is_compiled(self) -> bool:
        """Is all the code there that it needs?"""

    def is_wanted(self, table: BackendTable) -> bool:
        """Can it be of use beside what the table has?"""

    def prepare(self, table: BackendTable) -> TrialPlan:
        """Look at the blocks, and say what is to be shown. Raises one of ``errors`` where it cannot be built."""

    def build(self, hop: Span) -> Backend:
        """Build it for some blocks; what takes long is done once. Raises one of ``errors`` where it cannot be."""


class FusedCandidate:
    """Blocks of the usual kind in one compiled function (``fused``). Weights are laid out anew, block by block."""

    name = "one call"
    is_told = True
    stage = "looking at the weights"
    errors = (NotFused,)

    def __init__(self, subject: TrialSubject, trial: Trial, traced: Candidate) -> None:
        self._subject = subject
        self._trial = trial
        self._traced = traced
        self._stored_in: torch.dtype | None = None
        self._layouts: dict[int, BlockLayout] = {}

    @property
    def is_compiled(self) -> bool:
        """Is its function on disk?"""
        return precompile.is_compiled(self._subject.cache_folder)

    def is_wanted(self, table: BackendTable) -> bool:
        """Are the blocks of the usual kind?"""
        return self._subject.shape is not None

    def prepare(self, table: BackendTable) -> TrialPlan:
        """Find what all weights can be kept in. Raises NotFused."""
        subject = self._subject
        formats = []
        for block in subject.blocks:
            formats.append(format_of(block))
            subject.on_block()
        self._stored_in = common_format(formats)
        cache = self._trial.examples(1, 0, subject.sample)[0].cache
        if reason := _attention_trouble(subject.ragged, has_plain_caches=cache.is_plain):
            raise NotFused(reason)
        checks = []
        for hop in subject.kinds:
            checks.append(BackendCheck(f"comparing one call with the family's own pass in block {hop.start}", hop))
            far = BackendCheck(f"comparing one call far away in block {hop.start}", hop, (BETWEEN,), is_far=True)
            checks.append(far)
        return TrialPlan(
            tolerance=FUSED_TOLERANCE[subject.compute_dtype],
            sizes=TIMED,
            checks=checks,
            timed_hop=subject.sample,
            rival=self._traced,
            rival_from=MUCH,
            remembered_as=(subject.timing_key, compiled_folder(subject.cache_folder).name),
            parts=[Span(block, block + 1) for block in subject.span.blocks()],
            final_sizes=(1,),
        )

    def build(self, hop: Span) -> Backend:
        """Lay out what is not laid out yet. Raises NotFused."""
        subject = self._subject
        stored_in = self._stored_in
        assert subject.shape is not None
        assert stored_in is not None
        for block in hop.blocks():
            if block not in self._layouts:
                module = subject.blocks[block - subject.span.start]
                self._layouts[block] = lay_out(module, subject.shape, stored_in)
        layouts = [self._layouts[block] for block in hop.blocks()]
        return assemble(subject.shape, stored_in, layouts, subject.cache_folder, subject.on_block)


class TracedCandidate:
    """The operators of a pass without their modules (``traced``); never timed, since it leaves out work only."""

    name = "a traced pass"
    is_told = False
    stage = "writing down a pass"
    errors = TRACER_ERRORS
    is_compiled = True

    def __init__(self, subject: TrialSubject, trial: Trial) -> None:
        self._subject = subject
        self._trial = trial
        self._built: dict[Span, TracedBackend] = {}

    def is_wanted(self, table: BackendTable) -> bool:
        """Is there nothing faster for as many tokens as it is good for?"""
        return max((row.most_tokens for row in table.rows), default=0) < MAX_TRACED_TOKENS

    def prepare(self, table: BackendTable) -> TrialPlan:
        """Trace a pass through the span. Raises what a tracer does where it cannot."""
        span = self._subject.span
        self.build(span)
        return TrialPlan(
            tolerance=self._subject.traced_tolerance,
            sizes=(MAX_TRACED_TOKENS,),
            final_sizes=(1, BETWEEN),
        )

    def build(self, hop: Span) -> TracedBackend:
        """Trace a pass. Raises what a tracer does where it cannot."""
        if hop not in self._built:
            two = self._trial.examples(2, 0, hop)
            three = self._trial.examples(3, 0, hop)
            ragged = self._subject.ragged
            reference = self._trial.reference(hop)

            def forward(hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:  # tracers take no methods
                return reference.forward(hidden, positions)

            self._built[hop] = TracedBackend(ragged, ragged.trace(two, three, forward))
        return self._built[hop]


class GraphCandidate:
    """A traced pass as a CUDA graph (``graphs``)."""

    name = "a CUDA graph"
    is_told = True
    stage = "recording a pass"
    errors = TRACER_ERRORS
    is_compiled = True

    def __init__(self, subject: TrialSubject, trial: Trial, traced: TracedCandidate) -> None:
        self._subject = subject
        self._trial = trial
        self._traced = traced
        self._built: dict[Span, GraphedPass] = {}

    def is_wanted(self, table: BackendTable) -> bool:
        """Are the blocks on a card?"""
        return self._subject.device.type == "cuda"

    def prepare(self, table: BackendTable) -> TrialPlan:
        """Record a pass, where there is a traced one and nothing is known that prevents it. Raises as ``build``."""
        span = self._subject.span
        cache = self._trial.examples(1, 0, span)[0].cache
        has_plain_caches = cache.is_plain and not cache.is_rounded
        reason = trouble(self._subject.device) or _attention_trouble(self._subject.ragged, has_plain_caches)
        if reason:
            raise RuntimeError(reason)
        if not any(isinstance(row.backend, TracedBackend) for row in table.rows):
            raise RuntimeError("passes are not captured")
        sizes = self.build(span).sizes
        stage = "comparing a recorded pass"
        return TrialPlan(
            tolerance=FUSED_TOLERANCE[self._subject.compute_dtype],
            sizes=sizes,
            checks=[BackendCheck(stage, span, (*sizes, BETWEEN)), BackendCheck(f"{stage} far away", span, is_far=True)],
            timed_hop=span,
            rival=self._traced,
        )

    def build(self, hop: Span) -> GraphedPass:
        """Record a pass. Raises RuntimeError and others where it cannot."""
        from swarmd.compute.passes.graphs import GraphedPass  # late: Triton comes with torch where CUDA does

        if hop not in self._built:
            traced = self._traced.build(hop).traced
            example = self._trial.examples(1, 0, hop)[0]
            self._built[hop] = GraphedPass(self._subject.ragged, traced, example, self._subject.on_block)
        return self._built[hop]


def all_candidates(subject: TrialSubject, trial: Trial) -> list[Candidate]:
    """List the candidates in the order in which they are tried."""
    traced = TracedCandidate(subject, trial)
    return [
        FusedCandidate(subject, trial, traced),
        traced,
        GraphCandidate(subject, trial, traced),
    ]


def _attention_trouble(ragged: RaggedAttention, has_plain_caches: bool) -> str:
    """Say why attention cannot be computed without the family's layers; empty where it can."""
    if not has_plain_caches:
        return MORE_IS_KEPT
    return "" if ragged.is_plain else "its layers attend in a way of their own"
