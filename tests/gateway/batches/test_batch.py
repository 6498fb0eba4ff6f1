"""The lines of a batch, and what is told of it: pure."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.gateway.apis.refusals import ApiError
from swarmd.gateway.batches.batch import (
    MOST_TOLD,
    WINDOW_S,
    StoredBatch,
    describe,
    list_page,
    read_answered,
    read_lines,
    write_answer,
    write_expired,
)
from swarmd.gateway.batches.routes import read_form

CHAT = "/v1/chat/completions"


def line(name: str, **fields: object) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": CHAT, "body": {"model": "m"}, **fields})


def test_each_line_is_a_request_and_empty_ones_are_none() -> None:
    text = f"{line('a')}\r\n\n{line('b', body={'n': 2})}"
    lines, faults = read_lines(text.encode(), CHAT)
    assert not faults
    assert [(asked.custom_id, json.loads(bytes(asked.body))) for asked in lines] == [
        ("a", {"model": "m"}),
        ("b", {"n": 2}),
    ]


@pytest.mark.parametrize(
    ("text", "code", "number"),
    [
        ("", "empty_file", None),
        (f"{line('a')}\n{{", "invalid_json_line", 2),
        ("[]", "invalid_json_line", 1),
        (line(""), "invalid_json_line", 1),
        (line("a", method="GET"), "invalid_json_line", 1),
        (line("a", url="/v1/embeddings"), "invalid_url", 1),
        (f"{line('a')}\n\n{line('a')}", "duplicate_custom_id", 3),
        ("\udcff".encode("utf-8", "surrogateescape").decode("latin-1"), "invalid_json_line", 1),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, code: str, number: int | None) -> None:
    _, (fault,) = read_lines(text.encode(), CHAT)
    assert (fault.code, fault.line) == (code, number)


def test_of_many_faults_the_first_are_told() -> None:
    _, faults = read_lines(b"x\n" * 500, CHAT)
    assert [fault.line for fault in faults] == [*range(1, MOST_TOLD + 1)]


def test_a_cut_line_and_a_damaged_one_are_no_answers() -> None:
    whole = write_answer("a", 200, {"x": "\u2028\x85"}) + write_expired("b") + b"{damaged\n"
    assert len(whole.decode().splitlines()) == 3
    answered, n_bytes = read_answered(whole + write_answer("c", 200, {})[:-5])
    assert answered == {"a", "b"}
    assert n_bytes == len(whole)


def test_what_is_told_has_openais_fields() -> None:
    batch = StoredBatch(
        "batch_1", "key", CHAT, "file-1", 100, n_lines=3, output_file_id="file-2", error_file_id="file-3"
    )
    told = describe(batch)
    assert (told["status"], told["output_file_id"], told["error_file_id"]) == ("in_progress", None, None)
    assert told["expires_at"] == 100 + WINDOW_S
    batch.cancelling_at = 105
    assert describe(batch)["status"] == "cancelling"
    batch.state, batch.ended_at, batch.n_completed = "cancelled", 110, 2
    told = describe(batch)
    assert (told["status"], told["cancelled_at"], told["completed_at"]) == ("cancelled", 110, None)
    assert (told["output_file_id"], told["error_file_id"]) == ("file-2", None)
    assert told["request_counts"] == {"total": 3, "completed": 2, "failed": 0}


def test_a_list_goes_on_behind_its_last_one() -> None:
    items = [{"id": str(n)} for n in range(5)]
    page = list_page(items, 2, "1")
    assert [item["id"] for item in page["data"]] == ["2", "3"]
    assert (page["has_more"], page["last_id"]) == (True, "3")
    assert list_page([], 2, None) == {
        "object": "list",
        "data": [],
        "has_more": False,
        "first_id": None,
        "last_id": None,
    }


FORM = (
    b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n%s\r\n--x--\r\n'
)


@given(st.binary(max_size=200).filter(lambda data: b"--x" not in data))
def test_a_files_bytes_come_out_of_its_form_as_they_went_in(data: bytes) -> None:
    assert read_form("multipart/form-data; boundary=x", FORM % data) == ("a.jsonl", data)


@given(st.data())
def test_a_form_of_any_bytes_is_read_or_refused(data: st.DataObject) -> None:
    """Also one that was right but for some bytes."""
    content = bytearray(FORM % b"{}")
    for _ in range(data.draw(st.integers(1, 6))):
        at = data.draw(st.integers(0, len(content)))
        content[at : at + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    kind = data.draw(
        st.sampled_from(
            ["multipart/form-data; boundary=x", "multipart/form-data", "multipart/form-data; boundary*=a'b'%"]
        )
    )
    with suppress(ApiError):
        read_form(kind, bytes(content))
