"""Headers of fine-tuning: lanes, micro-batches through them and back, a client's own parameters. docs/protocol.md."""

from __future__ import annotations

from typing import Annotated

import msgspec

from swarmd.protocol.fields import (
    Addresses,
    Blob,
    Block,
    Count,
    Digest,
    Message,
    Name,
    Needs,
    Part,
    Request,
    SessionKey,
    TensorMeta,
    Weight,
)


class OpenLane(Request, tag="open_lane", frozen=True):
    """Take micro-batches of one client through blocks [start, end): forward and backward, without caches.

    ``client`` and ``weight`` are set by the daemon for its worker, as in ``OpenSession``. With ``changes`` rows that
    were sent before may travel as changes (wire.changes). Answered by ``Opened``.
    """

    session: SessionKey = b"\0" * 16
    model: Name = ""
    start: Block = 0
    end: Block = 0
    dtype: Name = "float32"
    predecessor: Name = ""
    successor: Name = ""
    successor_addresses: Addresses = ()
    client: Blob = b""
    codec: Name = "raw"
    needs: Needs = ()
    changes: bool = False
    weight: Weight = 1.0


class CloseLane(Message, tag="close_lane", frozen=True):
    """The client is done with a lane's hop."""

    session: SessionKey = b"\0" * 16
    start: Block = 0


class MicroBatchRow(msgspec.Struct, frozen=True, array_like=True):
    """A row of a micro-batch by its name, and how often it was sent over this link before: then it is a change."""

    id: Annotated[bytes, msgspec.Meta(max_length=16)]
    times: Count = 0


class Forward(Message, tag="forward", frozen=True):
    """Hidden states of micro-batch ``seq`` in front of block ``start``, for the hop that starts there (or the client).

    ``part`` (number, how many) cuts long ones along t. With ``keep`` a backward will follow; of those up to ``settled``
    nothing is needed any more. ``tuned`` is the version of the client's own parameters that take part. ``rows`` come
    with the first part, where the lane knows changes. Payload: as an op's; what returns to the client has no positions.
    """

    session: SessionKey = b"\0" * 16
    start: Block = 0
    seq: Count = 0
    part: Part = (0, 1)
    tensor: TensorMeta = TensorMeta(1, 1, 1)
    keep: bool = False
    tuned: Digest = b""
    settled: Count = 0
    rows: Annotated[tuple[MicroBatchRow, ...], msgspec.Meta(max_length=1_024)] = ()


class Backward(Message, tag="backward", frozen=True):
    """The gradient by the hidden states in front of block ``start``, for the hop that ends there (or the client).

    The gradient is what the payload holds divided by ``scale``, which keeps small ones within half precision.
    """

    session: SessionKey = b"\0" * 16
    start: Block = 0
    seq: Count = 0
    part: Part = (0, 1)
    tensor: TensorMeta = TensorMeta(1, 1, 1)
    scale: Annotated[float, msgspec.Meta(gt=0, le=1e38)] = 1.0


class Gradients(Message, tag="gradients", frozen=True):
    """A hop gives the client the gradient of its own parameters for one micro-batch: a piece of safetensors."""

    session: SessionKey = b"\0" * 16
    start: Block = 0
    seq: Count = 0
    part: Part = (0, 1)


class PutTuned(Request, tag="put_tuned", frozen=True):
    """A client gives its own parameters for blocks [start, end) of a model, known by ``version``.

    The payload is a piece of a safetensors file. Servers only cache them, apart for each client. ``id`` comes with the
    last piece and is answered by ``TunedHeld``.
    """

    version: Digest = b""
    start: Block = 0
    end: Block = 0
    part: Part = (0, 1)
    client: Blob = b""
    model: Name = ""


class TunedHeld(Message, tag="tuned_held", frozen=True):
    """All pieces of a ``PutTuned`` are here."""

    re: Count = 0
