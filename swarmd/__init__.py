"""Pool the computers you already have to run and train language models that none of them could alone.

>>> import swarmd
>>> with swarmd.connect(invite) as swarm:                                                     # doctest: +SKIP
...     model, tokenizer = swarm.model("demo"), swarm.tokenizer("demo")
...     ids = model.generate(**tokenizer("A module is", return_tensors="pt"), max_new_tokens=40)
"""

from __future__ import annotations

import os
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING

from swarmd.errors import (
    CacheExhausted,
    ConfigError,
    DaemonNotRunning,
    IntegrityError,
    NoRoute,
    NotJoined,
    PeerError,
    SwarmError,
    SwarmUnavailable,
)

if TYPE_CHECKING:
    from swarmd.client.blocking import Swarm
    from swarmd.client.swarm import AsyncSwarm

# Threads of torch that have nothing to do look for work, by default for 8 ms: between two tokens all cores burn. 1 ms
# is enough for what follows at once (benchmarks/waiting_threads.py). It is read when torch is imported.
if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
    os.environ["GOMP_SPINCOUNT"] = "50000"

__all__ = [
    "CacheExhausted",
    "ConfigError",
    "DaemonNotRunning",
    "IntegrityError",
    "NoRoute",
    "NotJoined",
    "PeerError",
    "SwarmError",
    "SwarmUnavailable",
    "aconnect",
    "connect",
]


def connect(
    invite: str | None = None,
    *,
    home: str | Path | None = None,
) -> Swarm:
    """Join a swarm as a user of its models: with an invite, or as a guest of the member whose state is in ``home``.

    Without either, the default home (or SWARMD_HOME) is used. The client has an identity of its own, certified by
    the invite or the member, and never shares a peer id with a daemon. Raises SwarmError.
    """
    from swarmd.client.blocking import Swarm
    from swarmd.client.entry import membership

    return Swarm(membership(invite, home))


def aconnect(
    invite: str | None = None,
    *,
    home: str | Path | None = None,
) -> AbstractAsyncContextManager[AsyncSwarm]:
    """The same for trio programs: ``async with swarmd.aconnect(invite) as swarm``."""
    from swarmd.client.entry import membership
    from swarmd.client.swarm import join_swarm

    return join_swarm(membership(invite, home))
