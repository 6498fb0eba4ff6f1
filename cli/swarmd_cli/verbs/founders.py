"""Verbs on founders: who they are, and who follows when one is lost, robbed or joined by others."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from swarmd_cli.context import founder, membership, print_json, reload_daemon
from swarmd_cli.terminal import print_table
from swarmd_cli.verbs.look import Json

app = typer.Typer(
    help="Founders: any one invites, revokes and adds models; so many together change who they are.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Key = Annotated[str, typer.Argument(metavar="KEY", help="A founder's key, as swarmd founders ls shows it.")]
Yes = Annotated[bool, typer.Option("--yes", help="Though the loss of any one key would leave nobody to change it.")]
Needed = Annotated[
    int | None, typer.Option("--needed", min=1, help="How many founders must sign the next change; as now.")
]


@app.command("ls")
def ls(as_json: Json = False) -> None:
    """List the founders, and how many of them change who they are.

    Example: swarmd founders ls
    """
    charter = membership().founders().charter
    own_founder = founder()
    own_key = own_founder.ensure_key().public_key if own_founder.is_here else b""
    if as_json:
        keys = [key.hex() for key in charter.keys]
        honoured = [key.hex() for key in charter.honoured]
        print_json({"founders": keys, "needed": charter.needed, "honoured": honoured})
        return
    rows = []
    for key in charter.keys:
        mark = " (this one)" if key == own_key else ""
        rows.append([key.hex() + mark, "founds"])
    rows += [[key.hex(), "founded; its invites' guests stay"] for key in charter.honoured]
    print_table(f"Founders: {charter.needed} of {len(charter.keys)} change who they are", ["key", ""], rows)


@app.command("key")
def key() -> None:
    """Print the key by which a founder can make this machine a founder, too. The private half stays here.

    Example: swarmd founders key
    """
    from swarmd.protocol.membership import charter

    membership().swarm()
    print(charter.encode_key(founder().ensure_key()))


@app.command("add")
def add(
    founder: Annotated[str, typer.Argument(metavar="KEY", help="What swarmd founders key printed there.")],
    needed: Needed = None,
    yes: Yes = False,
) -> None:
    """Make another member's machine a founder. Where several must sign, prints a line for the others.

    Example: swarmd founders add founder1-... --needed 2
    """
    from swarmd.errors import ConfigError
    from swarmd.protocol.membership import charter

    current = membership().founders().charter
    keys = (*current.keys, charter.decode_key_untrusted(founder))
    needed = needed or current.needed
    if needed == len(keys) and not yes:
        raise ConfigError(
            f"with {needed} of {len(keys)} the loss of one key leaves nobody to change this: --yes, if so"
        )
    _change(keys, needed, current.honoured)


@app.command("rm")
def rm(
    founder: Key,
    needed: Needed = None,
    stolen: Annotated[
        bool, typer.Option("--stolen", help="Whom its invites let in go, too, unless they are admitted for good.")
    ] = False,
) -> None:
    """Let a founder go. Without --stolen its certificates count on: whoever has the key could still invite.

    Example: swarmd founders rm 5f0c... --stolen
    """
    current = membership().founders().charter
    removed_key = _read_key(founder)
    keys = tuple(key for key in current.keys if key != removed_key)
    # Honoured keys are founders no more, but the certificates that they signed count on. A stolen key is not honoured:
    # its thief could let in anybody.
    candidates = current.honoured if stolen else (*current.honoured, *current.keys)
    honoured = tuple(key for key in candidates if key not in keys)
    if stolen:
        honoured = tuple(key for key in honoured if key != removed_key)
    if keys == current.keys and honoured == current.honoured:
        from swarmd.errors import ConfigError

        raise ConfigError(f"{founder[:16]} is no founder: see swarmd founders ls")
    n_needed = min(needed or current.needed, len(keys))
    _change(keys, n_needed, tuple(dict.fromkeys(honoured)))


@app.command("sign")
def sign(line: Annotated[str, typer.Argument(metavar="LINE", help="What founders add or rm printed.")]) -> None:
    """Sign another founder's change; the last that is needed makes it count.

    Example: swarmd founders sign charter1-...
    """
    from swarmd.protocol.membership import charter

    draft = charter.decode_line_untrusted(line)
    _print_charter(draft.charter)
    _sign_draft(draft)


def _change(
    keys: tuple[bytes, ...],
    needed: int,
    honoured: tuple[bytes, ...],
) -> None:
    from swarmd.protocol.membership import charter

    founder().key()
    _sign_draft(charter.draft_charter(membership().founders().charter, keys, needed, honoured))


def _sign_draft(draft: Any) -> None:
    from swarmd.protocol.membership import charter

    member = membership()
    previous = member.founders().charter
    signed = founder().sign_charter(draft)
    if member.founders().charter == signed.charter:
        reload_daemon()
        _print_charter(signed.charter)
        print("It counts from now on.")
        if signed.charter.needed == len(signed.charter.keys) > 1:
            print("All of them are needed: name another one before one more is lost.")
        return
    n_missing = charter.count_missing_signatures(signed, previous)
    next_step = "one of the new founders must take it over"
    if n_missing:
        next_step = f"{n_missing} of the founders must sign it, too"
    print(f"{next_step}: swarmd founders sign {charter.encode(signed)}")


def _print_charter(charter: Any) -> None:
    print(f"{len(charter.keys)} found the swarm, {charter.needed} of them change who they are:")
    for key in charter.keys:
        print(f"  {key.hex()}")


def _read_key(text: str) -> bytes:
    from swarmd.errors import ConfigError

    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigError(f"a founder's key is 64 hexadecimal digits (swarmd founders ls), not {text[:20]!r}")
    return key
