"""Whatever op a member sends, the worker answers or refuses it, and goes on with everybody else's."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest
import torch

from swarmd.compute.cache.handover import pack_state
from swarmd.compute.passes.span import LoadedSpan, LoadOptions
from swarmd.compute.serving import op_check
from swarmd.compute.serving.incoming_state import KEPT_TIMES, PART_BYTES, IncomingState
from swarmd.compute.serving.op_check import LEAST_KEPT_EDITS
from swarmd.compute.serving.session import HopSession
from swarmd.compute.serving.worker import Worker
from swarmd.errors import Refused
from swarmd.plan.chains.client_turns import MOST_IMMEDIATE_S
from swarmd.protocol.wire import frames, messages
from swarmd.protocol.wire import worker as worker_link
from swarmd.protocol.wire.frames import MAX_PAYLOAD_BYTES, FrameDecoder
from swarmd.protocol.wire.messages import CachePart, Edit, Op, OpenSession, Refusal
from swarmd.protocol.wire.worker import Tick
from swarmd.values import Span
from swarmd.wire.history import Budget, History, SentOp
from swarmd.wire.ops import encode_op
from tests import checkpoints
from tests.compute.serving.test_scheduler import BLOCKS, Bench
from tests.families import FAMILIES, make

HOSTILE, HONEST = b"x" * 16, b"y" * 16
ROWS = 1_024


@pytest.fixture(scope="module")
def span(tmp_path_factory: pytest.TempPathFactory) -> LoadedSpan:
    torch.set_num_threads(1)
    folder = checkpoints.make("llama", tmp_path_factory.mktemp("llama"), n_layers=3)
    return LoadedSpan(folder, BLOCKS, torch.float32)


def opened(span: LoadedSpan, codec: str = "raw") -> Bench:
    """An engine with the session of a hostile member, of many rows, and that of an honest one."""
    bench = Bench(span)
    opening = OpenSession(
        session=HOSTILE, start=0, end=3, max_tokens=400, client=HOSTILE, batch=ROWS, epoch=1, codec=codec
    )
    bench.feed(messages.encode_frame(opening))
    bench.seq[HOSTILE], bench.outputs[HOSTILE] = 0, []
    bench.open(HONEST)
    return bench


def still_serves(bench: Bench) -> bool:
    bench.put(HONEST, torch.randn(1, 4, 64), 0)
    bench.run()
    return len(bench.outputs[HONEST]) == 1


def test_an_op_whose_answer_might_not_fit_a_frame_is_refused(span: LoadedSpan) -> None:
    bench, n_tokens = opened(span, "int8"), 1 + MAX_PAYLOAD_BYTES // (ROWS * 64 * 4)
    positions = torch.arange(n_tokens, dtype=torch.int32).expand(ROWS, -1)
    sent = SentOp(1, (), torch.randn(ROWS, n_tokens, 64), positions, None)
    raw = encode_op(Op(session=HOSTILE, epoch=1), sent, "int8")
    assert len(raw) < MAX_PAYLOAD_BYTES / 2, "small on the wire"
    bench.feed(raw)
    bench.run()
    (refusal,) = bench.others
    assert isinstance(refusal, Refusal)
    assert "when it is not coded" in refusal.message
    assert still_serves(bench)


def test_an_op_without_an_answer_ends_its_session_and_nothing_else(
    span: LoadedSpan, monkeypatch: pytest.MonkeyPatch, nothing_breaks_behind_a_guard: list[logging.LogRecord]
) -> None:
    bench = opened(span)

    def answer() -> bytes:
        raise ValueError("frame too large")

    bench.put(HOSTILE, torch.randn(ROWS, 1, 64), 0)
    monkeypatch.setattr(bench.scheduler._queues.begun[HOSTILE, 0], "answer", answer)
    assert still_serves(bench)
    assert [m.code for m in bench.others if isinstance(m, Refusal)] == ["session_lost"]
    assert bench.scheduler.handled == 4, "two openings and two ops"
    assert "an op has no answer" in nothing_breaks_behind_a_guard.pop().getMessage()


def test_a_worker_skips_what_is_no_message_and_counts_it(caplog: pytest.LogCaptureFixture) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        worker, decoder = Worker(theirs), FrameDecoder()
        (junk,) = decoder.feed_untrusted(frames.encode(b"\x81\xa4type\xa6replay\xff", b""))
        assert worker._take_frame(junk) == []
        worker._send_frames([])
        (said,) = FrameDecoder().feed_untrusted(ours.recv(4_096))
        assert worker_link.decode(said.header) == Tick(handled=1), "else it would look stuck"
    assert "skipped" in caplog.text


REORDER_S = 0.02  # of a large cache
SHIFTED = (*range(1, ROWS), 0)


def reordering(span: LoadedSpan, monkeypatch: pytest.MonkeyPatch, *, settles: bool) -> tuple[Bench, list[float]]:
    """A hostile member's session whose edits take ``REORDER_S`` each, twenty of its ops, and signs of life."""
    bench, signs = Bench(span, can_interleave=True), list[float]()
    opening = OpenSession(session=HOSTILE, start=0, end=3, max_tokens=400, client=HOSTILE, batch=ROWS, epoch=1)
    bench.feed(messages.encode_frame(opening))
    bench.seq[HOSTILE], bench.outputs[HOSTILE] = 0, []
    bench.open(HONEST)

    def reorder(rows: torch.Tensor) -> None:
        bench.now += REORDER_S

    monkeypatch.setattr(bench.scheduler._queues.sessions[HOSTILE, 0].state.cache, "reorder", reorder)
    monkeypatch.setattr(span, "on_block", lambda: signs.append(bench.now))
    for _ in range(20):
        bench.seq[HOSTILE] += 1
        seq = bench.seq[HOSTILE]
        edits = (Edit(rows=SHIFTED),)
        bench.feed(
            messages.encode_frame(Op(session=HOSTILE, epoch=1, seq=seq, settled=settles * (seq - 1), edits=edits))
        )
    return bench, signs


def test_edits_are_work_others_get_their_turn_between_and_there_are_signs_of_life(
    span: LoadedSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, signs = reordering(span, monkeypatch, settles=True)
    assert bench.scheduler.has_work, "the rest waits its turn"
    assert bench.now <= MOST_IMMEDIATE_S + REORDER_S
    bench.put(HONEST, torch.randn(1, 4, 64), 0)
    bench.step()
    assert len(bench.outputs[HONEST]) == 1
    assert bench.now <= 2 * (MOST_IMMEDIATE_S + REORDER_S)
    bench.run()
    assert bench.scheduler.handled == 23, "two openings and 21 ops"
    assert bench.now == pytest.approx(20 * REORDER_S)
    gaps = [after - before for before, after in zip([0.0, *signs], signs, strict=False)]
    assert max(gaps) <= REORDER_S + 1e-9
    assert bench.scheduler._queues.turns.served[HOSTILE] > bench.scheduler._queues.turns.served[HONEST]


def test_ops_that_are_refused_are_work_as_well(span: LoadedSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    """They wait behind a prompt, by the thousand, and each takes a look."""
    bench, signs = Bench(span, can_interleave=True), list[float]()
    for key in (HOSTILE, HONEST):
        bench.open(key)
    bench.put(HOSTILE, torch.randn(1, 8, 64), 0)

    def look(tensor: torch.Tensor) -> bool:
        bench.now += REORDER_S
        return False

    for _ in range(20):
        bench.put(HOSTILE, torch.full((1, 1, 64), torch.nan), 8)
    monkeypatch.setattr(span, "on_block", lambda: signs.append(bench.now))
    monkeypatch.setattr(op_check, "is_finite", look)
    bench.step()
    assert len(bench.others) <= 1 + MOST_IMMEDIATE_S / REORDER_S, "the rest waits its turn"
    bench.run()
    assert [m.code for m in bench.others if isinstance(m, Refusal)] == ["not_finite"] * 20
    assert bench.scheduler.handled == 23, "two openings and 21 ops"
    gaps = [after - before for before, after in zip([0.0, *signs], signs, strict=False)]
    assert max(gaps) <= REORDER_S + 1e-9
    assert bench.scheduler._queues.turns.served[HOSTILE] > 20 * REORDER_S


def test_edits_that_are_kept_for_replay_are_bounded(span: LoadedSpan) -> None:
    bench = opened(span)
    limit = LEAST_KEPT_EDITS + KEPT_TIMES * 400
    for seq in range(1, limit // 9 + 2):
        raw = messages.encode_frame(Op(session=HOSTILE, epoch=1, seq=seq, edits=(Edit(crop=0),) * 8))
        bench.feed(raw)
        bench.run()
    refusals = [m for m in bench.others if isinstance(m, Refusal)]
    assert [m.code for m in refusals] == ["too_long"]
    assert "edits of separate ops" in refusals[0].message
    assert still_serves(bench)


def test_replays_give_signs_of_life_between_frames(span: LoadedSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, signs = Bench(span), list[int]()
    bench.open(HONEST)
    for step in range(5):
        bench.seq[HONEST] += 1
        sent = SentOp(bench.seq[HONEST], (), torch.randn(1, 1, 64), torch.full((1, 1), step, dtype=torch.int32), None)
        bench.feed(encode_op(Op(session=HONEST, epoch=1), sent, "raw"))
        bench.run()
    monkeypatch.setattr(span, "on_block", lambda: signs.append(1))
    bench.feed(messages.encode_frame(messages.Replay(id=9, session=HONEST, epoch=1, have=None)))
    assert len(signs) >= 5


def heir(family: str, folder: Path, n_tokens: int) -> tuple[LoadedSpan, HopSession]:
    """A session of so many tokens that waits for its caches."""
    span = LoadedSpan(
        make(family, folder, FAMILIES[family]), Span(0, 2), torch.float32, LoadOptions(has_plain_layers=True)
    )
    opening = OpenSession(session=HONEST, start=0, end=2, max_tokens=n_tokens, inherit="giver", epoch=1)
    return span, HopSession(span, opening, Budget())


@pytest.mark.filterwarnings("ignore")  # what a family warns of is its own affair
def test_caches_that_come_are_bounded_though_a_state_is_large(tmp_path: Path) -> None:
    """States do not grow with a session: a member that hands one over could send one for each token of it."""
    span, session = heir("mamba", tmp_path, 4_000)
    n_parts = 2 + (4_000 * span.example_cache(span.span).n_bytes() >> 20)
    part = CachePart(session=HONEST, start=0, epoch=1, n_parts=n_parts)
    with pytest.raises(Refused, match="this session has room for"):
        list(session.inherit(part, memoryview(b"part")))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["mamba", "lfm2", "llama"])
def test_all_that_a_session_can_have_fits_that_bound(family: str, tmp_path: Path) -> None:
    span, _ = heir(family, tmp_path, 200)
    cache = span.new_cache(span.span)
    cache.record_past()
    span.forward(*span.family.example(200), None, cache, 0)
    raw = pack_state(cache, History(False, Budget()), None, 200)
    assert len(raw) <= IncomingState(span, span.span, 1, 200).limit_bytes - PART_BYTES
