"""Which session already holds the tokens that another one begins with: a long prompt shared is computed once.

A session's beginning is known by digests of all that entered it, one for every ``BLOCK_TOKENS`` tokens, each over
everything before it (as in vLLM's prefix caching), until an edit ends that. Pure: sessions are keys here.
"""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Generic, TypeVar

BLOCK_TOKENS = 16  # tokens between two digests; shorter beginnings are computed as fast as they are copied
Key = TypeVar("Key", bound=Hashable)
DIGEST_BYTES = 16  # sessions of one client only are compared: nobody gains by a collision


Token = Iterable[bytes | memoryview]
"""The bytes of a token that enter a session, in parts."""


@dataclass(frozen=True, slots=True)
class Reached:
    """How far a prefix is known: its digests so far, and what the next ones go on from."""

    marks: tuple[bytes, ...]
    n_tokens: int
    hasher: hashlib.blake2b

    def then(self, tokens: Iterable[Token]) -> Reached:
        """How far it is known with these tokens behind it."""
        hasher = self.hasher.copy()
        marks = list(self.marks)
        n_tokens = self.n_tokens
        for token in tokens:
            n_tokens += 1
            for part in token:
                hasher.update(part)
            if n_tokens % BLOCK_TOKENS == 0:
                marks.append(hasher.digest())
        return Reached(tuple(marks), n_tokens, hasher)


# To digest a long prompt takes as long as copying it ten times, and most begin like no other. So whoever looks for one
# that begins alike reads the first block alone; the rest is read when something is known of it, or once the op is done.
@dataclass(frozen=True)
class PrefixExtension:
    """A prefix with the tokens of one more op, which are read when they are asked for."""

    before: Reached
    tokens: Sequence[Token]

    @cached_property
    def reached(self) -> Reached:
        """How far the prefix is known with all of them."""
        return self.before.then(self.tokens)

    @cached_property
    def first_mark(self) -> bytes | None:
        """The first digest that they lead to; None where they are too few."""
        n_tokens = BLOCK_TOKENS - self.before.n_tokens % BLOCK_TOKENS
        return self.before.then(self.tokens[:n_tokens]).marks[-1] if len(self.tokens) >= n_tokens else None


@dataclass(slots=True)
class Prefix:
    """The beginning of one session. ``scope`` is what else its cache depends on: client, blocks, adapter."""

    scope: tuple[bytes, ...]
    reached: Reached = field(init=False)
    is_over: bool = False

    def __post_init__(self) -> None:
        hasher = hashlib.blake2b(digest_size=DIGEST_BYTES)
        for part in self.scope:
            hasher.update(len(part).to_bytes(4, "big") + part)
        self.reached = Reached((), 0, hasher)

    def ahead(self, tokens: Sequence[Token]) -> PrefixExtension:
        """How it would go on with these tokens."""
        return PrefixExtension(self.reached, tokens)

    def crop(self, n_tokens: int) -> None:
        """Only the first ``n_tokens`` are still as they were; nothing that follows is known."""
        self.is_over = True
        self.reached = Reached(self.reached.marks[: n_tokens // BLOCK_TOKENS], n_tokens, self.reached.hasher)


# Two sessions share a prefix as far as their marks agree. A mark stands for everything before it, so one look at the
# longest common mark is enough, and no tokens are compared:
#
#     tokens   0 ....... 15 | 16 ...... 31 | 32 ...... 47
#     marks              m1 |           m2 |           m3      m2 = digest(scope, tokens 0 to 31)
#
# The scope begins each digest. So sessions of different clients never have a mark in common: a client cannot find out
# what another one has asked.


class Prefixes(Generic[Key]):
    """All sessions whose beginnings are held."""

    def __init__(self) -> None:
        self._holders: dict[bytes, dict[Key, None]] = {}
        self._marks: dict[Key, tuple[bytes, ...]] = {}

    def set(self, session: Key, marks: tuple[bytes, ...]) -> None:
        """Say what a session holds now; nothing: it is gone."""
        old_marks = self._marks.get(session, ())
        if old_marks is marks:
            return  # as after every step of decoding
        self._marks.pop(session, None)
        for mark in old_marks:
            self._holders[mark].pop(session)
            if not self._holders[mark]:
                del self._holders[mark]
        for mark in marks:
            self._holders.setdefault(mark, {})[session] = None
        if marks:
            self._marks[session] = marks

    def longest(self, wanted: PrefixExtension) -> tuple[Key, int] | None:
        """Who holds most of what a prefix will be, and how many tokens of it; None: nobody holds its next block."""
        if wanted.first_mark not in self._holders:
            return None
        marks = wanted.reached.marks
        for n_marks in range(len(marks), 0, -1):
            for session in self._holders.get(marks[n_marks - 1], ()):
                return session, n_marks * BLOCK_TOKENS
        return None
