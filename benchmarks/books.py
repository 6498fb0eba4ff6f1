"""The books of a week: how large they are, how long summing and checking takes.

python -m benchmarks.books [--members 1000] [--sessions 20] [--days 7]

Each member has so many sessions a day, each through two hops, so that there are two bills. All of them lie in one file
here, as whoever wants to recompute everybody's sums would have them; a member's own books hold its own.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from swarmd.protocol.accounts import usage_receipt as bills
from swarmd.protocol.accounts.usage_receipt import SignedUsageReceipt, UsageReceipt
from swarmd.protocol.membership.identity import Identity
from swarmd.usage_ledger import UsageLedger

BATCH = 20_000  # bills that are written at a time
N_CHECKED = 5_000  # bills whose signatures are true, and checked


def made(giver: Identity, taker: Identity, at: int, is_true: bool) -> tuple[UsageReceipt, SignedUsageReceipt]:
    bill = UsageReceipt(giver.peer_id, taker.peer_id, os.urandom(16), "m" * 64, 0, 15, random.randint(10, 2_000), at)
    if is_true:
        body, given = bills.sign_offer(bill, giver)
        return bill, SignedUsageReceipt(body, given, bills.sign_acceptance(body, taker))
    body, _ = bills.sign_offer(bill, giver) if not BODIES else (BODIES[0], b"")
    BODIES.append(body)
    return bill, SignedUsageReceipt(body, os.urandom(64), os.urandom(64))


BODIES: list[bytes] = []  # one body stands for all that are not checked


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=1_000)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--days", type=int, default=7)
    given = parser.parse_args()
    people = [Identity(os.urandom(32)) for _ in range(given.members)]
    names = [person.peer_id for person in people]
    vouchers = [os.urandom(32) for _ in people]
    n, rng = 2 * given.members * given.sessions * given.days, random.Random(1)
    with TemporaryDirectory() as folder:
        books = UsageLedger(Path(folder) / "books.db")
        for number in range(n):
            giver, taker = rng.sample(range(given.members), 2)
            bill, signed = made(people[0], people[1], int(number / n * given.days * 86_400), False)
            fields = {"giver": names[giver], "taker": names[taker]}
            books.add(msgspec.structs.replace(bill, **fields), signed, vouchers[taker])
            if number % BATCH == BATCH - 1:
                books.save()
        books.save()
        n_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
        begun = time.perf_counter()
        sums = books.sums(names[0], vouchers[0])
        sum_s = time.perf_counter() - begun
        small = UsageLedger(Path(folder) / "small.db")
        for _ in range(N_CHECKED):
            one, other = rng.sample(people, 2)
            bill, signed = made(one, other, 0, True)
            small.add(bill, signed, vouchers[0])
        small.save()
        begun = time.perf_counter()
        small.check()
        check_s = (time.perf_counter() - begun) / N_CHECKED
    print(
        f"{n:,} bills of {given.members} members, {given.days} days: {n_bytes / 1e6:.0f} MB, {n_bytes / n:.0f} B each"
    )
    print(f"summed by {len(sums)} vouchers in {sum_s:.2f} s; signatures of a bill checked in {1e6 * check_s:.0f} us")
    print(f"of one member: {2 * n / given.members:.0f} bills, {2 * n_bytes / given.members / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
