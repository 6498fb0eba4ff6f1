"""The files of one state folder: what lies where, how it is written, and who may write at a time.

Secrets are mode 0600, the folder 0700: other users of the machine can neither read nor lock anything. Every file is
written whole, to a new name, and renamed, so that a crash leaves the old one. What the files say is not known here.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from swarmd.errors import ConfigError
from swarmd.folders import (
    SOCKET,
    close_to_others,
    default_folder,
    is_answered,
    is_open_to_others,
    open_own,
    require_writable,
    write_file,
)


#     node.key, swarm.json        this machine's key, and its swarm: secret   (``membership``)
#     catalog.bin                 the newest catalog, as it was signed        (``membership``)
#     founder.key                 secret: of a founder, or of a member that is to become one   (``founder``)
#     models.json                 folders of the user's that are models       (``models``)
#     peers.json                  addresses to begin with; may be lost
#     standing.json, checks.json  what was seen of others
#     router.json                 the port that the router opened, to be closed again
#     books.db                    bills, and what this machine counted
#     weights/, drafts/, runs/    models, drafts for them, and training runs
#     digests/                    of the hub's files, until their model is added
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
    def router_file(self) -> Path:
        """Which port the router was asked to open, until it is asked to close it."""
        return self.folder / "router.json"

    @property
    def weights(self) -> Path:
        """Where swarmd keeps models that it fetched, and manifests of folders that were added."""
        return self.folder / "weights"

    @property
    def digests(self) -> Path:
        """Of the hub's files that were hashed for a model which is not added yet."""
        return self.folder / "digests"

    @property
    def drafts(self) -> Path:
        """Drafts that learned here, each in a folder of its model's hash."""
        return self.folder / "drafts"

    @property
    def runs(self) -> Path:
        """Training runs that this machine takes, or took, part in."""
        return self.folder / "runs"

    @property
    def has_joined(self) -> bool:
        """Is this folder a member of a swarm?"""
        return (self.folder / "swarm.json").is_file()

    @contextlib.contextmanager
    def lock_for_daemon(self) -> Iterator[None]:
        """Hold this folder for one daemon. Raises ConfigError when another holds it, or nothing can be written."""
        self._make_folder()
        require_writable(self.folder)
        path = self.folder / "lock"
        is_foreign = is_open_to_others(path) and not is_answered(self.socket)  # another user may hold it
        with open_own(path, anew=is_foreign) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ConfigError(f"another daemon runs on {self.folder}: swarmd down, or use another --home") from None
            yield

    @contextlib.contextmanager
    def lock_catalog(self) -> Iterator[None]:
        """Let nobody else change the catalog here for a moment."""
        self._make_folder()
        path = self.folder / "catalog.lock"
        with open_own(path, anew=is_open_to_others(path)) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def write(self, name: str, content: str | bytes, secret: bool = False) -> None:
        """Write a file whole or not at all; a secret one is its owner's alone. Raises ConfigError."""
        self._make_folder()
        write_file(self.folder / name, content, secret)

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise ConfigError(f"cannot use {self.folder} for state: {error.strerror}: choose another --home") from None
        close_to_others(self.folder)
