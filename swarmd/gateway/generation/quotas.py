"""What each API key may ask for, and what it has had: requests and tokens, in a minute and in a day.

A key's day is a day in UTC, and is kept in a file (SQLite), so that a restart forgives nothing. Minutes live in memory.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from swarmd.errors import ConfigError

logger = logging.getLogger(__name__)

FILE = "gateway-usage.db"
DAY_S = 86_400  # the longer stretch of time that a quota is for
MINUTE_S = 60  # the shorter one
WAIT_S = 5  # until other answers have ended, and given back what they did not need
BUSY_TIMEOUT_S = 0.25  # for another process, which lists the usage
_SCHEMA = """
create table if not exists used (
    day integer, key text, requests integer, prompt integer, generated integer, primary key (day, key)
) without rowid
"""
_SUM = """
select coalesce(sum(requests), 0), coalesce(sum(prompt), 0), coalesce(sum(generated), 0) from used where key = ?
"""
_SUM_OF_DAY = f"{_SUM} and day = ?"
_ADD = """
insert into used values (?, ?, ?, ?, ?) on conflict do update set
    requests = requests + excluded.requests, prompt = prompt + excluded.prompt,
    generated = generated + excluded.generated
"""


class KeyLimits(msgspec.Struct, frozen=True):
    """What one key may use, 0 for no limit: requests, and tokens of prompts and answers together, in a day (UTC)."""

    requests_day: int = 0
    requests_minute: int = 0
    tokens_day: int = 0
    tokens_minute: int = 0


class QuotaUsedUp(Exception):
    """A key may have no more now. ``retry_after_s`` is None where a program had better tell its user."""

    def __init__(self, message: str, code: str, retry_after_s: int | None) -> None:
        super().__init__(message)
        self.code = code
        self.retry_after_s = retry_after_s


class Used(NamedTuple):
    """Of one key: requests that were taken, tokens of their prompts, and tokens that were generated for them."""

    requests: int = 0
    prompt: int = 0
    generated: int = 0

    @property
    def tokens(self) -> int:
        """What counts for a quota of tokens."""
        return self.prompt + self.generated


class UsageFile:
    """What was used, by day and key. A gateway writes, ``swarmd gateway key ls`` reads.

    Reading raises ConfigError for a file that is damaged; one that cannot be written (a full disk) is only logged.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def add(self, day: int, key: str, used: Used) -> None:
        """Count what was used."""
        try:
            with closing(self._open()) as file, file:
                file.execute(_ADD, (day, key, *used))
        except sqlite3.Error as error:
            logger.warning("%s: what the key %r used is not kept over a restart: %s", self._path, key, error)

    def of_day(self, day: int, key: str) -> Used:
        """What a key used on one day."""
        return self._sum(_SUM_OF_DAY, key, day)

    def of_all_days(self, key: str) -> Used:
        """What a key has ever used."""
        return self._sum(_SUM, key)

    def _sum(self, query: str, *values: str | int) -> Used:
        if not self._path.is_file():
            return Used()
        try:
            with closing(self._open()) as file:
                return Used(*file.execute(query, values).fetchone())
        except sqlite3.Error as error:
            reason = f"{self._path} cannot be read: {error}"
            raise ConfigError(f"{reason}; remove it, and what keys used is forgotten") from None

    def _open(self) -> sqlite3.Connection:
        file = sqlite3.connect(self._path, timeout=BUSY_TIMEOUT_S)
        file.execute("pragma journal_mode = wal")
        file.execute("pragma synchronous = normal")  # a power cut may lose the last answers, and nothing else does
        file.execute(_SCHEMA)
        return file


@dataclass(slots=True)
class UsageWindow:
    """What a key used in a stretch of time, ``number`` counted in lengths of it since 1970."""

    number: int
    requests: int = 0
    tokens: int = 0


@dataclass(slots=True)
class KeyState:
    """A key's day and minute, and the tokens that answers under way may still take."""

    day: UsageWindow
    minute: UsageWindow
    n_reserved: int = 0


@dataclass(slots=True)
class Quotas:
    """Lets requests in and counts them. ``limits_of`` says what a key may use, None of one that is gone.

    Answers under way reserve what they may come to, so that many at once cannot pass a quota. None is given more than
    half of what is left, and ends there (``length``): so there is something for those beside it. ``clock``: seconds
    since 1970. Who needs no key ("") is not counted.
    """

    limits_of: Callable[[str], KeyLimits | None]
    file: UsageFile
    clock: Callable[[], float]
    _states: dict[str, KeyState] = field(default_factory=dict)

    def admit(self, key: str) -> None:
        """Count a request. Raises QuotaUsedUp for one too many."""
        if not key:
            return
        state = self._state(key)
        limits = self._limits(key)
        for window, limit, length_s in (
            (state.day, limits.requests_day, DAY_S),
            (state.minute, limits.requests_minute, MINUTE_S),
        ):
            if limit and window.requests >= limit:
                raise self._refuse(f"{limit} requests", length_s)
        state.day.requests += 1
        state.minute.requests += 1
        self.file.add(state.day.number, key, Used(requests=1))

    def reserve(self, key: str, n_prompt: int, n_more: int) -> int:
        """Say how many tokens an answer may have, of ``n_more`` that are asked for.

        They and the prompt's are reserved until ``settle``. Raises QuotaUsedUp where none is left.
        """
        granted = self.grant(key, n_prompt, n_more)
        if key:
            self._state(key).n_reserved += n_prompt + granted
        return granted

    def grant(self, key: str, n_prompt: int, n_more: int) -> int:
        """Say how many tokens an answer might have now, and reserve none. Raises QuotaUsedUp where none is left."""
        if not key:
            return n_more
        state = self._state(key)
        limits = self._limits(key)
        granted = n_more
        for window, limit, length_s in (
            (state.day, limits.tokens_day, DAY_S),
            (state.minute, limits.tokens_minute, MINUTE_S),
        ):
            if not limit:
                continue
            if n_prompt >= limit:
                message = f"the prompt has {n_prompt} tokens, and this key may use {limit}: it can never be answered"
                raise QuotaUsedUp(message, "insufficient_quota", None)
            left = limit - window.tokens - n_prompt
            if left <= 0:
                raise self._refuse(f"{limit} tokens", length_s)
            left -= state.n_reserved
            if left <= 0:
                message = f"other answers of this key may come to all that is left of its {limit} tokens: ask again"
                raise QuotaUsedUp(message, "rate_limit_exceeded", WAIT_S)
            granted = min(granted, -(-left // 2))
        return granted

    def settle(self, key: str, n_reserved: int, used: Used) -> None:
        """Count what an answer took, in place of what was reserved for it."""
        if not key:
            return
        state = self._state(key)
        state.n_reserved -= n_reserved
        state.day.tokens += used.tokens
        state.minute.tokens += used.tokens
        self.file.add(state.day.number, key, used)

    def _limits(self, key: str) -> KeyLimits:
        limits = self.limits_of(key)
        if limits is None:
            raise QuotaUsedUp("this key was taken back", "invalid_api_key", None)
        return limits

    def _state(self, key: str) -> KeyState:
        day, minute = int(self.clock()) // DAY_S, int(self.clock()) // MINUTE_S
        state = self._states.get(key)
        if state is None or state.day.number < day:  # a clock that is set back forgives nothing
            used = self._read(day, key)
            n_reserved = state.n_reserved if state else 0
            state = KeyState(UsageWindow(day, used.requests, used.tokens), UsageWindow(minute), n_reserved)
            self._states[key] = state
        if state.minute.number < minute:
            state.minute = UsageWindow(minute)
        return state

    def _read(self, day: int, key: str) -> Used:
        try:
            return self.file.of_day(day, key)
        except ConfigError as error:
            logger.error("%s", error)
            return Used()

    def _refuse(self, what: str, length_s: int) -> QuotaUsedUp:
        wait_s = length_s - int(self.clock()) % length_s
        period = "day (UTC)" if length_s == DAY_S else "minute"
        # Programs sleep as long as they are told: for the rest of a day they had better tell their user.
        retry_after_s = wait_s if length_s == MINUTE_S else None
        message = f"this key may use {what} a {period}; it may go on in {wait_s} s. Its maker sets its limits"
        code = "insufficient_quota" if length_s == DAY_S else "rate_limit_exceeded"
        return QuotaUsedUp(message, code, retry_after_s)
