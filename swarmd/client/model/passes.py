"""The passes of one text: windows of tokens go into the swarm, logits come back.

Two ways: one window after the other, through a session's ``step``; or several under way, through its ``send`` and
``receive``, where the client's part of a pass can be computed in two halves, before the swarm and behind it.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections import deque
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from swarmd.client.drafting.speculation import PassCost
from swarmd.client.model.remote_cache import RemoteCache
from swarmd.client.model.swarm_head import SwarmHead
from swarmd.client.model.traced_pass import StepPass
from swarmd.plan.chains.flight import TokenWindow
from swarmd.protocol.wire.alternatives import Alternative


@dataclass(frozen=True, slots=True)
class PassLogits:
    """The answer to a window: logits [1, n, vocabulary] of its rows (``Flight.rows_to_decide``), and what it took.

    ``hidden`` [1, n, d] is what they were computed from. Rows of a second choice are left out where servers did not
    compute it.
    """

    number: int
    logits: torch.Tensor
    hidden: torch.Tensor
    cost: PassCost


class Passes(Protocol):
    """How windows of a text travel."""

    @property
    def can_fly(self) -> bool:
        """May several be under way?"""

    @property
    def next_number(self) -> int:
        """The number of the next window."""

    def send(self, window: TokenWindow, flies: bool) -> None:
        """Send tokens on their way; ``flies``: others may follow before their answer is here."""

    def receive(self, timeout_s: float | None) -> PassLogits | None:
        """Wait for the next answer, as long as it takes or for so long; None where none came."""

    def void_from(self, number: int) -> None:
        """Nobody wants the windows from a number on."""


@dataclass(frozen=True, slots=True)
class LogitsSource:
    """What computes the logits of one text: a swarm head, else a trace of the client's part, else the family's forward.

    ``cache`` is the model's argument ``cache_name``.
    """

    model: Any
    cache: Any
    cache_name: str
    traced: StepPass | None
    head: SwarmHead | None

    def compute_logits(self, sent: torch.Tensor, n: int, is_prompt: bool = False) -> torch.Tensor:
        """Compute logits of the tokens sent, or of the last ``n`` only."""
        asks_head = self.head is not None and not self.head.rests(self.cache.session)
        if self.traced is not None and (is_prompt or asks_head):
            return self._compute_end(self.traced, sent, n)
        if self.traced is not None:
            positions, through_swarm = self.cache.prepare_append(sent.shape[1])
            return self.traced.compute(sent, positions, through_swarm)
        options = {self.cache_name: self.cache}
        if _keeps_logits(self.model.__class__):
            options["logits_to_keep"] = n
        output = self.model(input_ids=sent.to(self.model.device), use_cache=True, **options)
        logits: torch.Tensor = output.logits
        return logits

    def _compute_end(self, traced: StepPass, sent: torch.Tensor, n: int) -> torch.Tensor:
        """Send tokens [1, t]; returns logits of the last ``n``, for which alone norm and head are computed."""
        vocabulary = self.head.wanted_from(self.cache.session) if self.head is not None else 0
        positions, through_swarm = self.cache.prepare_append(sent.shape[1], n, vocabulary)
        hidden = through_swarm(traced.enter(sent, positions))[:, -n:]
        ids, positions = sent[:, -n:], positions[:, -n:]
        if self.head is None:
            return traced.compute(ids, positions, lambda _: hidden)
        session = self.cache.session
        assert session is not None
        hops_s = session.hops_s if sent.shape[1] == 1 else ()
        return self.head.read(ids, positions, hidden, session.served_logits, session, hops_s)

    def passes(self) -> Passes:
        """How windows travel, behind a prompt that was computed."""
        if self.traced is not None and isinstance(self.cache, RemoteCache) and self.cache.can_fly:
            return FlyingPasses(self.cache, self.traced, self.head, SinglePasses(self))
        return SinglePasses(self)


class SinglePasses:
    """One window after the other: it is computed when its answer is waited for."""

    can_fly = False
    next_number = 0

    def __init__(self, source: LogitsSource) -> None:
        self._source = source
        self._window: TokenWindow | None = None

    @property
    def has_window(self) -> bool:
        """Is one to be computed?"""
        return self._window is not None

    def send(self, window: TokenWindow, flies: bool) -> None:
        """Keep a window."""
        self._window = window

    def receive(self, timeout_s: float | None) -> PassLogits | None:
        """Compute it, if there is one."""
        window = self._window
        if window is None:
            return None
        self._window = None
        started_at = time.perf_counter()
        if window.n_cropped:
            self._source.cache.crop(-window.n_cropped)
        logits = self._source.compute_logits(torch.tensor([window.tokens]), window.n_wanted)
        cost = PassCost(len(window.tokens), time.perf_counter() - started_at)
        hidden = self._source.cache.returned
        return PassLogits(window.number, logits[:, -window.n_wanted :], hidden[:, -window.n_wanted :], cost)

    def void_from(self, number: int) -> None:
        """Nothing else is under way."""


class FlyingPasses:
    """Windows that are under way together: each goes in before the answer to the one before is here.

    One that flies alone is computed as ``single`` does, which takes less time here.
    """

    can_fly = True

    def __init__(self, cache: RemoteCache, traced: StepPass, head: SwarmHead | None, single: SinglePasses) -> None:
        self._cache = cache
        self._single = single
        self._traced = traced
        self._head = head
        self._sent: deque[tuple[TokenWindow, torch.Tensor, float]] = deque()  # positions, and seconds it took here
        self.next_number = cache.next_number

    def send(self, window: TokenWindow, flies: bool) -> None:
        """Compute the part before the swarm, and send it."""
        if not flies and not self._sent:
            self._single.send(window, flies)
            return
        started_at = time.perf_counter()
        ids = torch.tensor([(*window.tokens, *window.second)])
        places = [torch.arange(len(tokens)) + window.n_before for tokens in (window.tokens, window.second)]
        positions = torch.cat(places).unsqueeze(0)
        hidden = self._traced.enter(ids, positions)
        vocabulary = self._head.wanted_from(self._cache.session) if self._head is not None else 0
        alternatives = (Alternative(window.n_before, len(window.second)),) if window.second else ()
        if window.n_cropped:
            self._cache.crop(-window.n_cropped)
        self._cache.send(window.number, hidden, positions, window.n_wanted, vocabulary, alternatives)
        self._sent.append((window, positions, time.perf_counter() - started_at))

    def receive(self, timeout_s: float | None) -> PassLogits | None:
        """Wait for an answer, and compute the part behind the swarm."""
        if self._single.has_window:
            passed = self._single.receive(timeout_s)
            assert passed is not None
            assert self._cache.session is not None
            return replace(passed, cost=replace(passed.cost, hops_s=self._cache.session.hops_s))
        arrived = self._cache.receive(timeout_s)
        if arrived is None or not self._sent or self._sent[0][0].number != arrived.seq:
            return None  # it had come before its window was void
        started_at = time.perf_counter()
        window, positions, entering_s = self._sent.popleft()
        answer = arrived.answer
        second = window.second[: answer.n_alternative]
        rows = slice(len(window.tokens) - window.n_wanted, len(window.tokens) + len(second))
        ids = torch.tensor([(*window.tokens, *second)])[:, rows]
        positions = positions[:, rows]
        hidden = answer.hidden[:, -ids.shape[1] :]
        session = self._cache.session
        if self._head is not None and session is not None:
            logits = self._head.read(ids, positions, hidden, answer.logits, session, answer.hops_s)
        else:
            logits = self._traced.compute(ids, positions, lambda _: hidden)
        here_s = entering_s + time.perf_counter() - started_at
        cost = PassCost(len(window.tokens) + len(second), arrived.took_s, here_s, answer.hops_s, arrived.is_alone)
        return PassLogits(window.number, logits, hidden, cost)

    def void_from(self, number: int) -> None:
        """See ``ChainSession.void_from``."""
        while self._sent and self._sent[-1][0].number >= number:
            self._sent.pop()
        if self._cache.session is not None:
            self._cache.session.void_from(number)


@functools.cache
def _keeps_logits(family: type) -> bool:
    """Can its forward be told how many logits are wanted?"""
    return "logits_to_keep" in inspect.signature(family.forward).parameters  # type: ignore[attr-defined]
