"""What a peer gives to one that may dial it beside libp2p: where, whom to trust, and a token to begin with."""

from __future__ import annotations

from typing import Annotated

import msgspec

TOKEN_BYTES = 32  # cannot be guessed
Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
PinnedCertificate = Annotated[bytes, msgspec.Meta(min_length=1, max_length=2_048)]
Token = Annotated[bytes, msgspec.Meta(min_length=TOKEN_BYTES, max_length=TOKEN_BYTES)]


class DialTicket(msgspec.Struct, frozen=True, array_like=True):
    """A port, the certificate in DER that will be shown there, and the token that who dials has to show."""

    port: Port
    certificate: PinnedCertificate
    token: Token


NO_TICKET = DialTicket(1, b"\0", b"\0" * TOKEN_BYTES)
"""What a message has that says nothing."""
