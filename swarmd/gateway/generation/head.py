"""One thread for the client's own part of a model: every pass takes all rows that wait, of whatever requests.

Rows whose answers have come share the final norm, the head and the embedding of what they send next.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
import trio

from swarmd.client.links.link import ServedLogits
from swarmd.client.model.swarm_head import HeadChecks
from swarmd.client.sessions.session import ChainSession
from swarmd.compute.model.ends import MOST_ROWS, Ends


class HeadClient(Protocol):
    """One of those that share a head."""

    @property
    def start(self) -> int:
        """The position of what it sends next."""

    def decide(self, logits: torch.Tensor | None) -> list[int]:
        """Take logits [k, vocabulary], None at first; returns the tokens to send, none when it has ended."""


@dataclass(frozen=True, slots=True)
class ServerLogits:
    """Logits that a server gave a session, and whether they are computed here again."""

    session: ChainSession
    served: ServedLogits
    is_checked: bool


@dataclass(slots=True)
class HeadWork:
    """What the last block gave a row, [k, d] (None at first); then its next tokens, and these embedded, [1, t, d].

    ``wrong`` says what is wrong with the logits that were on ``offer``, if anything is. A row that ``wants_states``
    gets hidden states behind the final norm in place of logits.
    """

    row: HeadClient
    hidden: torch.Tensor | None = None
    arity: int = 0
    offer: ServerLogits | None = None
    wants_states: bool = False
    wrong: str = ""
    ids: list[int] = field(default_factory=list)
    embedded: torch.Tensor | None = None
    error: Exception | None = None
    done: trio.Event = field(default_factory=trio.Event)


class HeadThread:
    """Computes for all rows that wait, as long as it runs. With ``checks`` it takes servers' logits and checks some."""

    def __init__(self, ends: Ends, checks: HeadChecks | None = None) -> None:
        self.ends = ends
        self.checks = checks
        self._waiting: list[HeadWork] = []
        self._wake = trio.Event()

    async def __call__(
        self,
        row: HeadClient,
        hidden: torch.Tensor | None = None,
        arity: int = 0,
        offer: ServerLogits | None = None,
        wants_states: bool = False,
    ) -> HeadWork:
        """Have a row computed, with all others that wait by then; ``arity`` is what the model's layers return.

        Raises what ``decide`` raised.
        """
        work = HeadWork(row, hidden, arity, offer, wants_states)
        self._waiting.append(work)
        self._wake.set()
        await work.done.wait()
        if work.error is not None:
            raise work.error
        return work

    async def run(self) -> None:
        """Compute for all rows that wait, until cancelled."""
        # Rows that come while a pass runs on the thread are the next one's: batches grow with the load, and no pass
        # waits for more rows to come.
        while True:
            await self._wake.wait()
            self._wake = trio.Event()
            while self._waiting:
                batch = self._next_batch()
                await trio.to_thread.run_sync(self._compute, batch)
                for work in batch:
                    if work.offer is not None and work.wrong:  # whatever became of the request
                        await work.offer.session.reject_logits(work.offer.served, work.wrong)
                    work.done.set()

    def _next_batch(self) -> list[HeadWork]:
        """Take the oldest of those that wait, as many as MOST_ROWS has room for, and at least one."""
        n_rows = 0
        for count, work in enumerate(self._waiting):
            n_rows += 0 if work.hidden is None else len(work.hidden)
            if n_rows > MOST_ROWS and count:
                break
        else:
            count = len(self._waiting)
        batch = self._waiting[:count]
        self._waiting = self._waiting[count:]
        return batch

    def _compute(self, batch: list[HeadWork]) -> None:
        try:
            with torch.inference_mode():
                self._decide_all(batch)
                rows = [work for work in batch if work.ids and work.error is None]
                starts = [work.row.start for work in rows]
                embedded = self.ends.embed([work.ids for work in rows], starts)
                for work, tensor in zip(rows, embedded, strict=True):
                    work.embedded = tensor
        except Exception as error:  # noqa: BLE001 - every row's own task raises it
            for work in batch:
                work.error = work.error or error

    def _decide_all(self, batch: list[HeadWork]) -> None:
        """Give every row its logits: none at first, a server's as they are, or those computed here."""
        # Servers may send any logits. Those that are due for a check are computed here again from the hidden states,
        # and a row decides by what was computed here: a lie costs nothing then, and ``wrong`` tells of it.
        computed = []
        for work in batch:
            if work.hidden is None:
                _decide(work, None)
            elif work.wants_states:
                _decide(work, self.ends.states(work.hidden, work.arity))
            elif work.offer is not None and not work.offer.is_checked:
                _decide(work, work.offer.served.top.filled(self.ends.vocabulary))
            else:
                computed.append(work)
        for arity in {work.arity for work in computed}:
            rows = [work for work in computed if work.arity == arity]
            hidden = torch.cat([work.hidden for work in rows if work.hidden is not None])
            logits = self.ends.logits(hidden, arity)
            start = 0
            for work in rows:
                assert work.hidden is not None
                row_logits = logits[start : start + len(work.hidden)]
                if work.offer is not None and self.checks is not None:
                    work.wrong = self.checks.find_error(work.offer.served, row_logits, work.hidden.dtype)
                _decide(work, row_logits)
                start += len(work.hidden)


def _decide(work: HeadWork, logits: torch.Tensor | None) -> None:
    try:
        work.ids = work.row.decide(logits)
    except Exception as error:  # noqa: BLE001 - one row's trouble is none of the others'
        work.error = error
