"""What a worker finds out when it serves already: faster backends for a few tokens, and the error of few bits.

A process of its own compiles code meanwhile; each ``step`` is short, and made while nobody waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

from swarmd.compute.hardware.preemption import Preempted
from swarmd.compute.passes.backend_selection import begin_selection
from swarmd.compute.passes.quantisation_error import measure_quantization
from swarmd.compute.passes.span import LoadedSpan
from swarmd.protocol.wire.worker import Improved

MOST_TEXT = 500  # characters of what is reported


class Improvements:
    """Steps for one span, loaded from ``folder``. ``news`` holds what is to be reported, at most one message.

    ``compiler`` is the process that compiles, where that was not done before.
    """

    def __init__(self, span: LoadedSpan, folder: Path, compiler: Popen[bytes] | None) -> None:
        self.news: list[Improved] = []
        self._span = span
        self._selection = begin_selection(span)
        self._compiler = compiler
        self._folder = folder
        self._measurement: Iterator[float | None] | None = None
        if span.options.is_rounded:
            self._measurement = measure_quantization(span, folder)
        self._error: float | None = None

    @property
    def is_done(self) -> bool:
        """Are all backends tried, and the error measured?"""
        return not self._is_selecting and self._measurement is None

    @property
    def _is_selecting(self) -> bool:
        return self._selection is not None and self._selection.has_steps

    @property
    def kernels(self) -> str:
        """What computes layers, and a few tokens, and why."""
        decision = self._span.explain_kernels()
        later = "; quicker ways are looked for" if self._is_selecting else ""
        return f"{decision.action}: {decision.reason}{later}"[:MOST_TEXT]

    def step(self) -> bool:
        """Do a little; False where all remaining steps wait for compiled code. Raises Preempted."""
        if self._selection is not None and self._is_selecting and not self._wait_for_compiler():
            self._selection.step()
            if not self._is_selecting:
                self._report()
            return True
        if self._measurement is None:
            return False
        try:
            self._error = next(self._measurement)
        except Preempted:
            # An exception from within ends a generator, so the measurement begins anew.
            self._measurement = measure_quantization(self._span, self._folder)
            raise
        except StopIteration:
            self._measurement = None
            self._report()
        return True

    def _wait_for_compiler(self) -> bool:
        """Return whether the next step has to wait; where the compiler failed, go on without compiled code."""
        assert self._selection is not None
        if not self._selection.needs_compiled:
            return False
        if self._compiler is not None and self._compiler.poll() is None:
            return True
        self._selection.go_without_compiled("nothing can be compiled here: docs/operating.md")
        return False

    def _report(self) -> None:
        self.news = [Improved(kernels=self.kernels, quantization_error=self._error)]
