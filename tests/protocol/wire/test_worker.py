"""What a daemon and its worker can say, each understands."""

from __future__ import annotations

import inspect

import pytest

from swarmd.protocol.fields import Message
from swarmd.protocol.wire import messages, worker
from swarmd.protocol.wire.frames import FrameDecoder

DEFINED = [
    kind
    for _, kind in inspect.getmembers(worker, inspect.isclass)
    if issubclass(kind, Message) and kind.__module__ == worker.__name__
]


@pytest.mark.parametrize("kind", DEFINED, ids=lambda kind: kind.__name__)
def test_whatever_is_defined_is_understood(kind: type[Message]) -> None:
    (frame,) = FrameDecoder().feed_untrusted(messages.encode_frame(kind()))
    assert worker.decode(frame.header) == kind()
