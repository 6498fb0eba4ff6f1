"""Verbs on the gateway: serve OpenAI's API and the page, make and take back API keys."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from typing import Annotated

import typer

from swarmd.importing import importing
from swarmd_cli.context import home, membership, print_json
from swarmd_cli.preflight import require_answers
from swarmd_cli.terminal import print_table
from swarmd_cli.verbs.look import Json

PUBLIC = "0.0.0.0:4180"
FIRST_KEY = "first"

app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
key = typer.Typer(help="API keys: whoever has one may ask.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(key, name="key")


@app.callback()
def gateway(
    context: typer.Context,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where to listen; without it as config.toml says.")
    ] = "",
    public: Annotated[
        bool, typer.Option("--public", help="Let other machines in, on port 4180; the first key is made and printed.")
    ] = False,
) -> None:
    """Serve the models of the swarm over HTTP, as OpenAI's and Anthropic's clients expect it, until Ctrl-C.

    Example: swarmd gateway, and then: OPENAI_BASE_URL=http://127.0.0.1:4180/v1
    """
    if context.invoked_subcommand is not None:
        return
    import logging
    import os

    from swarmd import config, logs
    from swarmd.errors import ConfigError
    from swarmd.gateway.keys import Keys
    from swarmd.gateway.listening import open_listener
    from swarmd.resources import count_processors

    membership().swarm()
    settings = config.load(home().folder).check().gateway
    if public and listen:
        raise ConfigError(f"--public listens on {PUBLIC}: say --listen alone, and make a key for who may ask")
    chosen_settings = replace(settings, listen=listen or (PUBLIC if public else settings.listen))
    # A listener that cannot be is refused before torch is imported, and before a key is made.
    keys = Keys(home().folder)
    open_listener(chosen_settings.listen, public or bool(keys.all())).close()
    if public and not keys.all():
        print(keys.add(FIRST_KEY))
        print(f"This is the key {FIRST_KEY!r}, by which others may ask. It is not shown again.", file=sys.stderr)
    if config.SUPERVISED not in os.environ:
        require_answers()
        print("starting ...", file=sys.stderr, flush=True)
    with importing():
        import torch
        import trio

        from swarmd.gateway.serving import serve

    logs.configure_child("%(asctime)s %(levelname).1s %(message)s", logging.INFO)
    logging.getLogger("libp2p").setLevel(logging.ERROR)
    n_threads = min(torch.get_num_threads(), count_processors())
    torch.set_num_threads(max(1, n_threads // 2))  # the rest is for a worker that serves here

    def ready(url: str) -> None:
        print(f"The gateway is at {url} (OpenAI's clients: base URL {url}/v1)", flush=True)

    while trio.run(serve, home().folder, chosen_settings, ready):
        logging.getLogger(__name__).info("joining again, with a new certificate")


@key.command("add")
def add(
    name: Annotated[str, typer.Argument(help="Who or what the key is for.")],
    requests_day: Annotated[int, typer.Option(min=0, metavar="N", help="Requests in a day (UTC).")] = 0,
    requests_minute: Annotated[int, typer.Option(min=0, metavar="N", help="Requests in a minute.")] = 0,
    tokens_day: Annotated[int, typer.Option(min=0, metavar="N", help="Tokens in a day, read and written.")] = 0,
    tokens_minute: Annotated[int, typer.Option(min=0, metavar="N", help="Tokens in a minute.")] = 0,
    days: Annotated[float, typer.Option(min=0, metavar="N", help="Days until it ends; else it does not.")] = 0,
    model: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A model it is for; may be said again. Else all.")
    ] = None,
) -> None:
    """Make an API key and print it, once. Without limits it has none.

    Example: swarmd gateway key add laptop --tokens-day 1000000 --days 30
    """
    from swarmd.gateway.generation.quotas import KeyLimits
    from swarmd.gateway.keys import Keys

    limits = KeyLimits(requests_day, requests_minute, tokens_day, tokens_minute)
    api_key = Keys(home().folder).add(name, limits, tuple(model or ()), days)
    print(api_key)
    print("It is not shown again; only its hash is kept.", file=sys.stderr)


@key.command("ls")
def ls(as_json: Json = False) -> None:
    """List the keys: what each may use, and what it used today (UTC) and ever.

    Example: swarmd gateway key ls
    """
    from swarmd.gateway.generation.quotas import KeyLimits, UsageFile, Used
    from swarmd.gateway.keys import Keys, describe_keys

    listed = describe_keys(Keys(home().folder), UsageFile(home().folder), time.time())
    if as_json:
        print_json({"keys": listed})
        return
    rows = []
    for api_key in listed:
        limits, today = KeyLimits(**api_key["limits"]), Used(**api_key["today"])
        rows.append(
            [
                api_key["name"],
                _day(api_key["made_at"]),
                _day(api_key["ends_at"]) if api_key["ends_at"] else "never",
                ", ".join(api_key["models"]) or "all",
                _of(today.requests, limits.requests_day, limits.requests_minute),
                _of(today.tokens, limits.tokens_day, limits.tokens_minute),
                f"{Used(**api_key['ever']).tokens:,}",
            ]
        )
    columns = ["name", "made", "ends", "models", "requests today", "tokens today", "tokens ever"]
    print_table("API keys", columns, rows)


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(seconds))


def _of(used: int, limit: int, limit_minute: int) -> str:
    """What was used of what may be, and what a minute has beside it."""
    shown = f"{used:,} of {limit:,}" if limit else f"{used:,}"
    return f"{shown}, {limit_minute:,} a minute" if limit_minute else shown


@key.command("rm")
def rm(name: Annotated[str, typer.Argument(help="The key's name.")]) -> None:
    """Take a key back; it is refused from now on.

    Example: swarmd gateway key rm laptop
    """
    from swarmd.gateway.keys import Keys

    Keys(home().folder).remove(name)
    print(f"{name}: no longer let in")


def open_page(
    only_print: Annotated[bool, typer.Option("--print", help="Only print the address, with its token.")] = False,
) -> None:
    """Open the page of the gateway that runs here, as this machine's owner.

    Example: swarmd open
    """
    import webbrowser

    from swarmd.errors import ConfigError
    from swarmd.gateway.address import read_token, read_url

    url = read_url(home().folder)
    if url is None:
        raise ConfigError("no gateway runs here: start one with swarmd gateway, or say on = true under [gateway]")
    address = f"{url}/#token={read_token(home().folder)}"
    if only_print or not webbrowser.open(address):
        print(address)
