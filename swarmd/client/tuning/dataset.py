"""Rows of text for fine-tuning, from a JSONL file: checked as a whole, with line numbers, before anything is trained.

A row is ``{"text": ...}``, ``{"prompt": ..., "completion": ...}`` (the loss counts the completion only), or
``{"input_ids": [...], "labels": [...]}`` (labels as in transformers: -100 does not count; left out, all count).
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from swarmd.errors import ConfigError
from swarmd.text_files import find_other_format, read_bytes

IGNORED = -100  # label of a token without a loss, as in torch and transformers
MAX_REPORTED = 20  # faulty lines: a person mends these first
KINDS = ({"text"}, {"prompt", "completion"}, {"input_ids"}, {"input_ids", "labels"})


@dataclass(frozen=True, slots=True)
class DatasetRow:
    """Token ids, and for each the label that the loss counts there (IGNORED: none)."""

    ids: tuple[int, ...]
    labels: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Dataset:
    """All rows of a file, and its sha256: a run goes on with the same data only. Blank lines are no rows."""

    rows: tuple[DatasetRow, ...]
    digest: str
    line_numbers: tuple[int, ...] = ()  # of each row


@dataclass(frozen=True, slots=True)
class Encoding:
    """How text becomes ids: ``encode`` without special tokens, which ``begin`` and ``end`` are, and the limits."""

    encode: Callable[[str], Sequence[int]]
    begin: tuple[int, ...]
    end: tuple[int, ...]
    vocabulary: int
    max_tokens: int


class _BadRow(Exception):
    """Why a line cannot be used."""


def read_dataset(path: Path, encoding: Encoding) -> Dataset:
    """Read and check every line. Raises ConfigError that names the lines that cannot be used, and why."""
    raw = read_bytes(path)
    other = find_other_format(raw) or _find_other_json(raw)
    if other:
        raise ConfigError(f"{path}: {other}")
    lines = raw.removeprefix(codecs.BOM_UTF8).splitlines()
    rows = []
    line_numbers = []
    bad = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append(_read_row(line, encoding))
            line_numbers.append(number)
        except _BadRow as error:
            bad.append(f"  line {number}: {error}")
    if bad:
        remainder = [f"  and {len(bad) - MAX_REPORTED} more"] if len(bad) > MAX_REPORTED else []
        listed = "\n".join([*bad[:MAX_REPORTED], *remainder])
        raise ConfigError(f"{path}: {len(bad)} of {len(lines)} lines cannot be used:\n{listed}")
    if not rows:
        raise ConfigError(f'{path} is empty: expected a line like {{"text": "..."}} for each row')
    return Dataset(tuple(rows), sha256(raw).hexdigest(), tuple(line_numbers))


def _find_other_json(raw: bytes) -> str:
    """Say what JSON a file is whose lines are no rows, and what makes them that; "" where they may be."""
    text = raw.removeprefix(codecs.BOM_UTF8).lstrip()
    if text.startswith(b"["):
        return "it is one JSON array, expected an object on each line: jq -c '.[]' writes it so"
    if text.partition(b"\n")[0].strip() == b"{":
        return "its objects go over several lines, expected one on each line: jq -c . writes it so"
    return ""


def _read_row(line: bytes, encoding: Encoding) -> DatasetRow:
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        raise _BadRow(
            f"invalid UTF-8 at byte {error.start + 1}: convert the file first, as with iconv -f latin1 -t utf-8"
        ) from None
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:  # which counts lines, too: of this one
        raise _BadRow(f"no JSON: {error.msg} at character {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise _BadRow(f"no JSON: {error}") from None
    if isinstance(value, dict) and None in value.values():
        name = next(name for name in value if value[name] is None)
        raise _BadRow(
            f'"{name}" is null, as pandas fills columns that a row lacks: leave it out '
            "(jq -c 'with_entries(select(.value != null))')"
        )
    if not isinstance(value, dict) or set(value) not in KINDS:
        got = ", ".join(map(repr, value)) if isinstance(value, dict) else type(value).__name__
        raise _BadRow(f'expected an object with "text", "prompt" and "completion", or "input_ids", got {got or "none"}')
    row = _row_of_ids(value, encoding) if "input_ids" in value else _row_of_text(value, encoding)
    if len(row.ids) > encoding.max_tokens:
        raise _BadRow(f"{len(row.ids)} tokens, at most {encoding.max_tokens} fit: shorten it, or raise --max-length")
    if all(label == IGNORED for label in row.labels[1:]):
        raise _BadRow("it has no token to learn: it needs two tokens at least, and a label behind the first")
    return row


def _row_of_text(value: dict[str, Any], encoding: Encoding) -> DatasetRow:
    for name, text in value.items():
        if not isinstance(text, str):
            raise _BadRow(f'"{name}" is {type(text).__name__}, expected text')
        if not text.strip() and name != "prompt":
            raise _BadRow(f'"{name}" is empty')
        if any("\ud800" <= c <= "\udfff" for c in text):
            raise _BadRow(f'"{name}" holds half of a surrogate pair, which no UTF-8 can')
    has_prompt = "prompt" in value
    prompt = [*encoding.begin]
    if has_prompt:
        prompt += encoding.encode(value["prompt"])
    text = value.get("completion", value.get("text", ""))
    learned = [*encoding.encode(text), *encoding.end]
    prompt_labels = [IGNORED] * len(prompt) if has_prompt else prompt
    return DatasetRow((*prompt, *learned), (*prompt_labels, *learned))


def _row_of_ids(value: dict[str, Any], encoding: Encoding) -> DatasetRow:
    ids = value["input_ids"]
    labels = value.get("labels", ids)
    for name, numbers in (("input_ids", ids), ("labels", labels)):
        if not isinstance(numbers, list) or not numbers:
            raise _BadRow(f'"{name}" is no list of numbers')
        is_labels = name == "labels"
        for number in numbers:
            is_token = type(number) is int and 0 <= number < encoding.vocabulary
            is_ignored = type(number) is int and is_labels and number == IGNORED
            if not is_token and not is_ignored:
                allowed = f"0 to {encoding.vocabulary - 1}" + (f" or {IGNORED}" if is_labels else "")
                raise _BadRow(f'"{name}" holds {number!r}, expected {allowed}')
    if len(ids) != len(labels):
        raise _BadRow(f'{len(ids)} "input_ids" and {len(labels)} "labels": expected as many')
    return DatasetRow(tuple(ids), tuple(labels))
