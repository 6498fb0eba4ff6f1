"""One setting changes in a file that a person wrote, and nothing else does: by examples, and by generated files."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from swarmd_cli.toml_edit import set_in_file, set_value

from swarmd.errors import ConfigError

WRITTEN = """# mine
listen = "/ip4/127.0.0.1/tcp/0"

[policy]  # of this machine
hours = "sat"  # only then
# keep

# and this is about the gateway
[gateway]
on = false
"""


def set_hours(text: str) -> str:
    return set_value(text, "config.toml", "policy", "hours", "sun")


@pytest.mark.parametrize(
    ("text", "changed"),
    [
        ("", '[policy]\nhours = "sun"\n'),
        ("serve = false", 'serve = false\n[policy]\nhours = "sun"\n'),
        (WRITTEN, WRITTEN.replace('"sat"', '"sun"')),
        (WRITTEN.replace('hours = "sat"  # only then\n', ""), WRITTEN.replace('"sat"  # only then', '"sun"')),
        (
            'policy = {hours = "sat", on_battery = true}  # short\n',
            'policy = {hours = "sun", on_battery = true}  # short\n',
        ),
        ("policy = { on_battery = true }\n", 'policy = { on_battery = true, hours = "sun"}\n'),
        ('policy.hours = "sat"\nserve = false\n', 'policy.hours = "sun"\nserve = false\n'),
        (
            "policy.on_battery = true\nserve = false\npolicy.idle_minutes = 3\n[gateway]\n",
            'policy.on_battery = true\npolicy.hours = "sun"\nserve = false\npolicy.idle_minutes = 3\n[gateway]\n',
        ),
        ("['policy']\n\"hours\"\t=\t'sat'\t# x\n", '[\'policy\']\n"hours"\t=\t"sun"\t# x\n'),
        ('[ "\\u0070olicy" ]\nhours="sat"', '[ "\\u0070olicy" ]\nhours="sun"'),
        (
            'x = """\n[policy]\nhours = "sat"\n"""\n[policy]\nhours = \'\'\'\nsat\'\'\'\n[[serve]]\n',
            'x = """\n[policy]\nhours = "sat"\n"""\n[policy]\nhours = "sun"\n[[serve]]\n',
        ),
        (
            "big = 123456789012345678901234567890\nnever = nan\nday = 2026-11-27 07:32:00.5-07:00\n[[serve]]\n",
            "big = 123456789012345678901234567890\nnever = nan\nday = 2026-11-27 07:32:00.5-07:00\n[[serve]]\n"
            '\n[policy]\nhours = "sun"\n',
        ),
    ],
)
def test_a_setting_is_changed_however_its_table_is_written(text: str, changed: str) -> None:
    assert set_hours(text) == changed


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("policy = 3", "policy is a table [policy], not 3"),
        ('[[policy]]\nhours = "sat"', "policy is a table [policy], not ["),
        ("policy = ", "config.toml is no TOML: "),
        # tomlkit would put the two tables [[serve]] one behind the other: findings/toml_moved.sh
        ('[[serve]]\n[policy]\nhours = "sat"\n[[serve]]\n', "set hours in its table [policy] with an editor"),
    ],
)
def test_a_file_that_cannot_be_kept_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        set_hours(text)
    assert words in str(refusal.value)
    assert "config.toml" in str(refusal.value)


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"], ids=["plain", "BOM"])
@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
def test_mark_and_line_ends_stay(mark: bytes, end: str) -> None:
    def encode(text: str) -> bytes:
        return mark + text.replace("\n", end).encode()

    changed = set_in_file(encode(WRITTEN), "config.toml", "policy", "month_gib", 2.5)
    assert changed == encode(WRITTEN.replace("# only then\n", "# only then\nmonth_gib = 2.5\n"))


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ("#\n# größer\n".encode("latin-1"), "config.toml is not UTF-8: line 2 has the byte 0xf6; convert it first"),
        ("# x\n".encode("utf-16"), "it is UTF-16, expected UTF-8 text: convert it first: iconv -f utf-16 -t utf-8"),
    ],
)
def test_a_file_in_another_encoding_is_refused_with_what_to_do(raw: bytes, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        set_in_file(raw, "config.toml", "policy", "hours", "sun")
    assert words in str(refusal.value)


# --- any file ----------------------------------------------------------------------------------------------------
# Lines of TOML in any order, and of them the files that tomllib reads. The word COMMENT is in comments only.

NAMES = st.sampled_from(["policy", '"policy"', "'policy'", "gateway", "serve", '"größe 1"', "a", "b", "policy.sub"])
KEYS = st.sampled_from(
    ["hours", '"hours"', "on_battery", "policy.hours", "policy.x", '"a.b"', "a", "b.c", "b.d", "1", "''"]
)
VALUES = st.sampled_from(
    [
        '"sat"', "'sat'", '"""\nsat"""', "'''\n[policy]\nhours = 1\n'''", "0xdead_beef", "-0", "-0.0", "1_0e3", "1e400",
        "nan", "-inf", "99999999999999999999999", "1979-05-27T07:32:00Z", "07:32:00.123456789", "1979-05-27",
        "[]", "[1, # COMMENT\n 2,\n]", "[[1], {a = 1}]", "{}", '{ hours = "sat" }', "{hours = 1, b.c = 2}", "true",
    ]
)  # fmt: skip
BLANKS = st.sampled_from(["", "", " ", "\t"])
ENDINGS = st.sampled_from(["", "", " # COMMENT", "\t#COMMENT [policy]"])


@st.composite
def lines(draw: st.DrawFn) -> str:
    before, between, ending = draw(BLANKS), draw(BLANKS), draw(ENDINGS)
    kind = draw(st.sampled_from(["key", "key", "key", "table", "array", "comment", "blank"]))
    if kind == "key":
        return f"{before}{draw(KEYS)}{between}={between}{draw(VALUES)}{ending}"
    if kind == "blank":
        return before
    opening, closing = {"table": ("[", "]"), "array": ("[[", "]]"), "comment": ("# COMMENT ", "")}[kind]
    return f"{before}{opening}{between}{draw(NAMES)}{between}{closing}{ending}"


FILES = st.builds(lambda rows, end: "\n".join(rows) + end, st.lists(lines(), max_size=9), st.sampled_from(["", "\n"]))
NEW_VALUES = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False),
)


def read(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except ValueError:
        return {"no": "TOML"}


@settings(max_examples=80, deadline=None)
@given(FILES, st.sampled_from(["hours", "on_battery", "month_gib"]), NEW_VALUES)
@example("policy.hours = 1\npolicy.x = 2\n", "on_battery", True)
def test_in_any_file_that_is_changed_one_value_is_another_and_no_comment_is_lost(
    text: str, key: str, value: object
) -> None:
    before = read(text)
    assume(before != {"no": "TOML"})
    try:
        changed = set_value(text, "config.toml", "policy", key, value)
    except ConfigError as refusal:
        if not re.search(r"with an editor|is a table", str(refusal)):
            raise
        return
    after = read(changed)
    assert repr(after.get("policy", {}).pop(key)) == repr(value)
    policy = before.setdefault("policy", {})
    had = policy.pop(key, None)
    assert repr(after) == repr(before) or sorted(map(repr, after.items())) == sorted(map(repr, before.items()))
    if not isinstance(had, list | dict):
        assert changed.count("COMMENT") == text.count("COMMENT")
