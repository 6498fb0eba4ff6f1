"""Invites as people paste them, and as machines with many addresses write them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarmd.errors import ConfigError
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.membership.invite import MAX_ADDRESSES, SwarmKeys, create, decode_untrusted, encode

FOUNDER = Identity(b"f" * 32)
KEYS = SwarmKeys("ours", FOUNDER.public_key, b"p" * 32)
INVITE = create(KEYS, FOUNDER, ("/ip4/192.168.1.2/tcp/4117/p2p/X",), 10**10)


def broken(line: str, width: int, before: str = "", after: str = "") -> str:
    return "\n".join(f"{before}{line[n : n + width]}{after}" for n in range(0, len(line), width))


@pytest.mark.parametrize(
    "paste",
    [
        lambda line: f"  {line}\n",
        lambda line: f"swarmd join {line}",
        lambda line: f"`{line}`.",
        lambda line: f'"{line}"',
        lambda line: f"<{line}>, which is good for a week",
        lambda line: broken(line, 70, before="> "),
        lambda line: broken(line, 75, after="=\r"),
        lambda line: line.upper(),
        lambda line: f"here it is:\n\n    {line}\n\nsee you",
    ],
    ids=["blanks", "command", "backticks", "quotes", "brackets", "quoted", "mail", "upper case", "letter"],
)
def test_an_invite_is_read_however_it_was_pasted(paste: Callable[[str], str]) -> None:
    assert decode_untrusted(paste(encode(INVITE)), 0.0) == INVITE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda line: line[:-5], "cut short or mistyped"),
        (lambda line: line[:40] + line[41:], "cut short or mistyped"),
        (lambda line: line.replace("swarmd1-", "swarmd2-"), "version '2'.*update swarmd"),
        (lambda line: "swarmd join", "starts with swarmd1-, got 'swarmd join'"),
        (lambda line: line.removeprefix("swarmd1-"), "starts with swarmd1-"),
    ],
)
def test_what_is_no_whole_invite_says_so(change: Callable[[str], str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        decode_untrusted(change(encode(INVITE)), 0.0)


def test_of_many_addresses_an_invite_names_as_many_as_it_may() -> None:
    addresses = tuple(f"/ip4/10.0.0.{n}/tcp/4117/p2p/X" for n in range(MAX_ADDRESSES + 4))
    invite = create(KEYS, FOUNDER, addresses, 10**10)
    assert decode_untrusted(encode(invite), 0.0).addresses == addresses[:MAX_ADDRESSES]
