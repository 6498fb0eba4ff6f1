"""What the page shows of the swarm and of this machine, gathered here and sent when it has changed.

The swarm is seen through the gateway's own view; this machine through its daemon's control socket.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import trio

from swarmd.errors import SwarmError
from swarmd.folders import SOCKET
from swarmd.net.local import ask_daemon
from swarmd.plan.chains.view import SwarmView
from swarmd.values import ModelId, PeerId

LOOK_INTERVAL_S = 2.0  # a person sees a change within so long
SAMPLE_INTERVAL_S = 15.0  # of the curves
KEPT_SAMPLES = 240  # an hour
ASK_TIMEOUT_S = 5.0  # the daemon on the same machine
MOST_LOSSES = 500  # of a run's curve; a screen has not many more columns

Say = Callable[[str, Any], Awaitable[None]]


def of_swarm(view: SwarmView, here: str, chats: Callable[[ModelId], bool | None]) -> dict[str, Any]:
    """Models with what nobody serves and whether they can chat, peers with what they serve."""
    models = [
        {
            "name": name,
            "model": model,
            "n_blocks": n_blocks,
            "missing": [[s.start, s.end] for s in view.missing(ModelId(model), n_blocks)],
            "chats": chats(ModelId(model)),
        }
        for name, (model, n_blocks) in sorted(view.catalog.models.items())
    ]
    spans: dict[str, list[dict[str, Any]]] = {}
    for s in view.spans:
        row = {"model": s.model, "start": s.start, "end": s.end, "state": s.state, "dtype": s.dtype}
        spans.setdefault(s.peer, []).append({**row, "quantize": s.quantize, "tokens_per_s": s.decode_tokens_per_s})
    peers: list[dict[str, Any]] = [
        {
            "peer": peer,
            "short": peer[-8:],
            "is_here": peer == here,
            "device": record.device or "unknown",
            "memory_gib": _times(record.memory_bytes, 2**-30),
            "up_mbit": _times(record.up_bytes_per_s, 8e-6),
            "down_mbit": _times(record.down_bytes_per_s, 8e-6),
            "version": record.version or "unknown",
            "seen_at": record.issued_at,
            "spans": sorted(spans.get(peer, []), key=lambda s: (s["model"], s["start"])),
        }
        for peer, record in sorted(view.peers.items())
    ]
    peers.sort(key=lambda p: min(((s["model"], s["start"]) for s in p["spans"]), default=("~", 0)))
    return {"n_peers": len(peers), "models": models, "peers": peers}


def _times(value: float | None, factor: float) -> float | None:
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
        return PeerId(self.status.get("status", {}).get("peer", ""))

    async def run(self) -> None:
        """Look at it, now and then, until cancelled."""
        while True:
            await self._look()
            await trio.sleep(LOOK_INTERVAL_S)

    async def _look(self) -> None:
        try:
            status, runs = await self.ask("status"), await self.ask("train")
        except SwarmError as error:
            self.status = {"error": str(error)}
            return
        now = trio.current_time()
        if not self._history or now - self._history[-1]["at"] >= SAMPLE_INTERVAL_S:
            servers = [h["server"] for h in status["hosting"] if h["server"]]
            tokens, sessions = sum(s["tokens_served"] for s in servers), sum(s["sessions"] for s in servers)
            self._history.append({"at": now, "tokens": tokens, "sessions": sessions})
        self.status = {"status": status, "history": list(self._history)}
        self.training = {"runs": [{**run, "losses": run["losses"][-MOST_LOSSES:]} for run in runs["runs"]]}

    async def ask(self, verb: str, method: str = "GET") -> dict[str, Any]:
        """Ask the daemon. Raises SwarmError."""
        return await trio.to_thread.run_sync(lambda: ask_daemon(self._socket, verb, {}, method, ASK_TIMEOUT_S))


async def tell(swarm: Callable[[], dict[str, Any]], machine: Machine, say: Say) -> None:
    """Send what has changed, and at first everything, until cancelled."""
    sent: dict[str, bytes] = {}
    while True:
        for name, value in (("swarm", swarm()), ("machine", machine.status), ("training", machine.training)):
            raw = msgspec.json.encode(value)
            if sent.get(name) != raw:
                sent[name] = raw
                await say(name, raw)
        await trio.sleep(LOOK_INTERVAL_S)
