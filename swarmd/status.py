"""What a daemon says of itself and its swarm, as plain JSON values for the control API."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from swarmd.errors import ConfigError, NoRoute
from swarmd.node.balancer import Risk
from swarmd.node.server import ServerStatus
from swarmd.plan.routing import Route, best_rejected, best_route, trips_of
from swarmd.plan.view import SwarmView
from swarmd.protocol.records import Catalog
from swarmd.values import ModelId, PeerId, Span


def name_of(catalog: Catalog, model: str) -> str | None:
    """The catalog's name for a model's hash."""
    return next((name for name, (known, _) in catalog.models.items() if known == model), None)


def ms(seconds: float | None) -> float | None:
    """Milliseconds to two places, for people."""
    return None if seconds is None else round(1000 * seconds, 2)


def peers(view: SwarmView, me: PeerId, round_trip_s: Mapping[PeerId, float]) -> list[dict[str, Any]]:
    """One row for each member that is known, with what it serves."""
    rows = []
    for peer, record in sorted(view.peers.items()):
        spans = [s for s in view.spans if s.peer == peer]
        rows.append(
            {
                "peer": peer,
                "is_self": peer == me,
                "addresses": list(record.addresses),
                "version": record.version,
                "device": record.device,
                "device_memory_bytes": record.device_memory_bytes,
                "memory_bytes": record.memory_bytes,
                "cores": record.cores,
                "free_disk_bytes": record.free_disk_bytes,
                "up_bytes_per_s": record.up_bytes_per_s,
                "down_bytes_per_s": record.down_bytes_per_s,
                "round_trip_ms": ms(round_trip_s.get(peer)),
                "spans": [
                    {
                        "model": name_of(view.catalog, s.model) or s.model,
                        "blocks": [s.start, s.end],
                        "state": s.state,
                        "decode_tokens_per_s": s.decode_tokens_per_s,
                        "prefill_tokens_per_s": s.prefill_tokens_per_s,
                        "free_cache_tokens": s.free_cache_tokens,
                        "training_bytes": s.training_bytes,
                        "training_share": s.training_share,
                    }
                    for s in spans
                ],
            }
        )
    return rows


def sessions(server: ServerStatus) -> list[dict[str, Any]]:
    """One row for each hop that is served."""
    return [
        {
            "session": s.session,
            "client": s.client,
            "blocks": [s.span.start, s.span.end],
            "received": s.received,
            "finished": s.finished,
            "epoch": s.epoch,
            "why": s.why,
        }
        for s in server.sessions
    ]


def models(
    view: SwarmView, here: Callable[[ModelId], dict[str, Any]], risk: Callable[[ModelId, int], Risk]
) -> list[dict[str, Any]]:
    """One row for each model of the catalog: who serves its blocks, how safe they are, and what of it is here."""
    return [
        {
            "name": name,
            "model": model,
            "blocks": n_blocks,
            "coverage": view.coverage(ModelId(model), n_blocks),
            "missing": [[s.start, s.end] for s in view.missing(ModelId(model), n_blocks)],
            **here(ModelId(model)),
            **asdict(risk(ModelId(model), n_blocks)),
        }
        for name, (model, n_blocks) in sorted(view.catalog.models.items())
    ]


def chains(view: SwarmView, me: PeerId, round_trip_s: Mapping[PeerId, float], model: str) -> dict[str, Any]:
    """The chain that would be chosen for a model (or each of them), and the best rejected one. Raises ConfigError."""
    rows: dict[str, Any] = {}
    for name in [model] if model else sorted(view.catalog.models):
        found = view.model_named(name)
        if found is None:
            raise ConfigError(f"the catalog has no model {name!r}; it has: {', '.join(view.catalog.models)}")
        spans, wanted = view.serving(found[0]), Span(0, found[1])
        trips = trips_of(spans, me, {p: s / 2 for p, s in round_trip_s.items()})
        try:
            route = best_route(spans, wanted, me, trips)
            rejected = best_rejected(route, spans, wanted, me, trips)
            rows[name] = {**_row(route), "rejected": _row(rejected) if rejected else None}
        except NoRoute as error:
            rows[name] = {"cost_ms": None, "hops": [], "rejected": None, "error": str(error)}
    return rows


def _row(route: Route) -> dict[str, Any]:
    return {"cost_ms": ms(route.cost_s), "hops": list(route.why)}
