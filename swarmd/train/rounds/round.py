"""One round as each of its members lives it: give numbers, add up what others give, gather the average.

Numbers go up a tree for each part (plan.runs.topology, train.rounds.duties) in chunks, in order; who adds up sums what
everybody below has sent so far, in member order, and sends it on at once, and the averages that the root makes go down
the same way. Contributions are kept: when the group changes (a higher version, without a dead member, or with a dead
one's part given to others) sums are made anew from what is there. The leader is elsewhere.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import trio

from swarmd.net.rpc import Rpc
from swarmd.net.tasks import Tasks
from swarmd.protocol.runs.backing import ContributionShare
from swarmd.protocol.runs.recipe import Recipe
from swarmd.protocol.wire.rounds import Beat, Group, Reduced
from swarmd.train.rounds.accounts import ContributionProjection, RoundAccounts, flow_of
from swarmd.train.rounds.duties import Key
from swarmd.train.rounds.groups import counted_of
from swarmd.train.rounds.parts import InputSource, ReducedPart, chunk_elements
from swarmd.train.rounds.receiving import Arrival, Numbers, Receiving
from swarmd.train.rounds.round_progress import PresentVersion, RoundProgress, begin_version
from swarmd.train.rounds.sending import BEAT_INTERVAL_S, Sending
from swarmd.train.store.services import OffLoop, Wakeups
from swarmd.train.vectors.codecs import CodedVector, codec_of
from swarmd.train.vectors.scratch import NewVector, new_in_memory
from swarmd.train.vectors.state import Vector
from swarmd.train.vectors.sums import squares_in
from swarmd.values import PeerId

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
    """See the module. ``coded`` is this peer's contribution, or None; it must not change until the end.

    ``moved_at``: when anything came or was added up.
    """

    def __init__(
        self,
        rpc: Rpc,
        group: Group,
        recipe: Recipe,
        coded: CodedVector | None,
        sign: Callable[[bytes, ContributionProjection], ContributionShare],
        off_loop: OffLoop[Any],
        new_vector: NewVector = new_in_memory,
    ) -> None:
        self._sign = sign
        self._new_vector = new_vector
        self._codec = codec_of(recipe)
        self._chunk = chunk_elements(self._codec)
        self._me = rpc.network.peer_id
        self._coded = coded
        self._vector = coded.values if coded is not None else None
        self._accounts = RoundAccounts(recipe, group, self._codec)
        self._off_loop = off_loop
        self._parts: dict[Key, ReducedPart] = {}
        self._news = Wakeups()  # anything
        self.moved_at = trio.current_time()
        self._beat_now = trio.Event()
        self._tasks = Tasks()
        self._present = PresentVersion(self._begin_version(group))
        self._sending = Sending(
            rpc,
            self._tasks,
            coded,
            self._chunk,
            self._present,
        )
        self._receiving = Receiving(self._codec, self._parts, self._present, self._news, off_loop)

    @property
    def progress(self) -> RoundProgress:
        """How far this member is in the present version."""
        return self._present.progress

    @property
    def group(self) -> Group:
        """The group in its present version."""
        return self.progress.group

    # --- what the trainer calls --------------------------------------------------------------------------------

    async def run(self, beat: Callable[[Beat], Awaitable[None]]) -> None:
        """Take part until cancelled; ``beat`` brings signs of life to the leader."""
        async with self._tasks.open(), trio.open_nursery() as nursery:
            self._sending.follow(self.group, self.progress.duties)
            nursery.start_soon(self._reduce_parts)
            nursery.start_soon(self._gather_average)
            while True:
                self._beat_now = trio.Event()
                await beat(self.progress.make_beat())
                with trio.move_on_after(BEAT_INTERVAL_S):
                    await self._beat_now.wait()

    def change_group(self, group: Group) -> None:
        """Take part in the group as the leader has changed it."""
        if group.round != self.group.round or group.version <= self.group.version:
            return
        self._present.progress = self._begin_version(group)
        self._sending.follow(group, self.progress.duties)
        self._note_progress()

    @property
    def share_here(self) -> float:
        """How much of the average this peer has, or has made, as a share of the whole."""
        return sum(self.progress.results_here.values()) / self.group.n_elements

    async def take(self, peer: PeerId, message: Numbers, payload: memoryview) -> None:
        """Take numbers that a member sends, of any kind. Raises RemoteProtocolError."""
        arrival = await self._receiving.take(peer, message, payload)
        if arrival in (Arrival.PROGRESS, Arrival.COMPLETE):
            if isinstance(message, Reduced):  # some may be passed on
                self._sending.news.notify()
            self._note_progress()
        if arrival in (Arrival.COMPLETE, Arrival.FAULTY):
            self._beat_now.set()

    def give_assent(self, signature: bytes) -> None:
        """Stand for the commit that the leader has shown."""
        self.progress.assent = signature
        self._beat_now.set()

    async def give_share(self, average: bytes) -> None:
        """Sign what this peer gave to an average that others have, before it is here."""
        progress = self.progress
        if self._vector is not None and progress.is_counted and progress.share is None:
            projection = await self._off_loop(self._accounts.project, average, self._vector)
            if progress is self.progress and progress.share is None:
                progress.share = self._sign(average, projection)
                self._beat_now.set()

    # --- versions ----------------------------------------------------------------------------------------------

    def _begin_version(self, group: Group) -> RoundProgress:
        """Begin a version of the group, from the contributions that are here."""
        progress = begin_version(group, self._me, self._chunk, self._parts, self._new_vector)
        own_contribution = (self._me, self._coded) if self._coded is not None else None
        for start, end in progress.duties.sources:
            known = self._parts.get((start, end))
            if known:
                known.begin_again()
                continue
            total = self._new_vector(end - start, group.dtype)
            self._parts[start, end] = ReducedPart(
                start,
                end,
                self._chunk,
                self._codec,
                total,
                self._new_vector,
                own_contribution,
            )
        return progress

    # --- adding up and gathering ---------------------------------------------------------------------------------

    async def _reduce_parts(self) -> None:
        """Add up what is there of everybody below, part by part."""
        while True:
            progress = self.progress
            news = self._news.mark()
            duties = progress.duties
            total = sum(m.n for m in counted_of(progress.group))
            for key, sources in duties.sources.items():
                n_samples = total if key in duties.averages else None
                await self._reduce_part(self._parts[key], sources, n_samples, progress)
            if progress is self.progress:
                await news.wait()

    async def _reduce_part(
        self, part: ReducedPart, sources: Sequence[InputSource], n_samples: int | None, progress: RoundProgress
    ) -> None:
        """Add up what is there of one part, while the version stays."""
        while progress is self.progress:
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
            if progress is self.progress:
                part.results.append(result)
                self._sending.news.notify()
                self._note_progress()

    async def _gather_average(self) -> None:
        """Notice when the whole average of a version is here, hash it, and account for it."""
        while True:
            news = self._news.mark()
            progress = self.progress
            await self._measure_own(progress)
            progress = self.progress
            if progress.average is not None and not progress.result and progress.is_whole:
                await self._finish_average(progress, progress.average)
            await news.wait()

    async def _finish_average(self, progress: RoundProgress, average: Vector) -> None:
        """Hash a whole average, and sign what this member gave to it."""
        for start, end in progress.duties.averages:
            average[start:end] = self._parts[start, end].total
        digest = await self._off_loop(self._accounts.digest, average)
        vector = self._vector if progress.is_counted else None
        contribution = (self._me, vector) if vector is not None else None
        flow = flow_of(progress.duties, self._parts, vector)
        account = await self._off_loop(
            self._accounts.account,
            progress.group,
            digest,
            average,
            contribution,
            flow,
        )
        if progress is self.progress:
            progress.account = account
            progress.result = digest
            if account.contribution is not None:
                progress.share = self._sign(digest, account.contribution)
            else:
                progress.share = None
            self._beat_now.set()

    async def _measure_own(self, progress: RoundProgress) -> None:
        """Measure this peer's numbers for each that gets some: none of them can say otherwise then."""
        if self._vector is None or progress.squares:
            return
        squares: dict[PeerId, float] = {}
        for peer, keys in progress.duties.gives.items():
            squares[peer] = await self._off_loop(squares_in, self._vector, keys)
        progress.squares = squares

    def _note_progress(self) -> None:
        self.moved_at = trio.current_time()
        self._news.notify()
