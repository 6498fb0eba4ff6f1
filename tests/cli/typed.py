"""Verbs as a user types them, in this process."""

from __future__ import annotations

from swarmd_cli.main import app
from typer.testing import CliRunner

from swarmd.home.paths import Home


def swarmd(home: Home, *words: str) -> str:
    """What a verb prints. Raises what it refuses with."""
    done = CliRunner().invoke(app, ["--home", str(home.folder), *words])
    if done.exception is not None:
        raise done.exception
    return done.stdout
