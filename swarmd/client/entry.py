"""How a client enters: from an invite, or as a guest of the member whose state lies on this machine."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import msgspec

from swarmd.client.swarm import ClientMembership
from swarmd.errors import ConfigError, SwarmError
from swarmd.home import CLIENT_LIFETIME_S, Home, by_peer
from swarmd.net.local import ask_daemon
from swarmd.protocol.membership import invite as invites
from swarmd.protocol.membership.identity import Identity
from swarmd.values import PeerId


def membership(invite: str | None, home: str | Path | None) -> ClientMembership:
    """Make a throw-away identity and its certificate. Raises SwarmError."""
    if invite is not None and home is not None:
        raise ConfigError("connect with an invite or with a home, not with both")
    state = Home(Path(home)) if home is not None else Home.default()
    identity = Identity.generate()
    if invite is not None:
        ticket = invites.decode_untrusted(invite, time.time())
        certificate = ticket.admit(identity.public_key, "client", int(time.time()) + CLIENT_LIFETIME_S)
        return ClientMembership(
            ticket.swarm, identity, certificate, by_peer(ticket.addresses), state.folders(), state.weights
        )
    swarm = state.swarm()
    certificate = state.client_certificate(identity.public_key)
    near = _members_near(state)
    kept = (state.folders(), state.weights, state.checks_file, state.books_file)
    known = msgspec.structs.replace(swarm.keys, charters=state.charters())
    return ClientMembership(known, identity, certificate, near, *kept)


def _members_near(state: Home) -> dict[PeerId, tuple[str, ...]]:
    """Addresses from the running daemon if there is one, its own first, else from what it remembered."""
    if state.socket.exists():
        with suppress(SwarmError):
            found = ask_daemon(state.socket, "addresses", timeout_s=5.0)["addresses"]
            return {PeerId(p): tuple(a) for p, a in found.items() if a}
    return state.bootstrap()
