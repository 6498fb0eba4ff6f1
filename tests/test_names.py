"""How machines are called, and how members are told apart by people."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from swarmd.config import Config, load
from swarmd.errors import ConfigError
from swarmd.names import MAX_MEMBER_NAME, choose_member_name, label_ids, label_member
from swarmd.protocol.membership.records import PeerRecord

ANNA = "12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Nft9HyQ6X"
OTHER = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
NAMES = {ANNA: "anna", OTHER: ""}


@pytest.mark.parametrize(
    ("setting", "host", "told"),
    [
        ("auto", "laptop", "laptop"),
        ("auto", "laptop.home.example", "laptop"),
        ("auto", "localhost", ""),
        ("auto", "", ""),
        ("auto", "a\x1b[2Jb\u202e", "a?[2Jb?"),
        ("auto", "h" * 63, "h" * MAX_MEMBER_NAME),
        ("the big one", "laptop", "the big one"),
        ("", "laptop", ""),
    ],
)
def test_members_are_told_the_hosts_name_or_what_the_owner_says(setting: str, host: str, told: str) -> None:
    assert choose_member_name(setting, host) == told


def test_the_owner_says_it_in_the_file_the_environment_or_on_the_command_line(tmp_path: Path) -> None:
    folder = tmp_path
    assert load(folder, {}).name == "auto"
    (folder / "config.toml").write_text('name = ""\n')
    assert load(folder, {}).name == ""
    assert load(folder, {"SWARMD_NAME": "desk"}).name == "desk"
    assert load(folder, {"SWARMD_NAME": "desk"}, name="shelf").name == "shelf"


@pytest.mark.parametrize("name", ["x" * 33, "a\nb", "a\x1b[2J", " a", "a\u202eb", "a\u200bb"])
def test_a_name_that_cannot_be_shown_is_refused_where_it_is_set(name: str) -> None:
    with pytest.raises(ConfigError, match="the name of a machine"):
        Config(name=name).check()


def test_two_of_one_name_are_told_apart_by_the_id() -> None:
    names = {ANNA: "laptop", OTHER: "laptop"}
    assert label_member(ANNA, names) == f"{ANNA[-8:]} (laptop)"
    assert label_member(ANNA, names) != label_member(OTHER, names)


def test_who_has_no_name_is_shown_by_the_id() -> None:
    assert label_member(OTHER, NAMES) == label_member(OTHER, {}) == OTHER[-8:]


def test_a_name_that_others_give_themselves_is_bounded_and_clean() -> None:
    label = label_member(ANNA, {ANNA: "a\n\x1b[2J" + "x" * 500})
    assert label == f"{ANNA[-8:]} (a ?[2J{'x' * (MAX_MEMBER_NAME - 6)})"


def test_sentences_get_names_behind_the_ids_in_them() -> None:
    text = f"pushes to {ANNA[-8:]}, not {OTHER[-8:]}: /p2p/{ANNA} and 8auXSk2p are others"
    assert label_ids(text, NAMES) == text.replace(f"to {ANNA[-8:]}", f"to {ANNA[-8:]} (anna)")


class EarlierRecord(msgspec.Struct, tag_field="kind", tag="peer", frozen=True, omit_defaults=True):
    """What a version without names reads of a record."""

    peer: str
    version: str = ""


def test_versions_without_names_read_records_that_have_one_and_the_other_way_round() -> None:
    new = PeerRecord(ANNA, 1, 2, 3, (), name="anna")
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(new), type=EarlierRecord).peer == ANNA
    nameless = msgspec.msgpack.encode(PeerRecord(ANNA, 1, 2, 3, ()))
    assert b"name" not in nameless
    assert msgspec.msgpack.decode(nameless, type=PeerRecord).name == ""


def test_a_record_with_a_name_without_end_is_none() -> None:
    raw = msgspec.msgpack.encode(PeerRecord(ANNA, 1, 2, 3, (), name="x" * 33))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(raw, type=PeerRecord)
