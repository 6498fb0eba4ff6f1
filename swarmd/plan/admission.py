"""Who may reserve how much cache: tokens are promised once and never oversold, with a cap for each peer."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarmd.errors import Code, Refused

MAX_SHARE_PER_PEER = 0.5  # of the cache: one client never has all of it
RETRY_AFTER_S = 10.0  # a short generation has ended by then
MAX_SESSIONS_PER_PEER = 64  # each costs bookkeeping, however small it is


@dataclass(slots=True)
class CacheLedger:
    """Reservations of cache tokens by hop key."""

    total_tokens: int
    _reserved: dict[tuple[bytes, int], tuple[bytes, int]] = field(default_factory=dict)

    @property
    def free_tokens(self) -> int:
        return self.total_tokens - sum(n for _, n in self._reserved.values())

    def reserve(self, key: tuple[bytes, int], client: bytes, n_tokens: int) -> None:
        """Promise ``n_tokens`` to a hop of ``client`` (the key that answers for it).

        Raises Refused with both numbers and changes nothing; a second promise replaces the first.
        """
        others = {k: v for k, v in self._reserved.items() if k != key}
        free = self.total_tokens - sum(n for _, n in others.values())
        if n_tokens > self.total_tokens:
            raise Refused(
                Code.TOO_LONG, f"{n_tokens} cache tokens asked for, this server has {self.total_tokens} in all"
            )
        held = [n for owner, n in others.values() if owner == client]
        if len(held) >= MAX_SESSIONS_PER_PEER or (held and sum(held) + n_tokens > self._cap()):
            text = f"this client holds {sum(held)} of at most {self._cap()} cache tokens in {len(held)} sessions"
            raise Refused(Code.NO_CAPACITY, f"{text} and asks for {n_tokens} more", RETRY_AFTER_S)
        if n_tokens > free:
            text = f"{n_tokens} cache tokens asked for, {free} of {self.total_tokens} are free"
            raise Refused(Code.NO_CAPACITY, text, RETRY_AFTER_S)
        self._reserved[key] = (client, n_tokens)

    def release(self, key: tuple[bytes, int]) -> None:
        self._reserved.pop(key, None)

    def _cap(self) -> int:
        return int(self.total_tokens * MAX_SHARE_PER_PEER)
