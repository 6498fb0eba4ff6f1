"""Rows as changes against what was sent before: both ends come to the same bits, nearer each time."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from swarmd.errors import Refused
from swarmd.protocol.wire import worker
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.tuning import Forward, MicroBatchRow
from swarmd.wire import changes
from swarmd.wire.changes import Changes, rows_of
from swarmd.wire.micro_batches import forward_frames, read_values


def through(hidden: torch.Tensor, ends: tuple[Changes, Changes], codec: str = "int4") -> torch.Tensor:
    """Send rows from one end to the other; returns what that came to."""
    received = []
    rows = ()
    for raw in forward_frames(Forward(rows=rows_of(hidden, None)), 0, hidden, None, codec, ends[0]):
        (frame,) = FrameDecoder().feed_untrusted(raw)
        message = worker.decode(frame.header)
        assert isinstance(message, Forward)
        rows = message.rows or rows
        received.append(read_values(message.tensor, frame.payload))
    return ends[1].take(rows, torch.cat(received, 1))


def error(values: torch.Tensor, hidden: torch.Tensor) -> float:
    return float((values - hidden).norm() / hidden.norm())


def test_what_is_sent_again_comes_nearer_each_time() -> None:
    ends = (Changes(), Changes())
    hidden = torch.randn(3, 8, 64)
    errors = [error(through(hidden, ends), hidden) for _ in range(4)]
    assert errors[0] > 0.05
    assert all(later < 0.2 * previous for previous, later in pairwise(errors))


def test_what_has_changed_a_little_is_off_by_little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmd.wire.micro_batches.PART_BYTES", 1_500)  # several parts
    ends = (Changes(), Changes())
    hidden = torch.randn(3, 8, 64)
    for _ in range(3):
        through(hidden, ends)
    moved = hidden.clone()
    moved[:, :4] += 0.05 * torch.randn(3, 4, 64)  # the second half names a row
    assert error(through(moved, ends), moved) < 0.01
    shuffled = moved[[2, 0, 1]]
    assert error(through(shuffled, ends), shuffled) < 0.002
    assert error(through(torch.randn(1, 8, 64), ends), moved) > 0.05


def test_rows_of_another_length_are_sent_whole() -> None:
    ends = (Changes(), Changes())
    hidden = torch.randn(1, 8, 64)
    through(hidden, ends)
    longer = torch.cat([torch.randn(1, 8, 64), hidden[:, 4:], hidden[:, :4]], 1)
    assert torch.equal(through(longer, ends, "raw"), longer)


def test_changes_of_what_is_not_remembered_so_are_refused() -> None:
    ends = (Changes(), Changes())
    hidden = torch.randn(1, 8, 64)
    through(hidden, ends)
    with pytest.raises(Refused, match="send them whole"):
        through(hidden, (ends[0], Changes()))
    with pytest.raises(Refused, match="send them whole"):
        ends[1].take((MicroBatchRow(b"x", 3),), hidden)
    with pytest.raises(Refused, match="send them whole"):
        ends[1].take((), hidden)


def test_what_is_remembered_is_bounded_alike_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(changes, "MOST_BYTES", 5 * 8 * 64 * 4)
    ends = (Changes(), Changes())
    many = torch.randn(9, 8, 64)
    for _ in range(3):
        received = through(many, ends)
    assert ends[0].n_bytes == ends[1].n_bytes == changes.MOST_BYTES
    assert error(received[:5], many[:5]) < 0.01
    assert error(received[5:], many[5:]) > 0.05


def test_padding_has_no_part_in_a_rows_name() -> None:
    short = torch.randn(1, 3, 64)
    other_row = torch.randn(1, 3, 64)
    padded = torch.cat([torch.cat([short, other_row]), torch.zeros(2, 9, 64)], 1)
    mask = torch.zeros(2, 12, dtype=torch.uint8)
    mask[:, :3] = 1
    assert rows_of(padded, mask) == (*rows_of(short, None), *rows_of(other_row, None))
    assert len({row.id for row in rows_of(padded, mask)}) == 2
