"""Keep the daemon running: as a systemd unit of the user or of the machine, or as a launchd agent."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmd_cli.context import home, is_running, membership, print_json, set_home, was_home_named

if TYPE_CHECKING:
    from swarmd_cli.managers import Manager

app = typer.Typer(
    help="Keep the daemon running: systemd on Linux, launchd on macOS.", no_args_is_help=True, rich_markup_mode=None
)
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done.")]
System = Annotated[bool, typer.Option("--system", help="The machine's service, as a user of its own; needs root.")]


@app.command()
def install(dry_run: DryRun = False, system: System = False) -> None:
    """Write the unit, start it, and have it start with the machine.

    Example: swarmd service install --dry-run
    """
    from swarmd.errors import ConfigError

    manager = _choose_manager(system)
    text = manager.text(_find_program(system and not dry_run), home().folder)
    if dry_run:
        print(f"# {manager.path}\n{text}", end="")
        return
    manager.require()
    membership().swarm()
    if is_running() and manager.state().state != "active":
        raise ConfigError("the daemon is running already, started by hand: swarmd down first")
    # A unit that does not start is taken away again: else it would fail at every boot, without anybody looking.
    _write(manager.path, text)
    try:
        manager.start()
    except ConfigError:
        _remove(manager)
        raise
    print(f"Installed {manager.path}; the daemon runs, and starts with the machine.")
    print(manager.after_install())
    print("What it does: swarmd status, swarmd service logs. Remove it with: swarmd service uninstall")


@app.command()
def uninstall(dry_run: DryRun = False, system: System = False) -> None:
    """Stop the service and remove its unit; the state folder stays.

    Example: swarmd service uninstall
    """
    manager = _choose_manager(system)
    if dry_run:
        print(f"would stop the service and remove {manager.path}")
        return
    if not manager.path.is_file():
        print(f"not installed: {manager.path} is not there")
        return
    _remove(manager)
    print(f"Stopped the service and removed {manager.path}.")
    print(f"Identity, settings and models are still in {home().folder}; swarmd leave gives up the membership.")
    if leftover := manager.left_behind():
        print(leftover)


@app.command()
def status(
    as_json: Annotated[bool, typer.Option("--json", help='Print JSON with "schema": 1.')] = False,
    system: System = False,
) -> None:
    """Say whether the service is installed and running.

    Example: swarmd service status
    """
    state = _choose_manager(system).state()
    if as_json:
        print_json(asdict(state))
        return
    pid = f", pid {state.pid}" if state.pid else ""
    detail = f": {state.detail}" if state.detail else ""
    print(f"{state.state}{pid}{detail}")
    if state.installed:
        print(f"unit {state.unit}, {'starts' if state.starts_by_itself else 'does not start'} with the machine")
    if state.restarts:
        print(f"restarted {state.restarts} times since it was started: swarmd service logs says why")


@app.command()
def logs(
    lines: Annotated[int, typer.Option(help="How many lines.")] = 100,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines come.")] = False,
    dry_run: DryRun = False,
    system: System = False,
) -> None:
    """Show the service's log.

    Example: swarmd service logs --lines 20
    """
    from swarmd.errors import ConfigError

    command = _choose_manager(system).logs(lines, follow)
    if dry_run:
        print(" ".join(command))
        return
    try:
        raise typer.Exit(subprocess.run(command, check=False).returncode)
    except FileNotFoundError:
        raise ConfigError(f"this machine has no {command[0]}: without a service manager there is no log") from None


def _choose_manager(system: bool) -> Manager:
    """Choose the manager of this machine; the machine's service keeps its state where its manager makes it."""
    from swarmd.errors import ConfigError
    from swarmd_cli.managers import SYSTEM_HOME, find_manager

    manager = find_manager(system)
    if system:
        if was_home_named() and home().folder != SYSTEM_HOME:
            raise ConfigError(
                f"the machine's service keeps its state in {SYSTEM_HOME}, not {home().folder}: leave --home out"
            )
        set_home(SYSTEM_HOME)
    return manager


def _find_program(for_everyone: bool) -> list[str]:
    """Find the program that runs now. Raises ConfigError where a user of the daemon's own could not run it."""
    from swarmd.errors import ConfigError

    script = Path(sys.executable).with_name("swarmd")
    command = [sys.executable, "-P", "-m", "swarmd_cli.main"]
    if script.is_file():
        command = [str(script)]
    if not for_everyone:
        return command
    # Every folder on the way must let others in: to the program, to what it links to, and to Python itself.
    program = Path(command[0])
    python = Path(os.path.realpath(sys.executable))
    folders = {folder for path in (program, program.resolve(), python) for folder in path.parents}
    for folder in folders:
        is_hidden = folder in (Path("/root"), Path("/home"), Path("/run/user"))  # ProtectHome=yes
        if is_hidden or not folder.stat().st_mode & 0o001:
            raise ConfigError(
                f"the machine's service runs as its own user, who cannot enter {folder}, where {command[0]} lies: "
                "install swarmd where everyone may read, for example with python3 -m venv /opt/swarmd"
            )
    return command


def _write(path: Path, text: str) -> None:
    from swarmd.errors import ConfigError
    from swarmd.folders import write_file

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {path.parent}: {error.strerror}") from None
    write_file(path, text)


def _remove(manager: Manager) -> None:
    manager.stop()
    manager.path.unlink(missing_ok=True)
    manager.reload()
