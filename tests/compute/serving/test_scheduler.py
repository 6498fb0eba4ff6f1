"""Sessions of different lengths through one engine: together they give what each gives alone, and nobody starves."""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load, save

from swarmd.compute.linear.quantize import relative_error
from swarmd.compute.model.head import LogitsHead
from swarmd.compute.passes.backend_selection import select_backends
from swarmd.compute.passes.span import LoadedSpan
from swarmd.compute.serving.scheduler import Scheduler
from swarmd.plan.chains.batching import MOST_TOKENS_OF_CARD, Speed
from swarmd.protocol.wire import messages, worker
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.messages import CachePart, CloseSession, Edit, HandOver, Inherited, Op, OpenSession, Refusal
from swarmd.values import Span
from swarmd.wire import top
from swarmd.wire.history import Budget, SentOp
from swarmd.wire.ops import encode_op
from swarmd.wire.tensors import unpack_untrusted
from tests import checkpoints

BLOCKS = Span(0, 3)


def load_llama(folder: Path) -> LoadedSpan:
    """Three blocks of a small model, checked."""
    torch.set_num_threads(1)
    loaded = LoadedSpan(
        checkpoints.make("llama", folder, n_layers=3, max_position_embeddings=4_096), BLOCKS, torch.float32
    )
    loaded.self_test()
    assert loaded.can_batch
    return loaded


@pytest.fixture(scope="module")
def span(tmp_path_factory: pytest.TempPathFactory) -> LoadedSpan:
    return load_llama(tmp_path_factory.mktemp("llama"))


def alike(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Ways to compute in float32 are 3e-6 from what 64 bits give, single numbers up to 2e-4."""
    assert relative_error(actual, expected) < 1e-5


class Bench:
    """An engine and the sessions that a test drives by hand."""

    def __init__(self, span: LoadedSpan, can_interleave: bool = False, head: LogitsHead | None = None) -> None:
        """Where steps come aside, a second passes when the test says so: how long they take decides what gets in."""
        self.now = 0.0
        clock = (lambda: self.now) if can_interleave else time.perf_counter
        self.scheduler = Scheduler(span, Budget(), clock, can_interleave, head)
        self.outputs: dict[bytes, list[torch.Tensor]] = {}
        self.logits: dict[bytes, list[bytes]] = {}
        self.others: list[messages.AnyMessage] = []
        self.raw: list[bytes] = []
        self.n_passes = 0
        self.seq: dict[bytes, int] = {}

    def open(self, key: bytes, batch: int = 1, inherit: str = "", client: bytes = b"", weight: float = 1.0) -> None:
        fields = {"batch": batch, "inherit": inherit, "epoch": 1, "client": client or key, "weight": weight}
        opening = OpenSession(session=key, start=0, end=3, max_tokens=3_000, **fields)
        self.feed(messages.encode_frame(opening))
        self.seq[key] = 0
        self.outputs[key] = []

    def put(self, key: bytes, hidden: torch.Tensor, n_past: int, *edits: Edit, marks: Op | None = None) -> None:
        self.seq[key] += 1
        b, t, _ = hidden.shape
        positions = torch.arange(n_past, n_past + t, dtype=torch.int32).expand(b, t)
        self.put_op(key, SentOp(self.seq[key], edits, hidden, positions, None), marks)

    def put_op(self, key: bytes, sent: SentOp, marks: Op | None = None) -> None:
        header = msgspec.structs.replace(marks or Op(), session=key, epoch=1, settled=self.seq[key] - 1)
        self.feed(encode_op(header, sent, "raw"))

    def feed(self, raw: bytes) -> None:
        for frame in FrameDecoder().feed_untrusted(raw):
            for answer in self.scheduler.take(worker.decode(frame.header), frame):
                self._note(answer)

    def run(self) -> None:
        while self.scheduler.has_work:
            self.step()

    def step(self) -> None:
        self.n_passes += 1
        for answer in (*self.scheduler.run_pass(), *self.scheduler.settle()):
            self._note(answer)

    def step_aside(self) -> None:
        for answer in (*self.scheduler.run_interleaved(), *self.scheduler.settle()):
            self._note(answer)

    def _note(self, raw: bytes) -> None:
        self.raw.append(raw)
        (frame,) = FrameDecoder().feed_untrusted(raw)
        message = worker.decode(frame.header)
        if isinstance(message, Op) and message.tensor is not None:
            self.outputs[message.session].append(unpack_untrusted(message.tensor, frame.payload)[0])
            self.logits.setdefault(message.session, []).append(message.logits)
        elif not isinstance(message, worker.Done) or message.seq:  # else a session is open
            self.others.append(message)


def whole(span: LoadedSpan, hidden: torch.Tensor) -> torch.Tensor:
    return span.forward(hidden, torch.arange(hidden.shape[1]).expand(hidden.shape[0], -1))


def test_steps_of_several_sessions_share_passes_and_stay_apart(span: LoadedSpan) -> None:
    bench = Bench(span)
    rng = torch.Generator().manual_seed(0)
    sizes = {b"a" * 16: (1, 5), b"b" * 16: (2, 9), b"c" * 16: (1, 17)}
    hidden = {key: torch.randn(b, n + 6, 64, generator=rng) for key, (b, n) in sizes.items()}
    for key, (b, n) in sizes.items():
        bench.open(key, batch=b)
        bench.put(key, hidden[key][:, :n], 0)
        bench.run()
    bench.n_passes = 0
    for step in range(6):
        for key, (_, n) in sizes.items():
            bench.put(key, hidden[key][:, n + step : n + step + 1], n + step)
        bench.run()
    assert bench.n_passes == 6, "all three in each pass"
    for key in sizes:
        alike(torch.cat(bench.outputs[key], 1), whole(span, hidden[key]))
    assert not bench.others


def test_a_prompt_that_takes_a_card_no_time_is_one_pass(span: LoadedSpan) -> None:
    bench = Bench(span)
    bench.scheduler._most_tokens = MOST_TOKENS_OF_CARD
    prompt = torch.randn(1, 2_000, 64, generator=torch.Generator().manual_seed(3))
    for key, speed, n_passes in ((b"f" * 16, Speed(0.005, 1e-5), 1), (b"s" * 16, Speed(0.005, 1e-3), 4)):
        bench.scheduler._pace.speed = speed
        bench.open(key, client=key)
        bench.put(key, prompt, 0)
        bench.n_passes = 0
        bench.run()
        assert bench.n_passes == n_passes
        torch.testing.assert_close(bench.outputs[key][0], whole(span, prompt), rtol=1e-3, atol=1e-3)


def test_decoding_goes_on_beside_a_long_prefill(span: LoadedSpan) -> None:
    bench = Bench(span)
    rng = torch.Generator().manual_seed(1)
    decoding = b"d" * 16
    long = b"l" * 16
    hidden = torch.randn(1, 300, 64, generator=rng)
    prompt = torch.randn(1, 2_000, 64, generator=rng)
    bench.open(decoding)
    bench.open(long)
    bench.put(decoding, hidden[:, :4], 0)
    bench.run()
    bench.put(long, prompt, 0)
    n_steps = 4
    while not bench.outputs[long] and n_steps < 300:
        bench.put(decoding, hidden[:, n_steps : n_steps + 1], n_steps)
        bench.step()
        n_steps += 1
        assert len(bench.outputs[decoding]) == n_steps - 3, "each pass takes the decode step along"
    assert bench.outputs[long], "the prefill moved on beside it"
    torch.testing.assert_close(bench.outputs[long][0], whole(span, prompt), rtol=1e-3, atol=1e-3)
    actual = torch.cat(bench.outputs[decoding], 1)
    # how many steps there are depends on the machine: of hundreds some come near the bound of docs/protocol.md
    torch.testing.assert_close(actual, whole(span, hidden[:, :n_steps]), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("weight", "first"), [(1.0, b"l" * 16), (4.0, b"h" * 16)])
def test_who_weighs_more_gets_more_of_the_turns(span: LoadedSpan, weight: float, first: bytes) -> None:
    bench = Bench(span)
    prompt = torch.randn(1, 2_000, 64, generator=torch.Generator().manual_seed(4))
    for key, n_turns in ((b"l" * 16, 1.0), (b"h" * 16, weight)):
        bench.open(key, client=key, weight=n_turns)
        bench.put(key, prompt, 0)
    while not any(bench.outputs.values()):
        bench.step()
    assert [key for key, out in bench.outputs.items() if out] == [first]


@pytest.mark.parametrize("way", ["one call", "a straight line"])
def test_a_quick_pass_gives_the_same(span: LoadedSpan, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(span)
    rng = torch.Generator().manual_seed(2)
    hidden = torch.randn(1, 12, 64, generator=rng)
    key = b"k" * 16
    positions = torch.arange(12).unsqueeze(0)
    cache = span.new_cache()
    plain = [span.forward(hidden[:, i : i + 1], positions[:, i : i + 1], None, cache, i) for i in range(12)]
    monkeypatch.setattr(span, "_tables", {})  # both are put back
    monkeypatch.setattr(span, "layers", replace(span.layers, shape=span.layers.shape if way == "one call" else None))
    select_backends(span)
    assert ("one call" in span.explain_kernels().action) == (way == "one call")
    assert span.table(BLOCKS).rows
    bench.open(key)
    for i in range(12):
        bench.put(key, hidden[:, i : i + 1], i)
        bench.run()
    alike(torch.cat(bench.outputs[key], 1), torch.cat(plain, 1))


@pytest.fixture
def by_one_call(span: LoadedSpan, monkeypatch: pytest.MonkeyPatch) -> LoadedSpan:
    """The span, with one call as the quick way."""
    monkeypatch.setattr(span, "_tables", {})  # these are put back
    monkeypatch.setattr(span, "on_block", span.on_block)
    select_backends(span)
    assert span.interleaved_tokens
    return span


def test_steps_get_in_between_the_blocks_of_a_prompt(by_one_call: LoadedSpan) -> None:
    bench = Bench(by_one_call, can_interleave=True)
    rng = torch.Generator().manual_seed(6)
    decoding = b"d" * 16
    long = b"l" * 16
    n_steps = 4
    hidden = torch.randn(1, 300, 64, generator=rng)
    prompt = torch.randn(1, 600, 64, generator=rng)

    def on_block() -> None:
        nonlocal n_steps
        bench.now += 1.0
        if bench.scheduler.is_open_to_steps:
            bench.put(decoding, hidden[:, n_steps : n_steps + 1], n_steps)
            bench.step_aside()
            n_steps += 1
            assert len(bench.outputs[decoding]) == n_steps - 3

    for key in (decoding, long):
        bench.open(key)
    bench.put(decoding, hidden[:, :4], 0)
    bench.run()
    by_one_call.on_block = on_block
    bench.put(long, prompt, 0)
    bench.n_passes = 0
    bench.run()
    assert n_steps - 4 == bench.n_passes * len(BLOCKS)
    alike(torch.cat(bench.outputs[long], 1), whole(by_one_call, prompt))
    alike(torch.cat(bench.outputs[decoding], 1), whole(by_one_call, hidden[:, :n_steps]))
    assert not bench.others


def test_a_step_that_fails_in_the_midst_of_a_prompt_ends_its_own_session_only(
    by_one_call: LoadedSpan, monkeypatch: pytest.MonkeyPatch, nothing_breaks_behind_a_guard: list[logging.LogRecord]
) -> None:
    bench = Bench(by_one_call, can_interleave=True)
    rng = torch.Generator().manual_seed(7)
    failing = b"f" * 16
    long = b"l" * 16
    prompt = torch.randn(1, 100, 64, generator=rng)
    for key in (failing, long):
        bench.open(key)
    bench.put(failing, prompt[:, :1], 0)
    bench.run()

    def on_block() -> None:
        bench.now += 1.0
        if bench.scheduler.is_open_to_steps and not bench.others:
            bench.put(failing, prompt[:, :1], 1)
            with monkeypatch.context() as broken:
                broken.setattr(by_one_call, "run", lambda *_: torch.ones(2) @ torch.ones(3))
                bench.step_aside()

    by_one_call.on_block = on_block
    bench.put(long, prompt, 0)
    bench.run()
    (refusal,) = bench.others
    assert isinstance(refusal, Refusal)
    assert refusal.session == failing
    nothing_breaks_behind_a_guard.clear()
    alike(bench.outputs[long][0], whole(by_one_call, prompt))


def test_what_was_handed_over_goes_on_elsewhere(span: LoadedSpan) -> None:
    key = b"h" * 16
    rng = torch.Generator().manual_seed(3)
    hidden = torch.randn(1, 30, 64, generator=rng)
    old = Bench(span)
    heir = Bench(span)
    old.open(key)
    for a, b in ((0, 20), (20, 21)):
        old.put(key, hidden[:, a:b], a)
        old.run()
    old.raw.clear()
    old.feed(messages.encode_frame(HandOver(id=1, session=key, start=0, epoch=1, to="heir")))
    heir.open(key, inherit="old")
    for raw in old.raw[:-1]:  # the last says that all have left
        heir.feed(raw)
    assert [type(m) for m in heir.others] == [Inherited]
    heir.seq[key] = 2
    heir.put(key, hidden[:, 21:], 21)
    heir.run()
    alike(heir.outputs[key][-1], whole(span, hidden)[:, 21:])


def test_caches_that_were_changed_on_the_way_are_refused(span: LoadedSpan) -> None:
    key = b"t" * 16
    old = Bench(span)
    heir = Bench(span)
    old.open(key)
    old.put(key, torch.randn(1, 5, 64), 0)
    old.run()
    old.raw.clear()
    old.feed(messages.encode_frame(HandOver(id=1, session=key, start=0, epoch=1, to="heir")))
    heir.open(key, inherit="old")
    raw = bytearray(old.raw[0])
    raw[-1] ^= 1
    heir.feed(bytes(raw))
    (refusal,) = heir.others
    assert isinstance(refusal, Refusal)
    assert refusal.code == "session_lost"
    assert "digest" in refusal.message


FORGED: dict[str, dict[str, torch.Tensor]] = {
    "an endless count": {"n_tokens": torch.tensor(float("inf"))},
    "more tokens than keys": {"n_tokens": torch.tensor(900)},
    "more than reserved": {"n_tokens": torch.tensor(10**9)},
    "a number below zero": {"base.reached": torch.tensor([-1, 0])},
    "another op than announced": {"base.reached": torch.tensor([2, 0])},
    "positions of another length": {"recent.0.positions": torch.zeros(1, 3, dtype=torch.int32)},
    "no rows": {"recent.0.hidden": torch.zeros(0, 5, 64)},
    "values that are not finite": {"layer.0.keys": torch.full((1, 2, 5, 16), float("nan"))},
    "another number of heads": {"layer.0.keys": torch.zeros(1, 3, 5, 16)},
    "another dtype": {"layer.0.keys": torch.zeros(1, 2, 5, 16, dtype=torch.float16)},
    "an edit that does not fit": {
        "recent.0.edits": torch.frombuffer(bytearray(msgspec.msgpack.encode([{"rows": [7]}])), dtype=torch.uint8)
    },
    "a crop past the start": {
        "recent.0.edits": torch.frombuffer(bytearray(msgspec.msgpack.encode([{"crop": 99}])), dtype=torch.uint8)
    },
    "a mask of another shape": {"mask": torch.ones(1, 2, dtype=torch.uint8)},
}


@pytest.mark.parametrize("forgery", FORGED)
def test_forged_caches_end_their_own_session_and_nothing_else(span: LoadedSpan, forgery: str) -> None:
    key = b"f" * 16
    other_key = b"o" * 16
    old = Bench(span)
    heir = Bench(span)
    old.open(key)
    old.put(key, torch.randn(1, 5, 64), 0)
    old.run()
    old.raw.clear()
    old.feed(messages.encode_frame(HandOver(id=1, session=key, start=0, epoch=1, to="heir")))
    (frame,) = FrameDecoder().feed_untrusted(old.raw[0])
    part = worker.decode(frame.header)
    assert isinstance(part, CachePart)
    raw = save({**load(bytes(frame.payload)), **FORGED[forgery]})
    heir.open(key, inherit="old")
    heir.open(other_key)
    heir.feed(messages.encode_frame(msgspec.structs.replace(part, digest=hashlib.sha256(raw).digest()), raw))
    (refusal,) = heir.others
    assert isinstance(refusal, Refusal)
    assert refusal.code == "session_lost"
    hidden = torch.randn(1, 4, 64)
    heir.put(other_key, hidden, 0)
    heir.run()
    alike(heir.outputs[other_key][0], whole(span, hidden))


def test_a_pass_that_fails_ends_its_sessions_and_not_the_worker(
    span: LoadedSpan, monkeypatch: pytest.MonkeyPatch, nothing_breaks_behind_a_guard: list[logging.LogRecord]
) -> None:
    bench = Bench(span)
    for key in (b"x" * 16, b"y" * 16):
        bench.open(key)
        bench.put(key, torch.randn(1, 20, 64), 0)
    broken = bench.scheduler._queues.begun[b"x" * 16, 0]
    monkeypatch.setattr(broken, "piece", lambda _: [][1])
    bench.run()
    assert [m.code for m in bench.others if isinstance(m, Refusal)] == ["session_lost"]
    assert len(bench.outputs[b"y" * 16]) == 1
    assert bench.scheduler.handled == 4
    assert nothing_breaks_behind_a_guard.pop().levelno == logging.ERROR


def test_a_card_that_computes_nothing_any_more_ends_the_worker(
    span: LoadedSpan, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(span)
    key = b"c" * 16
    bench.open(key)
    bench.put(key, torch.randn(1, 20, 64), 0)

    def compute(_: int) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(bench.scheduler._queues.begun[key, 0], "piece", compute)
    with pytest.raises(torch.AcceleratorError):
        bench.run()


def test_every_frame_is_counted_once_it_is_dealt_with(span: LoadedSpan) -> None:
    bench = Bench(span)
    key = b"n" * 16
    bench.open(key)
    bench.put(key, torch.randn(1, 4, 64), 0)
    bench.put(key, torch.randn(1, 1, 64), 4)
    bench.put(key, torch.full((1, 1, 64), float("nan")), 5)
    bench.put(key, torch.randn(1, 1, 64), 5)
    bench.run()
    assert bench.scheduler.handled == 5
    assert [m.code for m in bench.others if isinstance(m, Refusal)] == ["not_finite"]
    bench.put(key, torch.randn(1, 1, 64), 6)
    bench.feed(messages.encode_frame(CloseSession(session=key)))
    assert bench.scheduler.handled == 7
    assert not bench.scheduler.has_work


class TestSharedBeginnings:
    """What several sessions of one client begin with is computed once, and changes no answer."""

    @pytest.fixture
    def bench(self, span: LoadedSpan) -> Bench:
        return Bench(span)

    @staticmethod
    def text(n: int, seed: int) -> torch.Tensor:
        return torch.randn(1, n, 64, generator=torch.Generator().manual_seed(seed))

    def answers(self, bench: Bench, key: bytes, hidden: torch.Tensor, client: bytes) -> int:
        """Open a session and send it all, in ops of 48 tokens; how many were taken over."""
        n_before = bench.scheduler.n_reused
        bench.open(key, client=client)
        for start in range(0, hidden.shape[1], 48):
            bench.put(key, hidden[:, start : start + 48], start)
        bench.run()
        actual = torch.cat(bench.outputs[key], 1)
        alike(actual, whole(bench.scheduler.engine, hidden))
        return bench.scheduler.n_reused - n_before

    def test_the_second_takes_over_what_the_first_computed(self, bench: Bench) -> None:
        system = self.text(120, 1)
        client = b"client"
        first, second = (torch.cat([system, self.text(30, seed)], 1) for seed in (2, 3))
        assert self.answers(bench, b"a" * 16, first, client) == 0
        assert self.answers(bench, b"b" * 16, second, client) == 112, "whole blocks of 16"
        assert self.answers(bench, b"c" * 16, first, client) == 144
        for key, text in ((b"a" * 16, first), (b"b" * 16, second)):  # they go on apart
            extra = self.text(1, key[0])
            bench.put(key, extra, 150)
            bench.run()
            right = whole(bench.scheduler.engine, torch.cat([text, extra], 1))[:, -1:]
            alike(bench.outputs[key][-1], right)

    def test_those_that_come_together_wait_for_the_first(self, bench: Bench) -> None:
        text = self.text(96, 1)
        keys = [bytes([i]) * 16 for i in range(4)]
        for key in keys:
            bench.open(key, client=b"client")
            bench.put(key, text, 0)
        bench.run()
        assert bench.scheduler.n_reused == 3 * 96
        for key in keys:
            alike(bench.outputs[key][0], whole(bench.scheduler.engine, text))

    def test_a_long_beginning_lies_in_memory_once(self, bench: Bench) -> None:
        system = self.text(320, 1)
        client = b"client"
        keys = [bytes([i]) * 16 for i in range(4)]
        texts = {key: torch.cat([system, self.text(20, key[0] + 5)], 1) for key in keys}
        for key in keys:
            self.answers(bench, key, texts[key], client)
        layers = [bench.scheduler._queues.sessions[key, 0].state.cache.owned[0] for key in keys]
        assert [layer.n_shared for layer in layers] == [340, 320, 320, 320], "the first gave all that it had"
        assert len({layer.prefix[0].data_ptr() for layer in layers}) == 1
        for n in range(2):  # all of them in one pass, and one that goes back behind what it shares
            for key in keys:
                bench.put(key, self.text(1, key[0] + n), 340 + n)
            bench.run()
        bench.put(keys[2], self.text(3, 1), 300, Edit(crop=42))
        bench.run()
        for key in keys:
            extra = [self.text(1, key[0]), self.text(1, key[0] + 1)]
            right = whole(bench.scheduler.engine, torch.cat([texts[key], *extra], 1))[:, -2:]
            actual = torch.cat(bench.outputs[key], 1)[:, 340:342]
            alike(actual, right)
        right = whole(bench.scheduler.engine, torch.cat([texts[keys[2]][:, :300], self.text(3, 1)], 1))[:, -3:]
        alike(bench.outputs[keys[2]][-1], right)

    def test_only_the_same_client_is_given_it(self, bench: Bench) -> None:
        assert self.answers(bench, b"a" * 16, self.text(64, 1), b"one") == 0
        assert self.answers(bench, b"b" * 16, self.text(64, 1), b"other") == 0

    def test_what_was_cropped_or_closed_is_not_there(self, bench: Bench) -> None:
        text = self.text(96, 1)
        client = b"client"
        first = b"a" * 16
        self.answers(bench, first, text, client)
        bench.put(first, self.text(4, 2), 40, Edit(crop=56))
        bench.run()
        assert self.answers(bench, b"b" * 16, text, client) == 32
        bench.feed(messages.encode_frame(CloseSession(session=b"b" * 16, start=0)))
        bench.feed(messages.encode_frame(CloseSession(session=first, start=0)))
        assert self.answers(bench, b"c" * 16, text, client) == 0

    def test_what_was_taken_over_is_handed_over_and_replayed_as_well(self, bench: Bench) -> None:
        text = self.text(96, 1)
        client = b"client"
        self.answers(bench, b"a" * 16, text, client)
        self.answers(bench, b"b" * 16, text, client)
        bench.feed(messages.encode_frame(CloseSession(session=b"a" * 16, start=0)))
        session = bench.scheduler._queues.sessions[b"b" * 16, 0]
        alike(session.state.history.tokens(0, 96), whole(bench.scheduler.engine, text))

    def test_batches_and_the_exact_grade_compute_for_themselves(self, bench: Bench) -> None:
        text = self.text(64, 1).expand(2, -1, -1)
        for key in (b"a" * 16, b"b" * 16):
            bench.open(key, batch=2, client=b"client")
            bench.put(key, text, 0)
            bench.run()
        assert bench.scheduler.n_reused == 0


class TestHead:
    """Behind the last block, for whoever asks, of all sessions of a pass at once."""

    @pytest.fixture
    def bench(self, tmp_path: Path) -> Bench:
        folder = checkpoints.make("llama", tmp_path, n_layers=3)
        return Bench(
            LoadedSpan(folder, BLOCKS, torch.float32), head=LogitsHead(folder, torch.float32, torch.device("cpu"), 0)
        )

    def test_those_who_ask_get_the_largest_logits_of_what_they_want(self, bench: Bench) -> None:
        asking = {b"a" * 16: 1, b"b" * 16: 4, b"c" * 16: 0, b"d" * 16: None}
        for key, want in asking.items():
            bench.open(key)
            bench.put(key, torch.randn(1, 9, 64), 0, marks=Op(want=want, top=True))
        bench.run()
        head = bench.scheduler._head
        assert head is not None
        for key, want in asking.items():
            if not want:
                assert not any(bench.logits.get(key, ()))  # nothing is wanted, or more than one answer holds
                continue
            (out,) = bench.outputs[key]
            (raw,) = bench.logits[key]
            assert out.shape == (1, want, 64)
            sent = top.unpack_untrusted(raw, want, 320)
            expected = head._ends.logits(out[0], bench.scheduler.engine.layer_arity)
            torch.testing.assert_close(sent.filled(320).gather(1, sent.ids), expected.gather(1, sent.ids))
            assert torch.equal(sent.ids[:, 0], expected.argmax(1))

    def test_who_does_not_ask_gets_none_and_nothing_passes_through(self, bench: Bench) -> None:
        bench.open(b"a" * 16)
        bench.put(b"a" * 16, torch.randn(1, 3, 64), 0, marks=Op(want=1, logits=b"of the client"))
        bench.run()
        assert bench.logits[b"a" * 16] == [b""]

    def test_an_op_that_only_rebuilds_state_gets_none(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        assert bench.scheduler._head is not None
        monkeypatch.setattr(bench.scheduler._head, "largest", lambda rows: pytest.fail("nobody sees these"))
        bench.open(b"a" * 16)
        bench.put(b"a" * 16, torch.randn(1, 3, 64), 0, marks=Op(want=1, top=True, silent_through=1, replay_end=3))
        bench.run()
        assert b"a" * 16 not in bench.logits

    def test_many_rows_are_computed_some_at_a_time(self, bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
        head = bench.scheduler._head
        sizes = list[int]()
        assert head is not None
        joint = head._ends.logits

        def noted(hidden: torch.Tensor, arity: int) -> torch.Tensor:
            sizes.append(len(hidden))
            return joint(hidden, arity)

        monkeypatch.setattr(head._ends, "logits", noted)
        rows = [torch.randn(n, 64) for n in (3, 70, 60)]
        alone = [top.unpack_untrusted(head.largest([of])[0], len(of), 320) for of in rows]
        sizes.clear()
        together = [top.unpack_untrusted(raw, len(of), 320) for raw, of in zip(head.largest(rows), rows, strict=True)]
        assert sizes == [64, 64, 5]
        for one, other in zip(alone, together, strict=True):
            torch.testing.assert_close(one.values, other.values)

    def test_a_head_that_fails_costs_its_logits_only(
        self, bench: Bench, monkeypatch: pytest.MonkeyPatch, nothing_breaks_behind_a_guard: list[logging.LogRecord]
    ) -> None:
        def fail(*fields: object) -> list[bytes]:
            raise RuntimeError("no memory")

        assert bench.scheduler._head is not None
        monkeypatch.setattr(bench.scheduler._head, "largest", fail)
        bench.open(b"a" * 16)
        bench.put(b"a" * 16, torch.randn(1, 3, 64), 0, marks=Op(want=1, top=True))
        bench.run()
        assert bench.logits[b"a" * 16] == [b""]
        assert nothing_breaks_behind_a_guard.pop().message == "a head failed"
