"""Run the daemon as a systemd user service."""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from swarmd_cli.context import home, print_json

app = typer.Typer(
    help="Keep the daemon running as a systemd user service.", no_args_is_help=True, rich_markup_mode=None
)
UNIT = "swarmd.service"
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print what would be done.")]


@app.command()
def install(dry_run: DryRun = False) -> None:
    """Write the unit, enable it and start it.

    Example: swarmd service install --dry-run
    """
    text = unit_text()
    if dry_run:
        print(f"# {unit_path()}\n{text}", end="")
        return
    home().swarm()
    unit_path().parent.mkdir(parents=True, exist_ok=True)
    unit_path().write_text(text)
    _systemctl("daemon-reload")
    _systemctl("enable", "--now", UNIT)
    print(f"installed {unit_path()}; keep it running after logout with: loginctl enable-linger")


@app.command()
def uninstall(dry_run: DryRun = False) -> None:
    """Stop the service and remove its unit.

    Example: swarmd service uninstall
    """
    if dry_run:
        print(f"systemctl --user disable --now {UNIT}\nrm {unit_path()}")
        return
    _systemctl("disable", "--now", UNIT)
    unit_path().unlink(missing_ok=True)
    _systemctl("daemon-reload")
    print(f"removed {unit_path()}")


@app.command()
def status(as_json: Annotated[bool, typer.Option("--json", help='Print JSON with "schema": 1.')] = False) -> None:
    """Say whether the service is installed and running.

    Example: swarmd service status
    """
    is_installed = unit_path().is_file()
    state = "not installed"
    if is_installed:
        state = _systemctl("is-active", UNIT, check=False).stdout.strip() or "unknown"
    if as_json:
        print_json({"installed": is_installed, "state": state, "unit": str(unit_path())})
    else:
        print(state)


@app.command()
def logs(lines: Annotated[int, typer.Option(help="How many lines.")] = 100, dry_run: DryRun = False) -> None:
    """Show the service's log.

    Example: swarmd service logs --lines 20
    """
    command = ["journalctl", "--user", "--unit", UNIT, "--lines", str(lines), "--no-pager"]
    if dry_run:
        print(" ".join(command))
        return
    raise typer.Exit(subprocess.run(command, check=False).returncode)


def unit_path() -> Path:
    return Path.home() / ".config" / "systemd" / "user" / UNIT


def unit_text() -> str:
    """Fill the template that ships with the package."""
    template = (resources.files("swarmd_cli") / "swarmd.service").read_text()
    command = shutil.which("swarmd") or f"{sys.executable} -P -m swarmd_cli.main"
    return template.replace("@COMMAND@", command).replace("@HOME@", str(home().folder))


def _systemctl(*arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    from swarmd.errors import ConfigError

    try:
        done = subprocess.run(["systemctl", "--user", *arguments], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError("this machine has no systemctl: run swarmd up under another supervisor") from None
    if check and done.returncode:
        raise ConfigError(f"systemctl --user {' '.join(arguments)}: {done.stderr.strip() or done.returncode}")
    return done
