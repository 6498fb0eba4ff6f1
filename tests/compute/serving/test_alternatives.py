"""Alternatives to what was tried: computed behind a part of the cache, beside the op's own tokens, and kept nowhere."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from swarmd.compute.passes.span import LoadedSpan, LoadOptions
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.alternatives import Alternative
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.messages import CachePart, Edit, HandOver, Inherited, Op, Refusal
from swarmd.wire.history import Budget, History, SentOp
from tests import checkpoints
from tests.compute.serving.test_scheduler import BLOCKS, Bench, alike, load_llama, whole
from tests.families import make_named

KEY, OTHER = b"k" * 16, b"o" * 16


@pytest.fixture(scope="module")
def span(tmp_path_factory: pytest.TempPathFactory) -> LoadedSpan:
    return load_llama(tmp_path_factory.mktemp("llama"))


def rows(n: int, seed: int) -> torch.Tensor:
    return torch.randn(1, n, 64, generator=torch.Generator().manual_seed(seed))


def put(
    bench: Bench, kept: torch.Tensor, n_past: int, *others: tuple[int, torch.Tensor], edits: tuple[Edit, ...] = ()
) -> None:
    """Put tokens, and alternatives that each begin behind so many of the session's."""
    bench.seq[KEY] += 1
    places = [torch.arange(n_past, n_past + kept.shape[1])]
    places += [torch.arange(n_before, n_before + other.shape[1]) for n_before, other in others]
    alternatives = tuple(Alternative(n_before, other.shape[1]) for n_before, other in others)
    hidden = torch.cat([kept, *(other for _, other in others)], 1)
    positions = torch.cat(places).to(torch.int32).unsqueeze(0)
    bench.put_op(KEY, SentOp(bench.seq[KEY], edits, hidden, positions, None, alternatives=alternatives))


@pytest.mark.parametrize("n_prompt", [20, 300])
def test_alternatives_are_as_if_they_had_been_said_and_what_follows_as_if_not(span: LoadedSpan, n_prompt: int) -> None:
    bench = Bench(span)
    bench.open(KEY)
    prompt, tried, more = rows(n_prompt, 1), rows(2, 2), rows(1, 3)
    one, longer = rows(1, 4), rows(3, 5)
    bench.put(KEY, prompt, 0)
    bench.run()
    put(bench, tried, n_prompt, (n_prompt, one), (n_prompt - 3, longer))
    put(bench, more, n_prompt + 2, (n_prompt + 1, one))
    bench.run()
    given, behind = bench.outputs[KEY][1:]
    said = whole(span, torch.cat([prompt, tried, more], 1))
    alike(given[:, :2], said[:, n_prompt : n_prompt + 2])
    alike(given[:, 2:3], whole(span, torch.cat([prompt, one], 1))[:, -1:])
    alike(given[:, 3:], whole(span, torch.cat([prompt[:, :-3], longer], 1))[:, -3:])
    alike(behind[:, :1], said[:, -1:])
    alike(behind[:, 1:], whole(span, torch.cat([prompt, tried[:, :1], one], 1))[:, -1:])
    assert not bench.others


def test_a_session_that_shares_its_beginning_has_alternatives_too(span: LoadedSpan) -> None:
    bench = Bench(span)
    prompt, tried, one = rows(320, 1), rows(1, 2), rows(1, 4)
    for key in (OTHER, KEY):
        bench.open(key, client=b"c" * 16)
        bench.put(key, prompt, 0)
        bench.run()
    assert bench.scheduler.n_reused > 0
    put(bench, tried, 320, (320, one))
    put(bench, tried, 321, (320, one), (300, one))
    bench.run()
    expected = whole(span, torch.cat([prompt, one], 1))[:, -1:]
    alike(bench.outputs[KEY][-2][:, 1:], expected)
    alike(bench.outputs[KEY][-1][:, 1:2], expected)
    alike(bench.outputs[KEY][-1][:, 2:], whole(span, torch.cat([prompt[:, :300], one], 1))[:, -1:])


def test_caches_of_8_bits_have_alternatives_too(tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path, n_layers=3)
    loaded = LoadedSpan(folder, BLOCKS, torch.float32, LoadOptions(kv_cache="int8"))
    loaded.self_test()
    bench = Bench(loaded)
    bench.open(KEY)
    prompt, tried, one = rows(20, 1), rows(1, 2), rows(1, 4)
    bench.put(KEY, prompt, 0)
    put(bench, tried, 20, (20, one))
    bench.run()
    again = Bench(loaded)
    again.open(KEY)
    again.put(KEY, prompt, 0)
    again.put(KEY, one, 20)
    again.run()
    alike(bench.outputs[KEY][-1][:, 1:], again.outputs[KEY][-1])


def test_a_family_that_forgets_leaves_them_out_and_says_so(tmp_path: Path) -> None:
    loaded = LoadedSpan(make_named("gemma3_text", tmp_path), BLOCKS, torch.float32)
    loaded.self_test()
    bench = Bench(loaded)
    bench.open(KEY)
    prompt, tried, one = (rows(n, seed)[..., :32] for n, seed in ((20, 1), (2, 2), (1, 3)))
    bench.put(KEY, prompt, 0)
    put(bench, tried, 20, (20, one))
    bench.run()
    assert [out.shape[1] for out in bench.outputs[KEY]] == [20, 2]
    alike(bench.outputs[KEY][-1], whole(loaded, torch.cat([prompt, tried], 1))[:, -2:])


@pytest.mark.parametrize(
    ("others", "why"),
    [
        (((26, rows(1, 4)),), "an alternative to other tokens than the 20 that the session holds"),
        (((20, rows(16, 4)),) * 4, "64 tokens of alternatives among the 65 of an op, which has 64 at most then"),
    ],
)
def test_alternatives_to_what_never_was_are_refused(
    span: LoadedSpan, others: tuple[tuple[int, torch.Tensor], ...], why: str
) -> None:
    bench = Bench(span)
    bench.open(KEY)
    bench.put(KEY, rows(20, 1), 0)
    put(bench, rows(1, 2), 20, *others)
    bench.run()
    (refusal,) = bench.others
    assert isinstance(refusal, Refusal)
    assert refusal.message == why


def test_an_op_of_alternatives_only_is_refused(span: LoadedSpan) -> None:
    bench = Bench(span)
    bench.open(KEY)
    bench.put(KEY, rows(20, 1), 0)
    put(bench, rows(0, 2), 20, (20, rows(1, 3)))
    bench.run()
    assert [type(other) for other in bench.others] == [Refusal]


def test_a_history_keeps_no_alternatives() -> None:
    history = History(False, Budget())
    positions = torch.arange(5, dtype=torch.int32).unsqueeze(0)
    history.add(SentOp(1, (), rows(5, 1), positions, None, alternatives=(Alternative(0, 2),)))
    assert history.n_kept == 3
    hidden, _ = history.placed(0, 9)
    assert torch.equal(hidden, rows(5, 1)[:, :3])
    history.settle(1)
    assert history.n_tokens == 3
    assert torch.equal(history.tokens(0, 3), rows(5, 1)[:, :3])


def test_what_is_handed_over_has_none(span: LoadedSpan) -> None:
    bench = Bench(span)
    bench.open(KEY)
    bench.put(KEY, rows(20, 1), 0)
    put(bench, rows(2, 2), 20, (20, rows(1, 3)))
    bench.run()
    bench.raw.clear()
    bench.feed(messages.encode_frame(HandOver(id=3, session=KEY, start=0, epoch=1)))
    bench.run()
    heir = Bench(span)
    heir.open(KEY, inherit="somebody")
    for raw in bench.raw:
        (frame,) = FrameDecoder().feed_untrusted(raw)
        if isinstance(messages.decode_untrusted(frame.header), CachePart):
            heir.feed(raw)
    heir.run()
    heir.seq[KEY] = 2
    heir.put(KEY, rows(1, 4), 22)
    heir.run()
    alike(heir.outputs[KEY][-1], whole(span, torch.cat([rows(20, 1), rows(2, 2), rows(1, 4)], 1))[:, -1:])
    inherited = [message for message in heir.others if isinstance(message, Inherited)]
    assert [message.tokens for message in inherited] == [22]


def test_a_bound_of_the_wire_holds() -> None:
    raw = msgspec.msgpack.encode(Op(alternatives=(Alternative(0, 17),)))
    with pytest.raises(msgspec.ValidationError):
        msgspec.msgpack.decode(raw, type=Op)
