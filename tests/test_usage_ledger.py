"""The books: what was given and taken, and that no bill counts that is forged, doubled, withheld or replayed."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from swarmd.errors import ConfigError, IntegrityError, SwarmError
from swarmd.protocol.accounts import usage_receipt as bills
from swarmd.protocol.accounts.usage_receipt import SignedUsageReceipt, UsageReceipt
from swarmd.protocol.membership.identity import Identity
from swarmd.usage_ledger import DAY_S, KEPT_S, UsageKind, UsageLedger, explain_failure

ME, ANNE, BERT = (Identity(bytes([n]) * 32) for n in (1, 2, 3))
OWN = b"own voucher"
ANNES = b"anne's voucher"
BERTS = b"bert's voucher"


def signed(
    giver: Identity, taker: Identity, n_tokens: int, session: int = 0, signed_at: int = DAY_S, **changes: object
) -> SignedUsageReceipt:
    made = UsageReceipt(giver.peer_id, taker.peer_id, bytes([session]) * 16, "m", 0, 4, n_tokens, signed_at)
    body, giver_signature = bills.sign_offer(msgspec.structs.replace(made, **changes), giver)
    return SignedUsageReceipt(body, giver_signature, bills.sign_acceptance(body, taker))


@pytest.fixture
def books(tmp_path: Path) -> UsageLedger:
    return UsageLedger(tmp_path / "books.db")


def add(books: UsageLedger, *entries: tuple[SignedUsageReceipt, bytes]) -> list[tuple[bytes, int, int]]:
    for bill, voucher in entries:
        books.add_untrusted(bill, voucher)
    books.save()
    return [(s.voucher, s.gave, s.took) for s in books.sums(ME.peer_id, OWN)]


def test_what_was_given_and_taken_is_summed_by_voucher(books: UsageLedger) -> None:
    assert add(
        books,
        (signed(ME, ANNE, 10), ANNES),
        (signed(ME, ANNE, 5, session=1), ANNES),
        (signed(BERT, ME, 7), BERTS),
    ) == [(ANNES, 60, 0), (BERTS, 0, 28)]
    (_, bert) = books.sums(ME.peer_id, OWN)
    assert bert.peers == (BERT.peer_id,)
    assert books.days(ME.peer_id, OWN) == {1: (60, 28)}
    assert books.sums(ME.peer_id, OWN, since=DAY_S + 1) == []


def test_what_a_machine_counts_by_itself_adds_up_and_stands_apart(books: UsageLedger) -> None:
    assert set(books.counted().values()) <= {0}
    books.count(UsageKind.MICRO_BATCHES, 3)
    books.count(UsageKind.WEIGHTS_GIVEN, 2**40)
    books.save()
    books.count(UsageKind.MICRO_BATCHES, 4)
    books.save()
    counted = books.counted(int(time.time()))
    assert (counted[UsageKind.MICRO_BATCHES], counted[UsageKind.WEIGHTS_GIVEN], counted[UsageKind.SAMPLES]) == (
        7,
        2**40,
        0,
    )
    assert set(books.counted(int(time.time()) + DAY_S).values()) == {0}
    assert books.sums(ME.peer_id, OWN) == []


def test_what_cannot_be_written_is_counted_later(books: UsageLedger, tmp_path: Path) -> None:
    (tmp_path / "books.db").mkdir()
    books.count(UsageKind.SAMPLES, 5)
    books.save()
    (tmp_path / "books.db").rmdir()
    books.count(UsageKind.SAMPLES, 6)
    books.save()
    assert books.counted()[UsageKind.SAMPLES] == 11


def test_bills_of_long_ago_are_forgotten(books: UsageLedger) -> None:
    add(books, (signed(ME, ANNE, 10), ANNES), (signed(ME, ANNE, 5, session=1, signed_at=9 * DAY_S), ANNES))
    books.prune(9 * DAY_S)
    assert [(s.gave, s.n_sessions) for s in books.sums(ME.peer_id, OWN)] == [(20, 1)]


def test_a_clock_that_is_years_ahead_forgets_no_bills(books: UsageLedger) -> None:
    """Bills of 1970, by the clock of now, were forgotten at the start."""
    add(books, (signed(ME, ANNE, 10), ANNES), (signed(ME, ANNE, 5, session=1, signed_at=9 * DAY_S), ANNES))
    books.forget_old()
    assert [(s.gave, s.n_sessions) for s in books.sums(ME.peer_id, OWN)] == [(60, 2)]
    add(books, (signed(ME, ANNE, 7, session=2, signed_at=9 * DAY_S + KEPT_S), ANNES))
    books.forget_old()
    assert [(s.gave, s.n_sessions) for s in books.sums(ME.peer_id, OWN)] == [(48, 2)]


def test_what_was_computed_is_counted_by_voucher_and_forgotten_with_the_bills(books: UsageLedger) -> None:
    for n in (3, 4):
        books.serve(b"a", n)
        books.save()
    books.serve(b"b", 5)
    books.save()
    assert books.served() == {b"a": 7, b"b": 5}
    now = int(time.time())
    assert not books.served(now + 2 * DAY_S)
    books.prune(now + 2 * DAY_S)
    assert not books.served()


def test_a_bill_that_grows_counts_once_and_an_older_one_changes_nothing(books: UsageLedger) -> None:
    early = signed(ME, ANNE, 10)
    late = signed(ME, ANNE, 25)
    for entries in ([early], [late], [early], [late, early, late]):
        total = add(books, *((bill, ANNES) for bill in entries))
    assert total == [(ANNES, 100, 0)]
    assert books.check() == 1


def test_what_is_withheld_by_one_side_is_in_the_others_books(tmp_path: Path) -> None:
    bill = signed(ME, ANNE, 10)
    mine = UsageLedger(tmp_path / "mine")
    annes = UsageLedger(tmp_path / "annes")
    add(mine, (bill, ANNES))
    annes.add_untrusted(bill, OWN)
    annes.save()
    assert [(s.gave, s.took) for s in annes.sums(ANNE.peer_id, ANNES)] == [(0, 40)]
    assert [(s.gave, s.took) for s in mine.sums(ME.peer_id, OWN)] == [(40, 0)]


def test_between_guests_of_one_voucher_nothing_counts(books: UsageLedger) -> None:
    assert add(books, (signed(ME, ANNE, 10**9), OWN), (signed(BERT, ME, 1), BERTS)) == [(BERTS, 0, 4)]


def test_forged_bills_do_not_get_in(books: UsageLedger) -> None:
    true = signed(ME, ANNE, 10)
    larger = msgspec.msgpack.encode(msgspec.structs.replace(bills.read_untrusted(true), n_tokens=10**6))
    wrong = [
        SignedUsageReceipt(larger, true.given, true.taken),
        SignedUsageReceipt(larger, bills.giver_signature_of(ME, larger), true.taken),
        SignedUsageReceipt(true.body, true.taken, true.given),
        SignedUsageReceipt(true.body, true.given, bills.sign_acceptance(true.body, BERT)),
        SignedUsageReceipt(true.body[:-1], true.given, true.taken),
        signed(ME, ANNE, 10, end=0),
    ]
    for bill in wrong:
        with pytest.raises(IntegrityError):
            books.add_untrusted(bill, ANNES)
    assert add(books) == []


def test_a_bill_of_one_session_is_none_of_another(books: UsageLedger) -> None:
    """A replay under another session's name would need both signatures again."""
    true = signed(ME, ANNE, 10)
    other_bill = msgspec.msgpack.encode(msgspec.structs.replace(bills.read_untrusted(true), session=bytes([9]) * 16))
    with pytest.raises(IntegrityError):
        books.add_untrusted(SignedUsageReceipt(other_bill, true.given, true.taken), ANNES)


def test_books_that_were_changed_are_found_out(books: UsageLedger, tmp_path: Path) -> None:
    add(books, (signed(ME, ANNE, 10), ANNES))
    database = sqlite3.connect(tmp_path / "books.db")
    with database:
        database.execute("update bills set amount = 4000")
    database.close()
    with pytest.raises(IntegrityError, match="changed"):
        books.check()


def test_damaged_books_say_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "books.db").write_bytes(b"x" * 5_000)
    books = UsageLedger(tmp_path / "books.db")
    with pytest.raises(IntegrityError, match="move it away"):
        books.sums(ME.peer_id, OWN)
    books.add_untrusted(signed(ME, ANNE, 1), ANNES)
    books.save()


def fill(database: sqlite3.Connection) -> None:
    database.execute("pragma max_page_count = 2")
    for n in range(100):
        database.execute(f"create table more{n} (x)")


def write_beside_another(database: sqlite3.Connection) -> None:
    file = database.execute("pragma database_list").fetchone()[2]
    with closing(sqlite3.connect(file, timeout=0)) as other:
        database.execute("begin exclusive")
        other.execute("create table more (x)")


def write_where_it_is_forbidden(database: sqlite3.Connection) -> None:
    database.execute("pragma query_only = on")
    database.execute("create table more (x)")


def open_a_folder(database: sqlite3.Connection) -> None:
    sqlite3.connect(Path(__file__).parent).execute("select 1 from bills")


def read_what_is_no_database(database: sqlite3.Connection) -> None:
    sqlite3.connect(__file__).execute("select 1 from bills")


def fail_to_share_memory(database: sqlite3.Connection) -> None:
    """As on a tmpfs that was full when SQLite made its -shm file."""
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
    raise error


@pytest.mark.parametrize(
    ("go_wrong", "kind", "says"),
    [
        (fill, ConfigError, "its disk is full"),
        (fail_to_share_memory, ConfigError, "its disk is full"),
        (write_beside_another, ConfigError, "in use by another process: try again"),
        (write_where_it_is_forbidden, ConfigError, "mounted for writing"),
        (open_a_folder, ConfigError, "have to be its user's"),
        (read_what_is_no_database, IntegrityError, "move it away to begin anew"),
    ],
)
def test_only_damaged_books_are_to_be_given_up(
    tmp_path: Path, go_wrong: Callable[[sqlite3.Connection], None], kind: type[SwarmError], says: str
) -> None:
    file = tmp_path / "some.db"
    with closing(sqlite3.connect(file)) as database:
        database.execute("create table bills (x)")
        with pytest.raises(sqlite3.Error) as caught:
            go_wrong(database)
    told = explain_failure(file, caught.value)
    assert type(told) is kind
    assert says in str(told)
    assert str(file) in str(told)
