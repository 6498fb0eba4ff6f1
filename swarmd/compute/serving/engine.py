"""The face of an engine: what computes the blocks of a span in a worker, whichever library it is.

The scheduler and its sessions know nothing else of it: no modules, no families, no kernels. An engine is loaded by
``engines.load_engine``. What not every engine can (fine-tuning, a head, faster backends later) is beside it in a
``LoadedEngine``.

    frames -> Worker -> Scheduler -> SessionQueues -> HopSession    which ops are computed together, what is answered
                            |                             |
                          run(pieces)               SessionCache    how: torch (``LoadedSpan``), or another library
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.cache.session_cache import SessionCache
from swarmd.compute.serving.client_parameters import NOTHING, ClientParameters
from swarmd.errors import Code, ConfigError, Refused
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import Frame
from swarmd.protocol.wire.tuning import Backward, CloseLane, Forward, OpenLane, PutTuned
from swarmd.protocol.wire.worker import Improved, Loaded, WorkerMessage
from swarmd.values import Span

PASS_ERRORS = (RuntimeError, ValueError, IndexError, TypeError, ArithmeticError)  # torch's own, out of memory too


class Adapters(Protocol):
    """The LoRA adapters that are loaded beside an engine's blocks."""

    def __contains__(self, adapter: str) -> bool: ...

    def get(self, adapter: str) -> Any:
        """Return what passes of sessions with this adapter are given (``SessionTokens.lora``); None if not loaded."""

    def load(self, adapter: str, shards: Sequence[Path], raw_config: bytes) -> None:
        """Load an adapter. Raises ConfigError for one that cannot be used here."""


class Engine(Protocol):
    """Blocks of one model, loaded. Hidden states are tensors [b, t, d] of ``dtype`` on ``device``."""

    on_block: Callable[[], None]
    """Called whenever a part of a pass is done: the worker gives signs of life, and lets other sessions in."""

    @property
    def span(self) -> Span:
        """The blocks that are here; a hop is any part of them."""

    @property
    def n_blocks(self) -> int:
        """Blocks of the whole model."""

    @property
    def hidden_size(self) -> int:
        """The d of hidden states."""

    @property
    def dtype(self) -> torch.dtype:
        """The type of hidden states."""

    @property
    def device(self) -> torch.device:
        """Where hidden states are taken and given."""

    @property
    def adapters(self) -> Adapters:
        """The adapters that sessions may name."""

    @property
    def can_batch(self) -> bool:
        """May several sessions be computed in one pass?"""

    @property
    def shares_prefixes(self) -> bool:
        """May sessions have a common prefix in memory once?"""

    @property
    def interleaved_tokens(self) -> int:
        """New tokens that can be computed in the midst of another pass; 0 where none can."""

    def can_interleave(self, n_tokens: int, hop: Span, cache: Any) -> bool:
        """Can so many new tokens with this cache be computed in the midst of another pass?"""

    def new_cache(self, hop: Span, max_tokens: int, is_exact: bool = False) -> SessionCache:
        """Make an empty cache for a session that reserves so many tokens, and may have to be repeated to the bit."""

    def example_cache(self, hop: Span, n_tokens: int = 1) -> SessionCache:
        """Make a cache with some tokens in it, to compare with what other workers hand over."""

    def refuses_rows(self, rows: torch.Tensor) -> str:
        """Say what is wrong with what a peer sent of some tokens [b, t, d]; empty if nothing is."""

    def run(self, pieces: Sequence[SessionTokens], hop: Span) -> list[torch.Tensor]:
        """Compute the new tokens of some sessions; returns [b, t, d] for each. Raises one of PASS_ERRORS.

        Where ``SessionTokens.is_alone`` is set the same tokens give the same bits whenever they are computed.
        """


class Head(Protocol):
    """Norm and head behind the last block."""

    def largest(self, rows: Sequence[torch.Tensor]) -> list[bytes]:
        """Turn what the last block gave, [t, d] each, into the largest logits of each token, packed (wire.top)."""


class FineTuning(Protocol):
    """Forward and backward of clients' micro-batches. ``handled`` counts the frames whose work is done."""

    handled: int

    @property
    def has_work(self) -> bool:
        """Does any pass wait?"""

    def take(self, message: WorkerMessage, frame: Frame) -> Iterator[bytes] | None:
        """Take one frame in and give the answers to send; None when it is not about fine-tuning."""

    def tuned(self, client: bytes, version: bytes, hop: Span) -> ClientParameters:
        """Return a client's own parameters for a hop. Raises Refused where they are not held."""

    def run_slice(self) -> Iterator[bytes]:
        """Compute a short while."""


class BackgroundWork(Protocol):
    """What an engine does for itself while nobody waits, in short steps: it becomes faster, or measures."""

    news: list[Improved]

    @property
    def is_done(self) -> bool:
        """Is nothing left to do?"""

    def step(self) -> bool:
        """Do a little; False where all that is left waits for something. Raises Preempted, where ``on_block`` does."""


@dataclass(frozen=True, slots=True)
class LoadSignals:
    """Whom a load tells what: ``on_block`` as the engine's, ``on_part`` with a stage, what is done, and of how much."""

    on_block: Callable[[], None]
    on_part: Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that is ready for work, what the daemon is told of it, and what it can beside computing sessions."""

    engine: Engine
    description: Loaded
    fine_tuning: FineTuning
    head: Head | None = None
    background: BackgroundWork | None = None


# --- what engines say that lack an ability -----------------------------------------------------------------------


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
