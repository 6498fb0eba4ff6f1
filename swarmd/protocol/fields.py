"""The bounded types that headers and records are made of, and what all headers have in common."""

from __future__ import annotations

from typing import Annotated

import msgspec

Text = Annotated[str, msgspec.Meta(max_length=512)]
Name = Annotated[str, msgspec.Meta(max_length=128)]
Weight = Annotated[float, msgspec.Meta(ge=0.01, le=100)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**53)]
Block = Annotated[int, msgspec.Meta(ge=0, le=4096)]
MAX_STAGES = 32  # of blocks, of one run; each has a ledger of its own, which every anchor keeps
Stage = Annotated[int, msgspec.Meta(ge=0, le=MAX_STAGES)]
"""A stage of a run: of the model's ends (embedding and head) 0, of blocks from 1 on."""
SessionKey = Annotated[bytes, msgspec.Meta(min_length=16, max_length=16)]
Blob = Annotated[bytes, msgspec.Meta(max_length=16_384)]
Addresses = Annotated[tuple[Text, ...], msgspec.Meta(max_length=16)]
Certificate = Annotated[tuple[Blob, ...], msgspec.Meta(max_length=6)]
Needs = Annotated[tuple[Name, ...], msgspec.Meta(max_length=32)]
Digest = Annotated[bytes, msgspec.Meta(max_length=32)]
Index = Annotated[int, msgspec.Meta(ge=0, le=65_535)]
Part = tuple[Index, Annotated[int, msgspec.Meta(ge=1, le=65_536)]]
"""Which part, and of how many."""
Rows = Annotated[tuple[Index, ...], msgspec.Meta(max_length=1024)]

MOST_ABSENT = 4_096  # tokens of a session that are void and not cropped yet: many times what is tried ahead
Absent = Annotated[int, msgspec.Meta(ge=0, le=MOST_ABSENT)]
MOST_HOPS_TIMED = 64  # of an op; those behind them tell nothing
MOST_LOGITS = 256  # of a token: sampling looks at 50 where nobody says otherwise
MOST_LOGITS_BYTES = 40_000  # of one op, two thirds of a header: those of 19 tokens
Logits = Annotated[bytes, msgspec.Meta(max_length=MOST_LOGITS_BYTES)]
HopTime = tuple[Block, Count, Count]
"""A hop's first block, microseconds of waiting, of computing."""
HopTimes = Annotated[tuple[HopTime, ...], msgspec.Meta(max_length=MOST_HOPS_TIMED)]


class Message(msgspec.Struct, tag_field="t", frozen=True, omit_defaults=True):
    """What every header has in common: a tag."""


class Request(Message, frozen=True):
    """What is answered: the reply names ``id``. Whoever sends it (``net.rpc``, ``node.worker``) numbers it."""

    id: Count = 0


class TensorMeta(msgspec.Struct, frozen=True, array_like=True):
    """Shape [b, t, d] and dtype of the hidden states that open a payload, and how they are coded there.

    Mask and positions, where there are any, follow them. The codec may differ from op to op: an encoder falls back to
    "raw" for values that its session's codec cannot hold.
    """

    b: Annotated[int, msgspec.Meta(ge=1, le=1024)]
    t: Annotated[int, msgspec.Meta(ge=1, le=65_536)]
    d: Annotated[int, msgspec.Meta(ge=1, le=65_536)]
    dtype: Name = "float32"
    has_mask: bool = False
    codec: Name = "raw"
    has_positions: bool = True
