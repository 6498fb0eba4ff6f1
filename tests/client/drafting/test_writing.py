"""What a model writes to learn from: turns as its template writes them, one after the other."""

from __future__ import annotations

import pytest
import torch

from swarmd.client.drafting.writing import (
    MOST_ASKED,
    TURN_EXAMPLES,
    ConversationWriter,
    TurnTokens,
    cut_rows,
    read_turns,
)
from swarmd.errors import ConfigError

USER, ASSISTANT, END = 1, 2, 3
WORD = {"apple": [50, 51], "zebra": [60]}


def render(turns: list[dict[str, str]]) -> list[int]:
    ids = [9]
    for turn in turns:
        ids += [USER if turn["role"] == "user" else ASSISTANT, *WORD[turn["content"]], END]
    return [*ids, ASSISTANT]


def test_turns_are_read_from_what_a_template_writes() -> None:
    turns = read_turns([render(example) for example in TURN_EXAMPLES])
    assert turns == TurnTokens(begin=(9, USER), answer=(END, ASSISTANT), ask=(END, USER))


def test_a_template_that_counts_its_turns_is_refused() -> None:
    rendered = [[*render(example)[:-1], 70 + len(example), ASSISTANT] for example in TURN_EXAMPLES]
    with pytest.raises(ConfigError, match="--data"):
        read_turns(rendered)


def likely(*tokens: int) -> torch.Tensor:
    logits = torch.full((len(tokens), 80), -1e9)
    for row, token in enumerate(tokens):
        logits[row, token] = 0.0
    return logits


def test_once_a_turn_has_ended_the_next_one_begins() -> None:
    writer = ConversationWriter(
        2, TurnTokens((9, USER), (END, ASSISTANT), (END, USER)), torch.Generator().manual_seed(0)
    )
    written = [writer.choose(likely(*tokens)) for tokens in ((20, 21), (END, 22), (23, END), (24, 25), (END, 26))]
    assert written == [[20, 21], [END, 22], [ASSISTANT, END], [24, ASSISTANT], [END, 26]]
    assert writer.choose(likely(27, END)) == [USER, END]


def test_a_turn_that_does_not_end_is_ended() -> None:
    writer = ConversationWriter(
        1, TurnTokens((9, USER), (END, ASSISTANT), (END, USER)), torch.Generator().manual_seed(0)
    )
    written = [writer.choose(likely(20))[0] for _ in range(MOST_ASKED + 1)]
    assert written == [*[20] * (MOST_ASKED - 1), END, ASSISTANT]


def test_rows_are_cut_from_all_texts() -> None:
    rows = cut_rows([list(range(300)), list(range(300, 1_100))])
    assert [row[0] for row in rows] == [0, 512]
    assert {len(row) for row in rows} == {512}
