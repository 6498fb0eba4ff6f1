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

app = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
key = typer.Typer(help="API keys: whoever has one may ask.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(key, name="key")


@app.callback()
def gateway(
    context: typer.Context,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where to listen; without it as config.toml says.")
    ] = "",
) -> None:
    """Serve the models of the swarm over HTTP, as OpenAI's and Anthropic's clients expect it, until Ctrl-C.

    Example: swarmd gateway, and then: OPENAI_BASE_URL=http://127.0.0.1:4180/v1
    """
    if context.invoked_subcommand is not None:
        return
    import logging
    import os

    from swarmd import config, logs
    from swarmd.gateway.keys import Keys
    from swarmd.gateway.listening import open_listener
    from swarmd.resources import count_processors

    membership().swarm()
    settings = config.load(home().folder).check().gateway
    chosen_settings = replace(settings, listen=listen or settings.listen)
    # A listener that cannot be is refused before torch is imported.
    has_keys = bool(Keys(home().folder).all())
    open_listener(chosen_settings.listen, has_keys).close()
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
def add(name: Annotated[str, typer.Argument(help="Who or what the key is for.")]) -> None:
    """Make an API key and print it, once.

    Example: swarmd gateway key add laptop
    """
    from swarmd.gateway.keys import Keys

    api_key = Keys(home().folder).add(name)
    print(api_key)
    print("It is not shown again; only its hash is kept.", file=sys.stderr)


@key.command("ls")
def ls(as_json: Json = False) -> None:
    """List the keys' names and when they were made.

    Example: swarmd gateway key ls
    """
    from swarmd.gateway.keys import Keys

    keys = Keys(home().folder).all()
    if as_json:
        listed = [{"name": api_key.name, "made_at": api_key.made_at} for api_key in keys]
        print_json({"keys": listed})
        return
    rows = []
    for api_key in keys:
        made = time.strftime("%Y-%m-%d %H:%M", time.localtime(api_key.made_at))
        rows.append([api_key.name, made])
    print_table("API keys", ["name", "made"], rows)


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
