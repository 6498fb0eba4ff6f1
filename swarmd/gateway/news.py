"""What the page shows of the swarm and of this machine, gathered here and sent when it has changed.

The swarm is seen through the gateway's own view; this machine through its daemon's control socket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import trio

from swarmd.errors import SwarmError
from swarmd.folders import SOCKET
from swarmd.gateway.generation.row import RowReport
from swarmd.gateway.models import ListedModel
from swarmd.names import label_member
from swarmd.net.local import ask_daemon
from swarmd.plan.chains.view import SwarmView
from swarmd.printable import clean_strings
from swarmd.values import ModelId, PeerId

LOOK_INTERVAL_S = 2.0  # a person sees a change within so long
FLOWS_PER_LOOK = 4  # answers grow faster than anything else
SAMPLE_INTERVAL_S = 15.0  # of the curves
KEPT_SAMPLES = 240  # an hour
ASK_TIMEOUT_S = 5.0  # the daemon on the same machine
MOST_LOSSES = 500  # of a run's curve; a screen has not many more columns

Say = Callable[[str, Any], Awaitable[None]]


def describe_swarm(
    view: SwarmView,
    own_peer: str,
    listed: Sequence[ListedModel],
) -> dict[str, Any]:
    """List models, with what nobody serves, whether they can chat, and how much; and peers, with what they serve."""
    models = [
        {
            "name": model.name,
            "model": model.model,
            "n_blocks": model.n_blocks,
            "missing": [[span.start, span.end] for span in model.missing],
            "chats": model.chats,
            "max_tokens": model.max_tokens,
        }
        for model in listed
    ]
    spans: dict[str, list[dict[str, Any]]] = {}
    for span in view.spans:
        row = {
            "model": span.model,
            "start": span.start,
            "end": span.end,
            "state": span.state,
            "dtype": span.dtype,
            "quantize": span.quantize,
            "tokens_per_s": span.decode_tokens_per_s,
        }
        spans.setdefault(span.peer, []).append(row)
    names: dict[str, str] = {peer: record.name for peer, record in view.peers.items()}
    peers: list[dict[str, Any]] = [
        {
            "peer": peer,
            "label": label_member(peer, names),
            "is_here": peer == own_peer,
            "device": record.device or "unknown",
            "memory_gib": _scale(record.memory_bytes, 2**-30),
            "up_mbit": _scale(record.up_bytes_per_s, 8e-6),
            "down_mbit": _scale(record.down_bytes_per_s, 8e-6),
            "version": record.version or "unknown",
            "seen_at": record.issued_at,
            "spans": sorted(spans.get(peer, []), key=_span_order),
        }
        for peer, record in sorted(view.peers.items())
    ]
    peers.sort(key=_peer_order)
    return {"n_peers": len(peers), "models": models, "peers": peers}


def describe_flow(model: ModelId, report: RowReport) -> dict[str, Any]:
    """Say through whom an answer that is being written goes, and how far it is; nothing of what it says."""
    return {
        "model": model,
        "chain": list(report.chain),
        "n_prompt": report.n_prompt,
        "n_generated": report.n_generated,
        "repairs": list(report.repairs),
    }


def _peer_order(peer: dict[str, Any]) -> tuple[str, int]:
    return min(map(_span_order, peer["spans"]), default=("~", 0))  # a peer that serves nothing is last


def _span_order(span: dict[str, Any]) -> tuple[str, int]:
    return span["model"], span["start"]


def _scale(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


class Machine:
    """This machine as its daemon tells of it, with the last hour."""

    def __init__(self, folder: Path) -> None:
        self._socket = folder / SOCKET
        self._history: deque[dict[str, float]] = deque(maxlen=KEPT_SAMPLES)
        self.status: dict[str, Any] = {"error": "no daemon runs here: swarmd up starts one"}
        self.training: dict[str, Any] = {"runs": []}

    @property
    def peer(self) -> PeerId:
        """The peer id of this machine; "" while no daemon runs here."""
        return PeerId(self.status.get("status", {}).get("peer", ""))

    async def run(self) -> None:
        """Look at it, now and then, until cancelled."""
        while True:
            await self._look()
            await trio.sleep(LOOK_INTERVAL_S)

    async def _look(self) -> None:
        # Without a daemon the last training is still shown: it says what was so, and the status says what is missing.
        try:
            status = await self.ask("status")
            runs = await self.ask("train")
        except SwarmError as error:
            self.status = {"error": str(error)}
            return
        looked_at = trio.current_time()
        if not self._history or looked_at - self._history[-1]["at"] >= SAMPLE_INTERVAL_S:
            servers = [hosting["server"] for hosting in status["hosting"] if hosting["server"]]
            tokens = sum(server["tokens_served"] for server in servers)
            sessions = sum(server["sessions"] for server in servers)
            self._history.append({"at": looked_at, "tokens": tokens, "sessions": sessions})
        self.status = {"status": status, "history": list(self._history)}
        shown_runs = []
        for run in runs["runs"]:
            shown_runs.append({**run, "losses": run["losses"][-MOST_LOSSES:]})
        self.training = {"runs": shown_runs}

    async def ask(self, verb: str, method: str = "GET") -> dict[str, Any]:
        """Ask the daemon. Raises SwarmError."""
        call = partial(ask_daemon, self._socket, verb, {}, method, ASK_TIMEOUT_S)
        return await trio.to_thread.run_sync(call)


async def send_changes(
    swarm: Callable[[], dict[str, Any]],
    flows: Callable[[], list[dict[str, Any]]],
    machine: Machine,
    say: Say,
) -> None:
    """Send what has changed, and everything at first, until cancelled."""
    # Compared as bytes: what encodes alike is alike for the page, and is not sent again.
    sent: dict[str, bytes] = {}
    for n_looks in count():
        topics: dict[str, Any] = {"flows": flows()}
        if n_looks % FLOWS_PER_LOOK == 0:
            topics |= {"swarm": swarm(), "machine": machine.status, "training": machine.training}
        for name, value in topics.items():
            raw = msgspec.json.encode(clean_strings(value))
            if sent.get(name) != raw:
                sent[name] = raw
                await say(name, raw)
        await trio.sleep(LOOK_INTERVAL_S / FLOWS_PER_LOOK)
