"""Forward and backward in a worker: equal to autograd, bounded in memory, and nothing from a client is believed."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors.torch
import torch

from swarmd.compute.passes.span import LoadedSpan
from swarmd.compute.serving.fine_tuning import Training
from swarmd.errors import Code
from swarmd.protocol.fields import TensorMeta
from swarmd.protocol.wire import messages, worker
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.messages import AnyMessage, Refusal
from swarmd.protocol.wire.tuning import Backward, Forward, Gradients, OpenLane, PutTuned, TunedHeld
from swarmd.values import Span
from swarmd.wire.micro_batches import backward_frames, forward_frames, pieces
from swarmd.wire.tensors import unpack_untrusted, unpack_values_untrusted
from tests import checkpoints

LANE = b"l" * 16
ROOM = 1 << 30


def load(folder: Path, kv_cache: str = "none") -> LoadedSpan:
    torch.set_num_threads(1)
    checkpoint = checkpoints.make("llama", folder, n_layers=4)
    loaded = LoadedSpan(checkpoint, Span(0, 4), torch.float32, kv_cache=kv_cache)
    loaded.self_test()
    return loaded


@pytest.fixture(scope="module")
def span(tmp_path_factory: pytest.TempPathFactory) -> LoadedSpan:
    return load(tmp_path_factory.mktemp("m"))


class Bench:
    """A worker's training with one lane over some of its blocks, driven by hand."""

    def __init__(self, span: LoadedSpan, limit_bytes: int = ROOM, hop: Span | None = None) -> None:
        self.training = Training(span, limit_bytes)
        self.hop = hop or span.span
        self.client = b"c"
        self.n_sent = 0
        self.answers: list[tuple[AnyMessage, memoryview]] = []
        self.open(LANE)

    def open(self, lane: bytes, client: bytes = b"c") -> None:
        self.feed(messages.encode_frame(OpenLane(session=lane, start=self.hop.start, end=self.hop.end, client=client)))

    def feed(self, *raws: bytes) -> None:
        for raw in raws:
            (frame,) = FrameDecoder().feed_untrusted(raw)
            self.n_sent += 1
            answers = self.training.take(worker.decode(frame.header), frame)
            assert answers is not None
            self.hear(list(answers))

    def hear(self, raws: list[bytes]) -> None:
        for raw in raws:
            (frame,) = FrameDecoder().feed_untrusted(raw)
            self.answers.append((worker.decode(frame.header), frame.payload))

    def run(self) -> list[tuple[AnyMessage, memoryview]]:
        """Compute all that waits; returns what was answered since the last time."""
        while self.training.has_work:
            self.hear(list(self.training.run_slice()))
        assert self.training.handled == self.n_sent
        answers, self.answers = self.answers, []
        return answers

    def forward(self, seq: int, hidden: torch.Tensor, mask: torch.Tensor | None = None, **fields: object) -> None:
        b, t, _ = hidden.shape
        places = torch.arange(t, dtype=torch.int32).expand(b, t), mask
        message = Forward(session=LANE, seq=seq, **{"keep": True, **fields})  # type: ignore[arg-type]
        self.feed(*forward_frames(message, self.hop.start, hidden, places, "raw"))

    def backward(self, seq: int, gradient: torch.Tensor, codec: str = "raw") -> None:
        self.feed(*backward_frames(LANE, self.hop.end, seq, gradient, codec))

    def put(self, tensors: dict[str, torch.Tensor], version: bytes = b"v" * 32) -> list[tuple[AnyMessage, memoryview]]:
        for number, n, piece in pieces(safetensors.torch.save(tensors)):
            put = PutTuned(7, version, self.hop.start, self.hop.end, (number, n), self.client)
            self.feed(messages.encode_frame(put, piece))
        return self.run()


def refused(answers: list[tuple[AnyMessage, memoryview]]) -> Code:
    ((message, _),) = answers
    assert isinstance(message, Refusal), message
    return Code(message.code)


def values(answers: list[tuple[AnyMessage, memoryview]], kind: type) -> torch.Tensor:
    ((message, payload),) = [(m, p) for m, p in answers if isinstance(m, kind)]
    assert isinstance(message, Forward | Backward)
    if message.tensor.has_positions:
        return unpack_untrusted(message.tensor, payload)[0]
    out = unpack_values_untrusted(message.tensor, payload)
    return out / message.scale if isinstance(message, Backward) else out


def by_autograd(
    span: LoadedSpan, hidden: torch.Tensor, gradient: torch.Tensor, hop: Span | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    entering = hidden.clone().requires_grad_()
    positions = torch.arange(hidden.shape[1]).expand(hidden.shape[:2])
    out = span.forward_with_grad(entering, positions, None, hop)
    return out.detach(), torch.autograd.grad(out, entering, gradient)[0]


@pytest.mark.parametrize("has_room", [True, False])  # for graphs, or they are computed again
def test_gradients_equal_autograd_with_and_without_graphs(span: LoadedSpan, has_room: bool) -> None:
    hidden = torch.randn(2, 9, 64)
    gradient = torch.randn(2, 9, 64)
    bench = Bench(span, hop=Span(1, 3), limit_bytes=ROOM if has_room else 30_000)
    bench.forward(1, hidden)
    out = values(bench.run(), Forward)
    assert bench.training._lanes[LANE, 1].batches[1].is_whole == has_room
    bench.backward(1, gradient)
    expected = by_autograd(span, hidden, gradient, bench.hop)
    torch.testing.assert_close(out, expected[0])
    torch.testing.assert_close(values(bench.run(), Backward), expected[1], rtol=1e-5, atol=1e-6)
    assert not bench.training._lanes[LANE, 1].batches


def test_padding_counts(span: LoadedSpan) -> None:
    hidden = torch.randn(2, 6, 64)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6], dtype=torch.uint8)
    bench = Bench(span)
    bench.forward(0, hidden, mask)
    padded = values(bench.run(), Forward)
    positions = torch.arange(6).expand(2, 6)
    torch.testing.assert_close(padded, span.forward_with_grad(hidden, positions, mask.long()).detach())
    assert not torch.equal(padded, span.forward_with_grad(hidden, positions).detach())


def test_small_gradients_survive_half_precision(span: LoadedSpan) -> None:
    hidden = torch.randn(1, 5, 64)
    gradient = 1e-9 * torch.randn(1, 5, 64)
    bench = Bench(span)
    bench.forward(0, hidden)
    bench.run()
    bench.backward(0, gradient, "float16")
    actual = values(bench.run(), Backward)
    expected = by_autograd(span, hidden, gradient)[1]
    assert (actual - expected).norm() / expected.norm() < 1e-3


def test_long_micro_batches_travel_in_parts(span: LoadedSpan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmd.wire.micro_batches.PART_BYTES", 2_000)
    hidden = torch.randn(1, 40, 64)
    gradient = torch.randn(1, 40, 64)
    bench = Bench(span)
    bench.forward(0, hidden)
    n_parts = len(bench.run())
    bench.backward(0, gradient)
    assert len(bench.run()) == n_parts > 3
    bench.forward(1, hidden)
    bench.answers.clear()
    frames = list(
        forward_frames(Forward(session=LANE, seq=2, keep=True), 0, hidden, (torch.zeros(1, 40).int(), None), "raw")
    )
    bench.feed(frames[0], frames[2])
    assert refused([(m, p) for m, p in bench.run() if not isinstance(m, Forward)]) is Code.OP_GAP


@pytest.mark.parametrize("kv_cache", ["none", "int8"])
def test_lora_and_prefix_get_the_gradients_of_autograd(kv_cache: str, tmp_path: Path) -> None:
    span = load(tmp_path, kv_cache)
    torch.manual_seed(1)
    hidden = torch.randn(2, 5, 64)
    gradient = torch.randn(2, 5, 64)
    tensors = {}
    for block in range(4):
        tensors |= {
            f"model.layers.{block}.self_attn.q_proj.lora_A": torch.randn(3, 64) / 8,
            f"model.layers.{block}.self_attn.q_proj.lora_B": torch.randn(64, 3) / 8,
            f"{block}.keys": torch.randn(1, 2, 4, 16),
            f"{block}.values": torch.randn(1, 2, 4, 16),
        }
    bench = Bench(span)
    ((held, _),) = bench.put(tensors)
    assert isinstance(held, TunedHeld)
    places = torch.arange(4, 9, dtype=torch.int32).expand(2, 5)
    message = Forward(session=LANE, seq=0, keep=True, tuned=b"v" * 32)
    bench.feed(*forward_frames(message, 0, hidden, (places, None), "raw"))
    out = values(bench.run(), Forward)
    bench.backward(0, gradient)
    answers = bench.run()
    actual = safetensors.torch.load(b"".join(p for m, p in answers if isinstance(m, Gradients)))

    model = span.model
    leaves = {k: v.clone().requires_grad_() for k, v in tensors.items()}
    cache = span.new_cache(with_gradients=True)
    entering = hidden.clone().requires_grad_()
    for block, layer in enumerate(cache.owned):
        layer.update(leaves[f"{block}.keys"].expand(2, -1, -1, -1), leaves[f"{block}.values"].expand(2, -1, -1, -1))
    names = [n for n in leaves if n.endswith("lora_A")]
    hooks = []
    for name in names:
        a = leaves[name]
        b = leaves[name.replace("lora_A", "lora_B")]
        module = model.get_submodule(name.removesuffix(".lora_A"))
        hooks.append(module.register_forward_hook(lambda _, x, y, a=a, b=b: y + x[0] @ a.T @ b.T))
    expected = span.forward_with_grad(entering, places, None, None, None, cache)
    for hook in hooks:
        hook.remove()
    reference = dict(
        zip(["", *leaves], torch.autograd.grad(expected, [entering, *leaves.values()], gradient), strict=True)
    )
    torch.testing.assert_close(out, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(values(answers, Backward), reference.pop(""), rtol=1e-4, atol=1e-5)
    assert actual.keys() == reference.keys()
    for name, value in reference.items():
        assert (actual[name] - value).norm() / value.norm() < 1e-5, name


def test_what_gave_way_is_said_to_be_gone(span: LoadedSpan) -> None:
    hidden = torch.randn(1, 8, 64)
    n_fit = 5
    bench = Bench(span, limit_bytes=n_fit * hidden.numel() * 4)
    for seq in range(1, n_fit + 5):
        bench.forward(seq, hidden)
    bench.run()
    assert sorted(bench.training._lanes[LANE, 0].batches) == [1, 2, 3, 4, 5], "the first come back first"
    bench.backward(n_fit + 2, hidden)
    assert refused(bench.run()) is Code.NOT_HELD
    bench.backward(1, hidden)
    assert not isinstance(bench.run()[0][0], Refusal)
    bench.backward(1, hidden)
    assert refused(bench.run()) is Code.NOT_HELD, "a gradient is given once"
    bench.forward(20, hidden, settled=4)
    bench.run()
    assert sorted(bench.training._lanes[LANE, 0].batches) == [5, 20], "nothing of what is settled is kept"


def test_what_cannot_be_used_is_refused_with_its_reason(span: LoadedSpan) -> None:
    bench = Bench(span)
    hidden = torch.randn(1, 4, 64)
    bench.forward(0, torch.full((1, 4, 64), float("nan")))
    assert refused(bench.run()) is Code.NOT_FINITE
    bench.forward(0, torch.randn(1, 4, 32))
    assert refused(bench.run()) is Code.BAD_SHAPE
    bench.forward(0, hidden, tuned=b"unknown")
    assert refused(bench.run()) is Code.NOT_HELD
    bench.feed(messages.encode_frame(Forward(session=b"?" * 16, tensor=TensorMeta(1, 1, 64)), bytes(260)))
    assert refused(bench.run()) is Code.NO_SESSION
    bench.feed(messages.encode_frame(Forward(session=LANE, tensor=TensorMeta(1, 1, 64)), bytes(7)))
    assert refused(bench.run()) is Code.MALFORMED
    bench.forward(1, hidden)
    bench.run()
    bench.backward(1, torch.full((1, 4, 64), float("inf")))
    assert refused(bench.run()) is Code.NOT_FINITE
    bench.forward(2, hidden)
    bench.run()
    bench.backward(2, torch.randn(1, 3, 64))
    assert refused(bench.run()) is Code.BAD_SHAPE
    bench.training._reader.max_tokens = 3
    bench.forward(3, hidden)
    assert refused(bench.run()) is Code.TOO_LONG


@pytest.mark.parametrize(
    "tensors",
    [
        {"model.layers.0.self_attn.q_proj.lora_A": torch.zeros(3, 64)},
        {"model.layers.0.self_attn.q_proj.lora_B": torch.zeros(64, 3)},
        {"lm_head.lora_A": torch.zeros(3, 64), "lm_head.lora_B": torch.zeros(320, 3)},
        {"0.keys": torch.zeros(1, 2, 4, 16)},
        {f"{b}.{n}": torch.zeros(1, 3, 4, 16) for b in range(4) for n in ("keys", "values")},
        {f"{b}.{n}": torch.zeros(1, 2, 4 + b, 16) for b in range(4) for n in ("keys", "values")},
        {"nonsense": torch.zeros(1)},
        {"9" * 5_000 + ".keys": torch.zeros(1)},
        {f"0{b}.{n}": torch.zeros(1, 2, 4, 16) for b in range(4) for n in ("keys", "values")},
        {
            "model.layers.0.self_attn.q_proj.lora_A": torch.zeros(3, 64),
            "model.layers.0.self_attn.q_proj.lora_B": torch.zeros(64, 3, dtype=torch.float16),
        },
        {
            "model.layers.0.self_attn.q_proj.lora_A": torch.full((3, 64), float("nan")),
            "model.layers.0.self_attn.q_proj.lora_B": torch.zeros(64, 3),
        },
    ],
)
def test_parameters_that_do_not_fit_are_refused(span: LoadedSpan, tensors: dict[str, torch.Tensor]) -> None:
    assert refused(Bench(span).put(tensors)) is Code.UNSUPPORTED


def test_parameters_are_each_clients_own(span: LoadedSpan) -> None:
    bench = Bench(span)
    pair = {
        f"model.layers.0.self_attn.q_proj.lora_{x}": torch.ones(*shape) for x, *shape in (("A", 3, 64), ("B", 64, 3))
    }
    bench.put(pair)
    bench.open(b"m" * 16, client=b"another")
    places = (torch.zeros(1, 4).int(), None)
    message = Forward(session=b"m" * 16, tuned=b"v" * 32)
    bench.feed(*forward_frames(message, 0, torch.randn(1, 4, 64), places, "raw"))
    assert refused(bench.run()) is Code.NOT_HELD


def test_what_clients_give_is_bounded_for_each_and_nobody_drives_another_out(span: LoadedSpan) -> None:
    bench = Bench(span, limit_bytes=200_000)
    pair = {
        f"model.layers.0.self_attn.q_proj.lora_{x}": torch.ones(*shape) for x, *shape in (("A", 9, 64), ("B", 64, 9))
    }
    bench.client = b"honest"
    bench.put(pair, b"h" * 32)
    bench.client = b"greedy"
    for number in range(100):
        bench.put(pair, bytes([number]) * 32)
    store = bench.training._tuned
    assert (b"honest", b"h" * 32, span.span) in store._held
    assert sum(t.n_bytes for (client, *_), t in store._held.items() if client == b"greedy") <= 100_000
    large = {f"model.layers.0.self_attn.q_proj.lora_{x}": torch.ones(*s) for x, *s in (("A", 300, 64), ("B", 64, 300))}
    assert refused(bench.put(large, b"l" * 32)) is Code.TOO_LONG
    bench.feed(messages.encode_frame(PutTuned(0, b"x" * 32, 0, 4, (0, 2), b"gone"), bytes(90_000)))
    bench.client = b"late"
    assert isinstance(bench.put(pair, b"z" * 32)[0][0], TunedHeld), "what was never finished is in nobody's way"


def test_three_clients_with_little_room_get_the_gradients_of_autograd(span: LoadedSpan) -> None:
    hidden = torch.randn(1, 6, 64)
    gradient = torch.randn(1, 6, 64)
    expected = by_autograd(span, hidden, gradient)[1]
    bench = Bench(span, limit_bytes=200_000)
    lanes = [bytes([n]) * 16 for n in range(3)]
    for lane in lanes:
        bench.open(lane, client=lane)
    places = (torch.arange(6, dtype=torch.int32).expand(1, 6), None)
    for seq in range(1, 5):
        for lane in lanes:
            bench.feed(*forward_frames(Forward(session=lane, seq=seq, keep=True), 0, hidden, places, "raw"))
    bench.run()
    for seq in range(1, 5):
        for lane in lanes:
            bench.feed(*backward_frames(lane, 4, seq, gradient, "raw"))
    for message, payload in bench.run():
        assert isinstance(message, Backward), message
        actual = unpack_values_untrusted(message.tensor, payload)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_clients_take_turns(span: LoadedSpan) -> None:
    bench = Bench(span)
    bench.open(b"m" * 16, client=b"another")
    hidden = torch.randn(2, 64, 64)
    places = (torch.zeros(2, 64).int(), None)
    for seq in range(6):
        bench.forward(seq, hidden)
    bench.feed(*forward_frames(Forward(session=b"m" * 16), 0, hidden, places, "raw"))
    sessions = [m.session for m, _ in bench.run() if isinstance(m, Forward)]
    assert b"m" * 16 in sessions[:3], "the second client waits for one micro-batch of the first, not for six"


def test_families_of_the_issue_give_gradients(tmp_path: Path) -> None:
    for family in ("gpt2", "bloom", "gemma3_text", "qwen3_moe"):
        folder = checkpoints.make(family, tmp_path / family, n_layers=2)
        loaded = LoadedSpan(folder, Span(0, 2), torch.float32)
        loaded.self_test()
        hidden = torch.randn(2, 12, 64)
        gradient = torch.randn(2, 12, 64)
        bench = Bench(loaded)
        bench.forward(0, hidden)
        bench.run()
        bench.backward(0, gradient)
        expected = by_autograd(loaded, hidden, gradient)[1]
        assert (values(bench.run(), Backward) - expected).norm() / expected.norm() < 1e-5, family
