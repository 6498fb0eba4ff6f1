"""How far a worker is with loading, in words."""

from __future__ import annotations

from swarmd.node.worker.loading import LoadingProgress
from swarmd.protocol.wire.worker import Loading


def test_what_is_left_is_told_once_parts_have_taken_their_time() -> None:
    progress = LoadingProgress()
    assert progress.describe(Loading(stage="reading", done=2, total=10), 100.0) == "reading, 2 of 10"
    assert progress.describe(Loading(stage="reading", done=4, total=10), 104.0) == "reading, 4 of 10, 12 s left"
    assert progress.describe(Loading(stage="packing", done=5, total=10), 105.0) == "packing, 5 of 10", "another stage"
