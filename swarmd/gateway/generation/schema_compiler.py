"""JSON schemas to matchers of one vocabulary (llguidance). As a program it is the child that tries a schema.

The library may take for ever or gigabytes for a schema of a few words, and no one knows all of those: so each schema is
compiled by a child with limits first (``schema_trials``), and here only once that went well. What it does for a schema
does not depend on who asks or when, so what the child got done is done here in the same time and room.

``python -m swarmd.gateway.generation.schema_compiler TOKENIZER_JSON VOCABULARY EOS`` is the child. It needs no torch.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from llguidance._tokenizer import TokenizerWrapper
from tokenizers import Tokenizer

from swarmd.client.text.child import limit
from swarmd.gateway.generation.json_schema import BadSchema
from swarmd.gateway.generation.token_bytes import TokenBytes

MOST_MEMORY_BYTES = 256 * 2**20  # beyond what an idle child has; a schema of 64 KiB with 1,000 properties takes 11 MiB
N_TRIED_TOKENS = 32  # of an answer, drawn by chance: rules are worked out as they are met
TOO_MUCH = {"ParserTooComplex", "LexerTooComplex", "InternalError"}
"""Why the library gives up, as it says; that a drawn answer leads nowhere is no fault of the schema."""
FORM = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
"""On one line: with white space as it likes, a small model writes nothing else for as long as it may."""


class Compiler:
    """Compiles for one vocabulary. Raises BadSchema for a tokenizer whose tokens have no bytes of their own."""

    def __init__(self, tokenizer: Tokenizer, vocabulary: int, eos: int) -> None:
        n_vocab = max(vocabulary, tokenizer.get_vocab_size())  # a tokenizer may have more tokens than its model
        try:
            self._tokenizer = LLTokenizer(tokenizer.to_str(), n_vocab=n_vocab, eos_token=eos)
        except ValueError:
            self._tokenizer = LLTokenizer(TokenizerWrapper(_Vocabulary(tokenizer, eos)), n_vocab=n_vocab)

    def compile(self, schema: str) -> LLMatcher:
        """Compile a schema, given as JSON. Raises BadSchema."""
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, overrides=FORM)
            matcher = LLMatcher(self._tokenizer, grammar, log_level=0)
        except ValueError as error:
            raise BadSchema(_explain_error(str(error))) from None
        if matcher.is_error():
            raise BadSchema(_explain_error(matcher.get_error()))
        return matcher


class _Vocabulary:
    """A vocabulary as llguidance takes it where it cannot read the tokenizer's file by itself."""

    def __init__(self, tokenizer: Tokenizer, eos: int) -> None:
        token_bytes = TokenBytes(tokenizer)
        if not token_bytes.is_known:
            raise BadSchema(
                f"this model's tokenizer ({token_bytes.kind}) does not write its tokens one by one, so no answer of "
                "it can be held to a schema: ask without one"
            )
        self.eos_token_id = eos
        self.bos_token_id = None
        self.special_token_ids = sorted(token_bytes.special | {eos})
        self.tokens = [token_bytes[token] for token in range(tokenizer.get_vocab_size())]
        special = token_bytes.special
        self._by_bytes = {written: token for token, written in enumerate(self.tokens) if token not in special}
        self._longest = max(map(len, self.tokens))

    def __call__(self, text: bytes | str) -> list[int]:
        """Split a text into tokens, each the longest that fits: any that write it will do."""
        remaining = text.encode() if isinstance(text, str) else text
        ids: list[int] = []
        while remaining:
            sizes = range(min(self._longest, len(remaining)), 0, -1)
            size = next((n for n in sizes if remaining[:n] in self._by_bytes), 0)
            if not size:
                return ids
            ids.append(self._by_bytes[remaining[:size]])
            remaining = remaining[size:]
        return ids


def _explain_error(error: str) -> str:
    """Tell what the library says of a schema, without what it tells of itself."""
    message = " ".join(error.partition("<state>")[0].split())[:300]
    missing, _, words = message.partition("Unimplemented keys: ")
    return message if missing else f"it says {words.strip('[]')}, which cannot be kept here: leave it out"


def try_schema(compiler: Compiler, schema: str) -> dict[str, Any]:
    """Compile a schema and write the beginning of an answer; returns what is wrong with it under "error"."""
    # The library works rules out as it meets them, so a schema that compiles may still be too much for it. Tokens
    # drawn by chance meet more of its rules than the likeliest ones would. The seed is fixed: a schema is judged
    # alike whenever it comes.
    try:
        matcher = compiler.compile(schema)
    except BadSchema as error:
        return {"error": str(error)}
    draw = random.Random(0)
    for _ in range(N_TRIED_TOKENS):
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits)
        if not len(allowed) or matcher.is_stopped():
            break
        matcher.compute_ff_tokens()
        matcher.consume_token(int(draw.choice(allowed)))
    return {"error": _explain_error(matcher.get_error())} if matcher.stop_reason() in TOO_MUCH else {}


def main(path: Path, vocabulary: int, eos: int) -> None:
    """Try one schema a line until they end."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print is no answer
    try:
        compiler = Compiler(Tokenizer.from_file(str(path)), vocabulary, eos)
    except BadSchema as error:
        print(json.dumps({"error": str(error)}), file=answers, flush=True)
        return
    limit(MOST_MEMORY_BYTES)
    print(json.dumps({}), file=answers, flush=True)
    for line in sys.stdin:
        schema = json.loads(line)["schema"]
        answer = try_schema(compiler, schema)
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    _, tokenizer_path, vocabulary_size, eos_token = sys.argv
    main(Path(tokenizer_path), int(vocabulary_size), int(eos_token))
