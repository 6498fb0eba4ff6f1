"""The ``swarmd`` command: verbs, global options, and how errors become one sentence and an exit code.

Verbs import what they need when they run, so that ``swarmd --help`` answers at once.
"""

from __future__ import annotations

import errno
import sys
from pathlib import Path
from typing import Annotated

import typer

from swarmd_cli.context import INTERRUPTED, set_home
from swarmd_cli.streams import discard_output, find_lost_output, prepare_streams
from swarmd_cli.terminal import guard_streams
from swarmd_cli.verbs import (
    bugreport,
    chat,
    credit,
    draft,
    founders,
    gateway,
    generate,
    look,
    member,
    members,
    models,
    plan,
    policy,
    service,
    top,
    train,
    tune,
)

app = typer.Typer(
    name="swarmd",
    help="Pool the computers you already have to run language models that none of them could alone.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        from importlib.metadata import version

        print(f"swarmd {version('swarmd')}")
        raise typer.Exit


@app.callback()
def options(
    home: Annotated[
        Path | None, typer.Option("--home", envvar="SWARMD_HOME", help="Folder that holds all state.")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    set_home(home)


app.command()(generate.demo)
app.command()(member.init)
app.command()(member.invite)
app.command()(member.join)
app.command()(member.leave)
app.command()(member.up)
app.command()(member.down)
app.command()(member.drain)
app.command()(policy.pause)
app.command()(member.resume)
app.command()(look.status)
app.command()(look.peers)
app.command()(look.ps)
app.command()(credit.credit)
app.command()(look.ping)
app.command()(look.why)
app.command()(look.doctor)
app.command("update-check")(look.update_check)
app.command()(top.top)
app.command()(bugreport.bugreport)
app.command()(generate.run)
app.command()(chat.chat)
app.command("open")(gateway.open_page)
app.command()(tune.tune)
app.add_typer(gateway.app, name="gateway")
app.add_typer(models.app, name="models")
app.add_typer(draft.app, name="draft")
app.add_typer(members.app, name="members")
app.add_typer(founders.app, name="founders")
app.add_typer(train.app, name="train")
app.add_typer(policy.app, name="policy")
app.add_typer(plan.app, name="plan")
app.add_typer(service.app, name="service")


def run() -> None:
    """Entry point: exit codes are those of docs/operating.md."""
    from swarmd.errors import SwarmError, all_errors

    prepare_streams()
    guard_streams()
    try:
        try:
            app(standalone_mode=True)
        finally:
            sys.stdout.flush()
    except BaseException as error:
        leaves = all_errors(error)
        lost = find_lost_output(leaves)
        if lost is not None:
            discard_output(sys.stdout)
            if lost.errno != errno.EPIPE:  # who pipes into ``head`` has read enough
                print(f"swarmd: standard output cannot be written: {lost.strerror}", file=sys.stderr)
            raise SystemExit(1) from None
        if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
            print("swarmd: interrupted", file=sys.stderr)
            raise SystemExit(INTERRUPTED) from None
        if not all(isinstance(leaf, SwarmError) for leaf in leaves):
            raise
        print(f"swarmd: {leaves[0]}", file=sys.stderr)
        raise SystemExit(getattr(leaves[0], "exit_code", 1)) from None


main = run  # what node.worker.forkserver calls in a module

if __name__ == "__main__":
    run()
