"""What members computed for each other: the bills of one machine in one file, and their sums.

SQLite keeps them (the standard library's): one row for each hop of a session, with its largest bill. Several processes
of one home write to the file. Sums count bills with both signatures only, which were checked when they came in, and can
be checked again (``check``). What a machine counts by itself (weights, micro-batches, hours) stands apart, and so does
what it computed for each voucher (``served``): nobody signs that, and no other member need believe it.
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import trio

from swarmd.errors import ConfigError, IntegrityError, SwarmError
from swarmd.protocol.accounts import usage_receipt as bills
from swarmd.protocol.accounts.usage_receipt import SignedUsageReceipt, UsageReceipt

logger = logging.getLogger(__name__)

SAVE_INTERVAL_S = 5.0  # what is lost in a crash are the last bills only
MAX_WAITING = 10_000  # bills, the newest, while the disk is full or another process writes
BUSY_TIMEOUT_S = 5.0  # for another process of this home to finish writing
KEPT_S = 731 * 86_400  # two years of bills: of a busy server some 100 MB
MOST_NAMED = 3  # peers of a voucher
DAY_S = 86_400  # what the plot counts by
PRIMARY_CODE = 0xFF  # of SQLite's result codes, which say more in their other bits
_SCHEMA = """
create table if not exists bills (
    giver text, taker text, voucher blob, session blob, start integer, amount integer, n_tokens integer, at integer,
    body blob, given blob, taken blob, primary key (giver, taker, session, start)
) without rowid;
create table if not exists counted (day integer, what text, n integer, primary key (day, what)) without rowid;
create table if not exists served (day integer, voucher blob, n integer, primary key (day, voucher)) without rowid;
"""
_SERVE = "insert into served values (?, ?, ?) on conflict do update set n = n + excluded.n;"
_COUNT = "insert into counted values (?, ?, ?) on conflict do update set n = n + excluded.n;"
_ADD = """
insert into bills values (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?) on conflict do update set
    amount = excluded.amount, n_tokens = excluded.n_tokens, at = excluded.at,
    body = excluded.body, given = excluded.given, taken = excluded.taken
    where excluded.amount > bills.amount;
"""


class UsageKind(StrEnum):
    """What a machine counts of its own giving and taking: nobody else signs it."""

    WEIGHTS_GIVEN = "bytes of weights given"
    WEIGHTS_TAKEN = "bytes of weights taken"
    MICRO_BATCHES = "micro-batches computed for others"
    SAMPLES = "samples computed for training runs"
    SECONDS = "seconds online as a server"


Count = Callable[[UsageKind, int], None]


@dataclass(frozen=True, slots=True)
class UsageSum:
    """What passed between this machine and the guests of one voucher: tokens times blocks, and when last.

    ``peers`` are those of them that gave.
    """

    voucher: bytes
    peers: tuple[str, ...]
    gave: int
    took: int
    n_sessions: int
    last_at: int


@dataclass(slots=True)
class _Total:
    """A ``UsageSum`` while rows are added to it; ``givers`` are all peers that gave."""

    given: int = 0
    taken: int = 0
    n_sessions: int = 0
    last_at: int = 0
    givers: list[str] = field(default_factory=list)


class _Database:
    """The file, opened for each use: several processes of one home write to it. With None there is none."""

    def __init__(self, file: Path | None) -> None:
        self.file = file

    def write(self, rows: Mapping[str, Sequence[tuple[object, ...]]]) -> None:
        """Execute statements, each with all of its rows, at once or not at all. Raises as ``query``."""
        assert self.file is not None
        try:
            with closing(self._open(self.file)) as database, database:
                for statement, values in rows.items():
                    database.executemany(statement, values)
        except sqlite3.Error as error:
            raise explain_failure(self.file, error) from None

    def query(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Return the rows of a query. Raises IntegrityError for a file that is damaged, else ConfigError."""
        if self.file is None or not self.file.is_file():
            return []
        try:
            with closing(self._open(self.file)) as database, database:
                return database.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise explain_failure(self.file, error) from None

    @staticmethod
    def _open(file: Path) -> sqlite3.Connection:
        database = sqlite3.connect(file, timeout=BUSY_TIMEOUT_S)
        database.execute("pragma journal_mode = wal")
        database.execute("pragma synchronous = normal")
        database.executescript(_SCHEMA)
        return database


# A bill is written again and again while its session goes on, each time with a larger amount. The file keeps one row
# for each hop of a session, and an older bill never overwrites a newer one (``_ADD``), in whatever order they come.
#
# What counts as proof are bills with both signatures: neither side can invent them alone. What a machine counts by
# itself is for its own eyes, and lies in tables of its own, so that the two are never added up.
class UsageLedger:
    """The bills of one home; with None as file nothing is kept."""

    def __init__(self, file: Path | None) -> None:
        self._database = _Database(file)
        self._waiting: list[tuple[UsageReceipt, SignedUsageReceipt, bytes]] = []
        self._counted: Counter[tuple[int, UsageKind]] = Counter()
        self._served: Counter[tuple[int, bytes]] = Counter()

    @property
    def are_kept(self) -> bool:
        """Are there books, or is this a process without a home?"""
        return self._database.file is not None

    def count(self, kind: UsageKind, n: int) -> None:
        """Note that this machine gave, or took, so much of something."""
        if self.are_kept:
            self._counted[int(time.time()) // DAY_S, kind] += n

    def serve(self, voucher: bytes, n: int) -> None:
        """Note that so many tokens times blocks were computed here for someone whom ``voucher`` brought in."""
        if self.are_kept:
            self._served[int(time.time()) // DAY_S, voucher] += n

    def add_untrusted(self, signed: SignedUsageReceipt, voucher: bytes) -> None:
        """Enter a bill with someone whom ``voucher`` brought in. Raises IntegrityError."""
        self.add(bills.read_untrusted(signed), signed, voucher)

    def add(self, bill: UsageReceipt, signed: SignedUsageReceipt, voucher: bytes) -> None:
        """Enter one whose signatures were checked."""
        if self.are_kept:
            self._waiting.append((bill, signed, voucher))

    async def keep(self) -> None:
        """Write what came now and then, until cancelled, and at the end; first forget what is very old."""
        if self.are_kept:
            await trio.to_thread.run_sync(self.forget_old)
        try:
            while True:
                await trio.sleep(SAVE_INTERVAL_S)
                if self._waiting or self._counted or self._served:
                    await trio.to_thread.run_sync(self.save)
        finally:
            self.save()

    def save(self) -> None:
        """Write what waits; a disk that is full costs bills, and nothing else."""
        if not self.are_kept or not (self._waiting or self._counted or self._served):
            return
        waiting = self._waiting
        self._waiting = []  # this is a thread: what comes in meanwhile is written the next time
        counted = self._counted
        self._counted = Counter()
        served = self._served
        self._served = Counter()
        bill_rows = [_row(bill, signed, voucher) for bill, signed, voucher in waiting]
        counted_rows = [(day, str(kind), n) for (day, kind), n in counted.items()]
        served_rows = [(day, voucher, n) for (day, voucher), n in served.items()]
        try:
            self._database.write({_ADD: bill_rows, _COUNT: counted_rows, _SERVE: served_rows})
        except SwarmError as error:
            logger.warning("%d bills are not written yet: %s", len(waiting), error)
            self._waiting = [*waiting, *self._waiting][-MAX_WAITING:]
            self._counted += counted
            self._served += served

    def forget_old(self) -> None:
        """Forget what is very old beside the newest that is kept: a clock that is years ahead makes nothing old."""
        try:
            newest = self._database.query(
                "select max(at) from (select at from bills union all select day * ? from served)", DAY_S
            )
        except SwarmError as error:
            logger.warning("old bills stay: %s", error)
            return
        if newest and newest[0][0] is not None:
            self.prune(min(int(time.time()), newest[0][0]) - KEPT_S)

    def prune(self, oldest_kept: int) -> None:
        """Forget bills from before a time, in unix seconds."""
        try:
            self._database.query("delete from bills where at < ?", oldest_kept)
            self._database.query("delete from served where day < ?", oldest_kept // DAY_S)
        except SwarmError as error:
            logger.warning("old bills stay: %s", error)

    def counted(self, since: int = 0) -> dict[UsageKind, int]:
        """What was counted since the day of a time in unix seconds. Raises as ``_Database.query``."""
        rows = dict(self._database.query("select what, sum(n) from counted where day >= ? group by 1", since // DAY_S))
        return {kind: rows.get(str(kind), 0) for kind in UsageKind}

    def served(self, since: int = 0) -> dict[bytes, int]:
        """Tokens times blocks that were computed here, by voucher, signed for or not. Raises as ``_Database.query``."""
        rows = self._database.query("select voucher, sum(n) from served where day >= ? group by 1", since // DAY_S)
        return dict(rows)

    def sums(self, me: str, own_voucher: bytes, since: int = 0) -> list[UsageSum]:
        """By voucher, the largest first: what ``me`` computed it gave; other bills here are what its clients took.

        Between guests of one voucher nothing counts, for they may be one machine. Raises as ``_Database.query``.
        """
        totals: dict[bytes, _Total] = {}
        query = (
            "select giver, voucher, sum(amount), count(distinct session), max(at) from bills "
            "where at >= ? and voucher != ? group by 1, 2 order by 3 desc"
        )
        for giver, voucher, amount, n_sessions, last_at in self._database.query(query, since, own_voucher):
            total = totals.setdefault(voucher, _Total())
            if giver == me:
                total.given += amount
            else:
                total.taken += amount
                total.givers.append(giver)
            total.n_sessions += n_sessions
            total.last_at = max(total.last_at, last_at)
        sums = []
        for voucher, total in totals.items():
            peers = tuple(total.givers[:MOST_NAMED])
            sums.append(UsageSum(voucher, peers, total.given, total.taken, total.n_sessions, total.last_at))
        return sorted(sums, key=lambda s: -s.gave - s.took)

    def days(
        self,
        me: str,
        own_voucher: bytes,
        since: int = 0,
    ) -> dict[int, tuple[int, int]]:
        """What was given and taken each day, by days since 1970."""
        days: dict[int, tuple[int, int]] = {}
        query = f"select giver = ?, at / {DAY_S}, sum(amount) from bills where at >= ? and voucher != ? group by 1, 2"
        for is_given, day, amount in self._database.query(query, me, since, own_voucher):
            amount_given, amount_taken = days.get(day, (0, 0))
            if is_given:
                amount_given += amount
            else:
                amount_taken += amount
            days[day] = (amount_given, amount_taken)
        return days

    def check(self) -> int:
        """Verify every signature again; returns how many bills there are. Raises IntegrityError."""
        n_bills = 0
        rows = self._database.query("select giver, taker, amount, body, given, taken from bills")
        for giver, taker, amount, body, giver_signature, taker_signature in rows:
            bill = bills.read_untrusted(SignedUsageReceipt(body, giver_signature, taker_signature))
            if (bill.giver, bill.taker, bill.amount) != (giver, taker, amount):
                raise IntegrityError(f"the books say {amount} for a bill of {bill.amount}: they were changed")
            n_bills += 1
        return n_bills


# A reader opens the file as writers do, and SQLite writes beside it (its -wal and -shm) before anything is read. So a
# full disk or a missing permission keeps books from being read, which are as they should be: only for a damaged file
# the advice is to give it up.
def explain_failure(file: Path, error: sqlite3.Error) -> SwarmError:
    """Say what keeps SQLite from a file, and what helps."""
    code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_ERROR)
    if code & PRIMARY_CODE == sqlite3.SQLITE_FULL or code == sqlite3.SQLITE_IOERR_SHMSIZE:
        return ConfigError(f"{file} cannot be used: its disk is full, or its user's quota is: make room")
    if code & PRIMARY_CODE in (sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_PERM):
        remedy = "it and its folder have to be its user's, and their disk mounted for writing"
        return ConfigError(f"{file} cannot be opened ({error}): {remedy}")
    if code & PRIMARY_CODE in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return ConfigError(f"{file} is in use by another process: try again in a moment")
    if code & PRIMARY_CODE == sqlite3.SQLITE_IOERR:
        return ConfigError(f"{file} cannot be used: its disk fails, or is full ({error})")
    return IntegrityError(f"{file} cannot be read: {error}; move it away to begin anew")


def _row(bill: UsageReceipt, signed: SignedUsageReceipt, voucher: bytes) -> tuple[object, ...]:
    """The columns of table ``bills``, in order."""
    return (
        bill.giver,
        bill.taker,
        voucher,
        bill.session,
        bill.start,
        bill.amount,
        bill.n_tokens,
        bill.at,
        signed.body,
        signed.given,
        signed.taken,
    )
