"""Verbs on founders: who they are, and who follows when one is lost, robbed or joined by others."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from swarmd_cli.context import home, print_json, table, tell_daemon
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
    state = home()
    charter = state.founders().charter
    own = state.founder_key().public_key if state.is_founder else b""
    if as_json:
        keys = [key.hex() for key in charter.keys]
        print_json({"founders": keys, "needed": charter.needed, "honoured": [key.hex() for key in charter.honoured]})
        return
    rows = [[key.hex() + (" (this one)" if key == own else ""), "founds"] for key in charter.keys]
    rows += [[key.hex(), "founded; its invites' guests stay"] for key in charter.honoured]
    table(f"Founders: {charter.needed} of {len(charter.keys)} change who they are", ["key", ""], rows)


@app.command("key")
def key() -> None:
    """Print the key by which a founder can make this machine a founder, too. The private half stays here.

    Example: swarmd founders key
    """
    from swarmd.protocol.membership import charter

    state = home()
    state.swarm()
    print(charter.encode_key(state.founder_key()))


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

    now = home().founders().charter
    keys, needed = (*now.keys, charter.decode_key_untrusted(founder)), needed or now.needed
    if needed == len(keys) and not yes:
        raise ConfigError(
            f"with {needed} of {len(keys)} the loss of one key leaves nobody to change this: --yes, if so"
        )
    _change(keys, needed, now.honoured)


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
    now, gone = home().founders().charter, _key(founder)
    keys = tuple(key for key in now.keys if key != gone)
    honoured = tuple(key for key in (*now.honoured, *(now.keys if not stolen else ())) if key not in keys)
    honoured = tuple(key for key in honoured if not (stolen and key == gone))
    if keys == now.keys and honoured == now.honoured:
        from swarmd.errors import ConfigError

        raise ConfigError(f"{founder[:16]} is no founder: see swarmd founders ls")
    _change(keys, min(needed or now.needed, len(keys)), tuple(dict.fromkeys(honoured)))


@app.command("sign")
def sign(line: Annotated[str, typer.Argument(metavar="LINE", help="What founders add or rm printed.")]) -> None:
    """Sign another founder's change; the last that is needed makes it count.

    Example: swarmd founders sign charter1-...
    """
    from swarmd.protocol.membership import charter

    draft = charter.decode_line_untrusted(line)
    _say(draft.charter)
    _finish(draft)


def _change(keys: tuple[bytes, ...], needed: int, honoured: tuple[bytes, ...]) -> None:
    from swarmd.protocol.membership import charter

    state = home()
    state.founder()
    _finish(charter.draft_charter(state.founders().charter, keys, needed, honoured))


def _finish(draft: Any) -> None:
    from swarmd.protocol.membership import charter

    state = home()
    before = state.founders().charter
    signed = state.found_on(draft)
    if state.founders().charter == signed.charter:
        tell_daemon()
        _say(signed.charter)
        print("It counts from now on.")
        if signed.charter.needed == len(signed.charter.keys) > 1:
            print("All of them are needed: name another one before one more is lost.")
        return
    left = charter.count_missing_signatures(signed, before)
    who = f"{left} of the founders must sign it, too" if left else "one of the new founders must take it over"
    print(f"{who}: swarmd founders sign {charter.encode(signed)}")


def _say(found: Any) -> None:
    print(f"{len(found.keys)} found the swarm, {found.needed} of them change who they are:")
    for key in found.keys:
        print(f"  {key.hex()}")


def _key(text: str) -> bytes:
    from swarmd.errors import ConfigError

    try:
        key = bytes.fromhex(text.strip())
    except ValueError:
        key = b""
    if len(key) != 32:
        raise ConfigError(f"a founder's key is 64 hexadecimal digits (swarmd founders ls), not {text[:20]!r}")
    return key
