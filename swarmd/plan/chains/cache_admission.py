"""How much cache each client may have: promises are never oversold, and give way when others ask.

A session is promised what it asks for while there is room. When a client asks for more than is free, promises shrink to
what their sessions use. If that is not enough, sessions of clients that use more than a fair share end, idle ones
first, then the newest; their clients replay them elsewhere. No client gets more than a fair share that way. Before all
that go sessions that were silent for long: they are kept as long as nobody needs their room.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

from swarmd.errors import Code, Refused

MAX_SHARE_PER_PEER = 0.5  # of the cache: one client never has all of it in several sessions
RETRY_AFTER_S = 10.0  # a short generation has ended by then
MAX_SESSIONS_PER_PEER = 64  # each costs bookkeeping, however small it is
SLACK_TOKENS = 256  # left to a session beyond what it uses: the next steps do not ask again
IDLE_S = 10.0  # without an op: a client that decodes, or reads what came, takes less
SILENT_S = 300.0  # without an op: a person thinks about the next message for less

Key = tuple[bytes, int]


# How one promise is divided. What others may take of it is its spare part, and nothing else:
#
#     |<------------------- requested -------------------->|
#     |<----------------- tokens (promised) -------->|
#     |<---- used ---->|<- SLACK_TOKENS ->|<- spare ->|
#
# Invariant: the promises' ``tokens`` never add up to more than ``total_tokens``. A client that asks for much and uses
# little so costs others nothing: its spare part shrinks as soon as somebody else needs room.
@dataclass(slots=True)
class Promise:
    """The cache tokens that one hop of ``owner`` requested, may use, and uses. ``order``: its age.

    ``owner`` is the key that answers for a client.

    Its owner's fair share grows with its ``weight``. What it uses is known from above: a crop gives nothing back here.
    """

    owner: bytes
    requested: int
    tokens: int
    order: int
    weight: float = 1.0
    used: int = 0
    used_at: float = 0.0

    @property
    def spare(self) -> int:
        """What can be taken back while it goes on."""
        return max(0, self.tokens - self.used - SLACK_TOKENS)

    def is_silent(self, now: float) -> bool:
        """Whether it ends as soon as anybody needs its room."""
        return now - self.used_at > SILENT_S


@dataclass(slots=True)
class CacheLedger:
    """Promises of cache tokens by hop key."""

    total_tokens: int
    _promises: dict[Key, Promise] = field(default_factory=dict)
    _order: itertools.count[int] = field(default_factory=itertools.count)

    @property
    def free_tokens(self) -> int:
        """What is promised to nobody."""
        return self.total_tokens - sum(p.tokens for p in self._promises.values())

    def room_tokens(self, now: float) -> int:
        """What somebody new could get."""
        promises = [p for p in self._promises.values() if not p.is_silent(now)]
        free_tokens = self.total_tokens - sum(p.tokens for p in promises)
        spare = sum(p.spare for p in promises)
        newcomers_share = self.total_tokens // (len({p.owner for p in promises}) + 1)
        return max(free_tokens, min(free_tokens + spare, newcomers_share))

    def reserve(
        self,
        key: Key,
        client: bytes,
        n_tokens: int,
        now: float = 0.0,
        weight: float = 1.0,
    ) -> list[Key]:
        """Promise ``n_tokens`` to a hop of ``client`` (the key that answers for it); returns hops that must end for it.

        Raises Refused with both numbers and changes nothing; a second promise replaces the first.
        """
        if n_tokens > self.total_tokens:
            raise Refused(
                Code.TOO_LONG, f"{n_tokens} cache tokens asked for, this server has {self.total_tokens} in all"
            )
        other_promises = {k: p for k, p in self._promises.items() if k != key}
        ending = self._choose_own(other_promises, client, n_tokens, now)
        kept_promises = {k: p for k, p in other_promises.items() if k not in ending}
        ending += self._make_room(kept_promises, client, weight, n_tokens, now)
        for ended in ending:
            del self._promises[ended]
        self._promises[key] = Promise(
            owner=client,
            requested=n_tokens,
            tokens=n_tokens,
            order=next(self._order),
            weight=weight,
            used_at=now,
        )
        return ending

    def use(self, key: Key, n_tokens: int, now: float) -> list[Key]:
        """A hop takes so many tokens more, at most; returns hops that must end for it.

        Raises Refused where its promise was taken back, and nothing is left to renew it.
        """
        promise = self._promises.get(key)
        if promise is None:
            return []
        promise.used = min(promise.requested, promise.used + n_tokens)
        promise.used_at = now
        if promise.used <= promise.tokens:
            return []
        other_promises = {k: p for k, p in self._promises.items() if k != key}
        n_promised = min(promise.requested, promise.used + SLACK_TOKENS)
        ending = self._make_room(other_promises, promise.owner, promise.weight, n_promised, now)
        for ended in ending:
            del self._promises[ended]
        promise.tokens = n_promised
        return ending

    def touch(self, key: Key, used_at: float) -> None:
        """Note when a hop was last used, though it took no tokens: it computes, or was asked something else."""
        promise = self._promises.get(key)
        if promise is not None:
            promise.used_at = max(promise.used_at, used_at)

    def release(self, key: Key) -> None:
        """Take back the whole promise of a hop that has ended; none is no error."""
        self._promises.pop(key, None)

    def _choose_own(self, other_promises: dict[Key, Promise], client: bytes, n_tokens: int, now: float) -> list[Key]:
        """Choose which of a client's own silent hops end, so that it has no more than one may. Raises Refused."""
        own = {key: promise for key, promise in other_promises.items() if promise.owner == client}
        limit = int(self.total_tokens * MAX_SHARE_PER_PEER)
        silent = sorted((key for key in own if own[key].is_silent(now)), key=lambda key: -own[key].used_at)
        ending: list[Key] = []
        while own:
            n_held = sum(promise.tokens for promise in own.values())
            if len(own) < MAX_SESSIONS_PER_PEER and n_held + n_tokens <= limit:
                break
            if not silent:
                text = f"this client holds {n_held} of at most {limit} cache tokens in {len(own)} sessions"
                raise Refused(Code.NO_CAPACITY, f"{text} and asks for {n_tokens} more", RETRY_AFTER_S)
            ending.append(silent.pop())
            del own[ending[-1]]
        return ending

    def _make_room(
        self,
        other_promises: dict[Key, Promise],
        client: bytes,
        weight: float,
        n_tokens: int,
        now: float,
    ) -> list[Key]:
        """Let others give way to ``n_tokens`` of a client; returns hops that end for it.

        Raises Refused, and changes nothing, if they need not.
        """
        n_promised = sum(p.tokens for p in other_promises.values())
        missing = n_tokens - (self.total_tokens - n_promised)
        silent_keys = _choose_silent(other_promises, missing, now)
        missing -= sum(other_promises[key].tokens for key in silent_keys)
        other_promises = {key: p for key, p in other_promises.items() if key not in silent_keys}
        ending = self._choose_ending(other_promises, client, weight, n_tokens, missing, now)
        # From here on nothing is refused, so that a refusal changed nothing. Sessions that end give all they had; the
        # rest comes from promises that go on, the emptiest first, and never from what a session has used.
        for key in ending:
            missing -= other_promises.pop(key).tokens
        for promise in sorted(other_promises.values(), key=lambda p: -p.spare):
            n_taken = min(promise.spare, max(0, missing))
            promise.tokens -= n_taken
            missing -= n_taken
        return [*silent_keys, *ending]

    def _choose_ending(
        self,
        other_promises: dict[Key, Promise],
        client: bytes,
        weight: float,
        n_tokens: int,
        missing: int,
        now: float,
    ) -> list[Key]:
        """Which hops must end, beside what all can spare, for ``n_tokens``, some of them missing. Raises Refused."""
        if missing <= 0:
            return []
        weights = {p.owner: p.weight for p in other_promises.values()}
        weights[client] = weight
        total_weight = sum(weights.values())
        fair = {owner: int(self.total_tokens * w / total_weight) for owner, w in weights.items()}
        client_tokens = sum(p.tokens for p in other_promises.values() if p.owner == client)
        has_little = client_tokens + n_tokens <= self.total_tokens // len(weights)
        ending: list[Key] | None
        if has_little and missing <= sum(p.spare for p in other_promises.values()):
            ending = []  # what nobody uses goes by heads: only who has to end goes by weight
        elif client_tokens + n_tokens > fair[client]:
            ending = None
        else:
            ending = _choose_above_share(other_promises, fair, missing, now)
        if ending is None:
            free = n_tokens - missing
            request = f"{n_tokens} cache tokens asked for, {free} of {self.total_tokens} are free"
            text = f"{request}, a fair share is {fair[client]}"
            raise Refused(Code.NO_CAPACITY, text, RETRY_AFTER_S)
        return ending


def _choose_silent(promises: dict[Key, Promise], missing: int, now: float) -> list[Key]:
    """Which of the hops that were silent for long end for ``missing`` tokens: the longest silent first."""
    ending: list[Key] = []
    for key in sorted(promises, key=lambda key: promises[key].used_at):
        if missing <= 0 or not promises[key].is_silent(now):
            break
        ending.append(key)
        missing -= promises[key].tokens
    return ending


def _choose_above_share(
    promises: dict[Key, Promise],
    fair: dict[bytes, int],
    missing: int,
    now: float,
) -> list[Key] | None:
    """Which hops must end so that ``missing`` tokens can be had, beside what all can spare; None if that is too few."""

    def comes_later(key: Key) -> tuple[bool, int]:
        promise = promises[key]
        return now - promise.used_at < IDLE_S, -promise.order

    # A client's sessions end one by one, and only while what it still has is more than its fair share: so a client
    # that stays within it is never thrown out, whatever others ask for.
    missing -= sum(p.spare for p in promises.values())
    ending: list[Key] = []
    for key in sorted(promises, key=comes_later):
        if missing <= 0:
            break
        promise = promises[key]
        remaining = [p for k, p in promises.items() if k not in ending]
        if _used_tokens(promise.owner, remaining) > fair[promise.owner]:
            ending.append(key)
            missing -= promise.tokens - promise.spare
    return ending if missing <= 0 else None


def _used_tokens(owner: bytes, promises: Iterable[Promise]) -> int:
    return sum(min(p.tokens, p.used + SLACK_TOKENS) for p in promises if p.owner == owner)
