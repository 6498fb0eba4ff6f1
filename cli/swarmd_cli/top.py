"""What this daemon does, live: a screen of it, drawn anew every second or two."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmd_cli.context import ask, drawn, duration, number, size
from swarmd_cli.look import download_line, reach_text, span_text

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

MOST_PEERS = 20  # as many as a screen holds: those nearby


def top(
    interval: Annotated[float, typer.Option(min=0.5, max=60, metavar="SECONDS", help="Between two looks.")] = 2.0,
) -> None:
    """Show what this daemon does, live, until Ctrl-C; one picture where the output is no terminal.

    Example: swarmd top
    """
    from rich.console import Console
    from rich.live import Live

    console, before, at = Console(), ask("status"), time.monotonic()
    if not sys.stdout.isatty():
        time.sleep(interval)
        console.print(screen(before, ask("status"), ask("peers")["peers"], time.monotonic() - at))
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        try:
            while True:
                time.sleep(interval)
                now, passed_s = ask("status"), time.monotonic() - at
                live.update(screen(before, now, ask("peers")["peers"], passed_s), refresh=True)
                before, at = now, at + passed_s
        except KeyboardInterrupt:
            return


def screen(before: dict[str, Any], now: dict[str, Any], peers: list[dict[str, Any]], passed_s: float) -> Group:
    """One picture, from what the daemon said ``passed_s`` apart."""
    from rich.console import Group

    lines = [
        f"[bold]{now['swarm']}[/]  {now['members']} members, up for {duration(now['uptime_s'])}, "
        f"{now['memory_mib']:.0f} MiB, version {now['version']}"
    ]
    if (policy := now["policy"]) is not None:
        n_bytes = max(0, policy["month_bytes"] - (before["policy"] or policy)["month_bytes"])
        lines.append(f"{policy['why']}; {8e-6 * n_bytes / passed_s:.2f} Mbit/s beyond the home")
    if (reach := now["reach"]) is not None:
        lines.append(reach_text(reach))
    lines += [f"[red]{row['kind']}: {row['text']}[/]" for row in now["health"] if row["is_fine"] is False]
    lines += [f"fetching {download_line(download)}" for download in now["downloads"]]
    return Group(*lines, _served(before, now, passed_s), _members(peers))


def _served(before: dict[str, Any], now: dict[str, Any], passed_s: float) -> Table:
    names = ["serves", "blocks", "state", "sessions", "tokens/s", "tuning tokens/s", "cache used"]
    rows = []
    for n, hosting in enumerate(now["hosting"]):
        serving, server, tuning = hosting["serving"], hosting["server"], hosting["tuning"]
        if not serving:
            rows.append([hosting["wanted"], "", f"{hosting['state']}: {hosting['why']}", "", "", "", ""])
            continue
        earlier = before["hosting"][n]
        rows.append(
            [
                serving["name"],
                span_text(serving["blocks"]),
                hosting["state"],
                str(server["sessions"]),
                _per_s(earlier["server"], server, "tokens_served", passed_s),
                _per_s(earlier["tuning"], tuning, "tokens_trained", passed_s),
                f"{100 * (1 - server['free_cache_tokens'] / max(1, server['total_cache_tokens'])):.0f} %",
            ]
        )
    return drawn(names, rows)


def _per_s(before: dict[str, Any] | None, now: dict[str, Any], name: str, passed_s: float) -> str:
    return f"{max(0, now[name] - before[name]) / passed_s:.1f}" if before else "unknown"


def _members(peers: list[dict[str, Any]]) -> Table:
    names = ["member", "way", "away", "serves", "tokens/s", "memory"]
    others = sorted(
        (p for p in peers if not p["is_self"]), key=lambda p: (p["round_trip_ms"] is None, p["round_trip_ms"])
    )
    rows = [
        [
            peer["peer"][-8:],
            peer["way"] or "not connected",
            number(peer["round_trip_ms"], " ms"),
            ", ".join(f"{s['model']} {span_text(s['blocks'])}" for s in peer["spans"]) or "nothing",
            ", ".join(number(s["decode_tokens_per_s"]) for s in peer["spans"]),
            size(peer["memory_bytes"]),
        ]
        for peer in others[:MOST_PEERS]
    ]
    return drawn(names, rows)
