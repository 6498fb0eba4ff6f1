"""Beginnings that sessions share: found wherever they are held, and never where they are not."""

from __future__ import annotations

from typing import NoReturn

from hypothesis import given
from hypothesis import strategies as st

from swarmd.plan.chains.prefixes import BLOCK_TOKENS, Prefix, Prefixes

texts = st.lists(st.sampled_from([(b"a", b"1"), (b"b", b"1")]), max_size=5 * BLOCK_TOKENS)
Text = list[tuple[bytes, bytes]]


@given(st.lists(texts, max_size=4), texts, st.data())
def test_the_longest_beginning_is_found_in_whole_blocks(held: list[Text], text: Text, data: st.DataObject) -> None:
    prefixes: Prefixes[int] = Prefixes()
    kept = []
    for number, tokens in enumerate(held):
        prefix, cut = Prefix((b"x",)), data.draw(st.integers(0, len(tokens)))
        prefix.reached = prefix.ahead(tokens[:cut]).reached
        prefix.reached = prefix.ahead(tokens[cut:]).reached
        n_left = data.draw(st.integers(0, len(tokens)))
        prefix.crop(n_left)
        prefixes.set(number, prefix.reached.marks)
        kept.append(tokens[:n_left])
    found = prefixes.longest(Prefix((b"x",)).ahead(text))
    best = max((_common(tokens, text) // BLOCK_TOKENS * BLOCK_TOKENS for tokens in kept), default=0)
    assert (found[1] if found else 0) == best
    assert found is None or _common(kept[found[0]], text) >= best


def test_of_a_prompt_that_begins_like_no_other_only_the_first_block_is_read() -> None:
    class Unreadable(tuple[bytes, bytes]):
        def __iter__(self) -> NoReturn:
            raise AssertionError

    prefixes: Prefixes[int] = Prefixes()
    prefixes.set(0, Prefix((b"x",)).ahead([(b"a", b"1")] * BLOCK_TOKENS).reached.marks)
    other = [(b"b", b"1")] * BLOCK_TOKENS + [Unreadable()] * BLOCK_TOKENS
    assert prefixes.longest(Prefix((b"x",)).ahead(other)) is None


@given(texts)
def test_what_else_the_cache_depends_on_sets_them_apart(text: Text) -> None:
    one, other = Prefix((b"ab", b"c")), Prefix((b"a", b"bc"))
    assert not {*one.ahead(text).reached.marks} & {*other.ahead(text).reached.marks}


@given(st.lists(texts, max_size=4))
def test_who_is_gone_leaves_nothing(held: list[Text]) -> None:
    prefixes: Prefixes[int] = Prefixes()
    for number, tokens in enumerate(held):
        prefixes.set(number, Prefix(()).ahead(tokens).reached.marks)
    for number in range(len(held)):
        prefixes.set(number, ())
    assert not prefixes._holders
    assert not prefixes._marks


def _common(a: Text, b: Text) -> int:
    n = min(len(a), len(b))
    return next((i for i in range(n) if a[i] != b[i]), n)
