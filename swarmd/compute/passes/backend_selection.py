"""Choose the backends of a span that serves already, in small steps that its worker makes while nobody waits.

A span is online as soon as the family's own pass gives right results. What is faster comes afterwards, one candidate
after the other (``candidates``), each by the same steps:

    prepare -> compared with the family's own pass, on parts of the span -> timed there, size after size -> chosen
      -> the other blocks are built, one by one -> the whole is compared once -> a row of the table: sessions use it
      from their next step on

The worker may break a step off (``Preempted``, raised from within a pass) and repeat it later: a step changes nothing
before its end. Timings are remembered for this machine, and not taken again; right results are verified at each start.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.cache.span_cache import SpanCache
from swarmd.compute.hardware.measurements import Measurements
from swarmd.compute.model.skeleton import text_config
from swarmd.compute.passes.backend import MAX_TRACED_TOKENS, BackendTable, RaggedBackend, TableRow
from swarmd.compute.passes.backend_trial import Trial
from swarmd.compute.passes.candidates import (
    MORE_IS_KEPT,
    BackendCheck,
    Candidate,
    TrialPlan,
    TrialSubject,
    all_candidates,
)
from swarmd.compute.passes.span import SELF_TEST_TOLERANCE, LoadedSpan
from swarmd.protocol.models.model_layout import EACH_LAYER
from swarmd.values import Span

logger = logging.getLogger(__name__)

WORTH = 0.9  # of the time of other backends: servers on equal machines should choose alike


class CandidateRejected(Exception):
    """Why a candidate is not taken: it gives something else, or takes longer."""


class CandidateTrial:
    """The steps by which one candidate becomes a row of the table, or is rejected. Each has a name in words.

    A rejection is raised: CandidateRejected, or one of the candidate's ``errors``.
    """

    def __init__(
        self,
        candidate: Candidate,
        trial: Trial,
        table: BackendTable,
        remembered: Measurements,
    ) -> None:
        self.candidate = candidate
        self.steps: deque[tuple[str, Callable[[], None]]] = deque([(candidate.stage, self._prepare)])
        self._trial = trial
        self._table = table
        self._remembered = remembered
        self._plan: TrialPlan
        self._most_tokens = 0
        self._findings: list[str] = []
        self._reason = ""

    def make_step(self) -> None:
        """Make the next step; if it raises, it is still the next one."""
        _, make = self.steps[0]
        make()
        self.steps.popleft()

    def _prepare(self) -> None:
        plan = self.candidate.prepare(self._table)
        key = plan.remembered_as
        known = self._remembered.find("backend", self.candidate.name, key) if key is not None else None
        if known is not None:
            self._most_tokens = int(known.get("most_tokens", 0))
            self._reason = str(known.get("reason", ""))
            if not self._most_tokens:
                raise CandidateRejected(f"{self._reason} (remembered)")
        self._plan = plan
        for check in plan.checks:
            self.steps.append((check.stage, partial(self._check, check)))
        if known is None and plan.timed_hop is not None:
            for n_tokens in plan.sizes:
                stage = f"timing {self.candidate.name}, {n_tokens} tokens"
                self.steps.append((stage, partial(self._time, plan.timed_hop, n_tokens)))
            self.steps.append(("choosing", self._choose))
        else:
            self._most_tokens = self._most_tokens or plan.sizes[-1]
            self._add_last_steps()

    def _check(self, check: BackendCheck) -> None:
        """Compare with the family's own pass."""
        backend = self.candidate.build(check.hop)
        if not backend.supports([self._trial.examples(1, 0, check.hop)[0].cache]):
            raise CandidateRejected(f"not {self.candidate.name}: {MORE_IS_KEPT}")
        position = self._trial.far if check.is_far else 0
        error = self._trial.error(backend.run, check.hop, position, check.sizes)
        if not error <= self._plan.tolerance:
            raise CandidateRejected(f"not {self.candidate.name}: it differs by {error:.2g}")

    def _time(self, hop: Span, n_tokens: int) -> None:
        """Take the candidate for so many tokens too, if it is worth it, and was for fewer."""
        sizes = self._plan.sizes
        index = sizes.index(n_tokens)
        if index and self._most_tokens < sizes[index - 1]:
            return
        trial = self._trial
        backend = self.candidate.build(hop)
        ratio = trial.seconds(backend.run, hop, n_tokens) / trial.pass_seconds(hop, n_tokens)
        finding = f"{ratio:.2f} for {n_tokens}"
        if self._plan.rival is not None and self._plan.rival_from < ratio <= WORTH and n_tokens <= MAX_TRACED_TOKENS:
            ratio = trial.seconds(backend.run, hop, n_tokens) / self._rival_seconds(hop, n_tokens)
            finding = f"{finding} ({ratio:.2f} of a straight line)"
        self._findings.append(finding)
        if not ratio <= WORTH:
            return
        # The steps before compared passes of up to MAX_TRACED_TOKENS tokens; longer ones are compared here.
        if n_tokens > MAX_TRACED_TOKENS:
            error = trial.error_of_several(backend.run, hop, n_tokens)
            if not error <= self._plan.tolerance:
                self._findings.append(f"for {n_tokens} it gives something else")
                return
        self._most_tokens = n_tokens

    def _rival_seconds(self, hop: Span, n_tokens: int) -> float:
        """Measure the time of a traced pass through the same blocks; of the pass itself where it cannot be traced."""
        rival = self._plan.rival
        assert rival is not None
        try:
            backend = rival.build(hop)
        except rival.errors as failure:
            logger.info("%s cannot be timed: %s", rival.name, failure)
            return self._trial.pass_seconds(hop, n_tokens)
        return self._trial.seconds(backend.run, hop, n_tokens)

    def _choose(self) -> None:
        self._reason = f"time of {self.candidate.name} against operators: {', '.join(self._findings)}"
        if self._plan.remembered_as is not None:
            result = {"most_tokens": self._most_tokens, "reason": self._reason}
            self._remembered.keep(result, "backend", self.candidate.name, self._plan.remembered_as)
        if not self._most_tokens:
            raise CandidateRejected(self._reason)
        self._add_last_steps()

    def _add_last_steps(self) -> None:
        hop = self._table.hop
        for part in self._plan.parts:
            stage = f"laying out block {part.start} of {hop}"
            self.steps.append((stage, partial(self._build, part)))
        self.steps.append(("comparing a whole pass", self._take))

    def _build(self, hop: Span) -> None:
        self.candidate.build(hop)

    def _take(self) -> None:
        """Have sessions computed by it, if a pass through the whole gives the same."""
        hop = self._table.hop
        if self._plan.final_sizes:
            self._check(BackendCheck("", hop, self._plan.final_sizes))
        backend = self.candidate.build(hop)
        name = self.candidate.name if self.candidate.is_told else ""
        row = TableRow(self._most_tokens, backend, name)
        if self._plan.timed_hop == hop:  # it was timed beside what the table has
            self._table.rows.insert(0, row)
        else:
            self._table.rows.append(row)
        self._tell(self._reason)

    def reject(self, reason: str) -> None:
        """Note why it is not taken."""
        logger.info("%s is not taken: %s", self.candidate.name, reason)
        self._tell(reason)

    def _tell(self, reason: str) -> None:
        if self.candidate.is_told:
            self._table.reason = reason


class BackendSelection:
    """The steps to faster backends: ``step()`` while ``has_steps``. They fill ``table``."""

    def __init__(
        self, candidates: Sequence[Candidate], trial: Trial, table: BackendTable, remembered: Measurements
    ) -> None:
        self.table = table
        self._trial = trial
        self._remembered = remembered
        self._waiting = deque(candidates)
        self._current: CandidateTrial | None = None
        self._begin_next()

    @property
    def has_steps(self) -> bool:
        """Is there anything left to try?"""
        return self._current is not None

    @property
    def stage(self) -> str:
        """What the next step does."""
        return self._current.steps[0][0] if self._current is not None else ""

    @property
    def needs_compiled(self) -> bool:
        """Has the next step to wait for compiled code?"""
        return self._current is not None and not self._current.candidate.is_compiled

    def step(self) -> None:
        """Make the next step; if it raises Preempted, it is still the next one."""
        current = self._current
        assert current is not None
        try:
            current.make_step()
        except torch.AcceleratorError:
            raise  # nothing will be computed by this process any more
        except CandidateRejected as rejection:
            self._reject(str(rejection))
        except current.candidate.errors as failure:
            self._reject(f"not {current.candidate.name}: {str(failure)[:200]}")
        else:
            if not current.steps:
                self._begin_next()

    def go_without_compiled(self, why: str) -> None:
        """Look for other backends, since nothing can be compiled here."""
        if self._current is not None:
            self._reject(f"not {self._current.candidate.name}: {why}")

    def _reject(self, reason: str) -> None:
        assert self._current is not None
        self._current.reject(reason)
        self._begin_next()

    def _begin_next(self) -> None:
        """Go on with the next candidate that can be of use; what the one before has laid out is given back."""
        self._current = None
        while self._waiting and self._current is None:
            candidate = self._waiting.popleft()
            if candidate.is_wanted(self.table):
                self._current = CandidateTrial(candidate, self._trial, self.table, self._remembered)


def begin_selection(span: LoadedSpan) -> BackendSelection | None:
    """Choose backends for passes through a whole span, from the beginning.

    None where sessions are computed alone, or blocks are not of one layer that takes hidden states.
    """
    ragged = span.ragged
    if ragged is None or span.family.layout != EACH_LAYER:
        return None
    span.forget_backends()
    compute_dtype = torch.bfloat16 if span.options.is_rounded else span.dtype
    subject = TrialSubject(
        span=span.span,
        blocks=span.blocks,
        kinds=span.family.kinds,
        sample=span.sample,
        ragged=ragged,
        shape=span.layers.shape,
        device=span.device,
        compute_dtype=compute_dtype,
        traced_tolerance=SELF_TEST_TOLERANCE[compute_dtype],
        timing_key=(*span.timing_key, span.layers.kernels.action, len(span.sample)),
        cache_folder=span.options.cache_folder,
        on_block=lambda: span.on_block(),  # looked up each time, so that it can be replaced
    )
    n_positions = getattr(text_config(span.model.config), "max_position_embeddings", None)
    trial = Trial(partial(RaggedBackend, span.family, ragged), _Examples(span), n_positions)
    return BackendSelection(all_candidates(subject, trial), trial, span.table(span.span), span.options.remembered)


def select_backends(span: LoadedSpan) -> None:
    """Choose backends now, step after step."""
    selection = begin_selection(span)
    while selection is not None and selection.has_steps:
        selection.step()


class _Examples:
    """Sessions with 2, 3, ... past tokens from a position on, and a new token each; the same each time.

    A selection takes them some 30 times. The past of each is computed once, and copied where its cache is plain.
    """

    def __init__(self, span: LoadedSpan) -> None:
        self._span = span
        self._pasts: dict[tuple[int, Span], list[SpanCache]] = {}

    @torch.inference_mode()
    def __call__(self, n_sessions: int, position: int, hop: Span) -> list[SessionTokens]:
        """Make so many of them."""
        rng = torch.Generator().manual_seed(0)
        pasts = self._pasts.setdefault((position, hop), [])
        examples = []
        for number in range(n_sessions):
            n_past = number + 2
            hidden = self._span.family.random_hidden(1, n_past + 1, rng)
            positions = position + torch.arange(n_past + 1, device=self._span.device).unsqueeze(0)
            cache = self._span.new_cache(hop)
            if not cache.is_plain:
                self._span.forward(hidden[:, :-1], positions[:, :-1], None, cache, 0, hop)
            else:
                if number == len(pasts):
                    past = self._span.new_cache(hop)
                    self._span.forward(hidden[:, :-1], positions[:, :-1], None, past, 0, hop)
                    pasts.append(past)
                cache.take_over(pasts[number], 0, n_past, may_share=False)
            examples.append(SessionTokens(hidden[:, -1:], positions[:, -1:], cache, n_past))
        return examples
