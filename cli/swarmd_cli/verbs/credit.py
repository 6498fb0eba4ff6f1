"""``swarmd credit``: what this machine gave to the swarm and took from it."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import typer

from swarmd.names import label_member
from swarmd_cli.context import find_names, format_size, home, membership, print_json
from swarmd_cli.curve import EIGHTHS
from swarmd_cli.terminal import print_table
from swarmd_cli.verbs.look import Json

DAYS = 30  # that are drawn, one column each


def credit(
    days: Annotated[int, typer.Option("--days", min=1, max=3650, help="Count so many days back.")] = DAYS,
    check: Annotated[bool, typer.Option("--check", help="Verify both signatures of every bill first.")] = False,
    as_json: Json = False,
) -> None:
    """Show what this machine computed for others and had computed by them, from bills that both sides signed.

    The unit is a token through one block. What passes between guests of one invite counts for nothing. Weights,
    micro-batches, samples and hours are counted by this machine alone.

    Example: swarmd credit --days 7
    """
    from swarmd.protocol.membership.identity import read_links_untrusted
    from swarmd.usage_ledger import DAY_S, UsageLedger

    state = home()
    member = membership()
    own_voucher = read_links_untrusted(member.swarm().certificate)[0].key
    ledger = UsageLedger(state.books_file)
    own_peer = member.identity().peer_id
    now_s = int(time.time())
    since = now_s - days * DAY_S
    n_checked = ledger.check() if check else None
    counted = ledger.counted(since)
    served = sum(n_served for voucher, n_served in ledger.served(since).items() if voucher != own_voucher)
    accounts = ledger.sums(own_peer, own_voucher, since)
    by_day = ledger.days(own_peer, own_voucher, since)
    n_gave = sum(account.gave for account in accounts)
    n_took = sum(account.took for account in accounts)
    if as_json:
        rows = [
            {
                "voucher": account.voucher.hex(),
                "peers": list(account.peers),
                "gave": account.gave,
                "took": account.took,
                "sessions": account.n_sessions,
                "last_at": account.last_at,
            }
            for account in accounts
        ]
        per_day = []
        for day, (day_gave, day_took) in sorted(by_day.items()):
            per_day.append({"day": day * DAY_S, "gave": day_gave, "took": day_took})
        alone = {kind.name.lower(): amount for kind, amount in counted.items()}
        totals = {"gave": n_gave, "took": n_took, "with": rows, "days": per_day, "bills_checked": n_checked}
        print_json({**totals, "counted": {**alone, "served": served}})
        return
    if n_checked is not None:
        print(f"{n_checked} bills, all signed by both sides", file=sys.stderr)
    partner_rows = []
    names = find_names()
    for account in accounts:
        sponsor = _format_sponsor(account.voucher, account.peers, names)
        age = _format_age(now_s - account.last_at)
        partner_rows.append([sponsor, f"{account.gave:,}", f"{account.took:,}", str(account.n_sessions), age])
    print_table(f"Tokens x blocks of the last {days} days", ["with", "gave", "took", "sessions", "last"], partner_rows)
    print_table("Counted by this machine alone", ["", ""], _own_rows(counted, served))
    if accounts:
        print(f"gave {n_gave:,}, took {n_took:,}")
        today = now_s // DAY_S
        first_day = today - min(days, DAYS) + 1
        columns = [by_day.get(day, (0, 0)) for day in range(first_day, today + 1)]
        _print_days("gave", [day_gave for day_gave, _ in columns])
        _print_days("took", [day_took for _, day_took in columns])


def _print_days(name: str, values: Sequence[int]) -> None:
    print(f"{name} {draw_sparkline(values)} {max(values):,} on the best day of {len(values)}")


def _own_rows(counted: dict[Any, int], served: int) -> list[list[str]]:
    from swarmd.usage_ledger import UsageKind

    return [
        ["tokens x blocks for others, signed for or not", f"{served:,}"],
        ["weights given to others", format_size(counted[UsageKind.WEIGHTS_GIVEN])],
        ["weights taken from others", format_size(counted[UsageKind.WEIGHTS_TAKEN])],
        ["micro-batches of fine-tuning", f"{counted[UsageKind.MICRO_BATCHES]:,}"],
        ["samples for training runs", f"{counted[UsageKind.SAMPLES]:,}"],
        ["online as a server", f"{counted[UsageKind.SECONDS] / 3600:.1f} h"],
    ]


def draw_sparkline(values: Sequence[int]) -> str:
    """Draw one column for each value, as high as it is large."""
    largest = max(values, default=0)
    if not largest:
        return EIGHTHS[0] * len(values)
    return "".join(EIGHTHS[-(-8 * value // largest)] for value in values)  # rounded up: what is not 0 is seen


def _format_sponsor(voucher: bytes, peers: Sequence[str], names: Mapping[str, str]) -> str:
    guests = ", ".join(label_member(peer, names) for peer in peers)
    return f"invite {voucher.hex()[:8]}" + (f": {guests}" if guests else "")


def _format_age(seconds: int) -> str:
    for unit, unit_s in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= unit_s:
            return f"{seconds // unit_s} {unit} ago"
    return "just now"
