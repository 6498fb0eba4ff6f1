"""Remove from a text what its reader must not learn: keys, invites, names of this machine, addresses of people."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from swarmd.gateway import keys
from swarmd.gateway.address import TOKEN_FILE

SECRET_FILES = ("node.key", "founder.key", "swarm.json", TOKEN_FILE, keys.FILE)
SHORTEST = 16  # letters of what is looked for as a secret: less is too often something else
INVITE_OR_KEY = re.compile(r"swarmd1-[a-z2-7]+|sk-[A-Za-z0-9_-]{8,}|hf_[A-Za-z0-9]{8,}")
LONG_HEX = re.compile(r"\b[0-9a-f]{64,}\b")
NAMED_SECRET = re.compile(r"(?im)^(\s*\S*(?:token|secret|password|passwd|api_key|psk)\S*\s*[=:]\s*)(?!\[secret\])\S.*$")
OWN_NAME = re.compile(r"(?m)^(\s*name\s*=\s*)\S.*$")  # in config.toml: what this machine is called
ADDRESS = re.compile(r"(?<![\w.:])(?:\d{1,3}(?:\.\d{1,3}){3}|[0-9a-fA-F]{0,4}(?::[0-9a-fA-F]{0,4}){2,7})(?![\w:])")


def read_secrets(folder: Path) -> set[str]:
    """Read what a home's secret files hold, text by text."""
    secrets: set[str] = set()
    for name in SECRET_FILES:
        try:
            text = (folder / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):
            continue
        try:
            secrets.update(_strings(json.loads(text)))
        except ValueError:
            secrets.add(text.strip())
    return {secret for secret in secrets if len(secret) >= SHORTEST and "/" not in secret[:1]}


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _strings(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)


def make_redactor(
    secrets: Iterable[str],
    names: Mapping[str, str],
) -> Callable[[str], str]:
    """Make a function that replaces secrets, and ``names`` (a user's, a machine's) by what they are called instead.

    Public addresses get numbers, the same for the same one in all texts, so that who talks with whom can be followed.
    """
    # Longer secrets and names first: a shorter one may be a part of a longer, whose rest would stay.
    ordered = sorted(secrets, key=len, reverse=True)
    ordered_names = sorted(names.items(), key=lambda pair: -len(pair[0]))
    numbers: dict[str, int] = {}

    def mask(match: re.Match[str]) -> str:
        try:
            host = ipaddress.ip_address(match[0])
        except ValueError:
            return match[0]
        if not host.is_global:
            return match[0]
        return f"[address {numbers.setdefault(str(host), len(numbers) + 1)}]"

    # What is known to be secret goes first, as it is; then what looks like a secret; names and addresses last, for
    # they may be parts of both.
    def redact(text: str) -> str:
        for secret in ordered:
            text = text.replace(secret, "[secret]")
        text = INVITE_OR_KEY.sub("[secret]", LONG_HEX.sub("[hex]", text))
        text = NAMED_SECRET.sub(r"\1[secret]", text)
        text = OWN_NAME.sub(r"\1[machine]", text)
        for name, replacement in ordered_names:
            text = re.sub(rf"(?<![\w]){re.escape(name)}(?![\w])", replacement, text)
        return ADDRESS.sub(mask, text)

    return redact
