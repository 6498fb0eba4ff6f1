"""What people are shown of text that comes from others."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.printable import clean_answer, clean_line, clean_strings, clean_text

ACTING = {
    "screen cleared": "\x1b[2J",
    "title set": "\x1b]0;mine\x07",
    "escape in one byte": "\x9b2J",
    "line overwritten": "safe\rgone",
    "direction turned": "\u202eexe.gpj",
    "direction isolated": "\u2066a\u2069",
    "letters hidden": "pay\u200bpal",
    "tag": "a\U000e0041",
    "byte order mark": "\ufeffa",
    "line separator": "a\u2028b",
    "half of a pair, as in a file's name": "a\udcffb",
    "filler": "a\u3164b",
}


@pytest.mark.parametrize("text", ACTING.values(), ids=ACTING.keys())
def test_what_cannot_be_seen_is_shown_as_a_question_mark(text: str) -> None:
    for shown in (clean_line(text), clean_text(text)):
        assert "?" in shown
        assert len(shown) == len(text)
        assert not set(shown) & set("\x1b\x07\x9b\r\u202e\u2066\u2069\u200b\U000e0041\ufeff\u2028\udcff\u3164")


def test_letters_of_all_scripts_and_spaces_stay() -> None:
    text = "Ünï 東京 العربية हिन्दी e\u0301 a\u00a0b 全\u3000角 👍🏽 [red]x[/red] :smile:"
    assert clean_line(text) == clean_text(text) == clean_answer(text) == text


def test_a_line_stays_one() -> None:
    assert clean_line("1.0\nadmitted\tby") == "1.0 admitted by"
    assert clean_text("a\n\tb\x00") == "a\n\tb?"


def test_an_answer_keeps_its_script_and_loses_what_acts() -> None:
    persian = "می\u200cخواهم"
    family = "👩\u200d👩\u200d👧"
    assert clean_answer(f"{persian}\n\t{family}") == f"{persian}\n\t{family}"
    assert clean_answer("a\r\nb\x1b[2J\x9b\u202ec\x07") == "a\nb?[2J??c?"


def test_strings_of_a_value_are_cleaned_wherever_they_are() -> None:
    value = {"a\x1b": ["b\n", ("c\u202e", 1)], "n": None, "x": 0.5}
    assert clean_strings(value) == {"a?": ["b ", ["c?", 1]], "n": None, "x": 0.5}


@given(st.text(st.characters(codec=None, exclude_categories=())))
def test_nothing_unseen_is_left_of_any_text(text: str) -> None:
    for shown in (clean_line(text), clean_text(text)):
        kept = shown.replace("\n", "").replace("\t", "")
        assert not {unicodedata.category(char) for char in kept} & {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
    assert clean_line(clean_line(text)) == clean_line(text)
