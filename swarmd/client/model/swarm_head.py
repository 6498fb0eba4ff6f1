"""The last hop's logits in place of a head here: when those that come are enough, and whether they are right.

A server that computes a head for others can lie about it, and no audit of blocks sees that. So hidden states come
along. The client's own head, which is not used otherwise, computes the first answer of every server again, and a share
of those after that.
"""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    MinLengthLogitsProcessor,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

from swarmd.client.links.link import ServedLogits
from swarmd.client.model.head_choice import HeadChoice
from swarmd.client.model.remote_cache import Session
from swarmd.client.model.traced_pass import StepPass
from swarmd.protocol.fields import MOST_LOGITS
from swarmd.values import Decision
from swarmd.wire.top import largest

CHECKED_SHARE = 1 / 64  # of what a server gives after its first: a liar is found within a hundred tokens or so
# of the largest logit: kernels round differently, and where hidden states came in a codec, they are others
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.01, torch.float16: 0.002}
CODED = {"raw": 0.0, "float16": 0.003, "bfloat16": 0.02, "int8": 0.06, "int4": 0.5}
NARROWING = (TopPLogitsWarper, MinPLogitsWarper, TypicalLogitsWarper, EpsilonLogitsWarper, EtaLogitsWarper)
"""What drops some of those that are left, by their probabilities among these."""
FORBIDDING = (MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor)
"""What drops ends of text."""


def n_needed(processors: Iterable[Any], samples: bool) -> int | None:
    """Count how many of the largest logits decide the next token; None where others may count."""
    needed = None if samples else 1
    n_forbidden = 0
    for processor in processors:
        if isinstance(processor, FORBIDDING):
            n_forbidden += processor.eos_token_id.numel()
        elif isinstance(processor, TopKLogitsWarper):
            needed = processor.top_k if needed is None else min(needed, processor.top_k)
        elif isinstance(processor, TemperatureLogitsWarper):
            continue
        elif needed is None or type(processor) not in NARROWING:
            return None
    return None if needed is None else needed + n_forbidden


def are_enough(needed: int | None) -> bool:
    """Are so many among the logits that come? None is all of them."""
    return needed is not None and needed <= MOST_LOGITS


def is_enough(processors: Iterable[Any], samples: bool) -> bool:
    """Do the logits that come decide the next token as all of them would?"""
    return are_enough(n_needed(processors, samples))


# What a server can do with logits: send wrong ones, at random or for chosen tokens only. Three numbers are compared
# with the client's own head: the logits of the tokens sent, the largest logits in order (so that a likely token is not
# left out), and the sum over the vocabulary (so that the rest is not larger than it may be). Every server's first
# answer is checked; after that it cannot know which are.
class HeadChecks:
    """Which answers of which servers are computed here again: a share, ``min_share`` at least. For one model.

    ``is_needed``: servers are asked wherever they have a head, else where that is quicker than the client's own.
    """

    def __init__(self, min_share: float = 0.0, rng: random.Random | None = None, is_needed: bool = True) -> None:
        self.is_needed = is_needed
        self._share = max(min_share, CHECKED_SHARE)
        self._rng = rng or random.Random()
        self._right: set[str] = set()
        self.n_taken = 0
        self.n_checked = 0

    def draw_check(self, served: ServedLogits) -> bool:
        """Draw whether these logits are computed here, too, and count them. Until a server was right once, all are."""
        self.n_taken += 1
        is_due = served.giver not in self._right or self._rng.random() < self._share
        self.n_checked += is_due
        return is_due

    def find_error(self, served: ServedLogits, expected: torch.Tensor, dtype: torch.dtype) -> str:
        """Say what is wrong with logits, by float32 ones [n, vocabulary] computed here; "" if nothing is.

        ``dtype`` is what the head is computed in. A server that was right is checked less often from then on.
        """
        top = served.top
        expected_top = largest(expected, top.ids.shape[1])
        tolerance = max(TOLERANCE[dtype], CODED[served.codec])
        bound = tolerance * float(expected.abs().max())
        differences = (
            expected.gather(1, top.ids) - top.values,
            expected_top.values - top.values,
            expected_top.log_sum - top.log_sum,
        )
        deviation = max(float(difference.abs().max()) for difference in differences)
        if deviation > bound:
            return f"logits that are off by {deviation:.3g}, with {bound:.2g} allowed"
        self._right.add(served.giver)
        return ""


HeadBy = Path | HeadChecks | None
"""What computes logits: the swarm, with these checks; 8 bits, compiled into a folder; or the head as it is."""


def head_called(name: str, compiled_in: Path, verify: float = 0.0) -> HeadBy:
    """Return what computes logits for one of config.HEADS.

    Of served logits at least the share ``verify`` is checked; with 1 all are computed here instead.
    """
    if name in ("auto", "swarm") and verify < 1:
        return HeadChecks(verify, is_needed=name == "swarm")
    return compiled_in if name == "int8" else None


class SwarmHead:
    """One model's steps, with logits of the last hop where it gives them."""

    def __init__(self, model: Any, traced: StepPass, checks: HeadChecks) -> None:
        self._traced = traced
        self._checks = checks
        self._weights = list(model.get_output_embeddings().parameters())
        self._known = self._fingerprint()
        self._vocabulary = int(model.get_output_embeddings().out_features)
        self._choices = defaultdict[str, HeadChoice](HeadChoice)  # by last hops, as people read them

    @property
    def is_current(self) -> bool:
        """Is the head here what it was? Else it is another one than the servers'."""
        return self._fingerprint() == self._known

    def wanted_from(self, session: Session | None) -> int:
        """Return the vocabulary whose largest logits the session's last hop is asked for; 0 where it is not."""
        if self._checks.is_needed:
            return self._vocabulary
        return self._vocabulary if session is not None and self.choice_for(session).asks else 0

    def rests(self, session: Session | None) -> bool:
        """Does one's own head compute the next token, and nothing is to be measured?"""
        return not self._checks.is_needed and session is not None and self.choice_for(session).rests()

    def choice_for(self, session: Session) -> HeadChoice:
        """Whose head is used where a session ends."""
        return self._choices[session.chain[-1]]

    def explain(self, session: Session | None) -> Decision[str]:
        """Say whose head is asked in a session, and why."""
        if self._checks.is_needed:
            return Decision("swarm", "as asked for")
        if session is None:
            return Decision("own", "no session")
        choice = self.choice_for(session)
        return Decision("swarm" if choice.asks else "own", choice.reason)

    def read(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        hidden: torch.Tensor,
        served: ServedLogits | None,
        session: Session,
        hops_s: Sequence[float],
    ) -> torch.Tensor:
        """Return the logits that came with hidden states [1, n, d], or those computed here, to check them or for want.

        ``ids`` and ``positions`` [1, n] are of the same tokens; ``hops_s`` is what each hop took for them.
        """
        own_s = None
        if served is not None and not self._checks.draw_check(served):
            logits = served.top.filled(self._vocabulary).unsqueeze(0)
        else:
            started_at = time.perf_counter()
            logits = self._traced.compute(ids, positions, lambda _: hidden)
            own_s = time.perf_counter() - started_at
            if served is not None:
                error = self._checks.find_error(served, logits[0].float(), hidden.dtype)
                if error:
                    session.reject_logits(served, error)
        if not self._checks.is_needed and hops_s and ids.shape[1] == 1:
            self.choice_for(session).note(hops_s[-1], own_s, served is not None)
        return logits

    def _fingerprint(self) -> list[tuple[int, int]]:
        return [(weight.data_ptr(), weight._version) for weight in self._weights]
