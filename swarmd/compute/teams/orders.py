"""What the leader of a team has its followers do, in the order in which it does so itself; and how that travels.

In msgpack: between processes of one machine with a length before it, over a socketpair that nobody else has; between
machines over a link (``links``).
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable

import msgspec
import torch

from swarmd.compute.teams.links import FrameKind, Link
from swarmd.protocol.wire.teams import TeamSeat
from swarmd.protocol.wire.worker import LoadSpan
from swarmd.values import Span
from swarmd.wire.tensors import DTYPES, raw_bytes

LENGTH = struct.Struct("<I")
OF_NAMES = {**DTYPES, "int64": torch.int64}


class Numbers(msgspec.Struct, array_like=True):
    """A tensor: its type, shape and bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Take(msgspec.Struct, tag="take"):
    """Be this member of a team of these weights: its slices of what ``load`` says.

    ``seats``: of all members behind the leader, where they are on several machines.
    """

    load: LoadSpan
    member: int
    weights: tuple[float, ...]
    seats: tuple[TeamSeat, ...] = ()


class Measure(msgspec.Struct, tag="measure"):
    """Say how fast this member computes slices of what ``load`` says, and then add up some sums."""

    load: LoadSpan
    member: int
    n_members: int


class NewCache(msgspec.Struct, tag="new"):
    """Make a cache, which is called by this number from now on."""

    cache: int
    hop: Span
    max_tokens: int
    is_rounded: bool


class BeginWith(msgspec.Struct, tag="begin"):
    """Put a prefix in front of an empty cache: keys and values of blocks [1, heads, n, head size], of all heads."""

    cache: int
    prefix: dict[int, tuple[Numbers, Numbers]]
    n_rows: int
    is_trained: bool


class KeepUpdates(msgspec.Struct, tag="updates"):
    """Keep an adapter, which is called by this number from now on: A, B and scale of each module, whole."""

    number: int
    updates: dict[str, tuple[Numbers, Numbers, float]]
    is_trained: bool


class Forget(msgspec.Struct, tag="forget"):
    """Give up caches, adapters, and graphs whose backward will not come."""

    numbers: list[int]


class RecordPast(msgspec.Struct, tag="record"):
    """Have a cache keep what a crop needs."""

    cache: int


class Crop(msgspec.Struct, tag="crop"):
    """Take back the last tokens of a cache."""

    cache: int
    n_tokens: int


class Reorder(msgspec.Struct, tag="reorder"):
    """Have row i of a cache be what row ``rows[i]`` was."""

    cache: int
    rows: list[int]


class TakeOver(msgspec.Struct, tag="over"):
    """Have tokens of another cache."""

    cache: int
    other: int
    start: int
    end: int
    may_share: bool


class Borrow(msgspec.Struct, tag="borrow"):
    """Begin with the first tokens of another cache."""

    cache: int
    other: int
    n_tokens: int


class Piece(msgspec.Struct, array_like=True):
    """New tokens of one session: see ``cache.pieces.SessionTokens``."""

    cache: int | None
    lora: int | None
    n_past: int
    is_exact: bool
    hidden: Numbers
    positions: Numbers
    mask: Numbers | None


class RunPass(msgspec.Struct, tag="run"):
    """Compute new tokens of some sessions; ``is_plain``: the family's own forward of the one piece.

    ``n_given``: sums that the leader has given its part to before.
    """

    hop: Span
    pieces: list[Piece]
    n_given: int
    is_plain: bool = False


class RunGraph(msgspec.Struct, tag="graph"):
    """Compute new tokens [b, t, d], and keep the graph, by this number, where gradients are wanted.

    They have no cache, or one that holds a prefix.
    """

    graph: int
    hop: Span
    piece: Piece
    n_given: int
    is_kept: bool


class RunBackward(msgspec.Struct, tag="backward"):
    """Compute gradients from that by what left a graph [b, t, d]; it is given up."""

    graph: int
    gradient: Numbers
    n_given: int


class KeepCopy(msgspec.Struct, tag="keep"):
    """Keep the first tokens of a copy of a cache, which is called by this number; begin one where they are none."""

    cache: int
    hop: Span
    n_tokens: int


class PutTokens(msgspec.Struct, tag="put"):
    """Add tokens to a layer of a copy: keys and values [b, h, t, d]."""

    cache: int
    layer: int
    keys: Numbers
    values: Numbers


class ShareRows(msgspec.Struct, tag="rows"):
    """Compute some of the new tokens of a session, of which this member has all blocks.

    Its copy of a cache holds ``n_past`` tokens. ``n_rows`` says how many new tokens each member has, in their order;
    ``hidden`` [b, t, d] and ``positions`` are this one's. ``number``: of the pass.
    """

    cache: int
    hop: Span
    n_past: int
    n_rows: tuple[int, ...]
    hidden: Numbers
    positions: Numbers
    number: int


OfCaches = NewCache | BeginWith | Forget | RecordPast | Crop | Reorder | TakeOver | Borrow
OfCopies = KeepCopy | PutTokens | ShareRows
Order = Measure | Take | OfCaches | KeepUpdates | RunPass | RunGraph | RunBackward | OfCopies
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Order)


def encode(order: Order) -> bytes:
    """Write an order as it travels."""
    return _encoder.encode(order)


def decode(data: bytes | bytearray) -> Order:
    """Read an order. Raises msgspec.DecodeError."""
    order: Order = _decoder.decode(data)
    return order


def send(connection: socket.socket, data: bytes) -> None:
    """Send an order, or an answer, to a process of this machine. Raises OSError."""
    connection.sendall(LENGTH.pack(len(data)) + data)


def tell(links: Iterable[Link], order: Order) -> None:
    """Have members on other machines do something. Raises TeamBroken."""
    data = encode(order)
    for link in links:
        link.send(FrameKind.ORDER, 0, data)


def receive(connection: socket.socket) -> bytes:
    """Wait for what the other process sends next. Raises EOFError where it has ended."""
    (n_bytes,) = LENGTH.unpack(_read(connection, LENGTH.size))
    return _read(connection, n_bytes)


def _read(connection: socket.socket, n_bytes: int) -> bytes:
    data = bytearray()
    while len(data) < n_bytes:
        part = connection.recv(n_bytes - len(data))
        if not part:
            raise EOFError
        data += part
    return bytes(data)


def write_numbers(tensor: torch.Tensor) -> Numbers:
    """A tensor as it travels."""
    return Numbers(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), bytes(raw_bytes(tensor)))


def read_numbers(numbers: Numbers) -> torch.Tensor:
    """The tensor that travelled."""
    return torch.frombuffer(bytearray(numbers.data), dtype=OF_NAMES[numbers.dtype]).view(numbers.shape)
