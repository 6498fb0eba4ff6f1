"""One request on its session: what is in the cache, what is sent next, and what becomes of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import trio

from swarmd.client.links.link import Doubt
from swarmd.client.links.ops import StepInput
from swarmd.client.model.swarm_head import HeadChecks, are_enough
from swarmd.client.sessions.session import ChainSession
from swarmd.gateway.generation.answer import Answer
from swarmd.gateway.generation.head import ServerLogits
from swarmd.protocol.wire.messages import Edit


@dataclass(slots=True)
class RowReport:
    """What became of a request, in numbers and words; times are seconds since it began."""

    n_prompt: int
    is_sent: bool = False  # the prompt, or a part of it, to servers
    n_cached: int = 0
    n_generated: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
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
    """An answer that grows over a session. ``tokens`` are in its cache, the last ``crop`` of them no longer wanted.

    With a ``vocabulary`` the last hop is asked for logits, where those that come decide all that is wanted.
    """

    def __init__(
        self,
        session: ChainSession,
        max_tokens: int,
        answer: Answer,
        tokens: tuple[int, ...] = (),
        vocabulary: int = 0,
    ) -> None:
        self.session = session
        self.max_tokens = max_tokens
        self.tokens = list(tokens)
        self.crop = 0
        self.answer = answer
        self.key = answer.options.key
        self._vocabulary = vocabulary if are_enough(answer.options.n_needed) else 0
        self._prompt = answer.options.prompt
        self._earlier_doubts: list[Doubt] = []  # of sessions that this answer outgrew
        self._earlier_logits = 0
        self._note_before()

    def _note_before(self) -> None:
        """Remember what the session's statistics hold of others' tokens."""
        statistics = self.session.statistics
        self._n_repairs = len(statistics.repairs)
        self._n_logits = statistics.n_logits
        self._n_doubts = len(statistics.doubts)

    def go_on_in(self, session: ChainSession, max_tokens: int) -> None:
        """Have another session, which knows nothing yet, in place of the one so far."""
        statistics = self.session.statistics
        self._earlier_doubts += statistics.doubts[self._n_doubts :]
        self._earlier_logits += statistics.n_logits - self._n_logits
        self.session = session
        self.max_tokens = max_tokens
        self.tokens = []
        self.crop = 0
        self._note_before()

    @property
    def start(self) -> int:
        """The position of what is sent next."""
        return len(self.tokens) - self.crop

    def decide(self, logits: torch.Tensor | None) -> list[int]:
        """Return the tokens to send next: at first what the cache lacks of the prompt."""
        if logits is None:
            return list(self._prompt[self.start :])
        ids = self.answer.decide(logits)
        self.crop = self.answer.rejected
        return ids

    async def step(self, ids: list[int], embedded: torch.Tensor) -> torch.Tensor:
        """Send tokens, [1, t, d]; returns what the last block gives where logits are needed, [n_wanted, d]."""
        start = self.start
        n_wanted = self.answer.n_wanted
        edits = (Edit(crop=self.crop),) if self.crop else ()
        end = start + len(ids)
        positions = torch.arange(start, end, dtype=torch.int32).unsqueeze(0)
        began_at = trio.current_time()
        step = StepInput(embedded, positions, edits, want=n_wanted, vocabulary=self._vocabulary)
        outputs = await self.session.step(step)
        assert outputs is not None
        if len(ids) == n_wanted and self.answer.n_tokens:  # no prompt among them, and nothing that a grammar forced
            self.answer.speculation.costs.measured(n_wanted, trio.current_time() - began_at)
        self.tokens[start:] = ids
        self.crop = 0
        return outputs[0, -n_wanted:]

    def offer(self, checks: HeadChecks | None) -> ServerLogits | None:
        """Return the logits that came with the last step, and whether they are checked; None without any."""
        served = self.session.served_logits
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
        report.n_logits = self._earlier_logits + self.session.statistics.n_logits - self._n_logits
