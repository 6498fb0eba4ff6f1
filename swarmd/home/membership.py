"""A member's own files: its key, its swarm's keys and certificate, and the newest catalog as it was signed."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import msgspec

from swarmd.errors import ConfigError, IntegrityError, NotJoined
from swarmd.folders import read_file, remove_file
from swarmd.home.paths import Home
from swarmd.protocol.membership.catalog import (
    MAX_AHEAD_S,
    MEMBERSHIP_LIFETIME_S,
    Catalog,
    read_catalog_untrusted,
)
from swarmd.protocol.membership.charter import Founders, founders_untrusted
from swarmd.protocol.membership.identity import Identity, certify
from swarmd.protocol.membership.invite import Invite, SwarmKeys
from swarmd.protocol.untrusted import read_json
from swarmd.text_files import read_text
from swarmd.values import PeerId

CLIENT_LIFETIME_S = 7 * 86_400  # a client's key is thrown away with its process
SEED_BYTES = 32  # of an Ed25519 key (RFC 8032)
OF_A_SWARM = (  # what goes when it is left; settings and models stay
    "swarm.json node.key founder.key catalog.bin peers.json standing.json checks.json pause.json "
    "books.db books.db-wal books.db-shm"
)


class SwarmFile(msgspec.Struct, frozen=True):
    """What ``swarm.json`` holds: the keys, this member's certificate, and addresses to join through."""

    keys: SwarmKeys
    certificate: tuple[bytes, ...]
    bootstrap: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MembershipFiles:
    """What one state folder knows as a member of its swarm."""

    home: Home

    # --- joining, leaving ------------------------------------------------------------------------------------

    def enter(self, invite: Invite, identity: Identity, catalog: bytes | None) -> None:
        """Become a member by an invite that was checked with the swarm."""
        expires_at = int(time.time()) + MEMBERSHIP_LIFETIME_S
        self.write_key(identity)
        if catalog is not None:
            self.save_catalog(catalog)
        else:
            remove_file(self.home.folder / "catalog.bin")  # of a swarm that was left halfway
        certificate = invite.admit(identity.public_key, "member", expires_at)
        self.write_swarm(SwarmFile(invite.swarm, certificate, invite.addresses))

    def leave(self) -> None:
        """Forget the swarm; settings and models stay."""
        for name in OF_A_SWARM.split():
            remove_file(self.home.folder / name)

    def write_key(self, identity: Identity) -> None:
        """Keep this machine's own key."""
        self.home.write("node.key", identity.seed.hex(), secret=True)

    def write_swarm(self, swarm: SwarmFile) -> None:
        """Keep the swarm's keys and this member's certificate: from now on this folder is a member."""
        self.home.write("swarm.json", msgspec.json.encode(swarm), secret=True)

    # --- who this is, and in which swarm ---------------------------------------------------------------------

    def swarm(self) -> SwarmFile:
        """Read what this member knows of its swarm. Raises NotJoined or ConfigError."""
        folder = self.home.folder
        path = folder / "swarm.json"
        if not path.is_file():
            raise NotJoined(f"{folder} is no member of a swarm: swarmd init --name NAME, or swarmd join INVITE")
        return read_json(path, SwarmFile, "remove it, and join again with an invite")

    def identity(self) -> Identity:
        """Read this machine's own key. Raises ConfigError."""
        return read_key(self.home, "node.key")

    def founders(self) -> Founders:
        """Who founds the swarm by now, as far as this member knows."""
        return founders_untrusted(self.swarm().keys.founder_key, self.charters())

    def charters(self) -> tuple[bytes, ...]:
        """What leads from the first founder to those of now, as far as this member knows."""
        return max(self.swarm().keys.charters, self.catalog().charters, key=len)

    def client_certificate(self, key: bytes) -> tuple[bytes, ...]:
        """Certify a throw-away client key with this member's own."""
        expires_at = int(time.time()) + CLIENT_LIFETIME_S
        link = certify(self.identity(), key, "client", expires_at)
        return (*self.swarm().certificate, link)

    def bootstrap(self) -> dict[PeerId, tuple[str, ...]]:
        """Every address known to have led into the swarm, by peer."""
        addresses_by_peer: dict[PeerId, tuple[str, ...]] = by_peer(self.swarm().bootstrap)
        with contextlib.suppress(ConfigError):  # it is made anew
            addresses_by_peer |= read_json(self.home.peers_file, dict[PeerId, tuple[str, ...]], "")
        return addresses_by_peer

    # --- the catalog -----------------------------------------------------------------------------------------

    def catalog_raw(self) -> bytes | None:
        """Read the catalog as it was signed; None before the first came. Raises ConfigError."""
        return read_file(self.home.folder / "catalog.bin")

    def catalog(self) -> Catalog:
        """Read and verify the catalog; an empty one before the first came. Raises IntegrityError."""
        raw = self.catalog_raw()
        return Catalog() if raw is None else self.verify_catalog(raw)

    def verify_catalog(self, raw: bytes) -> Catalog:
        """Read a signed catalog as every member of this swarm would. Raises IntegrityError."""
        return read_catalog_untrusted(raw, self.swarm().keys.founder_key)

    def save_catalog(self, raw: bytes) -> None:
        """Keep a catalog that came; not over a newer one, which another process has just signed here."""
        with self.home.lock_catalog():
            current = Catalog()
            with contextlib.suppress(IntegrityError):  # what cannot be read is not worth keeping
                current = self.catalog() if self.home.has_joined else current
            is_old = not current.version or current.version > time.time() + MAX_AHEAD_S
            if is_old or self.verify_catalog(raw).rank >= current.rank:
                self.write_catalog(raw)

    def write_catalog(self, raw: bytes) -> None:
        """Replace the catalog, while ``home.lock_catalog`` is held."""
        self.home.write("catalog.bin", raw)


def read_key(home: Home, name: str) -> Identity:
    """Read one of a home's secret keys. Raises ConfigError."""
    path = home.folder / name
    try:
        seed = bytes.fromhex(read_text(path).strip())
    except ValueError as error:
        raise ConfigError(f"{path} cannot be read as a key: {error}: put back a copy, or join again") from None
    if len(seed) != SEED_BYTES:
        raise ConfigError(f"{path} holds {len(seed)} B, a key has {SEED_BYTES}: put back a copy, or join again")
    return Identity(seed)


def by_peer(addresses: tuple[str, ...]) -> dict[PeerId, tuple[str, ...]]:
    """Group multiaddrs that end in /p2p/ID by that id; others are dropped."""
    addresses_by_peer: dict[PeerId, tuple[str, ...]] = {}
    for address in addresses:
        _, marker, peer = address.rpartition("/p2p/")
        if marker:
            addresses_by_peer[PeerId(peer)] = (*addresses_by_peer.get(PeerId(peer), ()), address)
    return addresses_by_peer
