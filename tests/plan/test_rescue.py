"""A block that nobody holds comes before more speed elsewhere: who leaves what for which model, and what is said."""

from __future__ import annotations

from typing import Any

import pytest

from swarmd.plan.chains.placement import choose_model, find_rescues
from swarmd.protocol.membership.records import SpanRecord
from swarmd.values import ModelId

OLD, NEW, OTHER = (ModelId(c * 64) for c in "ano")
MODELS = {"old": (OLD, 6), "new": (NEW, 30)}


def serves(peer: str, model: str = OLD, start: int = 0, end: int = 6, **more: Any) -> SpanRecord:
    fields = {"state": "online", "any_model": True, "moves_left": 4, **more}
    times: dict[str, Any] = {"sequence": 1, "issued_at": 0, "expires_at": 60, "certificate": ()}
    return SpanRecord(peer=peer, model=model, start=start, end=end, **times, **fields)


def names(spans: list[SpanRecord]) -> list[str]:
    (rescue,) = find_rescues(spans, MODELS)
    assert rescue.model == NEW
    return [peer for peer, _ in rescue.servers]


def test_four_volunteers_of_one_model_have_some_to_spare_for_a_second() -> None:
    spans = [serves(peer) for peer in "abcd"]
    assert names(spans) == ["a", "b", "c", "d"], "the first in line goes first, the others wait in turn"
    (rescue,) = find_rescues(spans, MODELS)
    assert "blocks [0,30) are held by nobody" in str(rescue)
    assert "a, b, c and 1 more can take them" in str(rescue)


@pytest.mark.parametrize(
    "more", [{"any_model": False}, {"moves_left": 0}, {"state": "joining"}, {"state": "draining"}], ids=str
)
def test_who_is_told_what_to_serve_or_moved_often_or_is_not_there_stays(more: dict[str, Any]) -> None:
    assert names([serves("a", **more), serves("b"), serves("c")]) == ["b", "c"]


def test_nobody_leaves_a_gap_behind_and_people_hear_what_they_can_do() -> None:
    spans = [serves("a", start=0, end=4), serves("b", start=3, end=6), serves("c", start=3, end=6)]
    assert names(spans) == ["b", "c"]
    assert names(spans[:2]) == []
    (rescue,) = find_rescues(spans[:2], MODELS)
    assert "swarmd up --serve new on a machine that has room" in str(rescue)


def test_who_is_on_its_way_is_waited_for() -> None:
    spans = [serves(peer) for peer in "abc"]
    assert find_rescues([*spans, serves("d", NEW, 0, 30, state="joining")], MODELS) == []
    (rescue,) = find_rescues([*spans, serves("d", NEW, 0, 20, state="joining")], MODELS)
    assert [str(s) for s in rescue.lacking] == ["[20,30)"]


def test_two_models_that_lack_blocks_are_not_given_the_same_server_first() -> None:
    models = {**MODELS, "third": (OTHER, 4)}
    first, second = find_rescues([serves(peer) for peer in "abcd"], models)
    assert first.servers[0] != second.servers[0]


def test_a_newcomer_takes_what_it_is_told_or_the_rarest_and_says_what_it_waits_for() -> None:
    spans = [serves("a")]
    assert choose_model(spans, MODELS, "", frozenset()).action == (NEW, 30)
    assert choose_model(spans, MODELS, "", frozenset(), {NEW}).action == (OLD, 6), "what was not tried comes first"
    assert choose_model(spans, MODELS, "old", frozenset()).action == (OLD, 6)
    assert choose_model(spans, MODELS, OLD, frozenset()).action == (OLD, 6)
    waiting = choose_model(spans, MODELS, "nope", frozenset())
    assert waiting.action is None
    assert "'nope'; it lists: new, old" in waiting.reason
    assert "models add" in choose_model([], {}, "", frozenset()).reason
    models = {"x": (OLD, 6), "y": (OTHER, 6)}
    assert choose_model([], models, "", frozenset({OTHER})).action == (OTHER, 6), "what is on the disk already"


def test_nobody_leaves_anything_for_weights_that_no_member_has() -> None:
    (rescue,) = find_rescues([serves(peer) for peer in "abcd"], MODELS, lambda model, block: block != 29)
    assert rescue.servers == ()
    assert "no member that is up has their weights" in str(rescue)


def test_a_model_of_two_names_lacks_its_blocks_once() -> None:
    spans = [serves(peer) for peer in "abcd"]
    assert len(find_rescues(spans, {**MODELS, "my new": MODELS["new"]})) == 1
