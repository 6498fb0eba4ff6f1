"""Answers that fit a JSON schema: which tokens may come next, which have to."""

from __future__ import annotations

import re

import numpy as np
import torch
from llguidance import LLMatcher

from swarmd.errors import ConfigError

LONGEST_MARK = 128  # characters of what an answer begins after


class Grammar:
    """Where one answer is in its grammar. It holds from the beginning, or from behind what ``begins_after`` matches."""

    def __init__(self, matcher: LLMatcher, vocabulary: int, begins_after: str = "") -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._begins_after = re.compile(begins_after) if begins_after else None
        self._text = ""  # before it holds: the end of it

    @property
    def holds(self) -> bool:
        """Whether it says what comes next."""
        return self._begins_after is None

    @property
    def is_done(self) -> bool:
        """Whether nothing may follow. Raises ConfigError where the library has given up."""
        self._require_no_error()
        return self.holds and bool(self._matcher.is_stopped())

    def allowed_tokens(self) -> torch.Tensor | None:
        """Return which tokens may come next: bool [vocabulary], None where all. Raises ConfigError where none can."""
        if not self.holds:
            return None
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        bits = np.unpackbits(packed, bitorder="little")[: self._vocabulary]
        mask = torch.from_numpy(bits.astype(bool))
        if not mask.any():
            self._require_no_error()
            raise ConfigError("no token of this model goes on with an answer that fits the schema: change the schema")
        return mask

    def accept_token(self, token: int, text: str) -> None:
        """Move on by a token of the answer, which writes this text."""
        if self._begins_after is None:
            self._matcher.consume_token(token)
            return
        self._text = (self._text + text)[-LONGEST_MARK - len(text) :]
        if self._begins_after.search(self._text):
            self._begins_after = None

    def forced_tokens(self) -> list[int]:
        """Return the tokens that have to come next, whatever the model says; none where there is a choice."""
        forced = list(self._matcher.compute_ff_tokens()) if self.holds else []
        foreign = (place for place, token in enumerate(forced) if token >= self._vocabulary)
        return forced[: next(foreign, len(forced))]  # a tokenizer may have more tokens than its model

    def copy(self, begins_after: str = "") -> Grammar:
        """Return the same place in the same grammar, for another answer, which may begin with something else."""
        return Grammar(self._matcher.deep_copy(), self._vocabulary, begins_after)

    def _require_no_error(self) -> None:
        if self._matcher.is_error():
            message, _, _ = self._matcher.get_error().partition("<state>")
            error = " ".join(message.split())[:300]
            raise ConfigError(f"the answer cannot be held to the schema any further ({error}): make the schema simpler")
