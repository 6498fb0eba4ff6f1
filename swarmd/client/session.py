"""A session over a chain of servers: ops go in, answers come out, trouble is noticed and repaired.

The client names the chain, opens a hop on each server, then sends ops to the first only; the answer comes from
the last. When a hop dies it is replaced and brought up to date (``repair``), and the session goes on.
docs/protocol.md, "Sessions", tells the whole story.
"""

from __future__ import annotations

import torch
import trio

from swarmd.client.chain import LEAVING_FOR_S, OPEN_TIMEOUT_S, Chain
from swarmd.client.links import Statistics, Swarm, Terms
from swarmd.client.ops import cut, read_answer
from swarmd.client.repair import Repairs
from swarmd.errors import CacheExhausted, Code, ConfigError, PeerError, Refused, SwarmError
from swarmd.protocol.frames import Frame
from swarmd.protocol.messages import AnyMessage, Edit, Inherited, Leaving, Op, Progress, Refusal, Suspect
from swarmd.values import Decision, PeerId
from swarmd.wire.history import Budget, History, Sent
from swarmd.wire.ops import encode_op

MAX_IN_FLIGHT = 16  # ops of a long prompt that may be under way
LOOK_INTERVAL_S = 0.25  # a twelfth of what makes a silent hop suspect
HOP_LOST = (Code.NO_SESSION, Code.SESSION_LOST, Code.NOT_SERVING)
CHAIN_BROKEN = (Code.OP_GAP, Code.STRANGER)


class ChainSession:
    """One session. All methods run in the client's trio thread; steps come one at a time."""

    def __init__(self, swarm: Swarm, terms: Terms, budget: Budget) -> None:
        self.hops = Chain(swarm, terms)
        self._swarm = swarm
        self._position = self.hops.position
        self._history = History(terms.grade == "exact", budget)
        self._repairs = Repairs(self.hops, self._history)
        self._answers: dict[int, tuple[Op, Frame]] = {}
        self._fatal: Exception | None = None
        self._is_busy = False  # a step is under way
        self._is_broken = False  # one broke off: nobody knows what its servers did
        self._is_closed = False
        self._quiet_repair: trio.Event | None = None

    @property
    def key(self) -> bytes:
        return self.hops.key

    @property
    def terms(self) -> Terms:
        return self.hops.terms

    @property
    def statistics(self) -> Statistics:
        return self.hops.statistics

    @property
    def layer_arity(self) -> int:
        return self.hops.layer_arity

    @property
    def codec(self) -> Decision[str]:
        return self.hops.codec

    @property
    def chain(self) -> tuple[str, ...]:
        return self.hops.names

    # --- the life of a session -------------------------------------------------------------------------------

    async def open(self) -> None:
        """Choose a chain and open every hop of it; retries elsewhere while a refusal allows. Raises SwarmError."""
        await self.hops.open()

    async def step(
        self,
        edits: tuple[Edit, ...],
        hidden: torch.Tensor | None,
        positions: torch.Tensor | None,
        mask: torch.Tensor | None,
        record_past: bool,
        want: int | None = None,
    ) -> torch.Tensor | None:
        """Send tokens through the chain; returns the last block's output [b, t, d].

        A long prompt becomes several ops, which fill the chain like a pipeline. With ``want`` only the last so many
        tokens of each row are true, the others zero. Raises SwarmError, after which the session is over: its servers
        may have changed or not.
        """
        while self._quiet_repair is not None:
            await self._quiet_repair.wait()
        if self._is_broken:
            raise ConfigError("this session ended with an error: start a new one")
        self._is_busy = self._is_broken = True  # until the answers are here
        self._fatal = None
        first = self._position.seq + 1
        whole = Sent(first, edits, hidden, positions, mask, record_past)
        is_exact = self.terms.grade == "exact"  # which must not depend on what was measured
        parts = cut(whole, () if is_exact else self._prefill_speeds())
        outs: list[torch.Tensor] = []
        for n_sent, sent in enumerate(parts, 1):
            left = sum(0 if p.hidden is None else p.hidden.shape[1] for p in parts[n_sent:])
            await self._send(sent, None if want is None else max(0, want - left))
            while n_sent - len(outs) >= (MAX_IN_FLIGHT if n_sent < len(parts) else 1):
                outs.append(await self._receive(first + len(outs), parts[len(outs)].hidden))
        self._is_busy = self._is_broken = False
        return None if hidden is None else outs[0] if len(outs) == 1 else torch.cat(outs, 1)

    def _prefill_speeds(self) -> list[float]:
        known = {s.peer: s for s in self._swarm.view().serving(self.terms.model)}
        records = [known.get(link.hop.peer) for link in self.hops.links]
        return [(r.prefill_tokens_per_s or 0.0) if r else 0.0 for r in records]

    async def _send(self, sent: Sent, want: int | None) -> None:
        self._position.seq = sent.seq
        self.statistics.steps += 1
        if self.hops.trouble is None:
            frame = encode_op(
                self.key, 0, self.hops.epoch, self._position.answered, sent, Op(want=want), None, self.codec.action
            )
            await self._send_to(0, sent.seq, frame)
        self._history.settle(self._position.answered)  # while the chain computes
        self._history.add(sent)

    async def _receive(self, seq: int, entered: torch.Tensor | None) -> torch.Tensor:
        """Wait for the answer to op ``seq``; what the client did not want comes as zeros. Raises SwarmError."""
        while seq not in self._answers:
            await self._wait()
        op, frame = self._answers.pop(seq)
        return torch.empty(0) if entered is None else read_answer(op, frame, entered)

    async def close(self) -> None:
        self._is_closed = True
        self._history.close()
        await self.hops.give_back(set())

    # --- what peers say --------------------------------------------------------------------------------------

    async def on_message(self, peer: PeerId, message: AnyMessage, frame: Frame) -> None:
        """Take one message about this session."""
        if isinstance(message, Op):
            await self._on_op(peer, message, frame)
        elif isinstance(message, Progress):
            link = self.hops.link_at(message.start)
            if link is not None and link.hop.peer == peer and message.epoch == self.hops.epoch:
                link.watch.on_progress(message.finished, trio.current_time())
        elif isinstance(message, Suspect):
            self._on_suspect(peer, message)
        elif isinstance(message, Refusal):
            self._on_refusal(peer, message)
        elif isinstance(message, Inherited):
            self._repairs.on_inherited(peer, message)
        elif isinstance(message, Leaving):
            self._on_leaving(peer, message)

    def _on_leaving(self, peer: PeerId, message: Leaving) -> None:
        """A hop will stop serving: move it now, or in the pause between two steps."""
        link = self.hops.link_at(message.start)
        if link is None or link.hop.peer != peer or link.is_leaving:
            return
        link.is_leaving = True
        self.hops.decline(peer, LEAVING_FOR_S)
        self.hops.worry(f"{link.hop} stops serving")
        if not self._is_busy and not self._is_closed:
            self._swarm.start_soon(self._repair_quietly)

    async def _repair_quietly(self) -> None:
        """Repair between two steps; the next step waits for it, and tries again if it failed."""
        if self._is_busy or self._quiet_repair is not None:
            return
        self._quiet_repair = trio.Event()
        try:
            await self._repairs.run()
        except SwarmError as error:
            self.hops.worry(str(error))
        finally:
            self._quiet_repair.set()
            self._quiet_repair = None
        if self._is_closed:
            await self.hops.give_back(set())

    def on_gone(self, peer: PeerId) -> None:
        """A connection ended. Whether its peer is dead is found out by asking it."""
        if any(link.hop.peer == peer for link in self.hops.links):
            self.hops.worry(f"the connection to {peer[-8:]} ended")

    async def _on_op(self, peer: PeerId, op: Op, frame: Frame) -> None:
        if op.epoch != self.hops.epoch:
            return
        if op.start < self.terms.n_blocks:
            index = self.hops.index_at(op.start)
            if index and self.hops.links[index - 1].hop.peer == peer:
                self.statistics.forwarded += 1
                await self._send_to(index, op.seq, frame.raw)
            return
        if self.hops.links[-1].hop.peer == peer and op.seq == self._position.answered + 1 <= self._position.seq:
            self.statistics.frames_received += 1
            self._answers[op.seq] = op, frame
            self._position.answered = op.seq
            for link in self.hops.links:  # whoever is in the way of an answer is alive
                link.watch.on_progress(op.seq, trio.current_time())
                self._swarm.rpc.standing.did_well(link.hop.peer)
            self.hops.notify()

    def _on_suspect(self, peer: PeerId, message: Suspect) -> None:
        index = self.hops.index_at(message.start)
        is_neighbour = bool(index) and self.hops.links[(index or 1) - 1].hop.peer == peer
        if (
            index is not None
            and is_neighbour
            and message.epoch == self.hops.epoch
            and message.seq > self._position.answered
        ):
            self.hops.lose(self.hops.links[index], f"{peer[-8:]} says: {message.reason}")

    def _on_refusal(self, peer: PeerId, refusal: Refusal) -> None:
        code, index = Code(refusal.code), self.hops.index_at(refusal.start)
        if refusal.epoch not in (0, self.hops.epoch) or index is None or code is Code.STALE_EPOCH:
            return
        link = self.hops.links[index]
        if peer not in (link.hop.peer, self.hops.links[max(0, index - 1)].hop.peer):
            return  # of a hop that is no more
        if code in HOP_LOST or code in CHAIN_BROKEN:
            link.is_lost = link.is_lost or code in HOP_LOST  # it says so itself: nobody is blamed
            self.hops.worry(f"{link.hop}: {refusal.message}")
        else:
            text = f"{link.hop} refused: {refusal.message}"
            self._fatal = CacheExhausted(text) if code is Code.TOO_LONG else Refused(code, text)
            self.hops.notify()

    # --- waiting and repairing -------------------------------------------------------------------------------

    async def _wait(self) -> None:
        """Wait for news, repair what broke, suspect who is silent. Raises SwarmError when it is hopeless."""
        if self._fatal is not None:
            raise self._fatal
        if self.hops.trouble is not None:
            await self._repairs.run()
            return
        changed = self.hops.changed
        with trio.move_on_after(LOOK_INTERVAL_S) as look:
            await changed.wait()
        if look.cancelled_caught:
            for link in self.hops.links:
                if (reason := link.watch.suspicion(trio.current_time())) is not None:
                    self.hops.lose(link, reason)

    # --- small things ----------------------------------------------------------------------------------------

    async def _send_to(self, index: int, seq: int, frame: bytes) -> None:
        link = self.hops.links[index]
        link.watch.on_sent(seq, trio.current_time())
        if index == 0:
            self.statistics.frames_sent += 1
        try:
            channel = await self._swarm.rpc.channel(link.hop.peer)
            with trio.fail_after(OPEN_TIMEOUT_S):
                await channel.send_raw(frame)
        except (PeerError, trio.TooSlowError) as error:
            self.hops.worry(f"{link.hop}: {error}")
