"""A draft block at work says what it says in learning, forgets what was wrong, and learns."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from swarmd.client.drafting import learning
from swarmd.client.drafting.block_draft import REACH, BlockDraft, BlockModel
from swarmd.client.drafting.draft_block import DraftBlock, load_block, make_block, save_block
from swarmd.client.drafting.examples import TOP, Examples
from swarmd.errors import ConfigError
from swarmd.protocol.models.draft import DraftSettings

SETTINGS = DraftSettings(hidden=24, embedding=16, width=64, inner=128, vocabulary=32)
N_WORDS = 40
EMBEDDING = torch.nn.Embedding(N_WORDS, SETTINGS.embedding)


@pytest.fixture
def block() -> DraftBlock:
    torch.manual_seed(3)
    return make_block(SETTINGS, torch.arange(4, 36), torch.zeros(32, 24)).eval()


def hidden_of(n: int) -> torch.Tensor:
    return torch.randn(n, SETTINGS.hidden, generator=torch.Generator().manual_seed(n))


@torch.no_grad()
def said(block: DraftBlock, text: list[int], hidden: torch.Tensor, n_unknown: int, n: int) -> list[int]:
    """What the block proposes, computed as in learning: all places at once, each step one further."""
    proposed: list[int] = []
    for n_steps in range(1, n + 1):
        embedded = EMBEDDING(torch.tensor([[*text[1:], *proposed]]))
        t = len(text) - 1
        entered = block.enter(embedded[:, :t], hidden[None, :t])
        entered[:, :n_unknown] = block.enter_unknown(embedded[:, :n_unknown])
        # in step s place i goes on from the token i + s + 1, as the last place does when the block is at work
        *_, logits = block.unroll(embedded, entered, n_steps)
        proposed.append(int(block.tokens[logits[0, -1].argmax()]))
    return proposed


def test_it_proposes_what_it_says_in_learning(block: DraftBlock) -> None:
    model = BlockModel(block, EMBEDDING)
    model.note(0.001)
    prompt, hidden = [5, 9, 9, 30, 7, 12], hidden_of(9)
    draft = BlockDraft(model)
    draft.begin(prompt)
    draft.end()
    text = [*prompt, 20, 21, 22]
    for place in range(len(prompt) - 1, len(text) - 1):
        draft.hear(place, hidden[place])
    expected = said(block, text, hidden, len(prompt) - 1, 4)
    assert draft.propose(text, (), 4, 0.0) == expected
    second = draft.second_choice(len(text) + 1)
    assert second is not None
    assert second != expected[1]


def test_what_was_wrong_leaves_no_trace(block: DraftBlock) -> None:
    model = BlockModel(block, EMBEDDING)
    model.note(0.001)
    text, hidden = [5, 9, 9, 30, 7, 12], hidden_of(8)
    draft, anew = BlockDraft(model), BlockDraft(model)
    for each in (draft, anew):
        each.begin(text)
        each.end()
        each.hear(5, hidden[5])
    tried = draft.propose([*text, 8], (), 5, 0.0)
    assert draft.propose([*text, 8], tried[:2], 1, 0.0) == tried[2:3]  # what is on its way already is not said again
    right = next(token for token in range(4, 36) if token != tried[0])
    for each in (draft, anew):
        each.hear(6, hidden[6])
    assert draft.propose([*text, 8, right], (), 3, 0.0) == anew.propose([*text, 8, right], (), 3, 0.0)


def test_tokens_that_another_source_tried_are_read(block: DraftBlock) -> None:
    model = BlockModel(block, EMBEDDING)
    model.note(0.001)
    draft, anew = BlockDraft(model), BlockDraft(model)
    for each in (draft, anew):
        each.begin([5, 6, 7])
        each.end()
    first = draft.propose([5, 6, 7, 8], (), 1, 0.0)
    assert draft.propose([5, 6, 7, 8], [*first, 9], 2, 0.0) == anew.propose([5, 6, 7, 8], [*first, 9], 2, 0.0)


def test_a_text_longer_than_it_reaches(block: DraftBlock) -> None:
    model = BlockModel(block, EMBEDDING)
    model.note(0.001)
    text = [4 + i * 7 % 32 for i in range(5 * REACH)]
    draft = BlockDraft(model)
    draft.begin(text[:10])
    draft.end()
    for n in itertools.chain(range(10, 3 * REACH, 5), (5 * REACH,)):  # at last nobody has asked for long
        draft.hear(n - 2, hidden_of(n)[0])
        assert len(draft.propose(text[:n], (), 3, 0.0)) == 3
    anew = BlockDraft(model)
    anew.begin(text[: 4 * REACH])
    anew.end()
    draft.hear(5 * REACH - 1, torch.zeros(24))
    assert len(anew.propose(text, (), 3, 0.0)) == 3


def test_it_ends_before_what_is_unlikely(block: DraftBlock) -> None:
    model = BlockModel(block, EMBEDDING)
    model.note(0.001)
    draft = BlockDraft(model)
    draft.begin([5, 6, 7])
    draft.end()
    assert draft.propose([5, 6, 7, 8], (), 8, 0.9) == []


def counting_rows(n_rows: int, n_places: int) -> Examples:
    """Texts that count on, with hidden states that tell nothing: what follows is in the tokens alone."""
    first = torch.randint(4, 36, (n_rows, 1), generator=torch.Generator().manual_seed(1))
    tokens = 4 + (first - 4 + torch.arange(n_places)) % 32
    top = torch.zeros(n_rows, n_places, TOP, dtype=torch.long)
    top[..., 0] = 4 + (tokens - 4 + 1) % 32
    chances = torch.zeros(n_rows, n_places, TOP)
    chances[..., 0] = 1.0
    return Examples(tokens, torch.zeros(n_rows, n_places, SETTINGS.hidden), top, chances)


def test_it_learns_and_is_judged_by_rows_that_it_has_not_seen(block: DraftBlock, tmp_path: Path) -> None:
    examples = counting_rows(6, REACH + 16)
    clock = itertools.count()
    before = learning.judge(block, EMBEDDING, examples.rows(slice(1)))
    assert before.acceptance[0] < 0.3
    *_, last = learning.learn(block, EMBEDDING, examples.rows(slice(1, 6)), 400, lambda: next(clock))
    assert last.n_steps == 399
    save_block(block, tmp_path / "draft.safetensors")
    found = load_block(SETTINGS, tmp_path / "draft.safetensors", N_WORDS, torch.float32)
    after = learning.judge(found, EMBEDDING, examples.rows(slice(1)))
    assert min(after.acceptance[: learning.MOST_STEPS]) > 0.9
    assert len(after.acceptance) >= learning.MOST_STEPS


def test_a_file_that_does_not_fit_is_refused(block: DraftBlock, tmp_path: Path) -> None:
    path = tmp_path / "draft.safetensors"
    save_block(block, path)
    with pytest.raises(ConfigError, match="tokens from 4 to 35, and the model has 30"):
        load_block(SETTINGS, path, 30, torch.float32)
    path.write_bytes(path.read_bytes()[:2_000])
    with pytest.raises(ConfigError, match="does not hold the tensors of this draft"):
        load_block(SETTINGS, path, N_WORDS, torch.float32)
