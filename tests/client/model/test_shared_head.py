"""A head that threads share: each gets its own logits, whatever becomes of the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swarmd.client.model.shared_head import SharedHead

WITHIN_S = 20.0


class SlowHead:
    """Doubles what it is given; each batch waits until the test lets it go."""

    def __init__(self) -> None:
        self.batches: list[list[float]] = []
        self.has_begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)
        self.refused: float | None = None  # a value that it fails with

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.batches.append(hidden[0, :, 0].tolist())
        self.has_begun.release()
        assert self.may_end.acquire(timeout=WITHIN_S)
        if self.refused in self.batches[-1]:
            raise RuntimeError("no memory")
        return 2 * hidden


def hidden_of(*values: float) -> torch.Tensor:
    return torch.tensor([[[value] for value in values]])


class Caller:
    """A thread that asks once."""

    def __init__(self, head: SharedHead, *values: float) -> None:
        self.logits: list[float] = []
        self.error: Exception | None = None
        self._ask: Callable[[], torch.Tensor] = lambda: head(hidden_of(*values))
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            with torch.no_grad():  # as ``generate`` does
                self.logits = self._ask()[0, :, 0].tolist()
        except Exception as error:  # noqa: BLE001 - what the test looks at
            self.error = error

    def join(self) -> None:
        self._thread.join(WITHIN_S)
        assert not self._thread.is_alive()


class Arrivals(list[Any]):
    """A list that tells of each entry."""

    def __init__(self) -> None:
        super().__init__()
        self.has_come = threading.Semaphore(0)

    def append(self, entry: Any) -> None:
        super().append(entry)
        self.has_come.release()

    def wait(self) -> None:
        assert self.has_come.acquire(timeout=WITHIN_S)


def make(head: SlowHead) -> tuple[SharedHead, Arrivals]:
    """A shared head, and the steps that come to it."""
    shared = SharedHead(head)
    arrivals = shared._waiting = Arrivals()
    return shared, arrivals


def test_who_comes_while_it_computes_is_in_the_next_batch() -> None:
    head = SlowHead()
    shared, arrivals = make(head)
    callers = []
    for values in ([1.0], [2.0, 3.0], [4.0], [5.0]):
        callers.append(Caller(shared, *values))
        arrivals.wait()
        if values == [1.0]:
            assert head.has_begun.acquire(timeout=WITHIN_S)
    head.may_end.release(2)
    for caller in callers:
        caller.join()
    assert head.batches == [[1.0], [2.0, 3.0, 4.0, 5.0]]
    assert [caller.logits for caller in callers] == [[2.0], [4.0, 6.0], [8.0], [10.0]]
    head.may_end.release()
    last = Caller(shared, 7.0)
    last.join()
    assert last.logits == [14.0], "it is free again"


def test_an_error_is_that_of_its_own_thread() -> None:
    head = SlowHead()
    shared, arrivals = make(head)
    head.refused = 2.0
    callers = []
    for value in (1.0, 2.0, 3.0):
        callers.append(Caller(shared, value))
        arrivals.wait()
        if value == 1.0:
            assert head.has_begun.acquire(timeout=WITHIN_S)
    head.may_end.release(4)
    for caller in callers:
        caller.join()
    assert head.batches[:2] == [[1.0], [2.0, 3.0]]
    assert sorted(head.batches[2:]) == [[2.0], [3.0]], "each alone, where they fail together"
    assert isinstance(callers[1].error, RuntimeError)
    assert [caller.logits for caller in callers] == [[2.0], [], [6.0]]


def test_who_computes_in_a_mode_of_its_own_computes_alone() -> None:
    head = SlowHead()
    shared, arrivals = make(head)
    head.may_end.release(3)
    with torch.inference_mode():
        assert shared(hidden_of(1.0)).is_inference()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        shared(hidden_of(2.0))
    with torch.enable_grad():
        shared(hidden_of(3.0))
    assert not arrivals.has_come.acquire(blocking=False)


def test_who_is_interrupted_leaves_the_head_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    head = SlowHead()
    shared = SharedHead(head)
    first = Caller(shared, 1.0)
    assert head.has_begun.acquire(timeout=WITHIN_S)

    def interrupt(turn: threading.Event, timeout: float | None = None) -> bool:
        head.may_end.release()
        first.join()  # by then the head was handed to who is interrupted
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(threading.Event, "wait", interrupt)
        with torch.no_grad(), pytest.raises(KeyboardInterrupt):
            shared(hidden_of(2.0))
    head.may_end.release()
    last = Caller(shared, 3.0)
    last.join()
    assert last.logits == [6.0]
    assert head.batches == [[1.0], [3.0]]
