"""What an answer may be: a JSON schema, or any JSON, as masks over the vocabulary (llguidance)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer

MOST_SCHEMA_BYTES = 65_536  # of a schema as text; compiling one takes milliseconds
FORM = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""On one line: with white space as it likes, a small model writes nothing else for as long as it may."""
ANY_JSON = '{"type": "object"}'


class BadSchema(Exception):
    """Why a schema cannot be used, for whoever wrote it."""


class Grammars:
    """Makes grammars for one vocabulary."""

    def __init__(self, tokenizer: str, vocabulary: int, eos: int) -> None:
        """``tokenizer`` is the text of a tokenizer.json."""
        self._vocabulary = vocabulary
        self._tokenizer = LLTokenizer(tokenizer, n_vocab=vocabulary, eos_token=eos)

    def of_schema(self, schema: dict[str, Any] | None) -> Grammar:
        """The grammar of what fits a JSON schema; of any JSON object without one. Raises BadSchema."""
        text = ANY_JSON if schema is None else json.dumps(schema)
        if len(text) > MOST_SCHEMA_BYTES:
            raise BadSchema(f"it has {len(text)} characters, at most {MOST_SCHEMA_BYTES} are taken")
        try:
            return self._grammar(LLMatcher.grammar_from_json_schema(text, overrides=FORM))
        except ValueError as error:
            raise BadSchema(" ".join(str(error).split())[:300]) from None

    def _grammar(self, source: str) -> Grammar:
        matcher = LLMatcher(self._tokenizer, source)
        if matcher.is_error():
            raise BadSchema(" ".join(matcher.get_error().split())[:300])
        return Grammar(matcher, self._vocabulary)


class Grammar:
    """Where one answer is in its grammar."""

    def __init__(self, matcher: LLMatcher, vocabulary: int) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary

    @property
    def is_done(self) -> bool:
        return bool(self._matcher.is_stopped())

    def allowed(self) -> torch.Tensor:
        """Which tokens may come next: bool [vocabulary]."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        return torch.from_numpy(np.unpackbits(bits, bitorder="little")[: self._vocabulary].astype(bool))

    def took(self, token: int) -> None:
        self._matcher.consume_token(token)

    def forced(self) -> list[int]:
        """Tokens that have to come next, whatever the model says; none where there is a choice."""
        return list(self._matcher.compute_ff_tokens())

    def copy(self) -> Grammar:
        """The same place in the same grammar, for another answer."""
        return Grammar(self._matcher.deep_copy(), self._vocabulary)
