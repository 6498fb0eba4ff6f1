"""Names that people give to models, swarms, runs and their machines: what may be one, and how members are called."""

from __future__ import annotations

import re
from collections.abc import Mapping

from swarmd.errors import ConfigError
from swarmd.printable import clean_line

MAX_MEMBER_NAME = 32  # characters of what a machine is called: it stands in a column beside others
HOST_NAME = "auto"  # the setting for: as this machine is called
SHORT_ID = 8  # characters at the end of a peer id, by which people tell members apart
MAX_NAME = 64  # characters of what a person calls a model, a swarm or a run


def require_name(kind: str, name: str) -> None:
    """Refuse what is no name that a person can read and type. ``kind``: a model, a swarm, a run. Raises ConfigError."""
    if not 1 <= len(name) <= MAX_NAME:
        raise ConfigError(f"the name of {kind} has 1 to {MAX_NAME} characters, not {len(name)}")
    if not name.isprintable() or name != name.strip():
        raise ConfigError(f"the name of {kind} is one line of characters that can be seen, not {name!r}")
    if is_model_hash(name):
        raise ConfigError(f"the name of {kind} cannot look like a model's hash: {name}")


def is_model_hash(text: str) -> bool:
    """Is this a sha256 in hex, as models and adapters are named by?"""
    return re.fullmatch("[0-9a-f]{64}", text) is not None


# --- members -----------------------------------------------------------------------------------------------------


def require_member_name(name: str) -> None:
    """Refuse what cannot be the name of a machine; none ("") can. Raises ConfigError."""
    if len(name) > MAX_MEMBER_NAME:
        raise ConfigError(f"the name of a machine has at most {MAX_MEMBER_NAME} characters, not {len(name)}: {name!r}")
    if name != clean_line(name) or name != name.strip():
        raise ConfigError(f"the name of a machine is one line of characters that can be seen, not {name!r}")


def choose_member_name(setting: str, host: str) -> str:
    """What members are told that this machine is called: as ``setting`` says, or as its host is called."""
    if setting != HOST_NAME:
        return setting
    name = clean_line(host.partition(".")[0]).strip()[:MAX_MEMBER_NAME]
    return "" if name == "localhost" else name


def label_member(peer: str, names: Mapping[str, str]) -> str:
    """Write a member for people: the end of its id, which nobody else has, and its name, which anybody may choose."""
    short = peer[-SHORT_ID:]
    name = clean_line(names.get(peer, "")).strip()[:MAX_MEMBER_NAME]
    return f"{short} ({name})" if name else short


def label_ids(text: str, names: Mapping[str, str]) -> str:
    """Write a sentence with the names of members behind the ends of their ids."""
    peers = {peer[-SHORT_ID:]: peer for peer in names}

    def label(match: re.Match[str]) -> str:
        peer = peers.get(match[0])
        return match[0] if peer is None else label_member(peer, names)

    return re.sub(rf"\b[1-9A-HJ-NP-Za-km-z]{{{SHORT_ID}}}\b", label, text)
