"""The engines that a worker has, and which of them loads what the daemon asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from swarmd.compute.serving.client_parameters import NOTHING, ClientParameters
from swarmd.compute.serving.engine import LoadedEngine, LoadSignals
from swarmd.compute.serving.torch_engine import load_torch_engine
from swarmd.errors import Code, ConfigError, Refused
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.tuning import Backward, CloseLane, Forward, OpenLane, PutTuned
from swarmd.protocol.wire.worker import LoadSpan, WorkerMessage
from swarmd.values import Span


@dataclass(frozen=True, slots=True)
class EngineKind:
    """One library that can compute blocks: which requests it is for, and how it loads them."""

    name: str
    takes: Callable[[LoadSpan], bool]
    load: Callable[[LoadSpan, LoadSignals], LoadedEngine]


ENGINES = (EngineKind("torch", lambda request: True, load_torch_engine),)
"""In their order: the first one that takes a request loads it."""


def load_engine(request: LoadSpan, signals: LoadSignals, kinds: Sequence[EngineKind] = ENGINES) -> LoadedEngine:
    """Load what the daemon asks for. Raises ConfigError where that cannot be."""
    for kind in kinds:
        if kind.takes(request):
            return kind.load(request, signals)
    names = ", ".join(kind.name for kind in kinds)
    raise ConfigError(f"{request.path}: no engine here computes this model; tried: {names}")


class NoFineTuning:
    """Refuses fine-tuning, for engines that compute no gradients."""

    has_work = False

    def __init__(self, engine: str) -> None:
        self.handled = 0
        self._reason = f"{engine} computes no gradients: fine-tune through servers that use torch"

    def take(self, message: WorkerMessage, frame: Frame) -> Iterator[bytes] | None:
        """Refuse one frame; None when it is not about fine-tuning."""
        if not isinstance(message, Forward | Backward | PutTuned | OpenLane | CloseLane):
            return None
        self.handled += 1
        if isinstance(message, OpenLane | CloseLane) or (isinstance(message, PutTuned) and not message.id):
            return iter(())  # nobody waits for an answer
        refusal = messages.refusal_for(message, Refused(Code.UNSUPPORTED, self._reason))
        return iter((messages.encode_frame(refusal),))

    def tuned(self, client: bytes, version: bytes, hop: Span) -> ClientParameters:
        """Return no parameters. Raises Refused where a client names some."""
        if version:
            raise Refused(Code.UNSUPPORTED, self._reason)
        return NOTHING

    def run_slice(self) -> Iterator[bytes]:
        """Compute nothing."""
        return iter(())
