"""The daemon for Prometheus: what ``swarmd status`` says, as numbers, over HTTP on this machine only.

Names as Prometheus recommends (https://prometheus.io/docs/practices/naming/): base units, ``_total`` for counters.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Iterator

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from swarmd.net.http import Connect, serve_http
from swarmd.node.machine.control import quiet_config
from swarmd.status import DaemonStatus

logger = logging.getLogger(__name__)


class StatusCollector(Collector):
    """Asks for the status when Prometheus asks, so that nothing is counted twice or goes stale."""

    def __init__(self, status: Callable[[], DaemonStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Give all metrics as they are now."""
        status = self._status()
        info = GaugeMetricFamily("swarmd_info", "Always 1.", labels=["swarm", "peer", "version"])
        info.add_metric([status.swarm, status.peer, status.version], 1)
        yield info
        yield GaugeMetricFamily("swarmd_uptime_seconds", "Since it started.", status.uptime_s)
        yield GaugeMetricFamily("swarmd_memory_bytes", "Of the daemon itself.", status.memory_mib * 2**20)
        yield GaugeMetricFamily("swarmd_members", "Members of the swarm that it knows.", status.members)
        if status.policy is not None:
            yield GaugeMetricFamily("swarmd_may_work", "1 if the policy lets it work.", float(status.policy.may_work))
        if status.reach is not None and status.reach.state != "unknown":
            is_open = float(status.reach.state == "open")
            yield GaugeMetricFamily("swarmd_reachable", "1 if members can connect to it.", is_open)
            yield GaugeMetricFamily("swarmd_circuits_relayed", "Circuits for others.", status.reach.relaying)
        yield from self._hosting(status)
        yield from self._models(status)

    @staticmethod
    def _hosting(status: DaemonStatus) -> Iterator[Metric]:
        """One row for each worker that serves."""
        labels = ["slot", "model"]
        online = GaugeMetricFamily("swarmd_worker_online", "1 while it serves.", labels=labels)
        restarts = CounterMetricFamily("swarmd_worker_restarts", "Of a worker.", labels=labels)
        sessions = GaugeMetricFamily("swarmd_sessions", "Sessions through a worker.", labels=labels)
        free = GaugeMetricFamily("swarmd_cache_free_tokens", "Room in its cache.", labels=labels)
        room = GaugeMetricFamily("swarmd_cache_tokens", "Size of its cache.", labels=labels)
        served = CounterMetricFamily("swarmd_tokens_served", "Tokens through its blocks.", labels=labels)
        reused = CounterMetricFamily("swarmd_tokens_reused", "Tokens that another session had computed.", labels=labels)
        tuned = CounterMetricFamily("swarmd_tokens_tuned", "Tokens of fine-tuning.", labels=labels)
        refused = CounterMetricFamily("swarmd_refused", "Refusals, by code.", labels=[*labels, "code"])
        for hosting in status.hosting:
            model = ""
            if hosting.serving is not None:
                model = hosting.serving.name or hosting.serving.model
            row = [str(hosting.slot), model]
            online.add_metric(row, float(hosting.state == "online"))
            if hosting.worker is not None:
                restarts.add_metric(row, hosting.worker.restarts)
            server = hosting.server
            if server is not None:
                sessions.add_metric(row, server.sessions)
                free.add_metric(row, server.free_cache_tokens)
                room.add_metric(row, server.total_cache_tokens)
                served.add_metric(row, server.tokens_served)
                reused.add_metric(row, server.tokens_reused)
                for code, count in server.refused.items():
                    refused.add_metric([*row, code], count)
            if hosting.tuning is not None:
                tuned.add_metric(row, hosting.tuning.tokens_trained)
        yield from (online, restarts, sessions, free, room, served, reused, tuned, refused)

    @staticmethod
    def _models(status: DaemonStatus) -> Iterator[Metric]:
        holders = GaugeMetricFamily("swarmd_model_holders", "Servers of its rarest block.", labels=["model"])
        for model in status.models:
            holders.add_metric([model.name], model.lowest)
        fetched = GaugeMetricFamily("swarmd_download_done_bytes", "Of a download under way.", labels=["model"])
        total = GaugeMetricFamily("swarmd_download_bytes", "All of a download under way.", labels=["model"])
        for download in status.downloads:
            fetched.add_metric([download.model], download.done_bytes)
            total.add_metric([download.model], download.total_bytes)
        yield from (holders, fetched, total)


def application(status: Callable[[], DaemonStatus], host: str) -> Starlette:
    """Build the ASGI application: GET /metrics and nothing else, under the name ``host`` or localhost."""
    registry = CollectorRegistry()
    registry.register(StatusCollector(status))

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    # a page whose own name leads here (DNS rebinding) gets nothing
    local = Middleware(TrustedHostMiddleware, allowed_hosts=["localhost", host])
    return Starlette(routes=[Route("/metrics", metrics)], middleware=[local])


async def serve_metrics(
    status: Callable[[], DaemonStatus],
    listen: str,
    connect: Connect | None = None,
) -> None:
    """Serve until cancelled on HOST:PORT; a daemon without metrics goes on, whatever ended them.

    ``connect``: see ``serve_http``.
    """
    host, _, port = listen.rpartition(":")
    try:
        listener = socket.create_server((host, int(port)))
    except (OSError, OverflowError) as error:
        logger.error("no metrics: cannot listen on %s: %s", listen, error)
        return
    try:
        listener.setblocking(False)
        await serve_http(application(status, host), quiet_config(), [listener], connect)
    except* OSError as errors:  # of the listener itself: a connection's own end with it
        logger.error("no metrics any more: listening on %s ended: %s", listen, errors.exceptions[0])
