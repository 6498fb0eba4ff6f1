"""What a worker finds out when it serves already: quick ways for a few tokens, and what few bits cost.

Compiled code is made by a process of its own meanwhile; each ``step`` is short, and made while nobody waits.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen

from swarmd.compute.passes.backend_selection import Preempted
from swarmd.compute.passes.quantisation_error import measure_quantization
from swarmd.compute.passes.span import LoadedSpan
from swarmd.protocol.wire.worker import Improved

MOST_TEXT = 500  # characters of what is told


class Improvements:
    """Steps for one span, loaded from ``folder``. ``news`` holds what is to be told, at most one message.

    ``compiler`` is the process that compiles, where that was not done before.
    """

    def __init__(self, span: LoadedSpan, folder: Path, compiler: Popen[bytes] | None) -> None:
        self.news: list[Improved] = []
        self._span = span
        self._quickening = span.quickening()
        self._compiler = compiler
        self._folder = folder
        self._loss: Iterator[float | None] | None = measure_quantization(span, folder) if span.is_rounded else None
        self._error: float | None = None

    @property
    def is_done(self) -> bool:
        return not self._is_quickening and self._loss is None

    @property
    def _is_quickening(self) -> bool:
        return self._quickening is not None and self._quickening.has_steps

    @property
    def kernels(self) -> str:
        """What computes layers, and a few tokens, and why."""
        found = self._span.explain_kernels()
        later = "; quicker ways are looked for" if self._is_quickening else ""
        return f"{found.action}: {found.reason}{later}"[:MOST_TEXT]

    def step(self) -> bool:
        """Do a little; False where all that is left waits for compiled code. Raises Preempted."""
        if self._quickening is not None and self._is_quickening and not self._waits_for_compiler():
            self._quickening.step()
            if not self._is_quickening:
                self._tell()
            return True
        if self._loss is None:
            return False
        try:
            self._error = next(self._loss)
        except Preempted:  # what was raised within ended it
            self._loss = measure_quantization(self._span, self._folder)
            raise
        except StopIteration:
            self._loss = None
            self._tell()
        return True

    def _waits_for_compiler(self) -> bool:
        assert self._quickening is not None
        if not self._quickening.needs_compiled:
            return False
        if self._compiler is not None and self._compiler.poll() is None:
            return True
        self._quickening.do_without_call("nothing can be compiled here: docs/operating.md")
        return False

    def _tell(self) -> None:
        self.news = [Improved(kernels=self.kernels, quantization_error=self._error)]
