"""Gives models to others: manifests and chunks, verified before they leave, at a bounded pace."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from typing import Protocol

import trio

from swarmd.errors import Code, Refused
from swarmd.net.pace import Pace
from swarmd.net.rpc import Channel
from swarmd.plan.links.download import PIECE_BYTES, Ref
from swarmd.protocol.models import manifest as manifests
from swarmd.protocol.models.manifest import Manifest
from swarmd.protocol.wire.messages import ChunksAre, ManifestIs, WantChunks, WantManifest, encode_frame
from swarmd.values import ModelId, PeerId, ranges
from swarmd.weights.folder import ModelFolder

logger = logging.getLogger(__name__)

MAX_READS = 4  # pieces in memory at the same time, for all who ask
SEND_TIMEOUT_S = 300.0  # for 4 MiB, waiting for the pace included
MAX_ANNOUNCED = 32  # models, and ranges of each at most
MAX_RANGES = 8  # announced for a model: the record has 8 KiB


class ReadableModel(Protocol):
    """What can be given away: a model's folder, or the state of a training run in memory."""

    @property
    def manifest(self) -> Manifest:
        """What the model consists of."""

    def read(self, ref: Ref) -> bytes:
        """Return one chunk. Raises Refused when it is not here."""


Find = Callable[[ModelId], ReadableModel | None]


# What a peer could do by asking: have memory filled (a piece has a bounded size, MAX_READS are read at a time, and each
# channel may have few answers in memory), ask and not read (given up after SEND_TIMEOUT_S), ask without end
# (the pace is shared with all traffic). What is sent was hashed just before: a disk that rots makes no liar of a donor.
class Donor:
    """See the module. ``folders`` is the owner's to fill; ``given`` hears of bytes that left."""

    def __init__(
        self,
        folders: dict[ModelId, ModelFolder],
        pace: Pace,
        given: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._given = given
        self._find: Find = lambda model: None
        self.given_bytes: Counter[PeerId] = Counter()
        self._folders = folders
        self._pace = pace
        self._reads = trio.CapacityLimiter(MAX_READS)

    def lend(self, find: Find) -> None:
        """Give away, too, what ``find`` has under a hash: the state of a training run."""
        self._find = find

    def holds(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Return what a record says: groups of each model, as ranges."""
        announced: dict[str, tuple[tuple[int, int], ...]] = {}
        for model, folder in list(self._folders.items()):
            if folder.held and len(announced) < MAX_ANNOUNCED:
                spans = ranges(set(folder.held))[:MAX_RANGES]
                announced[model] = tuple((span.start, span.end) for span in spans)
        return announced

    async def answer(self, channel: Channel, message: WantManifest | WantChunks) -> None:
        """Send what was asked for. Raises Refused."""
        model = ModelId(message.model)
        folder = self._folders.get(model) or self._find(model)
        if folder is None:
            raise Refused(Code.NOT_HERE, f"nothing of model {message.model[:12]} is here")
        if isinstance(message, WantManifest):
            async with self._reads:
                raw = await trio.to_thread.run_sync(lambda: manifests.encode(folder.manifest))
            await channel.answer(ManifestIs(re=message.id), raw)
            return
        async with channel.room_for(PIECE_BYTES):
            await self._send_chunks(channel, folder, message)

    async def _send_chunks(
        self,
        channel: Channel,
        folder: ReadableModel,
        message: WantChunks,
    ) -> None:
        """Read chunks and send them, slice by slice, as the pace allows. Raises Refused."""
        async with self._reads:
            payload = await trio.to_thread.run_sync(read_piece, folder, message.refs)
        frame = encode_frame(ChunksAre(re=message.id), payload)
        n_bytes = len(payload)
        del payload  # one copy is enough while it waits to be read
        with trio.move_on_after(SEND_TIMEOUT_S) as sending:
            await channel.send_in_slices(self._pace.slices(frame), self._pace.take)
        if sending.cancelled_caught:
            logger.info("%s asks for weights and does not read them", channel.peer)
            return
        self.given_bytes[channel.peer] += n_bytes
        self._given(n_bytes)


def read_piece(folder: ReadableModel, refs: tuple[tuple[int, int], ...]) -> bytes:
    """Read chunks, of bounded size together. Raises Refused."""
    parts = []
    total = 0
    for ref in refs:
        part = folder.read(ref)
        parts.append(part)
        total += len(part)
        if total > PIECE_BYTES:
            raise Refused(Code.MALFORMED, f"more than {PIECE_BYTES} B in one request")
    return b"".join(parts)


def groups_held(
    group_ranges: tuple[tuple[int, int], ...],
    n_groups: int,
) -> frozenset[int]:
    """Return the groups that a record's ranges name."""
    return frozenset(group for start, end in group_ranges for group in range(start, min(end, n_groups)))
