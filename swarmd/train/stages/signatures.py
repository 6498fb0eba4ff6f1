"""What a driver signs: what it gives to a pass itself, and what it has had from the first stage of blocks."""

from __future__ import annotations

from msgspec.structs import replace

from swarmd.protocol.membership.identity import public_key_of_untrusted, verify
from swarmd.protocol.wire.stages import PASS_DOMAIN, StagePass, statement_of
from swarmd.values import PeerId


def require_signed(
    message: StagePass, ledger: str, signature: bytes, digest: bytes, loss: float = 0.0, of: bytes = b""
) -> None:
    """Check what a driver has signed of a pass of a stage, by its ledger (``statement_of``). Raises IntegrityError."""
    key = public_key_of_untrusted(PeerId(message.driver))
    statement = statement_of(replace(message, run=ledger), digest, loss, of)
    verify(key, PASS_DOMAIN, statement, signature, f"a pass of {message.driver[-8:]}")
