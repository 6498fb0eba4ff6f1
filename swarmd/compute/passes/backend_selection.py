"""Choose the backends of a span that serves already, in small steps that its worker makes while nobody waits.

A span is online as soon as the family's own pass gives right results. What is faster comes afterwards:

    compiled code is there -> the fused kernel is right, on one block of each kind -> it is timed on a part of the span
      -> a traced pass is tried where the fused kernel is not much faster -> the other blocks are laid out, one by one
      -> the whole is compared once with the family's own pass -> sessions use it from their next step on

The worker may break a step off (``Preempted``, raised from within a pass) and repeat it later: a step changes nothing
before its end. Timings are remembered for this machine, and not taken again; right results are verified at each start.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import nn

from swarmd.compute.compiled.build import NotFused, compiled_folder
from swarmd.compute.hardware.measurements import Measurements
from swarmd.compute.passes import precompile
from swarmd.compute.passes.backend import MAX_CAPTURED, Backends, FusedBackend
from swarmd.compute.passes.backend_trial import Trial
from swarmd.compute.passes.fused import (
    TIMED,
    BlockLayout,
    FusedPass,
    FusedShape,
    assemble,
    common_format,
    format_of,
    lay_out,
)
from swarmd.compute.passes.ragged import RaggedAttention
from swarmd.compute.passes.traced import Pass
from swarmd.values import Span

logger = logging.getLogger(__name__)

MUCH = 0.6  # of the time of the pass itself: a traced pass takes two thirds of it or more
WORTH = 0.9  # of the time of other backends: servers on equal machines should choose alike
BETWEEN = 3  # tokens of a pass for which nothing was recorded: it takes what was for more
TRACER_ERRORS = (Exception,)  # a tracer, a recorder and a compiler fail in many ways, and all of them mean the same
FUSED_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.01}  # with 30 blocks half of it is seen


class Preempted(BaseException):
    """Raised by ``on_block`` in the midst of a step: somebody waits. No Exception, which tracers catch."""


@dataclass(frozen=True, slots=True)
class TrialSubject:
    """What is to become fast: the blocks of a span, hops of one block of each kind, and a part that no cache holds."""

    span: Span
    blocks: list[nn.Module]
    kinds: list[Span]
    sample: Span
    shape: FusedShape | None  # if a fused kernel may compute these blocks
    compute_dtype: torch.dtype
    tolerance: float  # relative, of a traced pass
    timing_key: tuple[object, ...]  # all that timings depend on, beside the machine
    on_block: Callable[[], None]
    record: Callable[[Pass], FusedBackend] | None = None  # on a card: a graph made of a traced pass
    trouble: str = ""  # why that cannot be


class BackendSelection:
    """The steps to faster backends: ``step()`` while ``has_steps``. Each has a name that says in words what it does."""

    def __init__(
        self, subject: TrialSubject, ragged: RaggedAttention, trial: Trial, cache_folder: Path, remembered: Measurements
    ) -> None:
        self.quick = Backends(ragged)
        self._subject = subject
        self._ragged = ragged
        self._trial = trial
        self._cache_folder = cache_folder
        self._remembered = remembered
        self._timing_key = (subject.timing_key, compiled_folder(cache_folder).name)
        self._steps: deque[tuple[str, Callable[[], None]]] = deque()
        self._layouts: dict[int, BlockLayout] = {}
        self._stored_in: torch.dtype | None = None
        self._findings: list[str] = []
        self._n_fused = 0
        self._may_fuse = True
        self._traced_sample: Pass | None = None
        if subject.shape is not None:
            self._add_step("looking at the weights", self._find_format)
        else:
            self._add_step("writing down a pass", self._capture_span)

    @property
    def has_steps(self) -> bool:
        """Is there anything left to try?"""
        return bool(self._steps)

    @property
    def needs_compiled(self) -> bool:
        """Has the next step to wait for compiled code?"""
        is_for_fused = self._subject.shape is not None and self._may_fuse
        return is_for_fused and self.has_steps and not precompile.is_compiled(self._cache_folder)

    def step(self) -> None:
        """Make the next step; if it raises Preempted, it is still the next one."""
        _, make = self._steps[0]
        try:
            make()
        except NotFused as error:
            self._steps.clear()
            self._give_up_fused(f"not one call: {error}")
        else:
            self._steps.popleft()

    def do_without_call(self, why: str) -> None:
        """Look for other backends, since nothing can be compiled here."""
        self._steps.clear()
        self._give_up_fused(f"not one call: {why}")

    def _add_step(self, stage: str, make: Callable[[], None]) -> None:
        self._steps.append((stage, make))

    def _give_up_fused(self, why: str) -> None:
        self._layouts.clear()
        self._n_fused = 0
        self._may_fuse = False
        self.quick.why = why
        if self.quick.captured is None:
            self._add_step("writing down a pass", self._capture_span)

    # --- a fused kernel ----------------------------------------------------------------------------------------------

    def _find_format(self) -> None:
        formats = []
        for block in self._subject.blocks:
            formats.append(format_of(block))
            self._subject.on_block()
        self._stored_in = common_format(formats)
        known = self._remembered.find("quick", self._timing_key)
        if known is not None:
            self._n_fused = int(known.get("n_fused", 0))
            self._findings = [str(known.get("why", ""))]
            if not self._n_fused:
                self._give_up_fused(f"{self._findings[0]} (remembered)")
                return
        for hop in self._subject.kinds:
            stage = f"comparing one call with the family's own pass in block {hop.start}"
            self._add_step(stage, partial(self._verify, hop))
            self._add_step(f"comparing one call far away in block {hop.start}", partial(self._verify_far, hop))
        if known is None:
            for n_tokens in TIMED:
                self._add_step(f"timing one call, {n_tokens} tokens", partial(self._time, n_tokens))
            self._add_step("choosing", self._choose)
        else:
            self._add_last_steps(needs_traced=self._n_fused < MAX_CAPTURED)

    def _fused_pass(self, hop: Span) -> FusedPass:
        """Make the fused kernel of some blocks."""
        shape = self._subject.shape
        stored_in = self._stored_in
        assert shape is not None
        assert stored_in is not None
        for block in hop.blocks():
            if block not in self._layouts:
                self._layouts[block] = lay_out(self._module(block), shape, stored_in)
        layouts = [self._layouts[block] for block in hop.blocks()]
        return assemble(shape, stored_in, layouts, self._cache_folder, self._subject.on_block)

    def _module(self, block: int) -> nn.Module:
        return self._subject.blocks[block - self._subject.span.start]

    def _verify(self, hop: Span) -> None:
        fused = self._fused_pass(hop)
        cache = self._trial.examples(1, 0, hop)[0].cache
        trouble = self._attention_trouble(fused.takes([cache]))
        if trouble:
            raise NotFused(trouble)
        self._refuse_wrong(self._trial.error(fused.run, hop))

    def _verify_far(self, hop: Span) -> None:
        fused = self._fused_pass(hop)
        self._refuse_wrong(self._trial.error(fused.run, hop, self._trial.far, (BETWEEN,)))

    def _refuse_wrong(self, error: float) -> None:
        if not error <= self._fused_tolerance:
            raise NotFused(f"it differs by {error:.2g}")

    @property
    def _fused_tolerance(self) -> float:
        return FUSED_TOLERANCE[self._subject.compute_dtype]

    def _attention_trouble(self, has_plain_caches: bool) -> str:
        """Say why these layers cannot be fused; empty where they can be."""
        if not has_plain_caches:
            return "its layers keep more than plain keys and values"
        return "" if self._ragged.is_plain else "its layers attend in a way of their own"

    def _time(self, n_tokens: int) -> None:
        """Take the fused kernel for so many tokens too, if it is worth it, and was for fewer."""
        index = TIMED.index(n_tokens)
        if index and self._n_fused < TIMED[index - 1]:
            return
        hop = self._subject.sample
        fused = self._fused_pass(hop)
        ratio = self._trial.seconds(fused.run, hop, n_tokens) / self._trial.pass_seconds(hop, n_tokens)
        finding = f"{ratio:.2f} for {n_tokens}"
        if MUCH < ratio <= WORTH and n_tokens <= MAX_CAPTURED:
            ratio = self._trial.seconds(fused.run, hop, n_tokens) / self._traced_seconds(hop, n_tokens)
            finding = f"{finding} ({ratio:.2f} of a straight line)"
        self._findings.append(finding)
        if not ratio <= WORTH:
            return
        # The steps before compared passes of up to MAX_CAPTURED tokens; longer ones are compared here.
        if n_tokens > MAX_CAPTURED:
            error = self._trial.error_of_several(fused.run, hop, n_tokens)
            if not error <= self._fused_tolerance:
                self._findings.append(f"for {n_tokens} it gives something else")
                return
        self._n_fused = n_tokens

    def _traced_seconds(self, hop: Span, n_tokens: int) -> float:
        """Measure the time of a traced pass through the sample; of the pass itself where it cannot be traced."""
        if self._traced_sample is None:
            try:
                self._traced_sample = self._capture(hop)
            except TRACER_ERRORS as failure:
                logger.info("passes are not captured: %s", failure)
                return self._trial.pass_seconds(hop, n_tokens)
        traced = self._traced_sample
        return self._trial.seconds(lambda pieces: self._ragged.run_captured(pieces, traced), hop, n_tokens)

    def _choose(self) -> None:
        why = f"time of one call against operators: {', '.join(self._findings)}"
        self._findings = [why]
        self._remembered.keep({"n_fused": self._n_fused, "why": why}, "quick", self._timing_key)
        if self._n_fused:
            self._add_last_steps(needs_traced=self._n_fused < MAX_CAPTURED)
        else:
            self._give_up_fused(why)

    def _add_last_steps(self, *, needs_traced: bool) -> None:
        for block in self._subject.span.blocks():
            stage = f"laying out block {block} of [{self._subject.span.start},{self._subject.span.end})"
            self._add_step(stage, partial(self._lay_out, block))
        self._add_step("comparing a whole pass", self._use_fused)
        if needs_traced:
            self._add_step("writing down a pass", self._capture_span)

    def _lay_out(self, block: int) -> None:
        self._fused_pass(Span(block, block + 1))

    def _use_fused(self) -> None:
        """Have sessions computed by the fused kernel, if a pass through the span gives the same."""
        span = self._subject.span
        fused = self._fused_pass(span)
        self._refuse_wrong(self._trial.error(fused.run, span, checked=(1,)))
        self.quick.fused = fused
        self.quick.n_fused = self._n_fused
        self.quick.why = self._findings[0]
        self._layouts.clear()  # the pass has them

    # --- a traced pass -----------------------------------------------------------------------------------------------

    def _capture(self, hop: Span) -> Pass:
        """Trace a pass. Raises what a tracer does where it cannot."""
        two = self._trial.examples(2, 0, hop)
        three = self._trial.examples(3, 0, hop)
        return self._ragged.capture(two, three, lambda hidden, positions: self._trial.forward(hidden, positions, hop))

    def _capture_span(self) -> None:
        """Have sessions computed by a traced pass, if that gives what the pass itself gives."""
        span = self._subject.span
        try:
            captured = self._capture(span)
            error = self._trial.error(lambda pieces: self._ragged.run_captured(pieces, captured), span, 0, (1, BETWEEN))
        except TRACER_ERRORS as failure:
            logger.info("passes are not captured: %s", failure)
        else:
            if error <= self._subject.tolerance:
                self.quick.captured = captured
            else:
                logger.info("passes are not captured: a captured pass differs by %.2g", error)
        if self._subject.record is not None:
            self._add_step("recording a pass", self._record)

    # --- on a card ---------------------------------------------------------------------------------------------------

    def _record(self) -> None:
        """Record the traced pass as a graph, where there is one and nothing is known that prevents it."""
        quick = self.quick
        trial = self._trial
        span = self._subject.span
        cache = trial.examples(1, 0, span)[0].cache
        trouble = self._subject.trouble or self._attention_trouble(cache.is_plain and not cache.is_rounded)
        if trouble or quick.captured is None:
            quick.why = f"no one call: {trouble or 'passes are not captured'}"
            return
        assert self._subject.record is not None
        try:
            graph = self._subject.record(quick.captured)
            checked = (*graph.timed, BETWEEN)
            near_error = trial.error(graph.run, span, 0, checked)
            error = max(near_error, trial.error(graph.run, span, trial.far))
            if error <= self._fused_tolerance:
                self._take_recorded(graph)
            else:
                quick.why = f"one call: it differs by {error:.2g}"
        except torch.AcceleratorError:
            raise  # nothing will be computed by this process any more
        except TRACER_ERRORS as failure:
            logger.info("passes are not recorded: %s", failure)
            quick.why = f"no one call: {str(failure)[:200]}"

    def _take_recorded(self, graph: FusedBackend) -> None:
        """Take what was recorded for as many tokens as it is worth."""
        span = self._subject.span
        traced = self.quick.captured
        assert traced is not None
        for n_tokens in graph.timed:
            if n_tokens <= MAX_CAPTURED:
                next_best_s = self._trial.seconds(
                    lambda pieces: self._ragged.run_captured(pieces, traced), span, n_tokens
                )
            else:
                next_best_s = self._trial.pass_seconds(span, n_tokens)
            ratio = self._trial.seconds(graph.run, span, n_tokens) / next_best_s
            self._findings.append(f"{ratio:.2f} for {n_tokens}")
            if ratio > WORTH:
                break
            if n_tokens > MAX_CAPTURED:
                error = self._trial.error_of_several(graph.run, span, n_tokens)
                if not error <= self._fused_tolerance:
                    self._findings.append(f"for {n_tokens} it gives something else")
                    break
            self.quick.fused = graph
            self.quick.n_fused = n_tokens
        self.quick.why = f"time of one call against operators: {', '.join(self._findings)}"
