"""One request on its session: what is in the cache, what is sent next, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import trio

from swarmd.client.links.link import Doubt
from swarmd.client.model.speculation import Costs
from swarmd.client.model.swarm_head import HeadChecks, are_enough
from swarmd.client.sessions.session import ChainSession
from swarmd.gateway.generation.answer import Answer, AnswerOptions
from swarmd.gateway.generation.head import ServerLogits
from swarmd.gateway.generation.token_bytes import TokenBytes
from swarmd.protocol.wire.messages import Edit


@dataclass(slots=True)
class RowReport:
    """What became of a request, in numbers and words; times are seconds since it began."""

    n_prompt: int
    n_cached: int = 0
    n_generated: int = 0
    n_sent_ahead: int = 0
    n_taken_ahead: int = 0
    n_logits: int = 0
    queued_s: float = 0.0
    prefilled_s: float = 0.0
    total_s: float = 0.0
    chain: tuple[str, ...] = ()
    repairs: list[str] = field(default_factory=list)
    longest_stall_s: float = 0.0
    doubts: list[Doubt] = field(default_factory=list)


class GenerationRow:
    """An answer that grows over a session. ``tokens`` are in its cache, the last ``crop`` of them no longer wanted.

    With a ``vocabulary`` the last hop is asked for logits, where those that come decide all that is wanted.
    """

    def __init__(
        self,
        session: ChainSession,
        max_tokens: int,
        wanted: AnswerOptions,
        written: TokenBytes,
        costs: Costs,
        tokens: tuple[int, ...] = (),
        vocabulary: int = 0,
    ) -> None:
        self.session = session
        self.max_tokens = max_tokens
        self.tokens = list(tokens)
        self.crop = 0
        self.answer = Answer(wanted, written, costs)
        self._vocabulary = vocabulary if are_enough(wanted.n_needed) else 0
        self.key = wanted.key
        self._prompt = wanted.prompt
        self._n_repairs, self._n_logits = len(session.statistics.repairs), session.statistics.n_logits
        self._n_doubts = len(session.statistics.doubts)

    @property
    def start(self) -> int:
        """The position of what is sent next."""
        return len(self.tokens) - self.crop

    def decide(self, logits: torch.Tensor | None) -> list[int]:
        """What to send next: at first what the cache lacks of the prompt."""
        if logits is None:
            return list(self._prompt[self.start :])
        ids = self.answer.decide(logits)
        self.crop = self.answer.rejected
        return ids

    async def step(self, ids: list[int], embedded: torch.Tensor) -> torch.Tensor:
        """Send tokens, [1, t, d]; returns what the last block gives where logits are needed, [want, d]."""
        start, want = self.start, self.answer.want
        edits = (Edit(crop=self.crop),) if self.crop else ()
        positions = torch.arange(start, start + len(ids), dtype=torch.int32).unsqueeze(0)
        begun = trio.current_time()
        out = await self.session.step(edits, embedded, positions, None, False, want, self._vocabulary)
        assert out is not None
        if len(ids) == want and self.answer.n_tokens:  # no prompt among them, and nothing that a grammar forced
            self.answer.speculation.costs.measured(want, trio.current_time() - begun)
        self.tokens[start:], self.crop = ids, 0
        return out[0, -want:]

    def offer(self, checks: HeadChecks | None) -> ServerLogits | None:
        """The logits that came with the last step, and whether they are looked at."""
        given = self.session.given
        return None if given is None or checks is None else ServerLogits(self.session, given, checks.is_due(given))

    def tell(self, told: RowReport) -> None:
        """Note what has happened so far."""
        told.chain = self.session.chain
        for repair in self.session.statistics.repairs[self._n_repairs :]:
            told.repairs.append(repair.reason)
            told.longest_stall_s = max(told.longest_stall_s, repair.stall_s)
        self._n_repairs = len(self.session.statistics.repairs)
        told.doubts = self.session.statistics.doubts[self._n_doubts :]
        told.n_generated = self.answer.n_tokens
        tried = self.answer.speculation
        told.n_sent_ahead, told.n_taken_ahead = tried.n_sent, tried.n_taken
        told.n_logits = self.session.statistics.n_logits - self._n_logits
