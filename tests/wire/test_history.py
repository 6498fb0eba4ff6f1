"""A history gives a successor exactly what it lacks: merged, in parts, with crops and reorders applied."""

from __future__ import annotations

from pathlib import Path

import torch
from hypothesis import given
from hypothesis import strategies as st

from swarmd.protocol.wire.messages import Edit
from swarmd.wire.history import Budget, History, SentOp

B = 3
D = 4


def sent(seq: int, n_tokens: int, edits: tuple[Edit, ...] = (), mask: torch.Tensor | None = None) -> SentOp:
    rng = torch.Generator().manual_seed(seq)
    hidden = torch.randn(B, n_tokens, D, generator=rng)
    return SentOp(seq, edits, hidden, torch.full((B, n_tokens), seq, dtype=torch.int32), mask)


steps = st.lists(
    st.tuples(
        st.integers(1, 5),
        st.sampled_from([0, 0, 0, 0, 3]),
        st.permutations(range(B)),
        st.sampled_from([False] * 4 + [True]),
    ),
    min_size=1,
    max_size=50,
)


@given(steps, st.integers(1, 7))
def test_merged_history_equals_a_plain_one(script: list[tuple[int, int, list[int], bool]], part: int) -> None:
    history = History(False, Budget())
    plain = torch.zeros(B, 0, D)
    positions = torch.zeros(B, 0, dtype=torch.int32)
    for seq, (n_tokens, crop, rows, reorders) in enumerate(script, start=1):
        crop = min(crop, plain.shape[1])
        crops = (Edit(crop=crop),) if crop else ()
        edits = (*crops, *((Edit(rows=tuple(rows)),) if reorders else ()))
        op = sent(seq, n_tokens, edits)
        history.add(op)
        history.settle(seq)
        plain = plain[:, : plain.shape[1] - crop]
        positions = positions[:, : positions.shape[1] - crop]
        if reorders:
            plain = plain[rows]
            positions = positions[rows]
        assert op.hidden is not None
        assert op.positions is not None
        plain = torch.cat([plain, op.hidden], 1)
        positions = torch.cat([positions, op.positions], 1)
    parts = [s for _, _, s in history.base(part)]
    assert torch.equal(torch.cat([s.hidden for s in parts if s.hidden is not None], 1), plain)
    assert torch.equal(torch.cat([s.positions for s in parts if s.positions is not None], 1), positions)
    assert history.base_seq == len(script)
    assert not list(history.after(0))


def test_unsettled_ops_stay_apart_and_are_given_after_the_merged_ones() -> None:
    history = History(False, Budget())
    for seq in range(1, 6):
        history.add(sent(seq, 1))
    history.settle(3)
    assert history.n_tokens == 3
    assert [s.seq for s in history.after(0)] == [4, 5]
    assert [s.seq for s in history.after(4)] == [5]


def test_the_exact_grade_keeps_every_op() -> None:
    history = History(True, Budget())
    for seq in range(1, 6):
        history.add(sent(seq, 1))
        history.settle(seq)
    assert not list(history.base(10))
    assert [s.seq for s in history.after(0)] == [1, 2, 3, 4, 5]


def test_padding_that_comes_late_is_ones_before() -> None:
    history = History(False, Budget())
    history.add(sent(1, 2))
    history.add(sent(2, 2, mask=torch.zeros(B, 2, dtype=torch.uint8)))
    history.settle(2)
    (_, _, merged) = next(history.base(10))
    assert merged.mask is not None
    assert merged.mask.tolist() == [[1, 1, 0, 0]] * B


def test_history_beyond_its_budget_lives_on_disk_and_stays_right(tmp_path: Path) -> None:
    budget = Budget(memory_bytes=4_000, spill_folder=tmp_path)
    history = History(False, budget)
    plain = []
    for seq in range(1, 400):
        op = sent(seq, 1)
        history.add(op)
        history.settle(seq)
        plain.append(op.hidden)
    assert budget.used_bytes <= 4_000
    assert not list(tmp_path.iterdir()), "spilled files are unlinked as soon as they are mapped"
    parts = [s.hidden for _, _, s in history.base(64) if s.hidden is not None]
    assert torch.equal(torch.cat(parts, 1), torch.cat([p for p in plain if p is not None], 1))
    history.close()
    assert budget.used_bytes == 0


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.data())
def test_tokens_are_given_wherever_they_lie(sizes: list[int], data: st.DataObject) -> None:
    history = History(False, Budget())
    ops = [sent(seq, n) for seq, n in enumerate(sizes, 1)]
    for op in ops:
        history.add(op)
    history.settle(data.draw(st.integers(0, len(ops))))
    every = torch.cat([op.hidden for op in ops if op.hidden is not None], 1)
    start = data.draw(st.integers(0, every.shape[1] - 1))
    end = data.draw(st.integers(start + 1, every.shape[1]))
    assert torch.equal(history.tokens(start, end), every[:, start:end])
