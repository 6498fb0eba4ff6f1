"""What is kept of micro-batches for their backward, what gives way, and for whom."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from swarmd.plan.chains.tuning_memory import BatchBook, HeldBatch, Room, make_room

LANE = (b"l", 0)
OTHER_LANE = (b"m", 0)


def held(*sizes: tuple[bytes, int]) -> list[HeldBatch]:
    return [HeldBatch((LANE, i), client, size, i) for i, (client, size) in enumerate(sizes)]


def test_what_fits_stays_and_the_last_come_is_not_kept() -> None:
    assert make_room(held((b"a", 5), (b"a", 4)), b"a", 1, 10).action == []
    assert make_room(held((b"a", 5), (b"a", 4)), b"a", 2, 10).action is None


def test_who_holds_most_gives_way_newest_first_but_never_below_the_other() -> None:
    known = held((b"a", 3), (b"a", 3), (b"a", 3))
    assert make_room(known, b"b", 3, 10).action == [known[2].key]
    assert make_room([*known[:2], *held((b"b", 3))], b"b", 4, 10).action is None


@given(st.lists(st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(1, 5)), max_size=12), st.integers(1, 6))
def test_room_is_never_oversold(sizes: list[tuple[bytes, int]], wanted: int) -> None:
    known, limit = held(*sizes), sum(n for _, n in sizes) + 2
    gone = make_room(known, b"c", wanted, limit).action
    if gone is not None:
        left = [h for h in known if h.key not in gone]
        assert sum(h.n_bytes for h in left) + wanted <= limit
        assert all(h.client != b"c" for h in known if h.key in gone)


def test_graphs_give_way_before_inputs_and_of_those_that_are_needed_last() -> None:
    book = BatchBook(limit_bytes=30)
    for seq in range(3):
        assert book.keep((LANE, seq), b"a", 2, remembered_bytes=0).action.is_kept
        book.add_graph((LANE, seq), 7)
    assert book.keep((LANE, 3), b"a", 9, remembered_bytes=0).action == Room(((LANE, 2),), (), is_kept=True)
    assert book.keep((LANE, 4), b"a", 8, remembered_bytes=0).action == Room(((LANE, 1),), (), is_kept=True)
    assert book.graph_bytes((LANE, 0)) == 7


def test_who_holds_most_loses_inputs_and_a_newcomer_that_finds_no_room_is_not_kept() -> None:
    book = BatchBook(limit_bytes=10)
    for seq in range(3):
        book.keep((LANE, seq), b"a", 3, remembered_bytes=0)
    assert book.keep((LANE, 3), b"a", 3, remembered_bytes=0).action == Room((), (), is_kept=False)
    assert book.keep((OTHER_LANE, 0), b"b", 3, remembered_bytes=0).action == Room((), ((LANE, 2),), is_kept=True)
    assert not book.has_room_for(2, remembered_bytes=0)
    book.forget((LANE, 0))
    assert book.has_room_for(2, remembered_bytes=0)
    assert not book.has_room_for(2, remembered_bytes=3), "what lanes remember of rows is in the same memory"


def test_what_is_settled_and_what_a_closed_lane_kept_is_forgotten() -> None:
    book = BatchBook(limit_bytes=10)
    for seq in range(1, 5):
        book.keep((LANE, seq), b"a", 1, remembered_bytes=0)
    book.keep((OTHER_LANE, 1), b"a", 4, remembered_bytes=0)
    assert book.settle(LANE, 2) == [1, 2]
    book.forget_lane(LANE)
    assert book.has_room_for(6, remembered_bytes=0)
    assert not book.has_room_for(7, remembered_bytes=0)
