"""Verbs on members: who is there and by whose invite, and turning one of them away for good."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from swarmd_cli.context import ask, home, is_running, print_json, table
from swarmd_cli.look import Json, span_text

app = typer.Typer(
    help="Members of the swarm: who brought them in, what others found of them; revoke them.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


@app.command("ls")
def ls(as_json: Json = False) -> None:
    """List the members that are there, by the invite that brought them in, and what others found of their blocks.

    Example: swarmd members ls
    """
    peers = ask("peers")["peers"]
    shown = [{key: peer[key] for key in ("peer", "is_self", "voucher", "found_right", "found_wrong")} for peer in peers]
    if as_json:
        print_json({"members": shown})
        return
    rows = [
        [
            peer["peer"] + (" (this one)" if peer["is_self"] else ""),
            "the founder" if not peer["voucher"] else f"invite {peer['voucher'][:8]}",
            ", ".join(f"{s['model']} {span_text(s['blocks'])}" for s in peer["spans"]) or "nothing",
            _found(peer),
        ]
        for peer in sorted(peers, key=lambda peer: (peer["voucher"], peer["peer"]))
    ]
    table("Members", ["member", "brought in by", "serves", "its blocks were found"], rows)


def _found(peer: dict[str, Any]) -> str:
    if not peer["found_right"] and not peer["found_wrong"]:
        return "not probed"
    said = [f"{n} x {word}" for n, word in ((peer["found_right"], "right"), (peer["found_wrong"], "WRONG")) if n]
    return ", ".join(said)


@app.command("revoke")
def revoke(
    peer: Annotated[str, typer.Argument(metavar="PEER", help="A member, by the end of its id.")],
    guests: Annotated[
        bool, typer.Option("--guests", help="Everybody else, too, whom the same invite brought in.")
    ] = False,
) -> None:
    """Turn a member away for good: its sessions and connections end wherever the news comes. Only the founder can.

    Example: swarmd members revoke 8auXSk2p --guests
    """
    import msgspec

    from swarmd.errors import ConfigError
    from swarmd.protocol.identity import public_key_of_untrusted

    state = home()
    state.founder()
    matches = [row for row in ask("peers")["peers"] if peer and row["peer"].endswith(peer)]
    if len(matches) != 1:
        raise ConfigError(f"{len(matches)} known peers have an id that ends in {peer!r}: see swarmd members ls")
    (row,) = matches
    if row["is_self"]:
        raise ConfigError("this machine itself: swarmd leave takes it out of the swarm")
    if guests and not row["voucher"]:
        raise ConfigError("the founder brought it in himself, by no invite: revoke it without --guests")
    key = bytes.fromhex(row["voucher"]) if guests else public_key_of_untrusted(row["peer"])
    state.change_catalog(lambda c: msgspec.structs.replace(c, revoked=tuple({*c.revoked, key})))
    if is_running():
        ask("reload", "POST")
    print(f"Revoked {row['peer']}" + (" and everybody whom its invite brought in." if guests else "."))
