"""Addresses of members as people pass them on: multiaddrs of TCP that end in /p2p/ID, through a relay perhaps."""

from __future__ import annotations

import re

from swarmd.errors import ConfigError

_PEER = r"/p2p/12D3KooW[1-9A-HJ-NP-Za-km-z]{44}"
_ADDRESS = re.compile(rf"/(ip4|ip6|dns|dns4|dns6)/[^/\s]{{1,253}}/tcp/\d{{1,5}}({_PEER}/p2p-circuit)?{_PEER}")


def looks_like_address(text: str) -> bool:
    """Does this begin as a multiaddr does?"""
    return text.lstrip().startswith("/")


def read_addresses_untrusted(text: str) -> tuple[str, ...]:
    """Read addresses as typed or pasted, with blanks or commas between them. Raises ConfigError."""
    addresses = tuple(part for part in re.split(r"[\s,]+", text) if part)
    for address in addresses:
        if not _ADDRESS.fullmatch(address):
            example = "/ip4/192.0.2.7/tcp/4117/p2p/12D3KooW..."
            raise ConfigError(f"expected an address from a member's swarmd status ({example}), got {address[:80]!r}")
    return addresses
