"""The gateway as a process: a guest of the member whose home it is, with torch, behind one TCP port."""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

import trio
from hypercorn.config import Config as HypercornConfig

from swarmd.client.entry import membership
from swarmd.client.swarm import join_swarm
from swarmd.config import SUPERVISED, GatewayConfig, split
from swarmd.folders import write_file
from swarmd.gateway.address import ADDRESS_FILE, TOKEN_FILE
from swarmd.gateway.app import Gateway
from swarmd.gateway.batches.store import BatchStore
from swarmd.gateway.generation.quotas import Quotas, UsageFile
from swarmd.gateway.generation.turns import Turns
from swarmd.gateway.guard import Guard
from swarmd.gateway.keys import Keys
from swarmd.gateway.listening import is_loopback, open_listener, url_of
from swarmd.gateway.models import ServedModels
from swarmd.gateway.news import Machine
from swarmd.gateway.page import Page
from swarmd.home.membership import CLIENT_LIFETIME_S
from swarmd.net.api import TaskStatus
from swarmd.net.http import serve_http

logger = logging.getLogger(__name__)

RENEWED_BEFORE_S = 86_400.0  # its certificate ends: for as long as half of it, a pause between answers is awaited
REQUEST_WITHIN_S = 15.0  # from a connection to its whole request head: slow ones are let go


async def serve(
    folder: Path,
    settings: GatewayConfig,
    ready: Callable[[str], None],
) -> bool:
    """Serve until SIGTERM or SIGINT; ``ready`` gets the URL. Raises SwarmError.

    Returns whether to serve again: its membership ends after some days, and a new one is a new beginning.
    """
    keys = Keys(folder)
    listener = open_listener(settings.listen, bool(keys.all()))
    is_local = is_loopback(listener.getsockname()[0])
    token = secrets.token_urlsafe(24)
    url = url_of(listener)
    origins = split(settings.origins)
    guard = Guard(keys, split(settings.hosts), origins, token, is_local)
    n_of_key = max(1, settings.waiting // 2) if keys.all() else settings.waiting
    turns = Turns(settings.running, settings.waiting, n_of_key)
    async with join_swarm(membership(None, folder)) as swarm, trio.open_nursery() as nursery:
        machine = Machine(folder)
        nursery.start_soon(machine.run)
        models = ServedModels(swarm, turns, nursery, settings)
        nursery.start_soon(models.prepare)
        quotas = Quotas(keys.limits_of, UsageFile(folder), time.time)
        n_batched = max(1, settings.running // 4)  # the rest is for people who wait
        page = Page(swarm, models, machine)
        gateway = Gateway(models, guard, turns, origins, page, quotas, BatchStore(folder), n_batched)
        await nursery.start(gateway.batches.run)
        await nursery.start(_cancel_on_signal, nursery.cancel_scope)
        if SUPERVISED in os.environ:
            nursery.start_soon(_cancel_with_daemon, nursery.cancel_scope)
        write_file(folder / TOKEN_FILE, token, secret=True)
        write_file(folder / ADDRESS_FILE, url)
        nursery.start_soon(_serve_http, gateway, listener)
        # A membership's certificate ends, and a running client cannot change its own. So the process's client ends
        # before, in a pause between answers if one comes in half a day, and ``serve`` is called again.
        try:
            ready(url)
            await trio.sleep(CLIENT_LIFETIME_S - RENEWED_BEFORE_S)
            with trio.move_on_after(RENEWED_BEFORE_S / 2):
                while turns.n_running + turns.n_waiting:
                    await trio.sleep(1)
        finally:
            for name in (TOKEN_FILE, ADDRESS_FILE):
                (folder / name).unlink(missing_ok=True)
        nursery.cancel_scope.cancel()
        return True
    return False


async def _serve_http(gateway: Gateway, listener: socket.socket) -> None:
    config = HypercornConfig()
    config.accesslog = None
    config.errorlog = logging.getLogger("hypercorn.error")
    config.loglevel = "ERROR"
    config.read_timeout = None
    config.keep_alive_timeout = REQUEST_WITHIN_S
    await serve_http(gateway.application(), config, [listener])


async def _cancel_on_signal(scope: trio.CancelScope, task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            scope.cancel()
            return


async def _cancel_with_daemon(scope: trio.CancelScope) -> None:
    """A daemon that started this process holds the other end of standard input; its death closes it."""
    async with trio.lowlevel.FdStream(os.dup(sys.stdin.fileno())) as pipe:
        while await pipe.receive_some():
            pass
    scope.cancel()
