"""Text out of tokens: what is given is never taken back."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from swarmd.gateway.generation.token_bytes import TokenBytes
from swarmd.gateway.generation.writing import Writer
from swarmd.home.models import bundled_folder
from tests.gateway.vocabularies import spm, unigram, word_piece

TOKENIZER = Tokenizer.from_file(str(bundled_folder() / "tokenizer.json"))
TOKENS = TokenBytes(TOKENIZER)


def written(text: str, stops: tuple[str, ...] = ()) -> tuple[str, Writer]:
    writer = Writer(TOKENS, stops)
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
    full_text = TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False).ids)
    shown, writer = written(text, tuple(stops))
    starts = [(full_text.find(stop), stop) for stop in stops]
    ends = [(start + len(stop), start) for start, stop in starts if start >= 0]
    assert shown == (full_text[: min(ends)[1]] if ends else full_text)
    assert (writer.stopped is None) == (not ends)


def test_what_began_like_a_stop_string_is_given_once_it_is_none() -> None:
    writer = Writer(TOKENS, ("END!",))
    texts = [writer.add(token) for token in TOKENIZER.encode("the END of it", add_special_tokens=False).ids]
    assert "".join(texts) + writer.finish() == "the END of it"
    assert writer.stopped is None


def test_half_a_character_at_the_end_is_said_to_be_one() -> None:
    writer = Writer(TOKENS, ())
    ids = TOKENIZER.encode("\U0001f468", add_special_tokens=False).ids
    assert len(ids) > 1, "this tokenizer writes it in bytes"
    assert [writer.add(token) for token in ids[:-1]] == [""] * (len(ids) - 1)
    assert set(writer.finish()) == {"\ufffd"}


# --- any tokens of any vocabulary ----------------------------------------------------------------------------------

VOCABULARIES = {"byte level": TOKENS, **{kind.__name__: TokenBytes(kind()) for kind in (spm, unigram, word_piece)}}
BYTES = tuple(3 + byte for byte in (0xF0, 0x9F, 0x98, 0x80, 0xC3, 0xA9, 0xE6, 0x97, 0xA5, 0xFF))  # of ``spm``


def grown(tokens: TokenBytes, prompt: list[int], answer: list[int], special: bool = False) -> str:
    writer = Writer(tokens, (), prompt, frozenset(tokens.special) if special else frozenset())
    texts = [writer.add(token) for token in answer]
    return "".join([*texts, writer.finish()])


def drawn(data: st.DataObject, kind: str) -> tuple[list[int], list[int]]:
    """A prompt and an answer of any tokens, often of bytes."""
    ids = st.integers(0, VOCABULARIES[kind].tokenizer.get_vocab_size() - 1)
    any_of = st.one_of(st.sampled_from(BYTES), ids) if kind == "spm" else ids
    return data.draw(st.lists(ids, max_size=6)), data.draw(st.lists(any_of, max_size=10))


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("kind", ["byte level", "spm", "unigram"])
@given(data=st.data())
@settings(max_examples=300)
def test_any_tokens_have_the_text_that_the_decoder_gives_them(kind: str, special: bool, data: st.DataObject) -> None:
    tokens = VOCABULARIES[kind]
    decode = tokens.tokenizer.decode
    prompt, answer = drawn(data, kind)
    prompt_text, full_text = (decode(ids, skip_special_tokens=not special) for ids in (prompt, prompt + answer))
    answer_text = grown(tokens, prompt, answer, special)
    visible = [token for token in prompt if special or token not in tokens.special]
    ends_in_byte = bool(visible) and tokens.single_byte(visible[-1]) is not None
    ends_whole = not prompt_text.endswith("\ufffd") and not ends_in_byte
    if full_text.startswith(prompt_text) and ends_whole:  # else what follows changes what the prompt's last bytes are
        assert prompt_text + answer_text == full_text
    alone = decode(answer, skip_special_tokens=not special)
    assert grown(tokens, [], answer, special) == alone


@given(data=st.data())
@settings(max_examples=100)
def test_a_decoder_that_nothing_is_known_of_never_fails(data: st.DataObject) -> None:
    prompt, answer = drawn(data, "word_piece")
    assert grown(VOCABULARIES["word_piece"], prompt, answer) is not None


def test_a_decoder_that_looks_at_neighbours_is_followed() -> None:
    assert grown(VOCABULARIES["word_piece"], [1], [1, 2, 1]) == " reds red"


def test_a_character_that_a_prompt_began_comes_whole_and_nothing_of_the_prompt_with_it() -> None:
    smile = [3 + byte for byte in "\U0001f600".encode()]
    tokens = VOCABULARIES["spm"]
    red = tokens.tokenizer.token_to_id("▁red")
    assert grown(tokens, [red, *smile[:2]], [*smile[2:], red]) == "\U0001f600 red"
    assert grown(tokens, [red, *smile[:2]], [red]) == " red"
    assert grown(tokens, [red, *smile[:2]], [smile[0], red]) == "\ufffd red"
    byte_level = TOKENIZER.encode("\U0001f600").ids
    assert grown(TOKENS, byte_level[:-1], byte_level[-1:]) == "\U0001f600"


@pytest.mark.parametrize(
    ("stop", "expected"), [("<|end|>", "the text"), ("<|end|>END", "the text!"), ("<|end|>!", "the text")]
)
def test_a_stop_string_may_name_a_special_token_that_is_not_shown(stop: str, expected: str) -> None:
    ids = [*TOKENIZER.encode("the text", add_special_tokens=False).ids, 0, *TOKENIZER.encode("!").ids]
    writer = Writer(TOKENS, (stop,))
    assert "".join(writer.add(token) for token in ids) + writer.finish() == expected
    assert writer.stopped == (stop if expected == "the text" else None)
