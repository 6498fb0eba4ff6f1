"""What a founder does: found a swarm, invite and admit members, sign charters; and, with its delegates, the catalog."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from swarmd.errors import ConfigError, IntegrityError
from swarmd.home.membership import MembershipFiles, SwarmFile, read_key
from swarmd.home.models import BUNDLED_NAME, bundled_model
from swarmd.home.paths import Home
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
    restore_lost_entries,
    sign_catalog,
    sign_catalog_as_delegate,
)
from swarmd.protocol.membership.charter import SignedCharter, count_missing_signatures
from swarmd.protocol.membership.charter import sign as sign_charter
from swarmd.protocol.membership.identity import Identity, certify
from swarmd.protocol.membership.invite import Invite, SwarmKeys

KEY_FILE = "founder.key"


@dataclass(frozen=True, slots=True)
class Founder:
    """The founder, or the delegate, whose state folder this is."""

    home: Home

    @property
    def membership(self) -> MembershipFiles:
        """A founder is a member, too."""
        return MembershipFiles(self.home)

    # --- its key ---------------------------------------------------------------------------------------------

    @property
    def is_here(self) -> bool:
        """Is a founder's key here, and one of this swarm?"""
        if not (self.home.folder / KEY_FILE).is_file():
            return False
        if not self.home.has_joined:
            return True
        return read_key(self.home, KEY_FILE).public_key in self.membership.founders().charter.keys

    @property
    def may_publish(self) -> bool:
        """May this member change the catalog, as a founder or its delegate?"""
        return self.is_here or self.membership.identity().public_key in self.membership.catalog().delegates

    def key(self) -> Identity:
        """Read the founder's key. Raises ConfigError where this is no founder."""
        if not self.is_here:
            raise ConfigError("only a founder of the swarm can do this: run it on the machine that ran swarmd init")
        return read_key(self.home, KEY_FILE)

    def ensure_key(self) -> Identity:
        """The key with which this machine founds, or can be made a founder; made where there is none."""
        if not (self.home.folder / KEY_FILE).is_file():
            self._write_key(Identity.generate())
        return read_key(self.home, KEY_FILE)

    def _write_key(self, key: Identity) -> None:
        self.home.write(KEY_FILE, key.seed.hex(), secret=True)

    # --- the swarm and its members ---------------------------------------------------------------------------

    def found(self, name: str) -> SwarmKeys:
        """Create a swarm with this machine as founder and first member. Raises ConfigError."""
        membership = self.membership
        if self.home.has_joined:
            name_here = membership.swarm().keys.name
            raise ConfigError(f"{self.home.folder} belongs to the swarm {name_here!r} already: swarmd leave first")
        founder = Identity.generate()
        node = Identity.generate()
        keys = SwarmKeys(name, founder.public_key, os.urandom(32))
        expires_at = int(time.time()) + MEMBERSHIP_LIFETIME_S
        self._write_key(founder)
        membership.write_key(node)
        catalog = Catalog(version=int(time.time()), models={BUNDLED_NAME: bundled_model()})
        membership.save_catalog(sign_catalog(catalog, founder))
        certificate = (certify(founder, node.public_key, "member", expires_at),)
        membership.write_swarm(SwarmFile(keys, certificate))  # now it is a member
        return keys

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
        membership = self.membership
        keys = msgspec.structs.replace(membership.swarm().keys, charters=membership.charters())
        invite = invites.create(keys, self.key(), addresses, terms.ends_at)
        if terms != InviteTerms(terms.ends_at):
            self.change_catalog(lambda c: add_invite(c, invite.identity.public_key, terms, time.time()))
        return invite

    def admit(self, arrivals: dict[bytes, AdmittedMember], previous: Catalog | None = None) -> Catalog:
        """Let members in for good, and bring back what a catalog ``previous`` said of people and this one does not.

        Raises ConfigError where this is no founder.
        """
        self.key()

        def change(catalog: Catalog) -> Catalog:
            lost = restore_lost_entries(catalog, previous, time.time()) if previous is not None else None
            return add_admitted(lost or catalog, arrivals, time.time())

        return self.change_catalog(change)

    # --- charters --------------------------------------------------------------------------------------------

    def sign_charter(self, draft: SignedCharter) -> SignedCharter:
        """Sign a charter as a founder of now; it counts once all have that must, and a new founder is here.

        Raises ConfigError, IntegrityError.
        """
        founders = self.membership.founders()
        key = self.ensure_key()
        if key.public_key in founders.charter.keys:
            draft = sign_charter(draft, key)
        if not count_missing_signatures(draft, founders.charter) and key.public_key in draft.charter.keys:
            with self.home.lock_catalog():
                self.membership.write_catalog(self._sign_under(draft))
        return draft

    def _sign_under(self, draft: SignedCharter) -> bytes:
        """Sign the present catalog under a new charter, in which this machine stays a member."""
        membership = self.membership
        old = membership.catalog()
        own_key = membership.identity().public_key
        this_member = {own_key: AdmittedMember(int(time.time()) + MEMBERSHIP_LIFETIME_S)}
        is_admitted = own_key in old.admitted
        keeps_delegates = draft.charter.honours(membership.founders().charter.issuers)
        new = msgspec.structs.replace(
            add_admitted(old, {} if is_admitted else this_member, time.time()),
            charters=(*membership.charters(), msgspec.msgpack.encode(draft)),
            delegates=old.delegates if keeps_delegates else (),
            version=int(time.time()),  # whatever number was chosen before: charters count first
            root=0,
        )
        raw = sign_catalog(new, read_key(self.home, KEY_FILE))
        membership.verify_catalog(raw)
        return raw

    # --- the catalog -----------------------------------------------------------------------------------------

    def change_catalog(self, change: Callable[[Catalog], Catalog]) -> Catalog:
        """Sign the next version of the catalog, as the founder or its delegate. Raises ConfigError for others."""
        membership = self.membership
        with self.home.lock_catalog():  # the daemon changes it, too, and so may another terminal
            old = membership.catalog()
            last = old.rank[1] if self.is_here else old.version  # whatever number a delegate chose
            version = max(last + 1, int(time.time()))
            new = msgspec.structs.replace(change(old), version=version, root=0)
            if version > time.time() + MAX_AHEAD_S:
                days = (version - time.time()) / 86_400
                raise ConfigError(
                    f"the catalog here is of {days:.0f} days from now, nobody takes the next: is a clock wrong?"
                )
            raw = self._sign(new)
            try:
                membership.verify_catalog(raw)  # nothing is saved that could not be read again
            except IntegrityError as error:
                raise ConfigError(f"the catalog cannot be changed so: {error}; nothing was changed") from None
            membership.write_catalog(raw)
            return new

    def _sign(self, catalog: Catalog) -> bytes:
        if self.is_here:
            return sign_catalog(catalog, self.key())
        membership = self.membership
        current = membership.catalog_raw()
        if current is None or not self.may_publish:
            raise ConfigError("only the swarm's founder, or a delegate that it names, can change the catalog")
        founder_key = membership.swarm().keys.founder_key
        return sign_catalog_as_delegate(catalog, membership.identity(), current, founder_key)
