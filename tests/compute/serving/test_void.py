"""Ops that are void: what is not computed yet never is, what follows is right, and every hop counts alike."""

from __future__ import annotations

import msgspec
import pytest
import torch

from swarmd.compute.passes.span import LoadedSpan
from swarmd.protocol.fields import MOST_ABSENT
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.messages import Edit, Op, Refusal, Replay, Void
from swarmd.wire.history import SentOp
from swarmd.wire.ops import encode_op
from tests.compute.serving.test_scheduler import Bench, alike, load_llama, whole

KEY = b"k" * 16


@pytest.fixture(scope="module")
def span(tmp_path_factory: pytest.TempPathFactory) -> LoadedSpan:
    return load_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def bench(span: LoadedSpan) -> Bench:
    bench = Bench(span)
    bench.open(KEY)
    return bench


def void(bench: Bench, first: int, last: int) -> None:
    bench.feed(messages.encode_frame(Void(session=KEY, start=0, epoch=1, first=first, last=last)))


def rows(n: int, seed: int) -> torch.Tensor:
    return torch.randn(1, n, 64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("when", ["before it comes", "while it waits", "while it is begun", "when it was computed"])
def test_what_follows_a_void_op_is_as_if_it_had_never_been(span: LoadedSpan, bench: Bench, when: str) -> None:
    prompt, tried, more, right = rows(6, 1), rows(3, 2), rows(2, 3), rows(2, 4)
    bench.put(KEY, prompt, 0)
    bench.run()
    if when == "before it comes":
        void(bench, 2, 3)
    bench.put(KEY, tried, 6)
    if when == "while it is begun":
        void(bench, 2, 3)
    bench.put(KEY, more, 9)
    if when == "while it waits":
        void(bench, 3, 3)
    if when == "when it was computed":
        bench.run()
        void(bench, 2, 3)
    bench.put(KEY, right, 6, Edit(crop=5))
    bench.run()
    n_computed = {"while it waits": 3, "when it was computed": 5}.get(when, 0)
    given = torch.cat(bench.outputs[KEY], 1)
    assert given.shape[1] == 6 + n_computed + 2, "nothing else was computed"
    expected = whole(span, torch.cat([prompt, right], 1))
    alike(given[:, -2:], expected[:, -2:])
    absent = [message.absent for message in bench.others if isinstance(message, Op)]
    assert sum(absent) == 5 - n_computed, "the next hop counts them all the same"


def test_only_what_is_void_is_dropped(span: LoadedSpan, bench: Bench) -> None:
    prompt, first, second = rows(6, 1), rows(3, 2), rows(2, 3)
    bench.put(KEY, prompt, 0)
    bench.put(KEY, first, 6)
    bench.put(KEY, second, 9)
    void(bench, 3, 3)
    bench.run()
    alike(torch.cat(bench.outputs[KEY], 1), whole(span, torch.cat([prompt, first], 1)))


def test_an_op_behind_void_tokens_has_to_crop_them_and_a_refusal_changes_nothing(
    span: LoadedSpan, bench: Bench
) -> None:
    prompt, right = rows(6, 1), rows(2, 4)
    bench.put(KEY, prompt, 0)
    void(bench, 2, 2)
    bench.put(KEY, rows(3, 2), 6)
    bench.put(KEY, rows(2, 3), 9, Edit(crop=1))
    bench.run()
    refusals = [message for message in bench.others if isinstance(message, Refusal)]
    assert [refusal.message for refusal in refusals] == [
        "tokens behind 2 that are void: a crop has to take those away first"
    ]
    bench.put(KEY, right, 6, Edit(crop=3))
    bench.run()
    alike(bench.outputs[KEY][-1], whole(span, torch.cat([prompt, right], 1))[:, -2:])


def test_a_successor_that_is_sent_everything_again_counts_alike(span: LoadedSpan, bench: Bench) -> None:
    """It is brought up to date in the midst of void ops; what follows is for it as for the one before."""
    prompt, right = rows(6, 1), rows(2, 4)
    bench.put(KEY, prompt, 0)
    void(bench, 2, 2)
    bench.put(KEY, rows(3, 2), 6)
    bench.run()
    bench.raw.clear()
    bench.feed(messages.encode_frame(Replay(id=7, session=KEY, start=0, epoch=1, have=None)))
    bench.run()
    successor = Bench(span)  # plays the next hop: it holds the same blocks, and that is all the same here
    successor.open(KEY)
    bench.put(KEY, right, 6, Edit(crop=3))
    bench.run()
    for raw in bench.raw:
        (frame,) = FrameDecoder().feed_untrusted(raw)
        message = messages.decode_untrusted(frame.header)
        if isinstance(message, Op):
            for_it = msgspec.structs.replace(message, start=0)
            successor.feed(messages.encode_frame(for_it, frame.payload))
    successor.run()
    first = whole(span, torch.cat([prompt, right], 1))
    alike(torch.cat(successor.outputs[KEY], 1)[:, -2:], whole(span, first)[:, -2:])


def test_more_absent_tokens_than_anybody_tries_are_refused(bench: Bench) -> None:
    bench.put(KEY, rows(4, 1), 0)
    for _ in range(2):
        bench.seq[KEY] += 1
        sent = SentOp(bench.seq[KEY], (), None, None, None, n_absent=MOST_ABSENT)
        bench.feed(encode_op(Op(session=KEY, epoch=1), sent, "raw"))
    bench.run()
    refusals = [message.message for message in bench.others if isinstance(message, Refusal)]
    assert refusals == ["4 tokens and 4096 more, this session reserved 3000"] * 2
