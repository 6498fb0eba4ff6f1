"""Takes what others of a round bring: their numbers, subtotals, results. It is what ``sending`` is at the other end.

Members may send anything, and in any order: what is not next in turn, or not of this version, changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import trio

from swarmd.errors import OutOfStep
from swarmd.protocol.wire.rounds import Contribution, Reduced, Subtotal
from swarmd.train.rounds.duties import Key
from swarmd.train.rounds.groups import counted_of
from swarmd.train.rounds.parts import ReducedPart
from swarmd.train.rounds.round_progress import PresentVersion, RoundProgress
from swarmd.train.store.services import OffLoop, Wakeups
from swarmd.train.vectors.codecs import Codec
from swarmd.train.vectors.coded_sums import read_reduced, read_subtotal
from swarmd.values import PeerId

CHANGES_WITHIN_S = 10.0  # for the word of a new group, which comes by another channel

Numbers = Contribution | Subtotal | Reduced


class Arrival(Enum):
    """What numbers that have come mean for a round."""

    NOTHING = "they were here, or are of another version"
    PROGRESS = "there is more to add up, or to pass on"
    COMPLETE = "the leader should hear of it now: all is here that is added up, or some are faulty"
    FAULTY = "results that cannot be: the leader should hear of it now"


class Receiving:
    """See the module. ``parts``: what is added up here; ``news``: the present version has changed."""

    def __init__(
        self,
        codec: Codec,
        parts: Mapping[Key, ReducedPart],
        present: PresentVersion,
        news: Wakeups,
        off_loop: OffLoop[Any],
    ) -> None:
        self._codec = codec
        self._parts = parts
        self._present = present
        self._news = news
        self._off_loop = off_loop

    async def take(self, peer: PeerId, message: Numbers, payload: memoryview) -> Arrival:
        """Take numbers that a member sends, of any kind. Raises RemoteProtocolError."""
        match message:
            case Contribution():
                return await self._take_contribution(peer, message, payload)
            case Subtotal():
                return await self._take_subtotal(peer, message, payload)
            case Reduced():
                return await self._take_reduced(peer, message, payload)

    # Reading takes time, in a thread where a codec is not plain. Whether the numbers are the next ones is asked before,
    # so that nobody makes this peer decode for nothing, and once more after: they may have come again meanwhile.

    async def _take_contribution(self, peer: PeerId, message: Contribution, payload: memoryview) -> Arrival:
        """Take a member's numbers for a part that is added up here."""
        part = await self._wait_for_part(message.part)
        if part is None or not any(m.peer == peer and m.n for m in self._present.progress.group.members):
            raise OutOfStep(f"a contribution of {peer} from element {message.start} on, not added up here")
        if not part.lacks(peer, message.start, message.n_elements):
            return Arrival.NOTHING
        fresh = (await self._read_payload(self._codec.read, payload, message.n_elements))[0]
        if not part.lacks(peer, message.start, message.n_elements):
            return Arrival.NOTHING
        part.take(peer, message.start, fresh, payload)
        return self._note_inputs(is_sound=part.incoming_from(peer).is_sound)

    async def _take_subtotal(self, peer: PeerId, message: Subtotal, payload: memoryview) -> Arrival:
        """Take what all below a member give, for a part that is added up here."""
        progress = await self._wait_for_version(message.version)
        if message.version != progress.group.version:
            return Arrival.NOTHING
        sources = progress.duties.sources.get(message.part, ())
        source = next((s for s in sources if s.peer == peer and s.is_subtotal), None)
        if source is None:
            raise OutOfStep(f"a subtotal of {peer} from element {message.start} on, not added up here")
        part = self._parts[message.part]
        if not part.lacks(peer, message.start, message.n_elements, is_subtotal=True):
            return Arrival.NOTHING
        fresh = await self._read_payload(read_subtotal, self._codec, payload, message.n_elements, source.n_contributors)
        is_of_version = message.version == self._present.progress.group.version
        if not is_of_version or not part.lacks(peer, message.start, message.n_elements, is_subtotal=True):
            return Arrival.NOTHING
        part.take(peer, message.start, fresh, payload, is_subtotal=True)
        return self._note_inputs(is_sound=part.incoming_from(peer, is_subtotal=True).is_sound)

    def _note_inputs(self, is_sound: bool) -> Arrival:
        is_complete = not is_sound or self._present.progress.has_all_inputs
        return Arrival.COMPLETE if is_complete else Arrival.PROGRESS

    async def _take_reduced(self, peer: PeerId, message: Reduced, payload: memoryview) -> Arrival:
        """Take averaged numbers from their reducer, or by way of others."""
        progress = await self._wait_for_version(message.version)
        part = progress.find_wanted_part(peer, message)
        if part is None:
            return Arrival.NOTHING
        counted = counted_of(progress.group)
        n_samples = sum(m.n for m in counted)
        values = await self._read_payload(
            read_reduced, self._codec, payload, message.n_elements, len(counted), n_samples
        )
        progress = self._present.progress
        if progress.find_wanted_part(peer, message) is None:
            return Arrival.NOTHING
        is_sound = progress.keep_results(part, message.start, values, payload)
        return Arrival.PROGRESS if is_sound else Arrival.FAULTY

    async def _wait_for_version(self, version: int) -> RoundProgress:
        """Wait for the word of a version, which comes by another channel; return the present one."""
        with trio.move_on_after(CHANGES_WITHIN_S):
            while version > self._present.progress.group.version:
                await self._news.wait()
        return self._present.progress

    async def _wait_for_part(self, key: Key) -> ReducedPart | None:
        """Return a part that is added up here; wait for the group that gives it to this peer."""
        with trio.move_on_after(CHANGES_WITHIN_S):
            while key not in self._parts:
                await self._news.wait()
        return self._parts.get(key)

    async def _read_payload(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Decode what was sent: in a thread where that takes long."""
        if self._codec.is_plain:
            return function(*arguments)
        return await self._off_loop(function, *arguments)
