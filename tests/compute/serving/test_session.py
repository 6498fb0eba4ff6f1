"""One hop's session in a worker: what it keeps for replay is bounded, whatever its client says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from swarmd.compute.passes.span import LoadedSpan
from swarmd.compute.serving.incoming_state import KEPT_TIMES
from swarmd.compute.serving.session import HopSession
from swarmd.errors import Refused
from swarmd.protocol.wire.messages import Edit, Op, OpenSession
from swarmd.values import Span
from swarmd.wire.history import Budget
from swarmd.wire.tensors import pack
from tests import checkpoints, families


def test_ops_that_are_never_settled_do_not_pile_up(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    span = LoadedSpan(checkpoints.make("llama", tmp_path, n_layers=2), Span(0, 2), torch.float32)
    session = HopSession(span, OpenSession(session=b"s" * 16, start=0, end=2, max_tokens=16), Budget())
    meta, payload = pack(torch.zeros(1, 16, 64), torch.zeros(1, 16, dtype=torch.int32), None)

    def apply_many() -> None:
        for seq in range(1, 100):
            edits = (Edit(crop=16),) if seq > 1 else ()
            op = session.begin(Op(session=b"s" * 16, seq=seq, edits=edits, tensor=meta), memoryview(payload))
            op.put(span.run([op.piece(16)])[0])
            op.answer()
            session.keep(op)

    with pytest.raises(Refused, match="kept for replay already"):
        apply_many()
    assert session.state.history.recent_tokens <= (KEPT_TIMES + 1) * 16


@pytest.mark.filterwarnings("ignore")  # what a family warns of is its own affair
def test_rows_that_are_not_of_the_family_are_refused_before_anything_is_computed(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = families.make_named("deepseek_v4", tmp_path)
    families.lay_out(folder)
    span = LoadedSpan(folder, Span(0, 2), torch.float32)
    session = HopSession(span, OpenSession(session=b"s" * 16, start=0, end=2, max_tokens=16), Budget())
    width, n_digits = span.hidden_size, span.family.format.n_digits
    rows = span.family.random_hidden(1, 4, torch.Generator().manual_seed(0))
    no_token, beyond = rows.clone(), rows.clone()
    no_token[0, 0, -1] = 0.5
    beyond[0, 3, -n_digits:] = 3.0
    for sent, message in (
        (rows[..., : width - n_digits], f"expected .batch, hidden, dtype. .1, {width}, .*got .1, {width - n_digits},"),
        (torch.cat([rows, rows], 2), f"got .1, {2 * width},"),
        (no_token, "op 1: input_ids holds what is no id of a token"),
        (beyond, "op 1: input_ids holds id 16777215, and the vocabulary has 160 tokens"),
    ):
        meta, payload = pack(sent, torch.arange(4, dtype=torch.int32).unsqueeze(0), None)
        with pytest.raises(Refused, match=message):
            session.begin(Op(session=b"s" * 16, seq=1, tensor=meta), memoryview(payload))
        assert session.state.n_tokens == 0
    meta, payload = pack(rows, torch.arange(4, dtype=torch.int32).unsqueeze(0), None)
    session.begin(Op(session=b"s" * 16, seq=1, tensor=meta), memoryview(payload))
