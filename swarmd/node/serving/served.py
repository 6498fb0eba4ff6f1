"""What one server serves, and the refusal of anything else."""

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
    """Blocks of a model, in one dtype, by ``identity``; ``books`` counts what was computed for others.

    At most ``limit_bytes`` of fine-tuning may wait here. ``weight_of`` says how much of a scarce cache a client gets.
    """

    identity: Identity
    books: UsageLedger
    model: ModelId
    span: Span
    dtype: str
    limit_bytes: int = 0
    understands: Understanding = OURS
    weight_of: Callable[[PeerId], float] = lambda _: 1.0

    def require(
        self,
        model: str,
        start: int,
        end: int,
        dtype: str,
        codec: str,
    ) -> None:
        """Refuse a request for other blocks, another dtype or an unknown codec. Raises Refused."""
        if model != self.model:
            raise Refused(Code.NOT_SERVING, f"this server holds {self.model[:12]}, not {model[:12]}")
        if not (start < end and self.span.covers(Span(start, end))):
            raise Refused(Code.NOT_SERVING, f"this server holds blocks {self.span}, not {start}:{end}")
        if dtype != self.dtype:
            raise Refused(Code.UNSUPPORTED, f"this server computes in {self.dtype}, not {dtype}")
        if codec not in self.understands.codecs:
            known = ", ".join(self.understands.codecs)
            raise Refused(Code.UNSUPPORTED, f"this server knows the codecs {known}, not {codec}")
