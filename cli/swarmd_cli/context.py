"""What every verb shares: the chosen home, the control API's client, and how values are written."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from swarmd.folders import SOCKET, default_folder, resolve_folder

if TYPE_CHECKING:
    from swarmd.home.founder import Founder
    from swarmd.home.membership import MembershipFiles
    from swarmd.home.models import ModelFolders
    from swarmd.home.paths import Home
    from swarmd.member_status import PeersAnswer
    from swarmd.status import Status

Answer = TypeVar("Answer", bound="Status")
JsonObject = dict[str, Any]

INTERRUPTED = 130  # what a shell says of a program that Ctrl-C ended
WAIT_S = 20.0  # the daemon gives sessions 15 s to be taken over
# The home that --home names. Verbs are called by typer, which passes the options of the program to nobody else.
_chosen: list[Path | None] = [None]


def set_home(folder: Path | None) -> None:
    """Choose the home for all that follows; None is the default one."""
    _chosen[0] = folder


def was_home_named() -> bool:
    """Did the user say --home?"""
    return _chosen[0] is not None


def _folder() -> Path:
    return resolve_folder(_chosen[0]) if _chosen[0] is not None else default_folder()


def home() -> Home:
    """Open the chosen home."""
    from swarmd.home.paths import Home

    return Home(_folder())


def membership() -> MembershipFiles:
    """Open what the chosen home knows as a member."""
    from swarmd.home.membership import MembershipFiles

    return MembershipFiles(home())


def founder() -> Founder:
    """Open what the chosen home may do as a founder, or as its delegate."""
    from swarmd.home.founder import Founder

    return Founder(home())


def model_folders() -> ModelFolders:
    """Open the list of models that the chosen home has in folders of the user's."""
    from swarmd.home.models import ModelFolders

    return ModelFolders(home())


# What the daemon answers is decoded into the very structs that it fills in (swarmd.status and its neighbours), so that
# mypy knows each field that a verb prints. What --json prints is the daemon's own answer, whatever is in it:
#
#     ask_json -- a dict --> print_json         read_answer -- a Status --> tables
#
# A daemon of a newer version may say more, which is passed over; one that says less is told of in read_answer.


def ask(
    answer: type[Answer],
    verb: str,
    method: str = "GET",
    timeout_s: float = 15.0,
    **query: str,
) -> Answer:
    """Call the daemon's control API. Raises DaemonNotRunning, or what the daemon refused with."""
    return read_answer(answer, ask_json(verb, method, timeout_s, **query))


def read_answer(answer: type[Answer], body: JsonObject) -> Answer:
    """Decode what a daemon answered. Raises SwarmError when a daemon of another version says something else."""
    try:
        return msgspec.convert(body, answer)
    except msgspec.ValidationError as error:
        from swarmd.errors import SwarmError

        text = "the daemon is of another version than this command, and its answer differs"
        raise SwarmError(f"{text}: {error}: start it anew (swarmd down, then swarmd up)") from None


def ask_json(
    verb: str,
    method: str = "GET",
    timeout_s: float = 15.0,
    **query: str,
) -> JsonObject:
    """Call the daemon's control API, and return its answer as it came. Raises as ``ask``."""
    from swarmd import errors
    from swarmd.net import local

    try:
        return local.ask_daemon(_folder() / SOCKET, verb, query, method, timeout_s)
    except errors.DaemonNotRunning:
        membership().swarm()  # not joined is the better answer when it is the case
        raise


def is_running() -> bool:
    """Does this home's daemon answer?"""
    from swarmd.errors import SwarmError

    try:
        ask_json("status", timeout_s=3.0)
    except SwarmError:
        return False
    return True


def find_peers() -> PeersAnswer:
    """Ask the daemon whom it knows; nobody where it does not run."""
    from swarmd.member_status import PeersAnswer

    return ask(PeersAnswer, "peers") if is_running() else PeersAnswer(peers=())


def find_names() -> dict[str, str]:
    """Ask the daemon what members are called, by peer id; nobody has a name where it does not run."""
    return {peer.peer: peer.name for peer in find_peers().peers}


def reload_daemon() -> None:
    """Have the daemon, if it runs, take over what was changed here: catalog, models, rules."""
    if is_running():
        ask_json("reload", "POST")


def wait_until(is_done: Callable[[], bool]) -> bool:
    """Wait as long as a daemon may take to leave, looking ten times a second; returns whether it did."""
    deadline = time.monotonic() + WAIT_S
    while not is_done():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def print_json(value: JsonObject) -> None:
    """Print a value for programs, with the schema's version."""
    json.dump({"schema": 1, **value}, sys.stdout, indent=2)
    sys.stdout.write("\n")


def format_size(n_bytes: float | None) -> str:
    """Write bytes for people; unknown stays unknown."""
    if n_bytes is None:
        return "unknown"
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n_bytes < 1024:
            return f"{n_bytes:.0f} {unit}" if unit == "B" else f"{n_bytes:.1f} {unit}"
        n_bytes /= 1024
    return f"{n_bytes:.1f} TiB"


def format_rate(bytes_per_s: float | None) -> str:
    """Write bytes per second as Mbit/s; unknown stays unknown."""
    return "unknown" if bytes_per_s is None else f"{8 * bytes_per_s / 1e6:.0f} Mbit/s"


def format_number(value: float | None, unit: str = "") -> str:
    """Write a number with four digits that count; unknown stays unknown."""
    return "unknown" if value is None else f"{value:.4g}{unit}"


def format_duration(seconds: float) -> str:
    """Write seconds for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5_400 else f"{seconds / 3600:.1f} h"


def format_percent(chance: float) -> str:
    """Write a chance for people; only what is certain is 0 or 100 %."""
    if chance <= 0 or chance >= 1:
        return f"{100 * min(1.0, max(0.0, chance)):.0f} %"
    if chance < 0.001:
        return "under 0.1 %"
    return "over 99.9 %" if chance > 0.999 else f"{100 * chance:.1f} %"
