"""Keys and values of one session's new tokens, among members of a team that each compute some of them.

A member attends to its own tokens and all before them, so it needs the keys of members before it in each layer, and has
those behind it get its own. All hold all tokens' when the pass is over.

    member 0    rows 0..a      keys of each layer, as it has them ----->  member 1
    member 1    rows a..t      keys of all layers, with its outputs, once it is done ----->  member 0

So nobody reads while another waits for him to: what goes back goes when who gets it is about to read it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from swarmd.compute.cache.kvcache import SlabLayer
from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.cache.shared_prefix import KeysAndValues
from swarmd.compute.teams.links import FrameKind, Link, receive_part
from swarmd.compute.teams.sums import TeamBroken
from swarmd.wire.tensors import raw_bytes


class RowExchange:
    """One member's side of one pass of a session, for ``RaggedAttention.on_keys``.

    ``links`` to all others; ``n_rows`` of each member; ``orders`` get what the leader asks instead, if it gives up.
    """

    def __init__(
        self,
        links: Mapping[int, Link],
        member: int,
        piece: SessionTokens,
        n_rows: Sequence[int],
        number: int,
        orders: list[bytearray],
    ) -> None:
        self._links = links
        self._member = member
        self._piece = piece
        self._n_rows = n_rows
        self._number = number
        self._orders = orders
        self.own: list[tuple[SlabLayer, KeysAndValues]] = []
        """Of each layer, in their order."""

    def on_keys(self, piece: SessionTokens, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put keys of members before this one into the layer's cache, and send this one's to those behind it."""
        if piece is not self._piece:
            return
        cache_layer = piece.cache.cache.layers[layer]
        data = _pack(keys, values) if self._member < len(self._n_rows) - 1 else b""
        for other in range(self._member):
            cache_layer.put(*self._receive(other, keys, values))
        for other in range(self._member + 1, len(self._n_rows)):
            self._links[other].send(FrameKind.PART, self._number, data)
        self.own.append((cache_layer, (keys, values)))

    def give_back(self, outputs: torch.Tensor) -> None:
        """Send this member's keys of all layers to the members before it, and to the first what it has computed."""
        for other in range(self._member):
            for _, (keys, values) in self.own:
                self._links[other].send(FrameKind.PART, self._number, _pack(keys, values))
        self._links[0].send(FrameKind.PART, self._number, raw_bytes(outputs))

    def take_back(self, other: int) -> None:
        """Put the keys of a member behind this one into the caches of all layers."""
        for cache_layer, (keys, values) in self.own:
            cache_layer.put(*self._receive(other, keys, values))

    def outputs_of(self, other: int) -> torch.Tensor:
        """What another member has computed, [b, t, d], at the leader."""
        hidden = self._piece.hidden
        shape = (hidden.shape[0], self._n_rows[other], hidden.shape[2])
        data = receive_part(self._links[other], self._number, self._orders)
        return _read(data, hidden.dtype, [shape], self._links[other])[0]

    def _receive(self, other: int, keys: torch.Tensor, values: torch.Tensor) -> KeysAndValues:
        """Keys and values of another member's rows, alike to this one's."""
        t = self._n_rows[other]
        shapes = [(part.shape[0], part.shape[1], t, part.shape[3]) for part in (keys, values)]
        data = receive_part(self._links[other], self._number, self._orders)
        their_keys, their_values = _read(data, keys.dtype, shapes, self._links[other])
        return their_keys, their_values


def _pack(keys: torch.Tensor, values: torch.Tensor) -> bytes:
    return b"".join((raw_bytes(keys), raw_bytes(values)))


def _read(
    data: bytearray, dtype: torch.dtype, shapes: Sequence[tuple[int, ...]], link: Link
) -> tuple[torch.Tensor, ...]:
    """Tensors of these shapes, one behind the other. Raises TeamBroken for more or less."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    if len(data) != sum(sizes) * dtype.itemsize:
        raise TeamBroken(f"{link.name} of the team gives {len(data)} B where {sum(sizes) * dtype.itemsize} are shared")
    parts = torch.split(torch.frombuffer(data, dtype=dtype), sizes)
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))
