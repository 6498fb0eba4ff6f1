"""One head for all threads that generate with a model: who comes while it computes is in its next batch.

Each step reads all of a head's weights, for one token or for many.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

logger = logging.getLogger(__name__)

MOST_TOGETHER = 64  # steps in one batch


@dataclass(slots=True, eq=False)
class _Step:
    """Hidden states [1, t, d] that wait; then their logits, if their batch had any.

    ``turn`` is set once it is done, or once the thread that waits for it is to compute all that wait.
    """

    hidden: torch.Tensor
    logits: torch.Tensor | None = None
    is_done: bool = False
    turn: threading.Event = field(default_factory=threading.Event)


# No thread is kept for it: whoever finds the head free computes for all that wait by then, itself among them, and hands
# the head to the oldest of those that came meanwhile.
#
#     thread 1   step --> free: computes [1] -------.                             returns
#     thread 2     step --> waits                    '--> computes [2, 3] ------> returns
#     thread 3        step --> waits ------------------------------------------> returns
#
# Where a batch fails, or is interrupted, each of it computes alone: an error is that of its own thread. So does whoever
# computes in another mode than ``generate`` does, for a mode is a thread's.
class SharedHead:
    """See the module. ``head`` gives each token's logits, whatever else is in the batch."""

    def __init__(self, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._head = head
        self._lock = threading.Lock()
        self._waiting: list[_Step] = []
        self._is_taken = False

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [1, t, d] to logits [1, t, vocabulary]. Raises what the head raises."""
        if torch.is_grad_enabled() or torch.is_inference_mode_enabled() or torch.is_autocast_enabled("cpu"):
            return self._head(hidden)
        step = _Step(hidden)
        with self._lock:
            self._waiting.append(step)
            if not self._is_taken:
                self._is_taken = True
                step.turn.set()
        try:
            step.turn.wait()
            if not step.is_done:
                self._compute_waiting()
        finally:
            self._leave(step)
        return self._head(hidden) if step.logits is None else step.logits

    def _leave(self, step: _Step) -> None:
        """Who is interrupted while it waits gives up its place, and the head if it had that."""
        with self._lock:
            if step in self._waiting:
                self._waiting.remove(step)
                if step.turn.is_set():
                    self._hand_on()

    def _compute_waiting(self) -> None:
        batch: list[_Step] = []
        try:
            with self._lock:
                batch = self._waiting[:MOST_TOGETHER]
                del self._waiting[:MOST_TOGETHER]
            logits = self._head(torch.cat([step.hidden for step in batch], 1))
            parts = torch.split(logits, [step.hidden.shape[1] for step in batch], 1)
            for step, part in zip(batch, parts, strict=True):
                step.logits = part
        except Exception as error:  # noqa: BLE001 - each of them computes alone then
            logger.debug("a batch of %d steps failed: %r", len(batch), error)
        finally:
            with self._lock:
                self._hand_on()
            for step in batch:
                step.is_done = True
                step.turn.set()

    def _hand_on(self) -> None:
        """Give the head to the oldest that waits, or to nobody; the lock is held."""
        if self._waiting:
            self._waiting[0].turn.set()
        else:
            self._is_taken = False
