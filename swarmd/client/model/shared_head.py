"""One head for all threads that generate with a model: who comes while it computes is in its next batch.

Each step reads all of a head's weights, for one token or for many.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

MOST_TOGETHER = 64  # steps in one batch


@dataclass(slots=True, eq=False)
class _Step:
    """Hidden states [1, t, d] that wait; then their logits, or why there are none.

    ``turn`` is set once they are there, or once the thread that waits for them is to compute all that wait.
    """

    hidden: torch.Tensor
    logits: torch.Tensor | None = None
    error: BaseException | None = None
    turn: threading.Event = field(default_factory=threading.Event)

    @property
    def is_done(self) -> bool:
        return self.logits is not None or self.error is not None


# No thread is kept for it: whoever finds the head free computes for all that wait by then, itself among them, and hands
# the head to the oldest of those that came meanwhile.
#
#     thread 1   step --> free: computes [1] -------.                             returns
#     thread 2     step --> waits                    '--> computes [2, 3] ------> returns
#     thread 3        step --> waits ------------------------------------------> returns
class SharedHead:
    """See the module. ``head`` gives each token's logits, whatever else is in the batch."""

    def __init__(self, head: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._head = head
        self._lock = threading.Lock()
        self._waiting: list[_Step] = []
        self._is_taken = False

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states [1, t, d] to logits [1, t, vocabulary]. Raises what the head raises."""
        step = _Step(hidden)
        with self._lock:
            self._waiting.append(step)
            waits = self._is_taken
            self._is_taken = True
        if waits:
            self._wait(step)
        if not step.is_done:
            self._compute_waiting()
        if step.logits is None:
            assert step.error is not None
            raise step.error
        return step.logits

    def _wait(self, step: _Step) -> None:
        """Wait for a step's turn; who is interrupted gives up its place, and the head if that was given to it."""
        try:
            step.turn.wait()
        except BaseException:
            with self._lock:
                if step in self._waiting:
                    self._waiting.remove(step)
                    if step.turn.is_set():
                        self._hand_on()
            raise

    def _compute_waiting(self) -> None:
        with self._lock:
            batch = self._waiting[:MOST_TOGETHER]
            del self._waiting[:MOST_TOGETHER]
        try:
            logits = self._head(torch.cat([step.hidden for step in batch], 1) if len(batch) > 1 else batch[0].hidden)
            parts = torch.split(logits, [step.hidden.shape[1] for step in batch], 1)
            for step, part in zip(batch, parts, strict=True):
                step.logits = part
        except BaseException as error:
            for step in batch:
                step.error = error
            raise
        finally:
            with self._lock:
                self._hand_on()
            for step in batch:
                step.turn.set()

    def _hand_on(self) -> None:
        """Give the head to the oldest that waits, or to nobody; the lock is held."""
        if self._waiting:
            self._waiting[0].turn.set()
        else:
            self._is_taken = False
