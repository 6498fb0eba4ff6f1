"""Who is suspected when."""

from __future__ import annotations

from swarmd.plan.chains.watch import SUSPECT_AFTER_S, Watch


def test_silence_is_suspicious_only_while_something_is_outstanding() -> None:
    watch = Watch()
    assert watch.suspicion(100.0) is None
    watch.on_sent(1, 100.0)
    assert watch.suspicion(100.0 + SUSPECT_AFTER_S - 0.1) is None
    assert "no sign of progress on op 1" in (watch.suspicion(100.0 + SUSPECT_AFTER_S) or "")
    watch.on_progress(0, 102.0)
    assert watch.suspicion(104.0) is None, "progress was reported, nothing finished: a long prefill is not death"
    watch.on_settled(1)
    assert watch.suspicion(1000.0) is None
    watch.on_sent(2, 2000.0)
    assert watch.suspicion(2001.0) is None, "the silence before counts for nothing"
