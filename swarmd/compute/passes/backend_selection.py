"""Find the quick ways of a span that serves already, in small steps that its worker makes while nobody waits.

A span is online as soon as the family's own pass gives right results. What is faster comes afterwards:

    compiled code is there -> one call is right, on one block of each kind -> it is timed on a part of the span
      -> a straight line is tried where one call is not much faster -> the other blocks are laid out, one by one
      -> the whole is compared once with the family's own pass -> sessions use it from their next step on

Whoever makes the steps may break one off (``Preempted``, raised from within a pass) and repeat it later: a step changes
nothing before its end. What was timed is remembered for this machine, and not timed again; what is right is verified at
each start.
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

MUCH = 0.6  # of the time of the pass itself: a straight line takes two thirds of it or more
WORTH = 0.9  # of the time of other ways: servers on equal machines should choose alike
BETWEEN = 3  # tokens of a pass for which nothing was recorded: it takes what was for more
TRACER_ERRORS = (Exception,)  # a tracer, a recorder and a compiler fail in many ways, and all of them mean the same
FUSED_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 0.01}  # with 30 blocks half of it is seen


class Preempted(BaseException):
    """Raised by ``on_block`` in the midst of a step: somebody waits. No Exception, which tracers catch."""


@dataclass(frozen=True, slots=True)
class TrialSubject:
    """What is to become quick: the blocks of a span, hops of one block of each kind, and a part that no cache holds."""

    span: Span
    blocks: list[nn.Module]
    kinds: list[Span]
    sample: Span
    shape: FusedShape | None  # if one call may compute these blocks
    computes_in: torch.dtype
    tolerance: float  # relative, of a straight line
    about: tuple[object, ...]  # all that timings depend on, beside the machine
    on_block: Callable[[], None]
    record: Callable[[Pass], FusedBackend] | None = None  # on a card: one call made of a straight line
    trouble: str = ""  # why that cannot be


class BackendSelection:
    """The steps to quick ways: ``step()`` while ``has_steps``. Each has a name that says in words what it does."""

    def __init__(
        self, subject: TrialSubject, ragged: RaggedAttention, trial: Trial, cache_folder: Path, remembered: Measurements
    ) -> None:
        self.quick = Backends(ragged)
        self._subject, self._ragged, self._trial = subject, ragged, trial
        self._cache_folder, self._remembered = cache_folder, remembered
        self._about = (subject.about, compiled_folder(cache_folder).name)
        self._steps: deque[tuple[str, Callable[[], None]]] = deque()
        self._laid_out: dict[int, BlockLayout] = {}
        self._stored_in: torch.dtype | None = None
        self._told: list[str] = []
        self._n_fused = 0
        self._may_call = True
        self._sample_line: Pass | None = None
        if subject.shape is not None:
            self._then("looking at the weights", self._find_format)
        else:
            self._then("writing down a pass", self._capture_whole)

    @property
    def has_steps(self) -> bool:
        return bool(self._steps)

    @property
    def needs_compiled(self) -> bool:
        """Has the next step to wait for compiled code?"""
        is_for_call = self._subject.shape is not None and self._may_call
        return is_for_call and self.has_steps and not precompile.is_compiled(self._cache_folder)

    def step(self) -> None:
        """Make the next step; if it raises Preempted, it is still the next one."""
        _, make = self._steps[0]
        try:
            make()
        except NotFused as error:
            self._steps.clear()
            self._give_up_call(f"not one call: {error}")
        else:
            self._steps.popleft()

    def do_without_call(self, why: str) -> None:
        """Nothing can be compiled here: look for other ways."""
        self._steps.clear()
        self._give_up_call(f"not one call: {why}")

    def _then(self, stage: str, make: Callable[[], None]) -> None:
        self._steps.append((stage, make))

    def _give_up_call(self, why: str) -> None:
        self._laid_out.clear()
        self._n_fused, self._may_call, self.quick.why = 0, False, why
        if self.quick.captured is None:
            self._then("writing down a pass", self._capture_whole)

    # --- one call ----------------------------------------------------------------------------------------------------

    def _find_format(self) -> None:
        formats = []
        for block in self._subject.blocks:
            formats.append(format_of(block))
            self._subject.on_block()
        self._stored_in = common_format(formats)
        if (known := self._remembered.find("quick", self._about)) is not None:
            self._n_fused = int(known.get("n_fused", 0))
            self._told = [str(known.get("why", ""))]
            if not self._n_fused:
                self._give_up_call(f"{self._told[0]} (remembered)")
                return
        for hop in self._subject.kinds:
            self._then(
                f"comparing one call with the family's own pass in block {hop.start}", partial(self._verify, hop)
            )
            self._then(f"comparing one call far away in block {hop.start}", partial(self._verify_far, hop))
        if known is None:
            for n_tokens in TIMED:
                self._then(f"timing one call, {n_tokens} tokens", partial(self._time, n_tokens))
            self._then("choosing", self._choose)
        else:
            self._finish_call(needs_line=self._n_fused < MAX_CAPTURED)

    def _part(self, hop: Span) -> FusedPass:
        """One call for some blocks."""
        shape, stored_in = self._subject.shape, self._stored_in
        assert shape is not None
        assert stored_in is not None
        for block in hop.blocks():
            if block not in self._laid_out:
                self._laid_out[block] = lay_out(self._module(block), shape, stored_in)
        rows = [self._laid_out[block] for block in hop.blocks()]
        return assemble(shape, stored_in, rows, self._cache_folder, self._subject.on_block)

    def _module(self, block: int) -> nn.Module:
        return self._subject.blocks[block - self._subject.span.start]

    def _verify(self, hop: Span) -> None:
        part = self._part(hop)
        cache = self._trial.examples(1, 0, hop)[0].cache
        if trouble := self._in_the_way(part.takes([cache])):
            raise NotFused(trouble)
        self._refuse_wrong(self._trial.error(part.run, hop))

    def _verify_far(self, hop: Span) -> None:
        self._refuse_wrong(self._trial.error(self._part(hop).run, hop, self._trial.far, (BETWEEN,)))

    def _refuse_wrong(self, error: float) -> None:
        if not error <= self._fused_tolerance:
            raise NotFused(f"it differs by {error:.2g}")

    @property
    def _fused_tolerance(self) -> float:
        return FUSED_TOLERANCE[self._subject.computes_in]

    def _in_the_way(self, is_kept_so: bool) -> str:
        """Why these layers are not for one call; empty where they can be."""
        if not is_kept_so:
            return "its layers keep more than plain keys and values"
        return "" if self._ragged.is_plain else "its layers attend in a way of their own"

    def _time(self, n_tokens: int) -> None:
        """Take one call for so many tokens too, if it is worth it, and was for fewer."""
        index = TIMED.index(n_tokens)
        if index and self._n_fused < TIMED[index - 1]:
            return
        hop = self._subject.sample
        part = self._part(hop)
        ratio = self._trial.seconds(part.run, hop, n_tokens) / self._trial.pass_seconds(hop, n_tokens)
        told, is_worth_it = f"{ratio:.2f} for {n_tokens}", ratio <= WORTH
        if is_worth_it and ratio > MUCH and n_tokens <= MAX_CAPTURED:
            ratio = self._trial.seconds(part.run, hop, n_tokens) / self._line_seconds(hop, n_tokens)
            told, is_worth_it = f"{told} ({ratio:.2f} of a straight line)", ratio <= WORTH
        if not is_worth_it:
            self._told.append(told)
        elif n_tokens > MAX_CAPTURED and not (
            self._trial.error_of_several(part.run, hop, n_tokens) <= self._fused_tolerance
        ):
            self._told += [told, f"for {n_tokens} it gives something else"]
        else:
            self._told.append(told)
            self._n_fused = n_tokens

    def _line_seconds(self, hop: Span, n_tokens: int) -> float:
        """The time of a pass by a straight line through the sample; that of the pass itself where there is none."""
        if self._sample_line is None:
            try:
                self._sample_line = self._capture(hop)
            except TRACER_ERRORS as failure:
                logger.info("passes are not captured: %s", failure)
                return self._trial.pass_seconds(hop, n_tokens)
        line = self._sample_line
        return self._trial.seconds(lambda pieces: self._ragged.run_captured(pieces, line), hop, n_tokens)

    def _choose(self) -> None:
        why = f"time of one call against operators: {', '.join(self._told)}"
        self._told = [why]
        self._remembered.keep({"n_fused": self._n_fused, "why": why}, "quick", self._about)
        if self._n_fused:
            self._finish_call(needs_line=self._n_fused < MAX_CAPTURED)
        else:
            self._give_up_call(why)

    def _finish_call(self, *, needs_line: bool) -> None:
        for block in self._subject.span.blocks():
            stage = f"laying out block {block} of [{self._subject.span.start},{self._subject.span.end})"
            self._then(stage, partial(self._lay_out, block))
        self._then("comparing a whole pass", self._use_call)
        if needs_line:
            self._then("writing down a pass", self._capture_whole)

    def _lay_out(self, block: int) -> None:
        self._part(Span(block, block + 1))

    def _use_call(self) -> None:
        """Have sessions computed by one call, if a whole pass gives the same."""
        span = self._subject.span
        whole = self._part(span)
        self._refuse_wrong(self._trial.error(whole.run, span, checked=(1,)))
        self.quick.fused, self.quick.n_fused, self.quick.why = whole, self._n_fused, self._told[0]
        self._laid_out.clear()  # the pass has them

    # --- a straight line ---------------------------------------------------------------------------------------------

    def _capture(self, hop: Span) -> Pass:
        """Write a pass down as a straight line. Raises what a tracer does where it cannot."""
        two, three = self._trial.examples(2, 0, hop), self._trial.examples(3, 0, hop)
        return self._ragged.capture(two, three, lambda hidden, positions: self._trial.forward(hidden, positions, hop))

    def _capture_whole(self) -> None:
        """Have sessions computed by a straight line, if that gives what the pass itself gives."""
        span, tolerance = self._subject.span, self._subject.tolerance
        try:
            captured = self._capture(span)
            error = self._trial.error(lambda pieces: self._ragged.run_captured(pieces, captured), span, 0, (1, BETWEEN))
        except TRACER_ERRORS as failure:
            logger.info("passes are not captured: %s", failure)
        else:
            if error <= tolerance:
                self.quick.captured = captured
            else:
                logger.info("passes are not captured: a captured pass differs by %.2g", error)
        if self._subject.record is not None:
            self._then("recording a pass", self._record)

    # --- on a card ---------------------------------------------------------------------------------------------------

    def _record(self) -> None:
        """Have one call made of the straight line, where there is one and nothing is known that is in the way."""
        quick, trial, span = self.quick, self._trial, self._subject.span
        cache = trial.examples(1, 0, span)[0].cache
        trouble = self._subject.trouble or self._in_the_way(cache.is_plain and not cache.is_rounded)
        if trouble or quick.captured is None:
            quick.why = f"no one call: {trouble or 'passes are not captured'}"
            return
        assert self._subject.record is not None
        try:
            made = self._subject.record(quick.captured)
            checked = (*made.timed, BETWEEN)
            error = max(trial.error(made.run, span, 0, checked), trial.error(made.run, span, trial.far))
            if error <= self._fused_tolerance:
                self._take_recorded(made)
            else:
                quick.why = f"one call: it differs by {error:.2g}"
        except torch.AcceleratorError:
            raise  # nothing will be computed by this process any more
        except TRACER_ERRORS as failure:
            logger.info("passes are not recorded: %s", failure)
            quick.why = f"no one call: {str(failure)[:200]}"

    def _take_recorded(self, made: FusedBackend) -> None:
        """Take what was recorded for as many tokens as it is worth."""
        span, line = self._subject.span, self.quick.captured
        assert line is not None
        for n_tokens in made.timed:
            if n_tokens <= MAX_CAPTURED:
                other_s = self._trial.seconds(lambda pieces: self._ragged.run_captured(pieces, line), span, n_tokens)
            else:
                other_s = self._trial.pass_seconds(span, n_tokens)
            ratio = self._trial.seconds(made.run, span, n_tokens) / other_s
            self._told.append(f"{ratio:.2f} for {n_tokens}")
            if ratio > WORTH:
                break
            if n_tokens > MAX_CAPTURED:
                error = self._trial.error_of_several(made.run, span, n_tokens)
                if not error <= self._fused_tolerance:
                    self._told.append(f"for {n_tokens} it gives something else")
                    break
            self.quick.fused, self.quick.n_fused = made, n_tokens
        self.quick.why = f"time of one call against operators: {', '.join(self._told)}"
