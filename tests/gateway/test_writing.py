"""Text out of tokens: what is given is never taken back."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from swarmd.gateway.writing import Writer
from swarmd.home import bundled_folder

TOKENIZER = Tokenizer.from_file(str(bundled_folder() / "tokenizer.json"))


def written(text: str, stops: tuple[str, ...] = ()) -> tuple[str, Writer]:
    writer = Writer(TOKENIZER, stops)
    parts = []
    for token in TOKENIZER.encode(text, add_special_tokens=False).ids:
        parts.append(writer.add(token))
        assert "\ufffd" not in parts[-1], "a character is given whole"
        if writer.stopped is not None:
            break
    return "".join(parts) + writer.finish(), writer


@pytest.mark.parametrize("text", ["Hello there", "Größe, 你好 \U0001f468\u200d\U0001f469", "", "a\n\nb"])
def test_text_comes_as_it_is(text: str) -> None:
    assert written(text)[0] == text


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=4), max_size=3))
@settings(max_examples=200)
@example("080", ["8", "080"])
@example("080", ["80", "080"])
def test_it_ends_before_the_stop_string_that_is_whole_first(text: str, stops: list[str]) -> None:
    whole = TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False).ids)
    found, writer = written(text, tuple(stops))
    ends = [(at + len(stop), at) for stop in stops if (at := whole.find(stop)) >= 0]
    assert found == (whole[: min(ends)[1]] if ends else whole)
    assert (writer.stopped is None) == (not ends)


def test_what_began_like_a_stop_string_is_given_once_it_is_none() -> None:
    writer = Writer(TOKENIZER, ("END!",))
    given = [writer.add(token) for token in TOKENIZER.encode("the END of it", add_special_tokens=False).ids]
    assert "".join(given) + writer.finish() == "the END of it"
    assert writer.stopped is None


def test_half_a_character_at_the_end_is_said_to_be_one() -> None:
    writer = Writer(TOKENIZER, ())
    ids = TOKENIZER.encode("\U0001f468", add_special_tokens=False).ids
    assert len(ids) > 1, "this tokenizer writes it in bytes"
    assert [writer.add(token) for token in ids[:-1]] == [""] * (len(ids) - 1)
    assert set(writer.finish()) == {"\ufffd"}
