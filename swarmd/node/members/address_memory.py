"""Addresses that have led to members, to begin with after a restart; a file keeps them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path

from swarmd.errors import ConfigError
from swarmd.folders import write_file
from swarmd.protocol.untrusted import read_json
from swarmd.values import PeerId

logger = logging.getLogger(__name__)

MAX_REMEMBERED = 64  # addresses of peers to begin with after a restart

MAX_PER_PEER = 32  # addresses: of two records
Addresses = tuple[str, ...]


class AddressMemory:
    """See the module. Begins with ``bootstrap``; without a file nothing is kept."""

    def __init__(
        self,
        bootstrap: Mapping[PeerId, Addresses],
        file: Path | None,
        me: PeerId,
    ) -> None:
        self.known: dict[PeerId, Addresses] = dict(bootstrap)
        self.known.pop(me, None)
        self.known |= _read(file)
        self._me = me
        self._file = file

    def remember(self, fresh: Mapping[PeerId, Addresses]) -> None:
        """Note addresses of live members, before those that are older."""
        if all(self.known.get(peer) == addresses for peer, addresses in fresh.items()):
            return
        self._keep(fresh)

    def add(self, given: Mapping[PeerId, Addresses]) -> bool:
        """Note more ways to members, beside those that are known of them, and return whether the file keeps them."""
        others = {peer: addresses for peer, addresses in given.items() if peer != self._me}
        return self._keep({peer: _join(addresses, self.known.get(peer, ())) for peer, addresses in others.items()})

    def _keep(self, newest: Mapping[PeerId, Addresses]) -> bool:
        older = {peer: addresses for peer, addresses in self.known.items() if peer not in newest}
        self.known = dict(list({**newest, **older}.items())[:MAX_REMEMBERED])
        if self._file is None:
            return False
        try:
            write_file(self._file, json.dumps(self.known))
        except ConfigError as error:
            logger.warning("addresses are not remembered: %s", error)
            return False
        return True


def _join(newer: Addresses, older: Addresses) -> Addresses:
    return tuple(dict.fromkeys((*newer, *older)))[:MAX_PER_PEER]


def _read(file: Path | None) -> dict[PeerId, Addresses]:
    if file is None or not file.is_file():
        return {}
    try:
        return read_json(file, dict[PeerId, Addresses], "it is made anew")
    except ConfigError as error:
        logger.warning("%s", error)
        return {}
