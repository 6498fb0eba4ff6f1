"""Which of the sessions that were kept goes on with a prompt: the one that has most of its beginning.

Pure: sessions are values here, the clock is an argument.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

MOST_KEPT = 16  # of one model: each holds room for its tokens on every server of its chain
LEAST_SHARED = 8  # tokens: fewer are prefilled as fast as a session is cropped
FIRST_TOKENS = 2_048  # of an answer are reserved at first, however long it may become
HEADROOM_TOKENS = 1_024  # for the next turn of a conversation; and half of what there is, for those after it
LEAST_TOKENS = 256  # of an answer that a kept session has room for: the rest is got when it is needed
LEAST_SHARE = 0.5  # of a kept session's tokens: cutting off more would rob another conversation of its cache


# A prompt of a conversation's next turn begins with the tokens of the last one. A kept session has these in the KV
# caches of its chain, so only the rest is sent:
#
#     session   s s s s s s s x x
#     prompt    s s s s s s s p p p p
#               n_shared ----->          x is cropped, p is prefilled
#
# Models that cannot crop a cache take only sessions without x (``GenerationEngine._take_kept``).


@dataclass(frozen=True, slots=True)
class KeptSession:
    """A session that waits: its tokens so far, how many it has room for, when it was put away, and whose it is."""

    session: Hashable
    tokens: tuple[int, ...]
    max_tokens: int
    since_s: float
    key: str = ""


# Answers may become as long as the context, and few do. Room for all of it, on every server of a chain, would keep out
# others; so a session begins with less, and its conversation goes on in a larger one when it is full. As each is half
# again as large as what it begins with, tokens are sent anew about twice at most on average.
def choose_room(n_tokens: int, n_more: int, most: int) -> int:
    """For how many tokens a session is opened that begins with ``n_tokens``, of an answer of up to ``n_more``."""
    return min(most, n_tokens + min(n_more, FIRST_TOKENS) + HEADROOM_TOKENS + n_tokens // 2)


def count_shared(a: Sequence[int], b: Sequence[int]) -> int:
    """Count the tokens that two sequences begin with in common."""
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)


def choose_session(
    sessions: Sequence[KeptSession], prompt: Sequence[int], n_more: int, key: str = ""
) -> tuple[KeptSession, int] | None:
    """Choose the session to go on with, and say how many of the prompt's tokens it has; None: begin anew.

    At least one token is left to send, since an answer begins with what comes after it. A session that has no room
    for the prompt and the first of ``n_more`` tokens is none. Nor is another key's: how many tokens it has in common
    with a prompt would tell what others wrote, and going on with it would take it away from them.
    """
    n_needed = len(prompt) + min(n_more, LEAST_TOKENS)
    matches: list[tuple[int, KeptSession]] = []
    for session in sessions:
        if session.key != key or session.max_tokens < n_needed:
            continue
        n_shared = min(count_shared(session.tokens, prompt), len(prompt) - 1)
        if n_shared >= LEAST_SHARED and n_shared >= LEAST_SHARE * len(session.tokens):
            matches.append((n_shared, session))
    if not matches:
        return None
    n_shared, chosen = max(matches, key=lambda match: (match[0], match[1].since_s))
    return chosen, n_shared


def choose_expired(sessions: Sequence[KeptSession], now: float, kept_for_s: float) -> list[KeptSession]:
    """Choose those to give back: too old, and of too many the oldest of the key that has most of them."""
    expired = [session for session in sessions if now - session.since_s > kept_for_s]
    young = [session for session in sessions if now - session.since_s <= kept_for_s]
    young.sort(key=lambda session: session.since_s)
    while len(young) > MOST_KEPT:
        n_of_key = Counter(session.key for session in young)
        oldest = max(young, key=lambda session: (n_of_key[session.key], -session.since_s))
        young.remove(oldest)
        expired.append(oldest)
    return expired


def choose_oldest(sessions: Sequence[KeptSession], n: int) -> list[KeptSession]:
    """Choose so many to give back, where servers have no room for another one."""
    return sorted(sessions, key=lambda session: session.since_s)[:n]
