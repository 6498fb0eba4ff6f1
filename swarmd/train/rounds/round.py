"""One round as each of its members lives it: give numbers, add up what others give, gather the average.

Numbers go up a tree for each part (plan.runs.topology, train.rounds.duties) in chunks, in order; who adds up sums what
everybody below has sent so far, in member order, and sends it on at once, and the averages that the root makes go down
the same way. Contributions are kept: when the group changes (a higher version, without a dead member, or with a dead
one's part given to others) sums are made anew from what is there. The leader is elsewhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import trio

from swarmd.errors import OutOfStep
from swarmd.net.rpc import Rpc
from swarmd.net.tasks import Tasks
from swarmd.protocol.runs.backing import ContributionShare
from swarmd.protocol.runs.recipe import Recipe
from swarmd.protocol.wire.rounds import Beat, Contribution, Group, Reduced, Subtotal
from swarmd.train.rounds import heartbeats
from swarmd.train.rounds.accounts import (
    AverageProjection,
    ContributionProjection,
    Flow,
    account_for_average,
    flow_of,
    project_contribution,
)
from swarmd.train.rounds.duties import Key, duties_of, has_all_inputs
from swarmd.train.rounds.groups import counted_of
from swarmd.train.rounds.parts import MOST_SQUARES, InputSource, ReducedPart, Result, chunk_elements
from swarmd.train.rounds.sending import BEAT_INTERVAL_S, ReadyParts, Sending
from swarmd.train.store.services import OffLoop, Wakeups
from swarmd.train.vectors.codecs import CodedVector, codec_of
from swarmd.train.vectors.coded_sums import read_reduced, read_subtotal
from swarmd.train.vectors.directions import directions_of
from swarmd.train.vectors.state import Vector
from swarmd.train.vectors.sums import squares_in, squares_of
from swarmd.values import PeerId

CHANGES_WITHIN_S = 10.0  # for the word of a new group, which comes by another channel


Numbers = Contribution | Subtotal | Reduced

# One member in one version of a group; a part is a range of the vector:
#
#     own numbers ----> parents (Contribution)          for parts that others add up
#     children   ----> ReducedPart ----> parent         Subtotal, where this member stands between
#                          |                            or, at the root, averages:
#                          v
#     parent ----> average [..........] ----> children  Reduced
#                          |
#                  hash, account, share ----> leader    in heartbeats
#
# Everything is in chunks, so that a part is summed while it still arrives. A new version replaces the average and all
# sums; each await may find that the version has changed, and what was computed for the old one is dropped then.
# Parents cannot be trusted with sums: each result is checked by what its members say (plan.runs.disputes).


class Round:
    """See the module. ``coded`` is this peer's contribution, or None; it must not change until the end."""

    def __init__(
        self,
        rpc: Rpc,
        group: Group,
        recipe: Recipe,
        coded: CodedVector | None,
        digest: Callable[[Vector], bytes],
        sign: Callable[[bytes, ContributionProjection], ContributionShare],
        off_loop: OffLoop[Any],
    ) -> None:
        self._sign = sign
        self._codec = codec_of(recipe)
        self._chunk = chunk_elements(self._codec)
        self._rpc = rpc
        self._me = rpc.network.peer_id
        self._coded = coded
        self._vector = coded.values if coded is not None else None
        self._digest = digest
        self._directions = partial(directions_of, recipe, group.parent, group.n_elements)
        self._off_loop = off_loop
        self._parts: dict[Key, ReducedPart] = {}
        self._news = Wakeups()  # anything
        self.moved_at = trio.current_time()
        self._beat_now = trio.Event()
        self._tasks = Tasks()
        self._sending = Sending(
            rpc,
            self._tasks,
            coded,
            self._chunk,
            self._ready_parts,
        )
        self._use_group(group)

    # --- what the trainer calls --------------------------------------------------------------------------------

    async def run(self, beat: Callable[[Beat], Awaitable[None]]) -> None:
        """Take part until cancelled; ``beat`` brings signs of life to the leader."""
        async with self._tasks.open(), trio.open_nursery() as nursery:
            self._sending.follow(self.group, self._duties)
            nursery.start_soon(self._reduce_parts)
            nursery.start_soon(self._gather_average)
            while True:
                self._beat_now = trio.Event()
                await beat(self._make_beat())
                with trio.move_on_after(BEAT_INTERVAL_S):
                    await self._beat_now.wait()

    def change_group(self, group: Group) -> None:
        """Take part in the group as the leader has changed it."""
        if group.round != self.group.round or group.version <= self.group.version:
            return
        self._use_group(group)
        self._sending.follow(group, self._duties)
        self._note_progress()

    @property
    def share_here(self) -> float:
        """How much of the average this peer has, or has made, as a share of the whole."""
        return sum(self._results_here().values()) / self.group.n_elements

    def _results_here(self) -> dict[int, int]:
        """Count the elements of each part's average that are here, by its first one."""
        made = {start: self._parts[start, end].reduced_to - start for start, end in self._duties.averages}
        return made | {start: upto - start for start, upto in self._got.items()}

    async def take(self, peer: PeerId, message: Numbers, payload: memoryview) -> None:
        """Take numbers that a member sends, of any kind. Raises RemoteProtocolError."""
        match message:
            case Contribution():
                await self._take_contribution(peer, message, payload)
            case Subtotal():
                await self._take_subtotal(peer, message, payload)
            case Reduced():
                await self._take_reduced(peer, message, payload)

    async def _take_contribution(self, peer: PeerId, message: Contribution, payload: memoryview) -> None:
        """Take a member's numbers for a part that is added up here. Raises RemoteProtocolError."""
        part = await self._wait_for_part(message.part)
        if part is None or not any(m.peer == peer and m.n for m in self.group.members):
            raise OutOfStep(f"a contribution of {peer} from element {message.start} on, not added up here")
        if not part.lacks(peer, message.start, message.n_elements):
            return
        fresh = (await self._read_payload(self._codec.read, payload, message.n_elements))[0]
        if part.lacks(peer, message.start, message.n_elements):  # it may have come again meanwhile
            part.take(peer, message.start, fresh, payload)
            is_faulty = not part.incoming_from(peer).is_sound
            self._note_progress(done=is_faulty or has_all_inputs(self._duties, self._parts))

    async def _take_subtotal(self, peer: PeerId, message: Subtotal, payload: memoryview) -> None:
        """Take what all below a member give, for a part that is added up here. Raises RemoteProtocolError."""
        await self._wait_for_version(message.version)
        if message.version != self.group.version:
            return
        sources = self._duties.sources.get(message.part, ())
        source = next((s for s in sources if s.peer == peer and s.is_subtotal), None)
        if source is None:
            raise OutOfStep(f"a subtotal of {peer} from element {message.start} on, not added up here")
        part = self._parts[message.part]
        if not part.lacks(peer, message.start, message.n_elements, is_subtotal=True):
            return
        fresh = await self._read_payload(
            read_subtotal,
            self._codec,
            payload,
            message.n_elements,
            source.n_contributors,
        )
        if message.version != self.group.version:
            return
        if part.lacks(peer, message.start, message.n_elements, is_subtotal=True):
            part.take(peer, message.start, fresh, payload, is_subtotal=True)
            is_faulty = not part.incoming_from(peer, is_subtotal=True).is_sound
            self._note_progress(done=is_faulty or has_all_inputs(self._duties, self._parts))

    async def _take_reduced(self, peer: PeerId, message: Reduced, payload: memoryview) -> None:
        """Take averaged numbers from their reducer, or by way of others. Raises RemoteProtocolError."""
        await self._wait_for_version(message.version)
        part = next((p for p in self.group.parts if p.start <= message.start < p.end), None)
        key = (part.start, part.end) if part is not None else (0, 0)
        if not self._lacks_results(message, key):
            return
        end = message.start + message.n_elements
        if part is None or self._duties.bringers.get(key) != peer:
            raise OutOfStep(f"results from element {message.start} on, which {peer} does not bring")
        upto = self._got.get(part.start, part.start)
        if message.start != upto or message.n_elements != min(self._chunk, part.end - upto):
            raise OutOfStep(f"{message.n_elements} results of {peer} from {message.start}, expected them from {upto}")
        counted = counted_of(self.group)
        n_samples = sum(m.n for m in counted)
        values = await self._read_payload(
            read_reduced,
            self._codec,
            payload,
            message.n_elements,
            len(counted),
            n_samples,
        )
        if not self._lacks_results(message, key):
            return
        if not squares_of(values) < MOST_SQUARES:
            self._faults[part.reducer] = "its results are not finite, or beyond all bounds"
            self._beat_now.set()
            return
        assert self.average is not None
        self.average[message.start : end] = values
        self._got[part.start] = end
        if key in self._relayed:
            self._relayed[key].append(Result(message.start, message.n_elements, bytes(payload)))
            self._sending.news.notify()
        self._note_progress()

    def _lacks_results(self, message: Reduced, key: Key) -> bool:
        """Are these of the present version, and not here yet?"""
        is_wanted = self.average is not None and not self.result and message.version == self.group.version
        end = message.start + message.n_elements
        return is_wanted and end > self._got.get(key[0], key[0])

    async def _wait_for_version(self, version: int) -> None:
        """Wait for the word of a version; it comes by another channel."""
        with trio.move_on_after(CHANGES_WITHIN_S):
            while version > self.group.version:
                await self._news.wait()

    async def _read_payload(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Decode what was sent: in a thread where that takes long."""
        if self._codec.is_plain:
            return function(*arguments)
        return await self._off_loop(function, *arguments)

    # --- versions ----------------------------------------------------------------------------------------------

    def _use_group(self, group: Group) -> None:
        self.group = group
        gets_average = any(m.peer == self._me and m.receives for m in group.members)
        self.average: Vector | None = np.empty(group.n_elements, group.dtype) if gets_average else None
        self.result = b""
        self.account: AverageProjection | None = None
        self._duties = duties_of(group, self._me)
        self._got: dict[int, int] = {}
        relayed_keys = set[Key]()
        for parts in self._duties.tells.values():
            relayed_keys.update((part.start, part.end) for part in parts)
        relayed_keys &= self._duties.bringers.keys()
        self._relayed: dict[Key, list[Result]] = {key: [] for key in relayed_keys}
        self._squares: dict[PeerId, float] = {}  # of this peer's numbers, by whom they go to
        self._faults: dict[int, str] = {}  # of results, by the place of their reducer
        self._share: ContributionShare | None = None
        self._assent = b""
        for start, end in self._duties.sources:
            known = self._parts.get((start, end))
            if known:
                known.begin_again()
                continue
            total: Vector = np.empty(end - start, group.dtype)
            own_contribution = (self._me, self._coded) if self._coded is not None else None
            self._parts[start, end] = ReducedPart(
                start,
                end,
                self._chunk,
                self._codec,
                total,
                own_contribution,
            )

    async def _wait_for_part(self, key: Key) -> ReducedPart | None:
        """Return a part that is added up here; wait for the group that gives it to this peer."""
        with trio.move_on_after(CHANGES_WITHIN_S):
            while key not in self._parts:
                await self._news.wait()
        return self._parts.get(key)

    # --- adding up and gathering ---------------------------------------------------------------------------------

    async def _reduce_parts(self) -> None:
        """Add up what is there of everybody below, part by part."""
        while True:
            version = self.group.version
            news = self._news.mark()
            duties = self._duties
            total = sum(m.n for m in counted_of(self.group))
            for key, sources in duties.sources.items():
                n_samples = total if key in duties.averages else None
                await self._reduce_part(self._parts[key], sources, n_samples, version)
            if version == self.group.version:
                await news.wait()

    async def _reduce_part(
        self, part: ReducedPart, sources: Sequence[InputSource], n_samples: int | None, version: int
    ) -> None:
        """Add up what is there of one part, while the version stays."""
        while version == self.group.version:
            chunk = part.next_chunk(sources)
            if chunk is None:
                return
            start, end = chunk
            inputs = part.inputs(sources, start, end)
            result = await self._off_loop(
                part.reduce,
                inputs,
                n_samples,
                start,
                end,
                part.total,
            )
            if version == self.group.version:
                part.results.append(result)
                self._sending.news.notify()
                self._note_progress()

    def give_assent(self, signature: bytes) -> None:
        """Stand for the commit that the leader has shown."""
        self._assent = signature
        self._beat_now.set()

    async def give_share(self, average: bytes) -> None:
        """Sign what this peer gave to an average that others have, before it is here."""
        version = self.group.version
        if self._vector is not None and self._is_counted and self._share is None:
            projection = await self._off_loop(self._given_to, average, self._vector)
            if version == self.group.version and self._share is None:
                self._share = self._sign(average, projection)
                self._beat_now.set()

    async def _gather_average(self) -> None:
        """Notice when the whole average of a version is here, hash it, and account for it."""
        while True:
            news = self._news.mark()
            version = self.group.version
            await self._measure_own(version)
            if self.average is not None and not self.result and self._is_whole():
                await self._finish_average(self.average, version)
            await news.wait()

    async def _finish_average(self, average: Vector, version: int) -> None:
        """Hash a whole average, and sign what this member gave to it."""
        for start, end in self._duties.averages:
            average[start:end] = self._parts[start, end].total
        digest = await self._off_loop(self._digest, average)
        vector = self._vector if self._is_counted else None
        contribution = (self._me, vector) if vector is not None else None
        flow = flow_of(self._duties, self._parts, vector)
        account = await self._off_loop(
            self._account_for,
            self.group,
            digest,
            average,
            contribution,
            flow,
        )
        if version == self.group.version:
            self.account = account
            self.result = digest
            self._share = self._sign(digest, account.contribution) if account.contribution is not None else None
            self._beat_now.set()

    def _given_to(self, digest: bytes, contribution: Vector) -> ContributionProjection:
        return project_contribution(self._directions(digest), contribution)

    def _account_for(
        self,
        group: Group,
        digest: bytes,
        average: Vector,
        contribution: tuple[PeerId, Vector] | None,
        flow: Flow,
    ) -> AverageProjection:
        return account_for_average(
            group,
            self._directions(digest),
            average,
            contribution,
            flow,
            self._codec,
        )

    def _is_whole(self) -> bool:
        are_here = all(self._got.get(start, start) == end for start, end in self._duties.bringers)
        return are_here and all(self._parts[key].reduced_to == key[1] for key in self._duties.sources)

    async def _measure_own(self, version: int) -> None:
        """Measure this peer's numbers for each that gets some: none of them can say otherwise then."""
        if self._vector is None or self._squares:
            return
        squares: dict[PeerId, float] = {}
        for peer, keys in self._duties.gives.items():
            squares[peer] = await self._off_loop(squares_in, self._vector, keys)
        if version == self.group.version:
            self._squares = squares

    @property
    def _is_counted(self) -> bool:
        return any(m.peer == self._me for m in counted_of(self.group))

    def _ready_parts(self) -> ReadyParts:
        """Return what can be sent on so far."""
        made = {key: self._parts[key].results for key in self._duties.sources}
        averages = {key: made[key] for key in self._duties.averages}
        return ReadyParts(made, {**self._relayed, **averages})

    # --- small things ------------------------------------------------------------------------------------------

    def _make_beat(self) -> Beat:
        """Make what the leader is told."""
        parts = {key: self._parts[key] for key in self._duties.sources}
        squares = self._squares if self._is_counted else {}
        state = heartbeats.HeartbeatState(
            self._results_here(),
            parts,
            squares,
            self._faults,
            self.account,
        )
        return heartbeats.make_heartbeat(
            self.group,
            self._duties,
            state,
            self.result,
            self._share,
            self._assent,
        )

    def _note_progress(self, done: bool = False) -> None:
        self.moved_at = trio.current_time()
        self._news.notify()
        if done:
            self._beat_now.set()
