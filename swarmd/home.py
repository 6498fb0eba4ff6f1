"""The state folder of one member: identity, the swarm's keys, catalog and models, as files of their own.

Secrets are mode 0600, the folder 0700: other users of the machine can neither read nor lock anything. Every file is
written whole, to a new name, and renamed, so that a crash leaves the old one.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import msgspec

from swarmd.errors import ConfigError, IntegrityError, NotJoined
from swarmd.folders import (
    SOCKET,
    close_to_others,
    default_folder,
    is_answered,
    is_open_to_others,
    open_own,
    write_file,
)
from swarmd.protocol.membership import invite as invites
from swarmd.protocol.membership.catalog import (
    MAX_AHEAD_S,
    MEMBERSHIP_LIFETIME_S,
    RIGHTS,
    AdmittedMember,
    Catalog,
    InviteTerms,
    Right,
    add_admitted,
    add_invite,
    read_catalog_untrusted,
    restore_lost_entries,
    sign_catalog,
    sign_catalog_as_delegate,
)
from swarmd.protocol.membership.charter import Founders, SignedCharter, count_missing_signatures, founders_untrusted
from swarmd.protocol.membership.charter import sign as sign_charter
from swarmd.protocol.membership.identity import Identity, certify
from swarmd.protocol.membership.invite import Invite, SwarmKeys
from swarmd.protocol.models import manifest
from swarmd.protocol.untrusted import read_json
from swarmd.values import ModelId, PeerId

CLIENT_LIFETIME_S = 7 * 86_400  # a client's key is thrown away with its process
SEED_BYTES = 32  # of an Ed25519 key (RFC 8032)
OF_A_SWARM = (  # what goes when it is left; settings and models stay
    "swarm.json node.key founder.key catalog.bin peers.json standing.json checks.json pause.json "
    "books.db books.db-wal books.db-shm"
)
BUNDLED_NAME = "demo"


class SwarmFile(msgspec.Struct, frozen=True):
    """What ``swarm.json`` holds: the keys, this member's certificate, and addresses to join through."""

    keys: SwarmKeys
    certificate: tuple[bytes, ...]
    bootstrap: tuple[str, ...] = ()


#     node.key, swarm.json        this machine's key, and its swarm: secret
#     founder.key                 secret: of a founder, or of a member that is to become one
#     catalog.bin                 the newest catalog, as it was signed
#     peers.json                  addresses to begin with; may be lost
#     standing.json, checks.json  what was seen of others
#     books.db                    bills, and what this machine counted
#     weights/, runs/             models and training runs
#     lock, catalog.lock          one daemon at a time; one change of the catalog at a time
#
# Several processes use a folder at once: a daemon, its gateway, commands. So a file is always replaced as a whole, the
# catalog is read, changed and written under its lock, and every call reads the files anew.
@dataclass(frozen=True, slots=True)
class Home:
    """One state folder."""

    folder: Path

    @classmethod
    def default(cls) -> Home:
        """The state folder that is used when none is named."""
        return cls(default_folder())

    @property
    def socket(self) -> Path:
        """Where the daemon answers its owner."""
        return self.folder / SOCKET

    @property
    def peers_file(self) -> Path:
        """Addresses of members that were met, to begin with after a restart."""
        return self.folder / "peers.json"

    @property
    def standing_file(self) -> Path:
        """What this machine's daemon holds against others."""
        return self.folder / "standing.json"

    @property
    def checks_file(self) -> Path:
        """What this machine's clients found of servers by checking them."""
        return self.folder / "checks.json"

    @property
    def books_file(self) -> Path:
        """What this machine gave to others and took from them."""
        return self.folder / "books.db"

    @property
    def pause_file(self) -> Path:
        """Until when its owner has paused this machine."""
        return self.folder / "pause.json"

    @property
    def traffic_file(self) -> Path:
        """What has gone to others and come from them this month."""
        return self.folder / "traffic.json"

    @property
    def weights(self) -> Path:
        """Where swarmd keeps models that it fetched, and manifests of folders that were added."""
        return self.folder / "weights"

    @property
    def runs(self) -> Path:
        """Training runs that this machine takes, or took, part in."""
        return self.folder / "runs"

    @property
    def is_founder(self) -> bool:
        """Is a founder's key here, and one of this swarm?"""
        if not (self.folder / "founder.key").is_file():
            return False
        return not self.has_joined or self._key("founder.key").public_key in self.founders().charter.keys

    @property
    def has_joined(self) -> bool:
        """Is this folder a member of a swarm?"""
        return (self.folder / "swarm.json").is_file()

    # --- founding, joining, leaving --------------------------------------------------------------------------

    def found(self, name: str) -> SwarmKeys:
        """Create a swarm with this machine as founder and first member. Raises ConfigError."""
        if self.has_joined:
            raise ConfigError(
                f"{self.folder} belongs to the swarm {self.swarm().keys.name!r} already: swarmd leave first"
            )
        founder = Identity.generate()
        node = Identity.generate()
        keys = SwarmKeys(name, founder.public_key, os.urandom(32))
        expires_at = int(time.time()) + MEMBERSHIP_LIFETIME_S
        self._write("founder.key", founder.seed.hex(), secret=True)
        self._write("node.key", node.seed.hex(), secret=True)
        catalog = Catalog(version=int(time.time()), models={BUNDLED_NAME: bundled_model()})
        self.save_catalog(sign_catalog(catalog, founder))
        certificate = (certify(founder, node.public_key, "member", expires_at),)
        self._save(SwarmFile(keys, certificate))  # now it is a member
        return keys

    def enter(self, invite: Invite, identity: Identity, catalog: bytes | None) -> None:
        """Become a member by an invite that was checked with the swarm."""
        expires_at = int(time.time()) + MEMBERSHIP_LIFETIME_S
        self._write("node.key", identity.seed.hex(), secret=True)
        if catalog is not None:
            self.save_catalog(catalog)
        else:
            (self.folder / "catalog.bin").unlink(missing_ok=True)  # of a swarm that was left halfway
        certificate = invite.admit(identity.public_key, "member", expires_at)
        self._save(SwarmFile(invite.swarm, certificate, invite.addresses))

    def leave(self) -> None:
        """Forget the swarm; settings and models stay."""
        for name in OF_A_SWARM.split():
            (self.folder / name).unlink(missing_ok=True)

    def swarm(self) -> SwarmFile:
        """Read what this member knows of its swarm. Raises NotJoined or ConfigError."""
        path = self.folder / "swarm.json"
        if not path.is_file():
            raise NotJoined(f"{self.folder} is no member of a swarm: swarmd init --name NAME, or swarmd join INVITE")
        return read_json(path, SwarmFile, "remove it, and join again with an invite")

    def identity(self) -> Identity:
        """Read this machine's own key. Raises ConfigError."""
        return self._key("node.key")

    def founder(self) -> Identity:
        """Read the founder's key. Raises ConfigError where this is no founder."""
        if not self.is_founder:
            raise ConfigError("only a founder of the swarm can do this: run it on the machine that ran swarmd init")
        return self._key("founder.key")

    def founders(self) -> Founders:
        """Who founds the swarm by now, as far as this member knows."""
        return founders_untrusted(self.swarm().keys.founder_key, self.charters())

    def charters(self) -> tuple[bytes, ...]:
        """What leads from the first founder to those of now, as far as this member knows."""
        return max(self.swarm().keys.charters, self.catalog().charters, key=len)

    def invite(
        self,
        addresses: tuple[str, ...],
        lifetime_s: int,
        uses: int = 0,
        waits: bool = False,
        may: tuple[Right, ...] = RIGHTS,
    ) -> Invite:
        """Make an invite, and list it where its ``InviteTerms`` are not "any number, for anything"."""
        terms = InviteTerms(int(time.time()) + lifetime_s, uses, waits, may)
        keys = msgspec.structs.replace(self.swarm().keys, charters=self.charters())
        invite = invites.create(keys, self.founder(), addresses, terms.ends_at)
        if terms != InviteTerms(terms.ends_at):
            self.change_catalog(lambda c: add_invite(c, invite.identity.public_key, terms, time.time()))
        return invite

    def admit(self, arrivals: dict[bytes, AdmittedMember], previous: Catalog | None = None) -> Catalog:
        """Let members in for good, and bring back what a catalog ``previous`` said of people and this one does not.

        Raises ConfigError where this is no founder.
        """
        self.founder()

        def change(catalog: Catalog) -> Catalog:
            lost = restore_lost_entries(catalog, previous, time.time()) if previous is not None else None
            return add_admitted(lost or catalog, arrivals, time.time())

        return self.change_catalog(change)

    def founder_key(self) -> Identity:
        """The key with which this machine founds, or can be made a founder; made where there is none."""
        if not (self.folder / "founder.key").is_file():
            self._write("founder.key", Identity.generate().seed.hex(), secret=True)
        return self._key("founder.key")

    def found_on(self, draft: SignedCharter) -> SignedCharter:
        """Sign a charter as a founder of now; it counts once all have that must, and a new founder is here.

        Raises ConfigError, IntegrityError.
        """
        founders = self.founders()
        key = self.founder_key().public_key
        if key in founders.charter.keys:
            draft = sign_charter(draft, self._key("founder.key"))
        if not count_missing_signatures(draft, founders.charter) and key in draft.charter.keys:
            with self._held("catalog.lock"):
                self._write("catalog.bin", self._founded_on(draft))
        return draft

    def _founded_on(self, draft: SignedCharter) -> bytes:
        """Sign the present catalog under a new charter, in which this machine stays a member."""
        old = self.catalog()
        swarm = self.swarm()
        this_member = {self.identity().public_key: AdmittedMember(int(time.time()) + MEMBERSHIP_LIFETIME_S)}
        is_admitted = this_member.keys() <= old.admitted.keys()
        keeps_delegates = draft.charter.honours(self.founders().charter.issuers)
        new = msgspec.structs.replace(
            add_admitted(old, {} if is_admitted else this_member, time.time()),
            charters=(*self.charters(), msgspec.msgpack.encode(draft)),
            delegates=old.delegates if keeps_delegates else (),
            version=int(time.time()),  # whatever number was chosen before: charters count first
            root=0,
        )
        raw = sign_catalog(new, self._key("founder.key"))
        read_catalog_untrusted(raw, swarm.keys.founder_key)
        return raw

    def client_certificate(self, key: bytes) -> tuple[bytes, ...]:
        """Certify a throw-away client key with this member's own."""
        expires_at = int(time.time()) + CLIENT_LIFETIME_S
        link = certify(self.identity(), key, "client", expires_at)
        return (*self.swarm().certificate, link)

    def bootstrap(self) -> dict[PeerId, tuple[str, ...]]:
        """Every address known to have led into the swarm, by peer."""
        addresses_by_peer: dict[PeerId, tuple[str, ...]] = by_peer(self.swarm().bootstrap)
        with contextlib.suppress(ConfigError):  # it is made anew
            addresses_by_peer |= read_json(self.peers_file, dict[PeerId, tuple[str, ...]], "")
        return addresses_by_peer

    # --- catalog and models ----------------------------------------------------------------------------------

    def catalog_raw(self) -> bytes | None:
        """Read the catalog as it was signed; None before the first came."""
        path = self.folder / "catalog.bin"
        return path.read_bytes() if path.is_file() else None

    def catalog(self) -> Catalog:
        """Read and verify the catalog; an empty one before the first came. Raises IntegrityError."""
        raw = self.catalog_raw()
        return Catalog() if raw is None else read_catalog_untrusted(raw, self.swarm().keys.founder_key)

    def save_catalog(self, raw: bytes) -> None:
        """Keep a catalog that came; not over a newer one, which another process has just signed here."""
        with self._held("catalog.lock"):
            current = Catalog()
            with contextlib.suppress(IntegrityError):  # what cannot be read is not worth keeping
                current = self.catalog() if self.has_joined else current
            is_old = not current.version or current.version > time.time() + MAX_AHEAD_S
            if is_old or read_catalog_untrusted(raw, self.swarm().keys.founder_key).rank >= current.rank:
                self._write("catalog.bin", raw)

    def change_catalog(self, change: Callable[[Catalog], Catalog]) -> Catalog:
        """Sign the next version of the catalog, as the founder or its delegate. Raises ConfigError for others."""
        with self._held("catalog.lock"):  # the daemon changes it, too, and so may another terminal
            old = self.catalog()
            last = old.rank[1] if self.is_founder else old.version  # whatever number a delegate chose
            version = max(last + 1, int(time.time()))
            new = msgspec.structs.replace(change(old), version=version, root=0)
            if version > time.time() + MAX_AHEAD_S:
                days = (version - time.time()) / 86_400
                raise ConfigError(
                    f"the catalog here is of {days:.0f} days from now, nobody takes the next: is a clock wrong?"
                )
            raw = self._sign(new)
            self._check(raw)
            self._write("catalog.bin", raw)
            return new

    def _check(self, raw: bytes) -> None:
        """Nothing is saved that could not be read again. Raises ConfigError."""
        try:
            read_catalog_untrusted(raw, self.swarm().keys.founder_key)
        except IntegrityError as error:
            raise ConfigError(f"the catalog cannot be changed so: {error}; nothing was changed") from None

    @property
    def may_publish(self) -> bool:
        """May this member change the catalog, as a founder or its delegate?"""
        return self.is_founder or self.identity().public_key in self.catalog().delegates

    def _sign(self, catalog: Catalog) -> bytes:
        if self.is_founder:
            return sign_catalog(catalog, self.founder())
        current = self.catalog_raw()
        if current is None or not self.may_publish:
            raise ConfigError("only the swarm's founder, or a delegate that it names, can change the catalog")
        return sign_catalog_as_delegate(catalog, self.identity(), current, self.swarm().keys.founder_key)

    def folders(self) -> dict[ModelId, Path]:
        """Checkpoint folders of the user's, by model hash; the bundled model is always there."""
        path = self.folder / "models.json"
        listed: dict[ModelId, str] = {}
        if path.is_file():
            listed = read_json(path, dict[ModelId, str], "remove it, and add the models again")
        bundled, _ = bundled_model()
        folders = {bundled: bundled_folder()}
        for model, folder in listed.items():
            folders[model] = Path(folder)
        return folders

    def add_folder(self, model: ModelId, folder: Path) -> None:
        """Use a model from a folder of the user's, where it is."""
        self._list_folders({**self.folders(), model: folder.resolve()})

    def forget_folder(self, model: ModelId) -> None:
        """No longer use a folder of the user's; it stays as it is."""
        folders = self.folders()
        folders.pop(model, None)
        self._list_folders(folders)

    def _list_folders(self, folders: dict[ModelId, Path]) -> None:
        bundled = bundled_folder()
        listed = {model: str(folder) for model, folder in folders.items() if folder != bundled}
        self._write("models.json", json.dumps(listed, indent=2))

    # --- files -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold this folder for one daemon. Raises ConfigError when another holds it."""
        self._make_folder()
        path = self.folder / "lock"
        is_foreign = is_open_to_others(path) and not is_answered(self.socket)  # another user may hold it
        with open_own(path, anew=is_foreign) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another daemon runs on {self.folder}: swarmd down, or use another --home") from None
            yield

    @contextlib.contextmanager
    def _held(self, name: str) -> Iterator[None]:
        """Let nobody else do the same here for a moment."""
        self._make_folder()
        path = self.folder / name
        with open_own(path, anew=is_open_to_others(path)) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _save(self, swarm: SwarmFile) -> None:
        self._write("swarm.json", msgspec.json.encode(swarm), secret=True)

    def _key(self, name: str) -> Identity:
        path = self.folder / name
        try:
            seed = bytes.fromhex(path.read_text().strip())
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} cannot be read as a key: {error}") from None
        if len(seed) != SEED_BYTES:
            raise ConfigError(f"{path} holds {len(seed)} B, a key has {SEED_BYTES}: put back a copy, or join again")
        return Identity(seed)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"cannot use {self.folder} for state: {error.strerror}: choose another --home") from None
        close_to_others(self.folder)

    def _write(self, name: str, content: str | bytes, secret: bool = False) -> None:
        self._make_folder()
        write_file(self.folder / name, content, secret)


def by_peer(addresses: tuple[str, ...]) -> dict[PeerId, tuple[str, ...]]:
    """Group multiaddrs that end in /p2p/ID by that id; others are dropped."""
    addresses_by_peer: dict[PeerId, tuple[str, ...]] = {}
    for address in addresses:
        _, marker, peer = address.rpartition("/p2p/")
        if marker:
            addresses_by_peer[PeerId(peer)] = (*addresses_by_peer.get(PeerId(peer), ()), address)
    return addresses_by_peer


def bundled_folder() -> Path:
    """Where the model lies that ships with swarmd."""
    return Path(str(resources.files("swarmd") / "bundled"))


@functools.cache
def bundled_model() -> tuple[ModelId, int]:
    """Hash and number of blocks of the model that ships with swarmd."""
    bundled = manifest.read_folder(bundled_folder())
    return manifest.model_id(bundled), bundled.n_blocks
