"""How work that nobody waits for gives way to work that somebody waits for."""

from __future__ import annotations


class Preempted(BaseException):
    """Raised by ``on_block`` in the midst of a step: somebody waits. No Exception, which tracers catch."""
