"""Metrics: the status as Prometheus reads it, for this machine only."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import msgspec
import pytest
import trio
import trio.testing
from prometheus_client.parser import text_string_to_metric_families

from swarmd.config import Config
from swarmd.errors import ConfigError
from swarmd.node.machine.metrics import application, serve_metrics
from swarmd.status import DaemonStatus

ROW: dict[str, Any] = {
    "slot": 0,
    "wanted": "m",
    "state": "online",
    "why": "",
    "serving": {"model": "hash", "name": "m", "blocks": [0, 6], "why": ""},
    "worker": {"state": "online", "pid": 1, "restarts": 2, "why": "", "batching": None, "kernels": None},
    "server": {
        "sessions": 3,
        "free_cache_tokens": 10,
        "total_cache_tokens": 20,
        "tokens_served": 1_000,
        "tokens_reused": 0,
        "refused": {"busy": 4},
    },
    "tuning": None,
    "balance": {"last_move": None, "last_look": "", "moves_left": 1},
}
STATUS: dict[str, Any] = {
    **dict.fromkeys(("serving", "worker", "server", "training", "balance")),
    "swarm": 'o"urs',
    "peer": "p",
    "version": "0",
    "uptime_s": 5.0,
    "addresses": [],
    "members": 7,
    "directory": {"known_peers": 6, "last_exchange_s": None, "reason": ""},
    "hosting": [ROW, {**ROW, "slot": 1, "serving": None, "worker": None, "server": None, "state": "choosing"}],
    "cannot_serve": "",
    "downloads": [],
    "models": [],
    "memory_mib": 1.0,
    "policy": {"may_work": False, "why": "", "changes_at": None},
}


def status() -> DaemonStatus:
    return msgspec.json.decode(json.dumps(STATUS), type=DaemonStatus)


async def get(host: str) -> httpx.Response:
    transport = httpx.ASGITransport(application(status, "127.0.0.1"))
    async with httpx.AsyncClient(transport=transport, base_url=f"http://{host}") as http:
        return await http.get("/metrics")


async def test_prometheus_reads_what_status_says() -> None:
    answer = await get("127.0.0.1:9417")
    samples = {
        (sample.name, sample.labels.get("slot", "")): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }
    assert samples["swarmd_members", ""] == 7
    assert samples["swarmd_memory_bytes", ""] == 2**20
    assert samples["swarmd_may_work", ""] == 0
    assert samples["swarmd_sessions", "0"] == 3
    assert samples["swarmd_tokens_served_total", "0"] == 1_000
    assert samples["swarmd_refused_total", "0"] == 4
    assert samples["swarmd_worker_online", "0"] == 1
    assert samples["swarmd_worker_online", "1"] == 0
    assert ("swarmd_reachable", "") not in samples, "what was not measured is not said"
    assert 'swarm="o\\"urs"' in answer.text


async def test_a_page_that_leads_its_own_name_here_gets_nothing() -> None:
    assert (await get("evil.example:9417")).status_code == 400
    assert (await get("localhost:9417")).status_code == 200


async def test_a_port_that_is_taken_ends_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with trio.fail_after(20):
            await serve_metrics(status, f"127.0.0.1:{listener.getsockname()[1]}")
    assert "no metrics: cannot listen on 127.0.0.1:" in caplog.text


async def test_it_is_served_until_it_is_cancelled() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve_metrics, status, f"127.0.0.1:{port}")
        async with httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(retries=5)) as http:
            assert "swarmd_members 7.0" in (await http.get(f"http://127.0.0.1:{port}/metrics")).text
        nursery.cancel_scope.cancel()


async def test_a_connection_that_raises_ends_neither_the_metrics_nor_the_daemon(
    caplog: pytest.LogCaptureFixture,
) -> None:
    n_connections = 0

    async def stumble(stream: trio.SocketStream) -> None:
        nonlocal n_connections
        n_connections += 1
        raise LookupError("a library's own mistake")

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with trio.open_nursery() as daemon:
        daemon.start_soon(serve_metrics, status, f"127.0.0.1:{port}", stumble)
        await trio.testing.wait_all_tasks_blocked()
        for _ in range(3):
            async with await trio.open_tcp_stream("127.0.0.1", port) as stream:
                assert await stream.receive_some() == b"", "it is closed"
        assert n_connections == 3
        daemon.cancel_scope.cancel()
    assert "a connection over HTTP ended with LookupError" in caplog.text


@pytest.mark.parametrize("listen", ["0.0.0.0:9417", "127.0.0.1", "9417", "example.org:80"])
def test_only_this_machine_may_ask(listen: str) -> None:
    with pytest.raises(ConfigError, match="metrics is HOST:PORT of this machine"):
        Config(metrics=listen).check()
