"""The engines that a worker has, and which of them loads what the daemon asks for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swarmd.compute.serving import llama_engine
from swarmd.compute.serving.engine import LoadedEngine, LoadSignals
from swarmd.compute.serving.team_engine import load_team, takes_team
from swarmd.compute.serving.torch_engine import load_torch_engine
from swarmd.errors import ConfigError
from swarmd.protocol.wire.worker import LoadSpan


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One library that can compute blocks: which requests it is for, and how it loads them."""

    name: str
    takes: Callable[[LoadSpan], bool]
    load: Callable[[LoadSpan, LoadSignals], LoadedEngine]


ENGINES = (
    EngineKind("a team", takes_team, load_team),
    EngineKind(llama_engine.NAME, llama_engine.takes, llama_engine.load_llama_engine),
    EngineKind("torch", lambda request: True, load_torch_engine),
)
"""In their order: the first one that takes a request loads it."""


def load_engine(request: LoadSpan, signals: LoadSignals, kinds: Sequence[EngineKind] = ENGINES) -> LoadedEngine:
    """Load what the daemon asks for. Raises ConfigError where that cannot be."""
    for kind in kinds:
        if kind.takes(request):
            return kind.load(request, signals)
    names = ", ".join(kind.name for kind in kinds)
    raise ConfigError(f"{request.path}: no engine here computes this model; tried: {names}")
