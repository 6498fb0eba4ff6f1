"""The picture that swarmd top draws, from what a daemon said at two moments."""

from __future__ import annotations

import os
import pty

from msgspec.structs import replace
from rich.console import Console, Group
from swarmd_cli.verbs.top import add_footer, draw_screen, handle_key, open_keyboard

from swarmd.errors import DaemonNotRunning
from swarmd.member_status import PeerRow
from swarmd.status import (
    DaemonStatus,
    HealthRow,
    HostingStatus,
    PolicyStatus,
    ReachStatus,
    ResumeAnswer,
    ServerStatus,
    ServingStatus,
    Status,
    TuningStatus,
    WorkerStatus,
)
from tests.cli.answers import filled

HOSTING = filled(
    HostingStatus,
    serving=filled(ServingStatus, name="demo", blocks=(0, 6)),
    worker=filled(WorkerStatus),
    server=filled(ServerStatus, sessions=2, tokens_served=100, free_cache_tokens=75, total_cache_tokens=100),
    tuning=filled(TuningStatus),
    state="online",
    wanted="demo",
)
RESTING = filled(HostingStatus, state="paused", why="its hours", wanted="other")
POLICY = filled(PolicyStatus, why="may serve until 08:00", month_bytes=1_000_000)
STATUS = filled(
    DaemonStatus,
    swarm="ours",
    members=3,
    uptime_s=7_200.0,
    memory_mib=125.4,
    version="0.1.0",
    policy=POLICY,
    reach=filled(ReachStatus, state="open", why="2 of 2 could connect"),
    health=(
        HealthRow(kind="clock", is_fine=False, text="95 s behind 2 of 2 other members", remedy="set it"),
        HealthRow(kind="disk", is_fine=True, text="72 GiB free"),
        HealthRow(kind="device", is_fine=None, text="no worker yet"),
    ),
    hosting=(HOSTING, RESTING),
)


def peer(name: str, round_trip_ms: float | None) -> PeerRow:
    return filled(PeerRow, peer=f"12D3KooW{name}", round_trip_ms=round_trip_ms)


def with_first(hosting: HostingStatus) -> DaemonStatus:
    return replace(STATUS, hosting=(hosting, RESTING))


def test_rates_are_those_between_two_looks_and_the_nearest_come_first() -> None:
    server = HOSTING.server
    assert server is not None
    later = with_first(replace(HOSTING, server=replace(server, tokens_served=server.tokens_served + 84)))
    later = replace(later, policy=replace(POLICY, month_bytes=POLICY.month_bytes + 500_000))
    console = Console(width=120, record=True, force_terminal=False)
    peers = [peer("unknown1", None), peer("far-away", 80.0), peer("unknown2", None), peer("next-one", 0.5)]
    console.print(draw_screen(STATUS, later, peers, 2.0))
    text = console.export_text()
    assert "42.0" in text, "tokens a second"
    assert "2.00 Mbit/s beyond the home" in text
    assert "25 %" in text
    assert "clock: 95 s behind" in text
    assert "disk" not in text, "nothing is wrong with it"
    assert "paused: its hours" in text
    assert text.index("next-one") < text.index("far-away") < text.index("unknown1")


def test_a_daemon_that_began_to_serve_between_two_looks() -> None:
    earlier = with_first(replace(HOSTING, serving=None, worker=None, server=None, tuning=None))
    console = Console(width=120, record=True, force_terminal=False)
    console.print(draw_screen(earlier, STATUS, [], 2.0))
    assert "unknown" in console.export_text()


def test_keys_pause_and_resume_and_say_what_came_of_it() -> None:
    verbs: list[str] = []

    def ask(answer: type[Status], verb: str, method: str, **query: str) -> Status:
        verbs.append(verb)
        policy = filled(PolicyStatus, why="paused by its owner")
        return filled(answer, policy=policy, **({"serving": True} if answer is ResumeAnswer else {}))

    def refuse(*words: object, **query: str) -> Status:
        raise DaemonNotRunning("no daemon answers")

    assert (handle_key("p", ask), handle_key("r", ask), handle_key("x", ask)) == (
        "paused by its owner",
        "serves again",
        "",
    )
    assert verbs == ["pause", "resume"]
    assert handle_key("p", refuse) == "no daemon answers"


def test_the_footer_names_the_keys() -> None:
    console = Console(width=80, record=True)
    console.print(add_footer(Group("picture"), "paused"))
    assert console.export_text().split("\n")[:3] == ["picture", "paused", "q quit   p pause   r resume"]


def test_one_key_is_read_without_enter_and_the_terminal_is_as_before() -> None:
    ours, theirs = pty.openpty()
    with os.fdopen(theirs) as terminal:
        with open_keyboard(terminal) as key_within:
            assert key_within(0.0) == ""
            os.write(ours, b"q")
            assert key_within(5.0) == "q"
        os.close(ours)
