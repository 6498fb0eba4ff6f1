"""What engines that compute no gradients, or read no adapters, say to those who want some."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from swarmd.compute.serving.client_parameters import NOTHING, ClientParameters
from swarmd.errors import Code, ConfigError, Refused
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.tuning import Backward, CloseLane, Forward, OpenLane, PutTuned
from swarmd.protocol.wire.worker import WorkerMessage
from swarmd.values import Span


class NoAdapters:
    """Refuses LoRA adapters, with the engine's own words."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def __contains__(self, adapter: str) -> bool:
        return False

    def get(self, adapter: str) -> None:
        return None

    def load(self, adapter: str, shards: Sequence[Path], raw_config: bytes) -> None:
        raise ConfigError(self._reason)


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
