"""How a client enters: from an invite, or as a guest of the member whose state lies on this machine."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import msgspec

from swarmd.client.swarm import ClientMembership
from swarmd.errors import ConfigError, SwarmError
from swarmd.folders import resolve_folder
from swarmd.home.membership import CLIENT_LIFETIME_S, MembershipFiles, by_peer
from swarmd.home.models import ModelFolders
from swarmd.home.paths import Home
from swarmd.net.local import ask_daemon
from swarmd.protocol.membership import invite as invites
from swarmd.protocol.membership.identity import Identity
from swarmd.values import PeerId


def membership(invite: str | None, home: str | Path | None) -> ClientMembership:
    """Make a throw-away identity and its certificate. Raises SwarmError."""
    if invite is not None and home is not None:
        raise ConfigError("connect with an invite or with a home, not with both")
    state = Home(resolve_folder(Path(home))) if home is not None else Home.default()
    identity = Identity.generate()
    if invite is not None:
        ticket = invites.decode_untrusted(invite, time.time())
        certificate = ticket.admit(identity.public_key, "client", int(time.time()) + CLIENT_LIFETIME_S)
        return ClientMembership(
            keys=ticket.swarm,
            identity=identity,
            certificate=certificate,
            bootstrap=by_peer(ticket.addresses),
            folders=ModelFolders(state).read(),
            weights=state.weights,
            drafts=state.drafts,
        )
    member = MembershipFiles(state)
    swarm = member.swarm()
    certificate = member.client_certificate(identity.public_key)
    return ClientMembership(
        keys=msgspec.structs.replace(swarm.keys, charters=member.charters()),
        identity=identity,
        certificate=certificate,
        bootstrap=_members_near(state),
        folders=ModelFolders(state).read(),
        weights=state.weights,
        drafts=state.drafts,
        checks=state.checks_file,
        books=state.books_file,
    )


def _members_near(state: Home) -> dict[PeerId, tuple[str, ...]]:
    """Addresses from the running daemon if there is one, its own first, else from what it remembered."""
    if state.socket.exists():
        with suppress(SwarmError):
            addresses = ask_daemon(state.socket, "addresses", timeout_s=5.0)["addresses"]
            return {PeerId(peer): tuple(known) for peer, known in addresses.items() if known}
    return MembershipFiles(state).bootstrap()
