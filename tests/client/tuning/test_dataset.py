"""Rows of a JSONL file: read as they are meant, or reported by line before anything begins."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmd.client.tuning.dataset import IGNORED, DatasetRow, Encoding, read_dataset
from swarmd.errors import ConfigError

LETTERS = Encoding(lambda text: [ord(c) % 100 for c in text], (101,), (102,), 110, 20)


def write(folder: Path, *lines: bytes | dict[str, object]) -> Path:
    path = folder / "rows.jsonl"
    path.write_bytes(
        b"".join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n" for line in lines)
    )
    return path


def test_rows_are_what_they_say(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"text": "ab"},
        {"prompt": "a", "completion": "b"},
        {"input_ids": [1, 2, 3]},
        {"input_ids": [1, 2], "labels": [IGNORED, 2]},
    )
    assert read_dataset(path, LETTERS).rows == (
        DatasetRow((101, 97, 98, 102), (101, 97, 98, 102)),
        DatasetRow((101, 97, 98, 102), (IGNORED, IGNORED, 98, 102)),
        DatasetRow((1, 2, 3), (1, 2, 3)),
        DatasetRow((1, 2), (IGNORED, 2)),
    )


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "a", "label": null}', '"label" is null, as pandas fills columns that a row lacks: leave it out'),
        ({"text": None}, '"text" is null'),
        (b'{"text": "\xff"}', "invalid UTF-8 at byte 11: convert the file first"),
        (b"nope", "no JSON: Expecting value at character 1"),
        (b"[" * 100_000, "no JSON"),
        (b"3", "got int"),
        ({"txt": "a"}, "got 'txt'"),
        ({"text": "a", "labels": [1]}, "expected an object"),
        ({"text": ""}, '"text" is empty'),
        ({"text": 3}, '"text" is int'),
        (b'{"text": "\\ud800"}', "surrogate"),
        ({"prompt": "a", "completion": " "}, '"completion" is empty'),
        ({"text": "a" * 30}, "32 tokens, at most 20 fit"),
        ({"input_ids": []}, "no list of numbers"),
        ({"input_ids": "ab"}, "no list of numbers"),
        ({"input_ids": [1, 110]}, '"input_ids" holds 110, expected 0 to 109'),
        ({"input_ids": [1, True]}, '"input_ids" holds True'),
        ({"input_ids": [1, IGNORED]}, '"input_ids" holds -100'),
        ({"input_ids": [1, 2], "labels": [1, 110]}, '"labels" holds 110, expected 0 to 109 or -100'),
        ({"input_ids": [1, 2], "labels": [1]}, "expected as many"),
        ({"input_ids": [1]}, "no token to learn"),
        ({"input_ids": [1, 2], "labels": [1, IGNORED]}, "no token to learn"),
    ],
)
def test_what_cannot_be_used_is_named_by_its_line(tmp_path: Path, line: bytes | dict[str, object], words: str) -> None:
    path = write(tmp_path, {"text": "fine"}, line, {"text": "fine"})
    with pytest.raises(ConfigError) as failure:
        read_dataset(path, LETTERS)
    assert "1 of 3 lines cannot be used" in str(failure.value)
    assert "line 2: " in str(failure.value)
    assert words in str(failure.value)


def test_many_bad_lines_are_counted_and_some_are_shown(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="50 of 50 lines") as failure:
        read_dataset(write(tmp_path, *[b"x"] * 50), LETTERS)
    assert "and 30 more" in str(failure.value)


def test_an_empty_or_missing_file_is_said_to_be_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        read_dataset(write(tmp_path), LETTERS)
    with pytest.raises(ConfigError, match="is empty"):
        read_dataset(write(tmp_path, b"", b"   "), LETTERS)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_dataset(tmp_path / "nothing", LETTERS)


ROW = b'{"text": "ab"}\n'


@pytest.mark.parametrize(
    "raw",
    [
        b"\xef\xbb\xbf" + ROW * 2,
        ROW + b"\n" + ROW,
        ROW * 2 + b" \n",
        ROW.replace(b"\n", b"\r\n") * 2,
        b"\n" + (ROW * 2)[:-1],
        ROW.replace(b"\n", b"\r") * 2,
    ],
    ids=["BOM", "blank line", "blank end", "CRLF", "no end", "CR"],
)
def test_rows_are_read_as_programs_of_all_kinds_write_them(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(raw)
    assert read_dataset(path, LETTERS).rows == (DatasetRow((101, 97, 98, 102), (101, 97, 98, 102)),) * 2


def test_a_blank_line_counts_when_a_bad_one_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"line 3: no JSON"):
        read_dataset(write(tmp_path, b"", ROW.strip(), b"x"), LETTERS)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (gzip.compress(ROW), r"it is compressed \(gzip\), expected UTF-8 text: unpack it first: gunzip"),
        (b"\x28\xb5\x2f\xfd\0", r"it is compressed \(Zstandard\)"),
        (
            ROW.decode().encode("utf-16"),
            "it is UTF-16, expected UTF-8 text: convert it first: iconv -f utf-16 -t utf-8",
        ),
        (ROW.decode().encode("utf-16-le"), "byte 2 is NUL: it is UTF-16"),
        (b"PAR1\0\0", r"it is a Parquet file, .*: write it as lines of JSON first: pandas'"),
        (
            b"\xef\xbb\xbf[" + ROW.strip() + b"]",
            r"it is one JSON array, expected an object on each line: jq -c '\.\[\]'",
        ),
        (b'{\n "text": "ab"\n}\n', "its objects go over several lines, expected one on each line: jq -c"),
    ],
    ids=["gzip", "zstd", "UTF-16", "UTF-16 without a mark", "Parquet", "array", "pretty"],
)
def test_a_file_of_another_kind_is_one_sentence_with_what_to_do(tmp_path: Path, raw: bytes, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(raw)
    with pytest.raises(ConfigError, match=rf"rows\.jsonl: {words}") as failure:
        read_dataset(path, LETTERS)
    assert "\n" not in str(failure.value)


@settings(max_examples=50)
@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(raw: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x"
        path.write_bytes(raw)
        try:
            read_dataset(path, LETTERS)
        except ConfigError:
            return
