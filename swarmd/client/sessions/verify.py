"""Every token checked: a second chain, of other servers, computes behind the first what that has given.

It takes what came since its last look as one prefill, which costs a fraction of what the tokens did one by one, and
runs beside the session; at the first token that differs the session ends with an error. docs/trust.md has its cost.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np
import torch
import trio

from swarmd.client.links.link import SessionOptions
from swarmd.client.sessions.session import ChainSession
from swarmd.errors import SwarmError, SwarmUnavailable, WrongAnswer
from swarmd.plan.trust.equality import Bound, bound_of, errors, is_equal, widen_bound
from swarmd.protocol.wire.messages import count_cropped
from swarmd.wire.history import SentOp

TOKENS_BEHIND = 16  # that the second chain waits for: fewer cost it as much as the first
OpenSecond = Callable[[SessionOptions], Awaitable[ChainSession]]


class VerifyingChain:
    """The second chain of one session. ``bound`` grows with the hops: each rounds what the one before gave."""

    def __init__(self, first: ChainSession, open_second: OpenSecond, start: Callable[..., None]) -> None:
        self._first = first
        self._open = open_second
        self._start = start
        self._session: ChainSession | None = None
        self._waiting: list[tuple[SentOp, torch.Tensor]] = []  # ops, and what came of them; nan was not asked for
        self._n_waiting = 0
        self._n_checked = 0  # tokens in the second chain's caches
        self._failure: SwarmError | None = None
        self._idle = trio.Event()
        self._idle.set()
        self._looking = trio.CancelScope()
        self._is_stopped = False

    async def stop(self) -> ChainSession | None:
        """Check nothing more; returns the second chain, which is to be closed."""
        self._is_stopped = True
        self._looking.cancel()
        await self._idle.wait()
        return self._session

    def follow(self, sent: SentOp, out: torch.Tensor | None, want: int | None) -> None:
        """An op was answered. Raises WrongAnswer once something before differs, or why nothing can be checked."""
        if self._failure is not None:
            raise self._failure
        self._waiting.append((sent, _wanted(out, want)))
        self._n_waiting += 0 if sent.hidden is None else sent.hidden.shape[1]
        if self._n_waiting >= TOKENS_BEHIND and self._idle.is_set():
            self._idle = trio.Event()
            self._start(self._look)

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    async def finish(self) -> None:
        """Check what is left. Raises as ``follow`` does."""
        await self._idle.wait()
        if self._waiting and self._failure is None:
            self._idle = trio.Event()
            await self._look()
        if self._failure is not None:
            raise self._failure

    async def _look(self) -> None:
        try:
            waiting, self._waiting, self._n_waiting = self._waiting, [], 0
            with trio.CancelScope() as self._looking:
                for sent, out in merged(waiting) if not self._is_stopped else ():
                    await self._check(sent, out)
        except SwarmError as error:
            self._failure = error
        except BaseException:
            self._failure = SwarmUnavailable("what checks this session failed")
            raise
        finally:
            self._idle.set()

    async def _check(self, sent: SentOp, out: torch.Tensor) -> None:
        second = await self._apart()
        again = await second.step(sent.edits, sent.hidden, sent.positions, sent.mask, sent.record_past)
        self._n_checked -= count_cropped(sent.edits)
        if again is None or sent.hidden is None:
            return
        entered, came, checked = (t.detach().float().numpy() for t in (sent.hidden, out, again))
        bound = self._bound()
        found = errors(entered, came, checked, bound)
        found[np.isnan(came).all(axis=(0, 2))] = 0.0  # what the client did not want did not come
        if not (equal := is_equal(found, bound)).action:
            first_wrong = int(np.argmax(found > min(bound.token, bound.typical)))
            at = self._n_checked + first_wrong
            raise WrongAnswer(
                f"token {at + 1} of the session is not what {second.hops} computes: {equal.reason}; it came through "
                f"{self._first.hops}",
                at,
            )
        self._n_checked += sent.hidden.shape[1]

    async def _apart(self) -> ChainSession:
        """The second chain, of none who are in the first. Raises SwarmUnavailable once a repair brought one over."""
        used = frozenset(link.hop.peer for link in self._first.hops.links)
        if self._session is not None and used & {link.hop.peer for link in self._session.hops.links}:
            raise SwarmUnavailable("a server of the first chain took over in the one that checks it: ask again")
        if self._session is None:
            without = self._first.terms.without | used
            self._session = await self._open(
                replace(self._first.terms, route=(), without=without, verify=0.0, head=False)
            )
        return self._session

    def _bound(self) -> Bound:
        """A hop rounds, and the next one computes with that."""
        links = [*self._first.hops.links, *(self._session.hops.links if self._session else ())]
        peers, view = {link.hop.peer for link in links}, self._first.hops.swarm.view()
        kinds = {span.quantize for span in view.serving(self._first.terms.model) if span.peer in peers}
        quantize = "none" if kinds <= {"none"} else "any"
        n_hops = len(self._first.hops.links)
        bound = bound_of(self._first.terms.dtype, quantize)
        return widen_bound(bound, n_hops)


def _wanted(out: torch.Tensor | None, want: int | None) -> torch.Tensor:
    """An answer [b, t, d] with no numbers where none were asked for; nothing else can be that, it was checked."""
    if out is None or want is None or want >= out.shape[1]:
        return torch.empty(0) if out is None else out
    return torch.cat([torch.full_like(out[:, : out.shape[1] - want], float("nan")), out[:, out.shape[1] - want :]], 1)


def merged(ops: list[tuple[SentOp, torch.Tensor]]) -> list[tuple[SentOp, torch.Tensor]]:
    """The same with tokens that were cropped again left out, and what follows in one op: [b, t, d] each."""
    whole: list[tuple[SentOp, torch.Tensor]] = []
    for sent, out in ops:
        n_cropped, has_rows = count_cropped(sent.edits), any(e.rows is not None for e in sent.edits)
        last = whole[-1] if whole else None
        if last is None or has_rows or not _can_drop(last[0], n_cropped) or sent.hidden is None:
            whole.append((sent, out))
            continue
        whole[-1] = _joined(last, n_cropped, sent, out)
    return whole


def _can_drop(sent: SentOp, n_tokens: int) -> bool:
    return sent.hidden is not None and n_tokens < sent.hidden.shape[1]


def _joined(
    last: tuple[SentOp, torch.Tensor], n_cropped: int, sent: SentOp, out: torch.Tensor
) -> tuple[SentOp, torch.Tensor]:
    before, came = last
    assert before.hidden is not None
    assert before.positions is not None
    assert sent.hidden is not None
    assert sent.positions is not None
    kept = slice(0, before.hidden.shape[1] - n_cropped)
    masks = [before.mask, sent.mask]
    if any(mask is not None for mask in masks):
        sizes = (before.hidden.shape[:2], sent.hidden.shape[:2])
        masks = [torch.ones(s, dtype=torch.uint8) if m is None else m for m, s in zip(masks, sizes, strict=True)]
    mask = None if masks[0] is None or masks[1] is None else torch.cat([masks[0][:, kept], masks[1]], 1)
    joined = replace(
        before,
        seq=sent.seq,
        hidden=torch.cat([before.hidden[:, kept], sent.hidden], 1),
        positions=torch.cat([before.positions[:, kept], sent.positions], 1),
        mask=mask,
        record_past=before.record_past or sent.record_past,
    )
    return joined, torch.cat([came[:, kept], out], 1)
