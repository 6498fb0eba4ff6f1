"""API keys: named, shown once, kept as hashes in a file that only its owner reads."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec

from swarmd.errors import ConfigError
from swarmd.folders import write_file
from swarmd.gateway.generation.quotas import DAY_S, KeyLimits, UsageFile
from swarmd.protocol.untrusted import read_json

FILE = "gateway-keys.json"
PREFIX = "sk-swarmd-"
MOST_DAYS = 36_500  # until a key ends
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


class ApiKey(msgspec.Struct, frozen=True):
    """One key: who it is for, the sha256 of it, when it was made, when it ends (0: never), and what it is for.

    ``models``: names; none is all.
    """

    name: str
    sha256: str
    made_at: int
    ends_at: int = 0
    models: tuple[str, ...] = ()
    limits: KeyLimits = KeyLimits()


class Keys:
    """The keys of one home. Read anew whenever the file has changed."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE
        self._read_at: tuple[int, int] | None = None
        self._keys: list[ApiKey] = []

    def all(self) -> list[ApiKey]:
        """Read the keys. Raises ConfigError for a file that is damaged."""
        try:
            file_status = self._path.stat()
        except FileNotFoundError:
            return []
        if (file_status.st_mtime_ns, file_status.st_size) != self._read_at:
            self._keys = read_json(self._path, list[ApiKey], "remove it, and add the keys again")
            self._read_at = file_status.st_mtime_ns, file_status.st_size
        return self._keys

    def add(
        self,
        name: str,
        limits: KeyLimits = KeyLimits(),
        models: tuple[str, ...] = (),
        days: float = 0,
    ) -> str:
        """Make a key that ends after some days (0: never); it is returned, and nowhere else. Raises ConfigError."""
        if not _NAME.fullmatch(name):
            raise ConfigError(f"a key's name has 1 to 64 letters, digits, dots and dashes, not {name[:80]!r}")
        if any(key.name == name for key in self.all()):
            raise ConfigError(f"there is a key {name!r} already: remove it first, or choose another name")
        key = PREFIX + secrets.token_urlsafe(32)
        if not 0 <= days < MOST_DAYS or any(limit < 0 for limit in msgspec.structs.astuple(limits)):
            raise ConfigError(f"limits of a key cannot be negative, and its days are 0 to {MOST_DAYS}")
        now = int(time.time())
        entry = ApiKey(name, _hash(key), now, now + round(days * DAY_S) if days else 0, models, limits)
        self._write([*self.all(), entry])
        return key

    def remove(self, name: str) -> None:
        """Forget a key. Raises ConfigError for a name that is none."""
        if all(key.name != name for key in self.all()):
            names = ", ".join(key.name for key in self.all()) or "none"
            raise ConfigError(f"there is no key {name!r}; there are: {names}")
        self._write([key for key in self.all() if key.name != name])

    def named(self, name: str) -> ApiKey | None:
        """Return the key of a name; None for one that is not known."""
        return next((key for key in self.all() if key.name == name), None)

    def limits_of(self, name: str) -> KeyLimits | None:
        """Return what the key of a name may use; None for one that is not known."""
        key = self.named(name)
        return key.limits if key else None

    def whose(self, presented_key: str) -> ApiKey | None:
        """Return a key, compared in constant time; None for one that is not known."""
        # All keys are compared, also after one has matched: the time tells nothing of which it was.
        digest = _hash(presented_key)
        found = None
        for key in self.all():
            if hmac.compare_digest(key.sha256, digest):
                found = key
        return found

    def _write(self, keys: list[ApiKey]) -> None:
        write_file(self._path, msgspec.json.encode(keys), secret=True)


def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


def describe_keys(keys: Keys, usage: UsageFile, now_s: float) -> list[dict[str, Any]]:
    """List the keys without what opens anything: what each may use, and what it used today (UTC) and ever.

    Raises ConfigError for a file that is damaged.
    """
    day = int(now_s) // DAY_S
    return [
        {
            **{name: value for name, value in msgspec.to_builtins(api_key).items() if name != "sha256"},
            "today": usage.of_day(day, api_key.name)._asdict(),
            "ever": usage.of_all_days(api_key.name)._asdict(),
        }
        for api_key in keys.all()
    ]
