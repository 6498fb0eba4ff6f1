"""When this machine works for others: pause, and the rules of its owner."""

from __future__ import annotations

import json
import re
from typing import Annotated, Any

import typer

from swarmd.values import count
from swarmd_cli.context import ask, home, print_json, reload_daemon, wait_until
from swarmd_cli.terminal import print_table

app = typer.Typer(help="When this machine works for others.", no_args_is_help=True, rich_markup_mode=None)
UNITS_S = {"m": 60, "h": 3_600, "d": 86_400}


def pause(
    for_: Annotated[str, typer.Option("--for", metavar="TIME", help="As 90m, 2h or 1d; without, until resume.")] = "",
) -> None:
    """Stop working for others at once, and free the memory; live sessions go on elsewhere.

    Example: swarmd pause --for 2h
    """
    from swarmd.status import PauseAnswer

    seconds = str(parse_duration(for_)) if for_ else ""
    answer = ask(PauseAnswer, "pause", "POST", seconds=seconds)
    print(f"{answer.policy.why}; {count(answer.sessions, 'session')} to go on elsewhere", flush=True)
    if wait_until(_is_nothing_served):
        print("nothing is served here any more; swarmd resume works again")
    else:
        print("the daemon is still at it: swarmd status")


def _is_nothing_served() -> bool:
    from swarmd.status import DaemonStatus

    return all(hosting.serving is None for hosting in ask(DaemonStatus, "status").hosting)


@app.command()
def show(as_json: Annotated[bool, typer.Option("--json", help='Print JSON with "schema": 1.')] = False) -> None:
    """Show the rules.

    Example: swarmd policy show
    """
    import dataclasses

    from swarmd import config

    rules = dataclasses.asdict(config.load(home().folder).policy)
    if as_json:
        print_json(rules)
        return
    rows = [[name, _format_toml(value), HELP[name]] for name, value in rules.items()]
    print_table("Policy", ["", "", ""], rows)


@app.command("set", context_settings={"ignore_unknown_options": True})
def set_(
    name: Annotated[str, typer.Argument(help="Which rule: swarmd policy show lists them.")],
    value: Annotated[str, typer.Argument(help='What it shall be; "" for none.')],
) -> None:
    """Change a rule in config.toml; a daemon that runs follows it at once.

    Example: swarmd policy set hours "mon-fri 22:00-08:00, sat, sun"
    """
    import os

    from swarmd import config
    from swarmd.folders import rewrite_file
    from swarmd.text_files import decode_text, read_bytes
    from swarmd_cli.toml_edit import set_in_file

    path = home().folder / config.FILE_NAME
    rule = _parse_value(name, value)
    raw = read_bytes(path) if os.path.lexists(path) else b""
    changed = set_in_file(raw, str(path), "policy", name, rule)
    # The whole file as it would be, read by the very code that the daemon reads it with: a rule that is refused must
    # not be written first, or the daemon would not start again.
    config.gather(config.parse_toml(decode_text(changed, str(path)), str(path)), str(path), {})
    rewrite_file(path, changed)
    reload_daemon()
    explain()


@app.command()
def explain() -> None:
    """Say in one line whether this machine works for others now, why, and when that changes.

    Example: swarmd policy explain
    """
    from swarmd.errors import DaemonNotRunning, NotJoined
    from swarmd.status import DaemonStatus

    try:
        daemon_status = ask(DaemonStatus, "status")
        if daemon_status.policy is not None:
            print(daemon_status.policy.why)
            return
    except (DaemonNotRunning, NotJoined):
        pass
    from swarmd import config
    from swarmd.net.traffic import Traffic
    from swarmd.node.machine.presence import limits_of, verdict_now

    rules = config.load(home().folder).policy
    traffic = Traffic(limits_of(rules), home().traffic_file)
    verdict = verdict_now(rules, home().pause_file, traffic)
    print(f"the daemon is not running (swarmd up); if it were: {verdict.reason}")


HELP = {
    "hours": 'only then, local time: mon-fri 22:00-08:00, sat, sun; "" is always',
    "idle_minutes": "only when keyboard and mouse have not been used for so long; 0 is always",
    "on_battery": "on battery too",
    "not_while": "not while one of these programs runs, comma-separated",
    "hottest_c": "not when CPU or NVIDIA card is hotter, in degrees Celsius; 0 is no limit",
    "up_mbit": "what leaves the home network, in Mbit/s; 0 is no limit",
    "down_mbit": "what enters it, in Mbit/s; 0 is no limit",
    "compute_share": "of the time processor or card computes for others, as 0.5; 1 is all of it",
    "leave_free_gib": "of the card's memory, or the machine's, for its owner, from the next load on; 0 leaves nothing",
    "month_gib": "both together in a calendar month, in GiB; 0 is no limit",
}


def parse_duration(text: str) -> int:
    """Read 90m, 2h, 1d or 1h30m. Raises ConfigError."""
    from swarmd.config import LONGEST_PAUSE_S
    from swarmd.errors import ConfigError

    plain = text.strip().lower()
    parts = re.findall(r"(\d+)([mhd])", plain)
    seconds = sum(int(digits) * UNITS_S[unit] for digits, unit in parts)
    is_all_read = "".join(digits + unit for digits, unit in parts) == plain
    if not is_all_read or not 0 < seconds <= LONGEST_PAUSE_S:
        raise ConfigError(f"--for takes a time such as 90m, 2h or 1d, at most 366d, not {text!r}")
    return seconds


def _parse_value(name: str, value: str) -> Any:
    """Turn what was typed into what the rule takes. Raises ConfigError."""
    from swarmd.config import PolicyConfig
    from swarmd.errors import ConfigError

    if name not in HELP:
        raise ConfigError(f"there is no rule {name!r}; there are: {', '.join(HELP)}")
    kind = type(getattr(PolicyConfig(), name))
    if any("\ud800" <= c <= "\udfff" for c in value):  # bytes of the command line that are no UTF-8
        raise ConfigError(f"{name} takes text in UTF-8, not {value!r}")
    words = {"true": True, "yes": True, "false": False, "no": False}
    try:
        return words[value.lower()] if kind is bool else kind(value or kind())
    except (KeyError, ValueError):
        takes = "yes or no" if kind is bool else "a number"
        raise ConfigError(f"{name} takes {takes}, not {value!r}") from None


def _format_toml(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # which TOML reads alike: strings, numbers, true and false
