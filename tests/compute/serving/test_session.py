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
from tests import checkpoints


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
