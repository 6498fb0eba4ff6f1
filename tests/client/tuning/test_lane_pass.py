"""What is under way in one lane, without I/O: what is waited for, what counts of what comes, and what is settled."""

from __future__ import annotations

import pytest
import safetensors.torch
import torch

from swarmd.client.links.client_parameters import TunedParameters
from swarmd.client.tuning.lane_failure import LEFT_OUT_S, LaneFailed, failure_of_refusal
from swarmd.client.tuning.lane_pass import LanePass, LanePasses, MicroBatch
from swarmd.errors import Code, RemoteProtocolError
from swarmd.plan.chains.routing import Hop
from swarmd.plan.trust.blame import Blame
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.messages import Refusal
from swarmd.protocol.wire.tuning import Backward, Forward, Gradients
from swarmd.values import PeerId, Span
from swarmd.wire.micro_batches import backward_frames, forward_frames

KEY = b"l" * 16
A, B = Hop(PeerId("a"), Span(0, 2)), Hop(PeerId("b"), Span(2, 4))
HIDDEN = torch.randn(1, 3, 4)
TUNED = TunedParameters({"w": torch.zeros(1), "v": torch.zeros(2)}, {"w": 0, "v": 3})


class Waiting:
    """The passes of one lane, and how often one of them was done."""

    def __init__(self) -> None:
        self.passes = LanePasses((A, B))
        self.n_done = 0

    def on_done(self) -> None:
        self.n_done += 1

    def forward(self, keep: bool = True) -> LanePass:
        batch = MicroBatch(HIDDEN, torch.zeros(1, 3).int(), None, TUNED, keep=keep)
        return self.passes.begin_forward(batch, self.on_done, None)

    def backward(self, seq: int) -> LanePass:
        return self.passes.begin_backward(seq, HIDDEN, TUNED, self.on_done)

    def come(self, *frames: bytes) -> None:
        for raw in frames:
            (frame,) = FrameDecoder().feed_untrusted(raw)
            message = messages.decode_untrusted(frame.header)
            assert isinstance(message, Forward | Backward | Gradients)
            self.passes.take(message, frame.payload)


def output(seq: int, values: torch.Tensor = HIDDEN) -> list[bytes]:
    return list(forward_frames(Forward(KEY, 4, seq), 4, values, None, "raw"))


def gradients(seq: int, start: int, **tensors: torch.Tensor) -> bytes:
    return messages.encode_frame(Gradients(KEY, start, seq), safetensors.torch.save(tensors))


def test_an_output_ends_a_forward_and_what_comes_twice_is_nobodys() -> None:
    lane = Waiting()
    entered = lane.forward()
    lane.come(*output(1, 2 * HIDDEN))
    assert lane.n_done == 1
    assert torch.equal(entered.answer()[0], 2 * HIDDEN)
    lane.passes.leave(entered, is_held=True)
    lane.come(*output(1), *output(7))
    assert lane.n_done == 1


def test_a_backward_waits_for_each_hops_gradients_in_any_order() -> None:
    lane = Waiting()
    entered = lane.backward(1)
    lane.come(gradients(1, 2, v=torch.ones(2)))
    lane.come(*backward_frames(KEY, 0, 1, 3 * HIDDEN, "raw"))
    assert lane.n_done == 0
    lane.come(gradients(1, 0, w=torch.ones(1)))
    assert lane.n_done == 1
    values, by_name = entered.answer()
    assert torch.allclose(values, 3 * HIDDEN)
    assert by_name.keys() == {"w", "v"}
    lane.come(gradients(1, 0, w=torch.ones(1)))
    assert lane.n_done == 1, "a hop gives its gradients once"


@pytest.mark.parametrize(
    "tensors",
    [{"w": torch.ones(2)}, {"v": torch.ones(2)}, {"w": torch.full((1,), torch.nan)}, {"w": torch.ones(1).int()}],
)
def test_gradients_of_other_parameters_shapes_or_types_are_no_honest_hops(tensors: dict[str, torch.Tensor]) -> None:
    lane = Waiting()
    lane.backward(1)
    with pytest.raises(RemoteProtocolError):
        lane.come(gradients(1, 0, **tensors))


def test_more_than_was_waited_for_is_refused_before_it_is_kept() -> None:
    lane = Waiting()
    lane.forward()
    with pytest.raises(RemoteProtocolError, match="expected"):
        lane.come(*output(1, torch.zeros(1, 4, 4)))
    lane.backward(1)
    with pytest.raises(RemoteProtocolError, match="more than there can be"):
        lane.come(messages.encode_frame(Gradients(KEY, 0, 1), bytes(100_000)))


def test_values_that_are_not_finite_fail_the_micro_batch_and_name_who_gave_them() -> None:
    lane = Waiting()
    entered = lane.forward()
    lane.come(*output(1, HIDDEN * float("nan")))
    assert lane.n_done == 1
    with pytest.raises(LaneFailed, match="not finite"):
        entered.answer()


def test_hops_may_forget_what_is_settled_and_nothing_that_may_come_back() -> None:
    lane = Waiting()
    first, second = lane.forward(), lane.forward()
    assert lane.passes.settled == 0
    lane.passes.leave(first, is_held=True)
    lane.passes.leave(second, is_held=True)
    lane.passes.leave(lane.backward(1), is_held=False)
    assert lane.passes.settled == 1
    lane.forward(keep=False)
    assert lane.passes.settled == 1
    lane.passes.live.discard(2)
    assert lane.passes.settled == 2, "all but the newest, which is under way"


def test_a_lane_that_is_over_fails_all_with_the_first_reason() -> None:
    lane = Waiting()
    entered = lane.forward()
    lane.passes.fail_all(LaneFailed("first"))
    lane.passes.fail_all(LaneFailed("second"))
    with pytest.raises(LaneFailed, match="first"):
        entered.answer()


def test_what_a_hop_cannot_send_its_neighbour_goes_by_the_client() -> None:
    passes = Waiting().passes
    assert passes.receiver(Forward(KEY, 4, 1)) is None
    assert passes.receiver(Backward(KEY, 0, 1)) is None
    assert passes.receiver(Forward(KEY, 2, 1)) == B
    for message in (Forward(KEY, 3, 1), Backward(KEY, 2, 1)):
        with pytest.raises(RemoteProtocolError, match="no hop of this lane"):
            passes.receiver(message)


def refused(code: Code, start: int, is_backward: bool = False) -> LaneFailed:
    return failure_of_refusal((A, B), Refusal(code=code.value, start=start), is_backward)


def test_values_that_are_not_finite_are_the_fault_of_who_gave_them() -> None:
    assert refused(Code.NOT_FINITE, 2).peers == ("a",)
    assert refused(Code.NOT_FINITE, 0).peers == (), "the client gave them"
    assert refused(Code.NOT_FINITE, 2, is_backward=True).peers == ("b",)


def test_what_is_not_held_is_nobodys_fault_and_what_is_full_ends_no_lane() -> None:
    lacking = refused(Code.NOT_HELD, 2)
    assert (lacking.peers, lacking.is_over) == ((), False)
    full = refused(Code.NO_CAPACITY, 2)
    assert (full.peers, full.is_over, full.blame) == (("b",), False, Blame.UNAVAILABLE)
    lost = refused(Code.SESSION_LOST, 0)
    assert lost.is_over
    assert lost.for_s < LEFT_OUT_S, "it is back soon"
    assert refused(Code.TOO_LONG, 0).is_final
