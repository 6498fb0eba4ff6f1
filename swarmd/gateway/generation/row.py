"""One request on its session: what is in the cache, what is sent next, and what becomes of it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

import torch
import trio

from swarmd.client.drafting.speculation import PassCost
from swarmd.client.links.link import Doubt, ServedLogits
from swarmd.client.links.ops import StepInput
from swarmd.client.model.swarm_head import HeadChecks, are_enough
from swarmd.client.sessions.session import ChainSession
from swarmd.gateway.generation.answer import Answer
from swarmd.gateway.generation.head import ServerLogits
from swarmd.plan.chains.flight import Flight, TokenWindow
from swarmd.protocol.wire.messages import Edit

NO_TOKEN = -1  # what no prompt has: hops may not have computed it


@dataclass(slots=True)
class RowReport:
    """What became of a request, in numbers and words; times are seconds since it began."""

    n_prompt: int
    is_sent: bool = False  # the prompt, or a part of it, to servers
    n_cached: int = 0
    n_generated: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    n_void: int = 0  # windows that were under way when a token before them turned out wrong
    tried_because: str = ""  # how far tokens were tried ahead last, and why
    n_logits: int = 0
    n_reasoning: int = 0  # tokens of thoughts among those generated
    queued_s: float = 0.0
    prefilled_s: float = 0.0
    total_s: float = 0.0
    chain: tuple[str, ...] = ()
    repairs: list[str] = field(default_factory=list)
    longest_stall_s: float = 0.0
    doubts: list[Doubt] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AllTokens:
    """Asks the head to embed tokens that are all sent anew, from the first position on (a ``HeadClient``)."""

    tokens: list[int]
    start: int = 0

    def decide(self, logits: torch.Tensor | None) -> list[int]:
        """Return them: there is nothing to decide."""
        return self.tokens


class GenerationRow:
    """An answer that grows over a session: first the prompt is sent, then windows of what is known and tried.

    ``tokens`` are in the session's caches. With a ``vocabulary`` the last hop is asked for logits, where those that
    come decide all that is wanted.
    """

    def __init__(
        self,
        session: ChainSession,
        max_tokens: int,
        answer: Answer,
        tokens: tuple[int, ...] = (),
        n_shared: int = 0,
        vocabulary: int = 0,
    ) -> None:
        """``n_shared`` of the cached tokens are those of the prompt."""
        self.session = session
        self.max_tokens = max_tokens
        self.answer = answer
        self.key = answer.options.key
        self._vocabulary = vocabulary if are_enough(answer.options.n_needed) else 0
        self._cached = list(tokens)
        self._known = list(answer.options.prompt)  # what is sent before windows are
        self._n_shared = n_shared
        self._flight: Flight | None = None
        self._flies = False  # may windows be under way together?
        self._window: TokenWindow | None = None  # sent next, or last
        self._answered: TokenWindow | None = None  # last
        self._hidden = torch.empty(0)  # [n_wanted, d], what came last
        self._sent: dict[int, TokenWindow] = {}
        self._step: StepInput | None = None  # waits to be sent, and for its answer
        self._void_from: int | None = None
        self._earlier_doubts: list[Doubt] = []  # of sessions that this answer outgrew
        self._earlier_logits = 0
        self._earlier_void = 0
        self._note_before()

    def _note_before(self) -> None:
        """Remember what the session's statistics hold of others' tokens."""
        statistics = self.session.statistics
        self._n_repairs = len(statistics.repairs)
        self._n_logits = statistics.n_logits
        self._n_void = statistics.n_void
        self._n_doubts = len(statistics.doubts)

    def go_on_in(self, session: ChainSession, max_tokens: int) -> None:
        """Have another session, which knows nothing yet, in place of the one so far; nothing may be under way."""
        statistics = self.session.statistics
        self._earlier_doubts += statistics.doubts[self._n_doubts :]
        self._earlier_logits += statistics.n_logits - self._n_logits
        self._earlier_void += statistics.n_void - self._n_void
        self.session = session
        self.max_tokens = max_tokens
        self._known = self.answer.tokens
        self._cached = []
        self._n_shared = 0
        self._flight = None
        self._window = None
        self._note_before()

    @property
    def tokens(self) -> tuple[int, ...]:
        """What the session's caches hold; NO_TOKEN for each that was tried, and is of no use to anybody."""
        n_tried = 0 if self._flight is None else self._flight.n_to_crop
        return (*self._cached[: len(self._cached) - n_tried], *[NO_TOKEN] * n_tried)

    @property
    def start(self) -> int:
        """The position of what is sent next."""
        return self._n_shared if self._window is None else self._window.n_before

    @property
    def is_waiting(self) -> bool:
        """Is something under way, or being drafted, that the answer needs?"""
        if self.answer.finish:
            return False
        if self._flight is None:
            return self._step is not None
        return self._step is not None or self._flight.n_under_way > 0 or self.answer.speculation.can_draft

    @property
    def outgrows(self) -> bool:
        """Does what is sent next not fit its session?"""
        n_next = len(self._known) - self._n_shared if self._window is None else len(self._window.tokens)
        return self.start + n_next > self.max_tokens

    def decide(self, logits: torch.Tensor | None) -> list[int]:
        """Take the logits of what came last, if anything did; returns the tokens to send next, if any are due."""
        if self._flight is None and logits is None:
            return self._known[self._n_shared :]
        now = time.perf_counter()
        if self._flight is None:
            assert logits is not None
            self.answer.begin(logits, self._hidden)
            number = self.session.chain.position.seq + 1 if self._flies else 0
            self._flight = self.answer.fly(self._cached, number, self.max_tokens, self._flies, now)
        elif logits is not None:
            assert self._answered is not None
            self._void_from = self.answer.read(self._answered, logits, self._hidden, now)
        return self._next_tokens(now)

    def _next_tokens(self, now: float) -> list[int]:
        speculation = self.answer.speculation
        if self.answer.finish:
            return []
        while speculation.can_draft and not speculation.takes_time:
            speculation.draft()
        if not speculation.is_due(now):
            return []
        self._window = speculation.next_window(now)
        return list(self._window.tokens)

    async def is_next_answer_first(self) -> bool:
        """Wait until the next answer is here, or more may be drafted or sent before it; is it the answer?"""
        if self.answer.finish or self._flight is None:
            return True
        pause_s = self.answer.speculation.patience_s(time.perf_counter())
        return pause_s is None or await self.session.has_news(pause_s)

    async def draft(self, drafting: trio.CapacityLimiter) -> None:
        """Have a source that takes time propose more, in a thread beside the head's."""
        if self.answer.speculation.can_draft:
            draft = self.answer.speculation.draft
            await trio.to_thread.run_sync(draft, limiter=drafting, abandon_on_cancel=True)  # type: ignore[call-arg]

    async def send(self, ids: list[int], embedded: torch.Tensor) -> None:
        """Send tokens, [1, t, d]."""
        window = self._window
        if window is None:
            self._flies = self.session.can_fly
            n_cropped, n_wanted = len(self._cached) - self._n_shared, 1
            self._cached[self._n_shared :] = ids
        else:
            n_cropped, n_wanted = window.n_cropped, window.n_wanted
        start = self.start
        positions = torch.arange(start, start + len(ids), dtype=torch.int32).unsqueeze(0)
        edits = (Edit(crop=n_cropped),) if n_cropped else ()
        step = StepInput(embedded, positions, edits, want=n_wanted, vocabulary=self._vocabulary)
        if window is None or not self._flies:
            self._step = step
            return
        self._sent[window.number] = window
        await self.session.send(step)

    async def receive(self) -> tuple[torch.Tensor, ServedLogits | None] | None:
        """Wait for what the last block gives where logits are needed, [n_wanted, d], and for logits that came with it.

        None where that is void by now.
        """
        step = self._step
        if step is not None:
            assert step.want is not None
            began_at = trio.current_time()
            outputs = await self.session.step(step)
            self._step = None
            assert outputs is not None
            if self._window is not None:
                cost = PassCost(len(self._window.tokens), trio.current_time() - began_at, 0.0, self.session.hops_s)
                self._begin_answer(self._window, cost)
            self._hidden = outputs[0, -step.want :]
            return self._hidden, self.session.served_logits
        arrived = await self.session.receive()
        if arrived is None:
            return None
        window = self._sent.pop(arrived.seq)
        answer = arrived.answer
        self._begin_answer(window, PassCost(len(window.tokens), arrived.took_s, 0.0, answer.hops_s, arrived.is_alone))
        self._hidden = answer.hidden[0, -window.n_wanted :]
        return self._hidden, answer.logits

    def _begin_answer(self, window: TokenWindow, cost: PassCost) -> None:
        if len(window.tokens) > window.n_wanted:  # a grammar forced some, which are no tries
            cost = replace(cost, is_alone=False)
        self._answered = self.answer.speculation.begin_answer(window.number, cost)

    def tell_void(self) -> None:
        """Have all hops hear of windows that are void, if some have become so."""
        void_from = self._void_from
        self._void_from = None
        if void_from is not None:
            self.session.void_from(void_from)
            self._sent = {number: window for number, window in self._sent.items() if number < void_from}

    def leave_session(self) -> None:
        """Leave the session to steps of others: the answer has ended, and what is under way is of no use to it."""
        self.tell_void()
        self.session.ignore_windows()

    def offer(self, served: ServedLogits | None, checks: HeadChecks | None) -> ServerLogits | None:
        """Return logits that came, and whether they are checked; None without any."""
        if served is None or checks is None:
            return None
        return ServerLogits(self.session, served, checks.draw_check(served))

    def tell(self, report: RowReport) -> None:
        """Write into the report what has happened so far."""
        report.chain = self.session.hop_names
        for repair in self.session.statistics.repairs[self._n_repairs :]:
            report.repairs.append(repair.reason)
            report.longest_stall_s = max(report.longest_stall_s, repair.stall_s)
        self._n_repairs = len(self.session.statistics.repairs)
        report.doubts = [*self._earlier_doubts, *self.session.statistics.doubts[self._n_doubts :]]
        report.n_generated = self.answer.n_tokens
        speculation = self.answer.speculation
        report.n_drafted = speculation.n_sent
        report.n_accepted = speculation.n_taken
        report.n_void = self._earlier_void + self.session.statistics.n_void - self._n_void
        report.tried_because = speculation.last_plan or speculation.reason
        report.n_logits = self._earlier_logits + self.session.statistics.n_logits - self._n_logits
