"""Which of the sessions that were kept goes on with a prompt: the one that has most of its beginning.

Pure: sessions are values here, the clock is an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

KEPT_FOR_S = 300.0  # half of what a server grants a silent session
MOST_KEPT = 16  # of one model: each holds room for its tokens on every server of its chain
LEAST_SHARED = 8  # tokens: fewer are prefilled as fast as a session is cropped
LEAST_SHARE = 0.5  # of a kept session's tokens: cutting off more would rob another conversation of its cache


@dataclass(frozen=True, slots=True)
class KeptSession:
    """A session that waits: its tokens so far, how many it has room for, when it was put away, and whose it is."""

    session: Hashable
    tokens: tuple[int, ...]
    max_tokens: int
    since_s: float
    key: str = ""


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def best(
    kept: Sequence[KeptSession], prompt: Sequence[int], n_more: int, key: str = ""
) -> tuple[KeptSession, int] | None:
    """The session to go on with, and how many of the prompt's tokens it has; None: begin anew.

    At least one token is left to send, since an answer begins with what comes after it. A session that has no room
    for the prompt and ``n_more`` tokens is none. Nor is another key's: how many tokens it has in common with a prompt
    would tell what others wrote, and going on with it would take it away from them.
    """
    own = [k for k in kept if k.key == key and k.max_tokens >= len(prompt) + n_more]
    found = [(min(shared(k.tokens, prompt), len(prompt) - 1), k) for k in own]
    found = [(n, k) for n, k in found if n >= LEAST_SHARED and n >= LEAST_SHARE * len(k.tokens)]
    if not found:
        return None
    n, chosen = max(found, key=lambda pair: (pair[0], pair[1].since_s))
    return chosen, n


def outdated(kept: Sequence[KeptSession], now: float) -> list[KeptSession]:
    """Those to give back: too old, and of too many the oldest of the key that has most of them."""
    given_back = [k for k in kept if now - k.since_s > KEPT_FOR_S]
    young = sorted((k for k in kept if now - k.since_s <= KEPT_FOR_S), key=lambda k: k.since_s)
    while len(young) > MOST_KEPT:
        n_of = Counter(k.key for k in young)
        oldest = max(young, key=lambda k: (n_of[k.key], -k.since_s))
        young.remove(oldest)
        given_back.append(oldest)
    return given_back
