"""What is under way in one session: ops without an answer, and how often chains gave what cannot be right.

Values only: time is an argument, and nothing is sent from here. Limits of patience are here, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarmd.client.links.answers import OpAnswer
from swarmd.client.links.link import HopLink
from swarmd.errors import Code, Refused, SwarmError, SwarmUnavailable
from swarmd.values import PeerId
from swarmd.wire.history import SentOp
from swarmd.wire.tensors import is_finite

MAX_WRONG = 4  # chains in one step that gave what cannot be right, one after the other
LONGEST_S = 60.0  # signs of life without an answer, beyond what computing takes
SLACK = 4.0  # other sessions are computed too
SLOWEST_TOKENS_PER_S = 2.0  # of a prefill: a server that is slower, or says so, is no use to anybody


@dataclass(frozen=True, slots=True)
class OpInFlight:
    """An op without an answer; the client wants the last ``want`` tokens of each row (None: all).

    With a ``vocabulary`` it wants their largest logits, too.
    """

    sent: SentOp
    want: int | None = None
    vocabulary: int = 0

    @property
    def n_tokens(self) -> int:
        """Tokens that it sends, of all rows."""
        hidden = self.sent.hidden
        return 0 if hidden is None else hidden.shape[0] * hidden.shape[1]

    @property
    def is_finite(self) -> bool:
        """Does it hold hidden states, and all of them numbers?"""
        hidden = self.sent.hidden
        return hidden is not None and is_finite(hidden)


@dataclass(frozen=True, slots=True)
class SentWindow:
    """An op of tokens that were tried ahead, by its number; its tokens are behind ``n_before`` others."""

    seq: int
    n_before: int
    sent_at: float
    is_alone: bool  # when it was sent, nothing else was under way


class OpsInFlight:
    """The ops that are sent and not answered, and answers that the step has not taken yet."""

    def __init__(self) -> None:
        self.client_s = 0.0  # between the answer before and what was sent last
        self._ops: dict[int, OpInFlight] = {}
        self._answers: dict[int, OpAnswer] = {}
        self._void: set[int] = set()  # of the ops: what comes of them is of no use
        self._progress_at = 0.0  # when something was sent that nothing was waiting for, or an answer came
        self._n_replayed = 0  # tokens that a repair has computed again since the last answer

    def __len__(self) -> int:
        return len(self._ops)

    def add(self, op: OpInFlight, now: float) -> None:
        """An op is about to be sent."""
        if not self._ops:
            self.client_s = now - self._progress_at
            self._progress_at = now
        self._ops[op.sent.seq] = op

    def get(self, seq: int) -> OpInFlight | None:
        """Return an op that has no answer yet."""
        return self._ops.get(seq)

    def void(self, first: int, last: int) -> None:
        """Nobody wants the answers of ops ``first`` to ``last``."""
        for seq in range(first, last + 1):
            self._answers.pop(seq, None)
            if seq in self._ops:
                self._void.add(seq)

    def is_void(self, seq: int) -> bool:
        """Is the answer of an op of no use?"""
        return seq in self._void

    def answer(self, seq: int, answer: OpAnswer, now: float) -> float:
        """An op is answered; returns the seconds since something was sent or answered before."""
        waited_s = self.waited_s(now)
        del self._ops[seq]
        if seq in self._void:
            self._void.remove(seq)
        else:
            self._answers[seq] = answer
        self._progress_at = now
        self._n_replayed = 0
        return waited_s

    def has_answer(self, seq: int) -> bool:
        """Is an answer here that nobody has taken?"""
        return seq in self._answers

    def take_answer(self, seq: int) -> OpAnswer | None:
        """Return an answer once; None before it is here."""
        return self._answers.pop(seq, None)

    def note_repair(self, n_tokens: int, now: float) -> None:
        """The chain was repaired, and computes so many tokens of its history again."""
        self._progress_at = now
        self._n_replayed = n_tokens

    def waited_s(self, now: float) -> float:
        """Return the seconds since something was sent or answered."""
        return now - self._progress_at

    def longest_wait_s(self, tokens_per_s: Sequence[float]) -> float:
        """How long a chain may be busy without an answer, by the speeds that its servers announce.

        LONGEST_S at least.
        """
        n_tokens = self._n_replayed + sum(op.n_tokens for op in self._ops.values())
        s_per_token = sum(1 / max(SLOWEST_TOKENS_PER_S, speed) for speed in tokens_per_s)
        return LONGEST_S + SLACK * n_tokens * s_per_token


# Peers choose what comes in, and what cannot be right may be any hop's doing, or the model's. So a wrong chain is only
# counted, and another one is tried. A right answer shows that the model is sound: then whoever gave a wrong one is at
# fault. MAX_WRONG chains in turn end the step: then the model or the input is at fault, and nobody is blamed.
class WrongChains:
    """What chains of one step gave that cannot be right. ``failure`` ends the step, once there is one."""

    def __init__(self) -> None:
        self.failure: SwarmError | None = None
        self._n_wrong = 0
        self._faulty: list[tuple[PeerId, str]] = []
        self._accusers: set[PeerId] = set()  # of the whole session

    def begin_step(self) -> None:
        """Forget the chains of the step before; who accused others then is remembered."""
        self.failure = None
        self._n_wrong = 0
        self._faulty.clear()

    def note_faulty(self, peer: PeerId, reason: str) -> None:
        """A peer gave what cannot be right; whether it is at fault is not known yet."""
        self._faulty.append((peer, reason))

    def take_faulty(self) -> list[tuple[PeerId, str]]:
        """There is a right answer: return those who gave another one, and why that could not be right."""
        faulty = self._faulty[::-1]
        self._faulty.clear()
        return faulty

    def count_wrong(self, reason: str) -> None:
        """A chain gave what cannot be right."""
        self._n_wrong += 1
        if self._n_wrong > MAX_WRONG:
            text = f"{self._n_wrong} chains in turn gave no right answer: {reason}"
            self.failure = Refused(Code.NOT_FINITE, text)

    def count_stuck(self) -> None:
        """A chain was busy for ever. Raises SwarmUnavailable after MAX_WRONG."""
        self._n_wrong += 1
        if self._n_wrong > MAX_WRONG:
            raise SwarmUnavailable(f"{self._n_wrong} chains in turn gave signs of life and no answer")

    def choose_culprit(self, links: Sequence[HopLink], index: int) -> HopLink:
        """Hop ``index`` says that what it was given cannot be: choose who is done without for it.

        One of the two is wrong: first the giver, then, when the same hop says so again, who says it.
        """
        accuser = links[index]
        has_accused = accuser.hop.peer in self._accusers
        self._accusers.add(accuser.hop.peer)
        return links[index - 1] if index and not has_accused else accuser
