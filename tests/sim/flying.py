"""A text that is generated with windows in flight over a simulated chain, and what the whole model says."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import trio

from swarmd.client.drafting.speculation import Costs, PassCost, Speculation
from swarmd.client.links.answers import WindowAnswer
from swarmd.client.links.ops import StepInput
from swarmd.client.sessions.session import ChainSession
from swarmd.plan.chains.flight import Flight, TokenWindow
from swarmd.protocol.wire.alternatives import Alternative
from swarmd.protocol.wire.messages import Edit
from tests.scripted_source import ScriptedSource
from tests.sim.swarm import HIDDEN, Reference

VOCABULARY = 64
TABLE = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(3))
PROMPT = [5, 9, 2, 7]


def embed(tokens: Sequence[int]) -> torch.Tensor:
    return TABLE[list(tokens)].unsqueeze(0)


def choose(out: torch.Tensor) -> int:
    """The token after one whose last hidden states these are: it depends on every bit of them, and is never WRONG."""
    return 1 + int((out.double() * 1e6).sum().round()) % (VOCABULARY - 1)


def plain_text(n_tokens: int, n_blocks: int, prompt: Sequence[int] = PROMPT) -> list[int]:
    """What the whole model says, token by token."""
    reference = Reference(n_blocks)
    out = reference.step(embed(prompt))
    text = list(prompt)
    while len(text) < len(prompt) + n_tokens:
        text.append(choose(out[0, -1]))
        out = reference.step(embed(text[-1:]))
    return text


class FlyingText:
    """Generates over one session, as the library and the gateway do; answers come in a task of their own."""

    def __init__(self, session: ChainSession, source: ScriptedSource, n_tokens: int) -> None:
        self.session = session
        self.speculation = Speculation(Costs(), [source])
        self.text = list(PROMPT)
        self.flight = Flight([], [], 0)
        self._each_s = source.each_s
        self._n_tokens = len(PROMPT) + n_tokens
        self._sent: dict[int, TokenWindow] = {}
        self._arrived: deque[WindowAnswer] = deque()
        self._wake = trio.Event()

    async def run(self) -> list[int]:
        """Generate all tokens. Raises SwarmError."""
        positions = torch.arange(len(PROMPT), dtype=torch.int32).unsqueeze(0)
        out = await self.session.step(StepInput(embed(PROMPT), positions, want=1))
        assert out is not None
        self.text.append(choose(out[0, -1]))
        self.flight = Flight(self.text, self.text[:-1], self.session.chain.position.seq + 1)
        assert self.session.can_fly
        self.speculation.start(self.flight, self._n_tokens, can_fly=True, now=trio.current_time(), tries_seconds=True)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._receive)
            while len(self.text) < self._n_tokens:
                await self._go_on()
            nursery.cancel_scope.cancel()
        void_from = self.speculation.stop()
        if void_from is not None:
            self.session.void_from(void_from)
        self.session.ignore_windows()
        return self.text

    async def go_on(self, n_shared: int, tokens: Sequence[int]) -> int:
        """Take a step in the same session, as a next turn does that begins like this text; returns what follows."""
        positions = torch.arange(n_shared, n_shared + len(tokens), dtype=torch.int32).unsqueeze(0)
        crop = Edit(crop=len(self.flight.cached) - n_shared)
        out = await self.session.step(StepInput(embed(tokens), positions, (crop,), want=1))
        assert out is not None
        return choose(out[0, -1])

    async def _receive(self) -> None:
        while True:
            answer = await self.session.receive()
            if answer is None:
                await trio.sleep(0.001)
                continue
            self._arrived.append(answer)
            self._wake.set()

    async def _go_on(self) -> None:
        speculation = self.speculation
        now = trio.current_time()
        if speculation.is_due(now):
            window = speculation.next_window(now)
            self._sent[window.number] = window
            assert await self.session.send(step_of(window)) == window.number
            return
        if self._arrived:
            self._take(self._arrived.popleft())
        elif speculation.can_draft:
            await trio.sleep(self._each_s)
            speculation.draft()
        else:
            self._wake = trio.Event()
            with trio.move_on_after(0.01 + (speculation.patience_s(now) or 0.0)):
                await self._wake.wait()

    def _take(self, answer: WindowAnswer) -> None:
        speculation = self.speculation
        window = self._sent.pop(answer.seq)
        hops_s = tuple(max(0.001, seconds) for seconds in answer.answer.hops_s)
        cost = PassCost(len(window.tokens), answer.took_s, 0.0, hops_s, answer.is_alone)
        if speculation.begin_answer(window.number, cost) is None:
            return
        n_before = len(self.text)
        rows = answer.answer.hidden[0, -(window.n_wanted + answer.answer.n_alternative) :]
        for row in speculation.rows_to_decide(window):
            if len(self.text) == self._n_tokens or row >= len(rows):
                break
            speculation.take(choose(rows[row]))
        void_from = speculation.end_answer(len(self.text) - n_before, trio.current_time())
        if void_from is not None:
            self.session.void_from(void_from)


def step_of(window: TokenWindow, **changes: Any) -> StepInput:
    """A window as a session takes it."""
    places = [torch.arange(len(tokens)) + window.n_before for tokens in (window.tokens, window.second)]
    positions = torch.cat(places).to(torch.int32).unsqueeze(0)
    edits = (Edit(crop=window.n_cropped),) if window.n_cropped else ()
    alternatives = (Alternative(window.n_before, len(window.second)),) if window.second else ()
    hidden = embed((*window.tokens, *window.second))
    return StepInput(hidden, positions, edits, want=window.n_wanted, alternatives=alternatives, **changes)
