"""What this daemon does, live: a screen of it, drawn anew every second or two."""

from __future__ import annotations

import math
import os
import select
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from swarmd.names import label_ids, label_member
from swarmd.values import count
from swarmd_cli.context import ask, format_duration, format_number, format_size
from swarmd_cli.terminal import make_console, make_table, styled
from swarmd_cli.verbs.look import download_line, reach_text, span_text

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from swarmd.member_status import PeerRow
    from swarmd.status import DaemonStatus

MOST_PEERS = 20  # as many as a screen holds: those nearby


def top(
    interval: Annotated[float, typer.Option(min=0.5, max=60, metavar="SECONDS", help="Between two looks.")] = 2.0,
) -> None:
    """Show what this daemon does, live, until q; p pauses it, r resumes. One picture where the output is no terminal.

    Example: swarmd top
    """
    from rich.live import Live

    from swarmd.member_status import PeersAnswer
    from swarmd.status import DaemonStatus

    # Rates are differences of two looks. Each picture needs the counters of the look before, and the time between
    # the two as it was, not as it should have been.
    console = make_console()
    earlier = ask(DaemonStatus, "status")
    looked_at = time.monotonic()
    if not sys.stdout.isatty():
        time.sleep(interval)
        status = ask(DaemonStatus, "status")
        peers = ask(PeersAnswer, "peers").peers
        console.print(draw_screen(earlier, status, peers, time.monotonic() - looked_at))
        return
    message = ""
    picture = draw_screen(earlier, earlier, ask(PeersAnswer, "peers").peers, interval)
    with open_keyboard(sys.stdin) as key_within, Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(add_footer(picture, message), refresh=True)
        try:
            while True:
                key = key_within(max(0.0, looked_at + interval - time.monotonic()))
                if key == "q":
                    return
                if key:
                    message = handle_key(key)
                    live.update(add_footer(picture, message), refresh=True)
                    continue
                status = ask(DaemonStatus, "status")
                passed_s = time.monotonic() - looked_at
                picture = draw_screen(earlier, status, ask(PeersAnswer, "peers").peers, passed_s)
                live.update(add_footer(picture, message), refresh=True)
                earlier = status
                looked_at += passed_s
        except KeyboardInterrupt:
            return


@contextmanager
def open_keyboard(file: TextIO) -> Iterator[Callable[[float], str]]:
    """Yield a function that waits some seconds for a key; "" is none. Without a terminal it only waits."""
    if not file.isatty():
        yield _wait
        return
    import termios
    import tty

    fd = file.fileno()
    settings = termios.tcgetattr(fd)
    tty.setcbreak(fd)
    try:
        yield lambda within_s: _key_of(fd, within_s)
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, settings)


def _wait(within_s: float) -> str:
    time.sleep(within_s)
    return ""


def _key_of(fd: int, within_s: float) -> str:
    """Read the first key that is pressed within so long; a terminal that is gone counts as q."""
    is_ready, _, _ = select.select([fd], [], [], within_s)
    if not is_ready:
        return ""
    return os.read(fd, 64).decode(errors="replace")[:1] or "q"


def handle_key(key: str, ask: Callable[..., Any] = ask) -> str:
    """Do what a key stands for, and say what came of it."""
    from swarmd.errors import SwarmError
    from swarmd.status import PauseAnswer, ResumeAnswer

    try:
        if key == "p":
            paused: PauseAnswer = ask(PauseAnswer, "pause", "POST", seconds="")
            return paused.policy.why
        if key == "r":
            resumed: ResumeAnswer = ask(ResumeAnswer, "resume", "POST", model="")
            return "serves again" if resumed.serving else f"not yet: {resumed.policy.why if resumed.policy else ''}"
    except SwarmError as error:
        return str(error)
    return ""


def add_footer(picture: Group, message: str) -> Group:
    """Put what the last key did, and the keys, under the picture."""
    from rich.console import Group

    keys = styled(("q", "bold"), " quit   ", ("p", "bold"), " pause   ", ("r", "bold"), " resume")
    return Group(picture, *([message] if message else []), keys)


def draw_screen(earlier: DaemonStatus, status: DaemonStatus, peers: Iterable[PeerRow], passed_s: float) -> Group:
    """Draw one picture, from what the daemon said ``passed_s`` apart."""
    from rich.console import Group

    peers = tuple(peers)
    names = {peer.peer: peer.name for peer in peers}
    members = count(status.members, "member")
    uptime = f"up for {format_duration(status.uptime_s)}"
    facts = f"{members}, {uptime}, {status.memory_mib:.0f} MiB, version {status.version}"
    lines: list[str | Text] = [styled((status.swarm, "bold"), f"  {facts}")]
    policy = status.policy
    if policy is not None:
        earlier_policy = earlier.policy or policy
        n_bytes = max(0, policy.month_bytes - earlier_policy.month_bytes)
        lines.append(f"{policy.why}; {8e-6 * n_bytes / passed_s:.2f} Mbit/s beyond the home")
    if status.reach is not None:
        lines.append(label_ids(reach_text(status.reach), names))
    lines += [styled((f"{row.kind}: {row.text}", "red")) for row in status.health if row.is_fine is False]
    lines += [f"fetching {download_line(download)}" for download in status.downloads]
    return Group(*lines, _draw_served(earlier, status, passed_s), _draw_members(peers, names))


def _draw_served(earlier: DaemonStatus, status: DaemonStatus, passed_s: float) -> Table:
    names = ["serves", "blocks", "state", "sessions", "tokens/s", "tuning tokens/s", "cache used"]
    rows = []
    for n, hosting in enumerate(status.hosting):
        serving = hosting.serving
        server = hosting.server
        tuning = hosting.tuning
        if serving is None or server is None or tuning is None:
            rows.append([hosting.wanted, "", f"{hosting.state}: {hosting.why}", "", "", "", ""])
            continue
        earlier_hosting = earlier.hosting[n]
        n_served_before = earlier_hosting.server.tokens_served if earlier_hosting.server else None
        n_trained_before = earlier_hosting.tuning.tokens_trained if earlier_hosting.tuning else None
        free_share = server.free_cache_tokens / max(1, server.total_cache_tokens)
        rows.append(
            [
                serving.name or "",
                span_text(serving.blocks),
                hosting.state,
                str(server.sessions),
                _format_per_s(n_served_before, server.tokens_served, passed_s),
                _format_per_s(n_trained_before, tuning.tokens_trained, passed_s),
                f"{100 * (1 - free_share):.0f} %",
            ]
        )
    return make_table(names, rows)


def _format_per_s(earlier: int | None, count_now: int, passed_s: float) -> str:
    return "unknown" if earlier is None else f"{max(0, count_now - earlier) / passed_s:.1f}"


def _draw_members(peers: Iterable[PeerRow], names: Mapping[str, str]) -> Table:
    columns = ["member", "way", "away", "serves", "tokens/s", "memory"]
    other_peers = [peer for peer in peers if not peer.is_self]
    other_peers.sort(key=lambda peer: math.inf if peer.round_trip_ms is None else peer.round_trip_ms)
    return make_table(columns, [_member_row(peer, names) for peer in other_peers[:MOST_PEERS]])


def _member_row(peer: PeerRow, names: Mapping[str, str]) -> list[str]:
    spans = peer.spans
    return [
        label_member(peer.peer, names),
        peer.way or "not connected",
        format_number(peer.round_trip_ms, " ms"),
        ", ".join(f"{span.model} {span_text(span.blocks)}" for span in spans) or "nothing",
        ", ".join(format_number(span.decode_tokens_per_s) for span in spans),
        format_size(peer.memory_bytes),
    ]
