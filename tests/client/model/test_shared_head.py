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
        self.error: Exception | None = None

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        self.batches.append(hidden[0, :, 0].tolist())
        self.has_begun.release()
        assert self.may_end.acquire(timeout=WITHIN_S)
        if self.error is not None:
            raise self.error
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
        self._has_come = threading.Semaphore(0)

    def append(self, entry: Any) -> None:
        super().append(entry)
        self._has_come.release()

    def wait(self) -> None:
        assert self._has_come.acquire(timeout=WITHIN_S)


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
    assert shared(hidden_of(7.0)).item() == 14.0, "it is free again"


def test_an_error_is_that_of_its_batch() -> None:
    head = SlowHead()
    shared, arrivals = make(head)
    head.error = RuntimeError("no memory")
    first = Caller(shared, 1.0)
    assert head.has_begun.acquire(timeout=WITHIN_S)
    others = [Caller(shared, 2.0), Caller(shared, 3.0)]
    for _ in (first, *others):
        arrivals.wait()
    head.may_end.release()
    first.join()
    assert head.has_begun.acquire(timeout=WITHIN_S)
    head.error = None
    head.may_end.release()
    for caller in others:
        caller.join()
    assert isinstance(first.error, RuntimeError)
    assert sorted(caller.logits for caller in others) == [[4.0], [6.0]]


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
        with pytest.raises(KeyboardInterrupt):
            shared(hidden_of(2.0))
    head.may_end.release()
    last = Caller(shared, 3.0)
    last.join()
    assert last.logits == [6.0]
    assert head.batches == [[1.0], [3.0]]
