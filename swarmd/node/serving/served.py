"""What one server serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from swarmd.errors import Code, Refused
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.understanding import OURS, Understanding
from swarmd.usage_ledger import UsageLedger
from swarmd.values import ModelId, PeerId, Span


@dataclass(frozen=True, slots=True)
class ServedBlocks:
    """Blocks of a model, in one dtype, by ``identity``; what was given is in ``books``.

    ``limit_bytes`` may wait here for fine-tuning. ``weight_of`` a client says how much it gets of what is short.
    """

    identity: Identity
    books: UsageLedger
    model: ModelId
    span: Span
    dtype: str
    limit_bytes: int = 0
    understands: Understanding = OURS
    weight_of: Callable[[PeerId], float] = lambda _: 1.0

    def require(self, model: str, start: int, end: int, dtype: str, codec: str) -> None:
        """Refuse what is something else. Raises Refused."""
        if model != self.model:
            raise Refused(Code.NOT_SERVING, f"this server holds {self.model[:12]}, not {model[:12]}")
        if not (start < end and self.span.covers(Span(start, end))):
            raise Refused(Code.NOT_SERVING, f"this server holds blocks {self.span}, not {start}:{end}")
        if dtype != self.dtype:
            raise Refused(Code.UNSUPPORTED, f"this server computes in {self.dtype}, not {dtype}")
        if codec not in self.understands.codecs:
            known = ", ".join(self.understands.codecs)
            raise Refused(Code.UNSUPPORTED, f"this server knows the codecs {known}, not {codec}")
