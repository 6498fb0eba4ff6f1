"""All running requests of one model: each has a session of its own over the swarm, they share one head.

A session that ended well is kept for a while: the next turn of its conversation sends only what is new.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import replace

import torch
import trio
from tokenizers import Tokenizer

from swarmd.client.drafting.lookup import Lookup
from swarmd.client.drafting.source import DraftSource
from swarmd.client.drafting.speculation import Costs
from swarmd.client.links.link import SessionOptions
from swarmd.client.links.ops import StepInput
from swarmd.client.sessions.session import ChainSession
from swarmd.client.swarm import AsyncSwarm
from swarmd.client.text.prompts import Prompts
from swarmd.compute.model.ends import MOST_ROWS
from swarmd.errors import Code, Refused, SwarmError
from swarmd.gateway.generation import kept_sessions as keeping
from swarmd.gateway.generation.answer import Answer, AnswerDelta, AnswerOptions
from swarmd.gateway.generation.ending import read_end_tokens
from swarmd.gateway.generation.head import HeadThread
from swarmd.gateway.generation.kept_sessions import KeptSession
from swarmd.gateway.generation.row import AllTokens, GenerationRow, RowReport
from swarmd.gateway.generation.sampling import SampledToken
from swarmd.gateway.generation.schema_trials import Grammars
from swarmd.gateway.generation.scoring import PromptScores, PromptStates
from swarmd.gateway.generation.token_bytes import TokenBytes
from swarmd.gateway.generation.turns import Turns
from swarmd.net.api import TaskStatus
from swarmd.values import ModelId

logger = logging.getLogger(__name__)

SWEEP_INTERVAL_S = 15.0  # between two looks for sessions that were kept long enough
CLOSE_WITHIN_S = 2.0  # to tell the servers of a session that it is over, whatever happens


OnDelta = Callable[[AnswerDelta], Awaitable[None]]


class GenerationEngine:
    """One model for any number of requests."""

    def __init__(
        self,
        swarm: AsyncSwarm,
        options: SessionOptions,
        head: HeadThread,
        tokenizer: Tokenizer,
        prompts: Prompts,
        turns: Turns,
        kept_for_s: float,
    ) -> None:
        self._kept_for_s = kept_for_s
        self.head = head
        self.ends = head.ends
        self.tokenizer = tokenizer
        self.prompts = prompts
        self.turns = turns
        self._swarm = swarm
        self._options = options
        self._kept: list[KeptSession] = []
        self._running: dict[int, RowReport] = {}
        self._costs = Costs()
        self.make_draft: Callable[[], DraftSource] | None = None  # makes one for a text, where this model has a draft
        self._drafting = trio.CapacityLimiter(1)
        self.token_bytes = TokenBytes(tokenizer)
        ends = self.ends.eos | read_end_tokens(prompts.folder, tokenizer)
        self.eos = frozenset(token for token in ends if token < self.ends.vocabulary)
        eos = min(self.eos, default=0)
        self.grammars = Grammars(tokenizer, prompts.folder / "tokenizer.json", self.ends.vocabulary, eos)

    @property
    def model(self) -> ModelId:
        """The model that it generates with."""
        return self._options.model

    @property
    def n_kept(self) -> int:
        """Sessions that wait for a next turn."""
        return len(self._kept)

    @property
    def running(self) -> list[RowReport]:
        """What becomes of the answers that are being written."""
        return list(self._running.values())

    async def run(self, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Compute for all rows, and give back what was kept long enough, until cancelled.

        Raises ConfigError or SwarmUnavailable before it has started, for a tokenizer that cannot be read. That error
        comes alone, not in a group: ``prompts`` is entered outside of the nursery.
        """
        async with self.prompts, self.grammars, trio.open_nursery() as nursery:
            nursery.start_soon(self.head.run)
            task_status.started()
            try:
                while True:
                    await trio.sleep(SWEEP_INTERVAL_S)
                    await self._sweep()
            finally:
                await self._give_back(self._kept)

    async def write(self, options: AnswerOptions, on_delta: OnDelta, report: RowReport) -> None:
        """Generate; every piece goes to ``on_delta`` as it comes, what becomes of it into ``report``.

        Cancelled, the servers have their room back at once. Raises SwarmError, QueueFull.
        """
        asked_at = trio.current_time()
        async with self.turns.turn(options.key):
            report.queued_s = trio.current_time() - asked_at
            self._running[id(report)] = report
            try:
                await self._answer(options, on_delta, report)
            finally:
                del self._running[id(report)]

    async def score(self, options: AnswerOptions, n_top: int, report: RowReport) -> list[SampledToken]:
        """How likely the tokens of a prompt are, but for its first; answers to it go on from there if it is kept.

        Raises SwarmError, QueueFull.
        """
        scores = PromptScores(options.prompt, n_top)
        await self._read(options.prompt, scores, options.key, report, options.keeps)
        return scores.tokens

    async def embed(self, prompt: tuple[int, ...], key: str, report: RowReport) -> torch.Tensor:
        """Return the last hidden states of a prompt's tokens, [t, d]. Raises SwarmError, QueueFull."""
        states = PromptStates(prompt)
        await self._read(prompt, states, key, report, keeps=False)
        return torch.cat(states.parts)

    async def _read(
        self,
        prompt: tuple[int, ...],
        reader: PromptScores | PromptStates,
        key: str,
        report: RowReport,
        keeps: bool,
    ) -> None:
        """Send a prompt in a session of its own, and read what comes of it."""
        is_embedded = isinstance(reader, PromptStates)
        async with self.turns.turn(key):
            room = keeping.choose_room(len(prompt), 0 if is_embedded else 1, self.ends.max_tokens)
            session = await self._open_session(room)
            is_kept = False
            try:
                embedded = (await self.head(reader)).embedded
                positions = torch.arange(len(prompt), dtype=torch.int32).unsqueeze(0)
                report.is_sent = True
                hidden = await session.step(StepInput(embedded, positions, want=len(prompt)))
                assert hidden is not None
                for part in torch.split(hidden[0], MOST_ROWS):
                    await self.head(reader, part, session.layer_arity, wants_states=is_embedded)
                is_kept = keeps
            finally:
                if is_kept:
                    self._kept.append(KeptSession(session, prompt, room, trio.current_time(), key))
                else:
                    await self._close(session)

    async def _answer(self, options: AnswerOptions, on_delta: OnDelta, report: RowReport) -> None:
        # A kept session may have lost its servers meanwhile. As long as nothing was answered, the client does not
        # know: the conversation begins anew on another chain.
        began_at = trio.current_time()
        row = self._take_kept(options)
        if row is not None:
            report.n_cached = row.start
            try:
                await self._write(row, on_delta, report, began_at)
                return
            except SwarmError as error:
                if report.n_generated or report.prefilled_s:
                    raise
                logger.info("a conversation begins anew: %s", error)
        report.n_cached = 0
        await self._write(await self._open(options), on_delta, report, began_at)

    # One pass of a row, as often as it takes:
    #
    #     head: decide the next tokens, embed them    ->  session: the chain's hops    ->  hidden states back
    #        ^------------------------------------------------------------------------------------'
    #
    # Where windows fly, more tokens are sent before the hidden states of those before are back. The head is shared by
    # all rows (``HeadThread``), the session is the row's own. A row that ends well leaves its session to the next
    # turn; one that was cancelled or failed does not, for its cache may hold half an op.
    async def _write(self, row: GenerationRow, on_delta: OnDelta, report: RowReport, began_at: float) -> None:
        is_complete = False
        speculation = row.answer.speculation
        try:
            speculation.begin(row.answer.options.prompt)
            work = await self.head(row)
            while work.embedded is not None or row.is_waiting:
                if work.embedded is not None:
                    ids, embedded = work.ids, work.embedded
                    if row.outgrows:
                        try:
                            ids, embedded = await self._enlarge(row)
                        except SwarmError as error:
                            logger.info("an answer ends, as no servers have more room for it: %s", error)
                            row.answer.finish = "length"
                            await on_delta(row.answer.piece())
                            break
                    report.is_sent = True
                    await row.send(ids, embedded)
                if not await row.is_next_answer_first():
                    await row.draft(self._drafting)
                    work = await self.head(row)
                    continue
                arrived = await row.receive()
                assert arrived is not None
                hidden, served = arrived
                report.prefilled_s = report.prefilled_s or trio.current_time() - began_at
                offer = row.offer(served, self.head.checks)
                work = await self.head(row, hidden, row.session.layer_arity, offer)
                row.tell_void()
                row.tell(report)
                await on_delta(row.answer.piece())
            is_complete = True
        finally:
            report.total_s = trio.current_time() - began_at
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(speculation.end)
            if is_complete and row.answer.options.keeps:
                row.leave_session()
                ended_at = trio.current_time()
                self._kept.append(KeptSession(row.session, row.tokens, row.max_tokens, ended_at, row.key))
            else:
                await self._close(row.session)

    # --- sessions that are kept --------------------------------------------------------------------------------

    def _take_kept(self, options: AnswerOptions) -> GenerationRow | None:
        choice = keeping.choose_session(self._kept, options.prompt, options.max_tokens, options.key)
        if choice is None or not options.keeps:
            return None
        chosen, n_shared = choice
        if len(chosen.tokens) > n_shared and not self.ends.can_crop:
            return None
        self._kept.remove(chosen)
        assert isinstance(chosen.session, ChainSession)
        return self._make_row(chosen.session, chosen.max_tokens, options, chosen.tokens, n_shared)

    async def _open(self, options: AnswerOptions) -> GenerationRow:
        room = keeping.choose_room(len(options.prompt), options.max_tokens, self.ends.max_tokens)
        return self._make_row(await self._open_session(room, options.keeps), room, options)

    async def _enlarge(self, row: GenerationRow) -> tuple[list[int], torch.Tensor]:
        """Have a row go on in a larger session; returns all of its tokens, which are sent next, and these embedded."""
        tokens = list(row.answer.tokens)
        n_more = row.answer.options.max_tokens - row.answer.n_tokens
        room = keeping.choose_room(len(tokens), n_more, self.ends.max_tokens)
        old = row.session
        row.go_on_in(await self._open_session(room, row.answer.options.keeps), room)
        await self._close(old)
        work = await self.head(AllTokens(tokens))
        assert work.embedded is not None
        return tokens, work.embedded

    async def _open_session(self, room: int, may_take_room: bool = True) -> ChainSession:
        """Open a session; where servers are full, again without the older half of those that are kept, and without any.

        Raises SwarmError.
        """
        # Kept sessions hold cache that a new one may need. They are a courtesy; a request that waits is not.
        for n_left in (len(self._kept) // 2, 0) if may_take_room and self._kept else ():
            try:
                return await self._swarm.open_session(self._options_for(room))
            except Refused as error:
                if error.code is not Code.NO_CAPACITY:
                    raise
                await self._give_back(keeping.choose_oldest(self._kept, len(self._kept) - n_left))
        return await self._swarm.open_session(self._options_for(room))

    def _make_row(
        self,
        session: ChainSession,
        room: int,
        options: AnswerOptions,
        tokens: tuple[int, ...] = (),
        n_shared: int = 0,
    ) -> GenerationRow:
        vocabulary = self.ends.vocabulary if self.head.checks is not None else 0
        answer = Answer(options, self.token_bytes, self._costs, self._make_sources())
        return GenerationRow(session, room, answer, tokens, n_shared, vocabulary)

    def _make_sources(self) -> list[DraftSource]:
        """Make what proposes tokens for one text."""
        sources: list[DraftSource] = [Lookup()]
        if self.make_draft is not None:
            try:
                sources.append(self.make_draft())
            except Exception as error:  # noqa: BLE001 - whatever is wrong with it, an answer does not need it
                logger.warning("an answer goes on without its draft: %s: %s", type(error).__name__, error)
        return sources

    def _options_for(self, max_tokens: int) -> SessionOptions:
        kind = self._swarm.quantize(self._options.model, self._options.n_blocks)
        return replace(self._options, max_tokens=max_tokens, quantize=kind)

    async def _sweep(self) -> None:
        await self._give_back(keeping.choose_expired(self._kept, trio.current_time(), self._kept_for_s))

    async def _give_back(self, expired: list[KeptSession]) -> None:
        """End sessions, all at once: one whose servers are gone takes as long as it takes to be sure."""
        sessions = [kept_session.session for kept_session in expired]
        self._kept = [kept_session for kept_session in self._kept if kept_session not in expired]
        # Shielded: servers are told also when this process ends, or they would hold the caches until they expire.
        with trio.CancelScope(shield=True):
            async with trio.open_nursery() as nursery:
                for session in sessions:
                    assert isinstance(session, ChainSession)
                    nursery.start_soon(self._close, session)

    async def _close(self, session: ChainSession) -> None:
        with trio.move_on_after(CLOSE_WITHIN_S) as scope:
            scope.shield = True
            await self._swarm.close_session(session)
