"""Which kept session goes on with a prompt."""

from __future__ import annotations

from swarmd.gateway.generation.kept_sessions import (
    MOST_KEPT,
    KeptSession,
    choose_expired,
    choose_oldest,
    choose_room,
    choose_session,
    count_shared,
)


def kept(name: str, tokens: range, max_tokens: int = 1_000, since_s: float = 0.0) -> KeptSession:
    return KeptSession(name, tuple(tokens), max_tokens, since_s)


def test_the_longest_common_beginning_wins() -> None:
    short = kept("short", range(20))
    long = kept("long", range(40))
    assert choose_session([short, long], range(60), 10) == (long, 40)


def test_a_token_is_left_to_send_when_the_prompt_is_all_there() -> None:
    same = kept("same", range(30))
    assert choose_session([same], range(30), 10) == (same, 29)


def test_a_session_without_room_is_none() -> None:
    assert choose_session([kept("full", range(30), max_tokens=65)], range(60), 10) is None


def test_an_answer_that_may_be_as_long_as_the_context_leaves_room_to_others() -> None:
    assert choose_room(100, 16, most=131_072) == 100 + 16 + 1_024 + 50
    assert choose_room(12_000, 119_000, most=131_072) == 12_000 + 2_048 + 1_024 + 6_000
    assert choose_room(100_000, 31_072, most=131_072) == 131_072
    assert choose_session([kept("small", range(30), max_tokens=400)], range(60), 100_000) is not None


def test_another_conversation_that_only_begins_alike_keeps_its_cache() -> None:
    other_session = kept("other", range(100))
    prompt = [*range(20), *range(500, 540)]
    assert choose_session([other_session], prompt, 10) is None


def test_few_tokens_in_common_are_prefilled_again() -> None:
    assert choose_session([kept("x", range(7))], range(60), 10) is None


def test_of_equals_the_newest() -> None:
    old = kept("old", range(30), since_s=1)
    new = kept("new", range(30), since_s=2)
    assert choose_session([new, old], range(60), 10) == (new, 30)


def test_old_ones_and_the_oldest_of_too_many_are_given_back() -> None:
    old = kept("old", range(9), since_s=0)
    many = [kept(str(i), range(9), since_s=60.0 + i) for i in range(MOST_KEPT + 2)]
    assert choose_expired([old, *many], 80.0, kept_for_s=60.0) == [old, many[0], many[1]]


def test_a_server_without_room_is_given_back_the_oldest() -> None:
    five = [kept(str(i), range(9), since_s=i) for i in (3, 1, 5, 2, 4)]
    assert [session.session for session in choose_oldest(five, 3)] == ["1", "2", "3"]


def test_what_two_have_in_common() -> None:
    assert count_shared([1, 2, 3], [1, 2, 4]) == 2
    assert count_shared([], [1]) == 0
    assert count_shared([1, 2], [1, 2, 3]) == 2


def test_another_keys_session_is_none() -> None:
    theirs = KeptSession("theirs", tuple(range(40)), 1_000, 0.0, "a")
    ours = KeptSession("ours", tuple(range(20)), 1_000, 0.0, "b")
    assert choose_session([theirs, ours], range(60), 10, "b") == (ours, 20)
    assert choose_session([theirs], range(60), 10, "b") is None
    assert choose_session([theirs], range(60), 10) is None


def test_who_keeps_most_gives_back_first() -> None:
    few = [KeptSession(f"few {i}", (1,), 1_000, 0.0, "few") for i in range(2)]
    many = [KeptSession(f"many {i}", (1,), 1_000, 10.0 + i, "many") for i in range(MOST_KEPT)]
    assert choose_expired([*few, *many], 40.0, kept_for_s=60.0) == many[:2], "though the other key's are older"
