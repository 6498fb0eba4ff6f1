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
from swarmd.client.links.ops import StepInput
from swarmd.client.sessions.session import ChainSession
from swarmd.errors import SwarmError, SwarmUnavailable, WrongAnswer
from swarmd.plan.trust.equality import Bound, bound_of, is_equal, measure_errors, widen_bound
from swarmd.protocol.wire.messages import count_cropped
from swarmd.wire.history import SentOp

TOKENS_BEHIND = 16  # that the second chain waits for: fewer cost it as much as the first
OpenSecond = Callable[[SessionOptions], Awaitable[ChainSession]]


# The second chain runs behind the first, a window at a time:
#
#     first chain    t1 t2 t3 ... t16 | t17 ...            one pass a token: the client waits for each
#     second chain                    [t1 ... t16]         one prefill for the window: the client waits for none
#
# Speculation sends tokens and crops them again. Both happen within a window, so the second chain need not compute them:
# ``merge_cropped`` leaves them out first. The chains share no server. A repair may bring one over; then the check ends
# with an error, because a server must not check itself.
class VerifyingChain:
    """The second chain of one session. ``bound`` grows with the hops: each rounds what the one before gave."""

    def __init__(self, first: ChainSession, open_second: OpenSecond, start: Callable[..., None]) -> None:
        self._first = first
        self._open = open_second
        self._start = start
        self._session: ChainSession | None = None
        self._waiting: list[tuple[SentOp, torch.Tensor]] = []  # ops with their answers; NaN was not asked for
        self._n_waiting = 0
        self._n_checked = 0  # tokens in the second chain's caches
        self._failure: SwarmError | None = None
        self._idle = trio.Event()
        self._idle.set()
        self._checking = trio.CancelScope()
        self._is_stopped = False

    async def stop(self) -> ChainSession | None:
        """Check nothing more; returns the second chain, which is to be closed."""
        self._is_stopped = True
        self._checking.cancel()
        await self._idle.wait()
        return self._session

    def follow(
        self,
        sent: SentOp,
        out: torch.Tensor | None,
        want: int | None,
    ) -> None:
        """An op was answered. Raises WrongAnswer once something before differs, or why nothing can be checked."""
        if self._failure is not None:
            raise self._failure
        self._waiting.append((sent, _mask_unwanted(out, want)))
        self._n_waiting += sent.n_kept
        if self._n_waiting >= TOKENS_BEHIND and self._idle.is_set():
            self._idle = trio.Event()
            self._start(self._check_waiting)

    @property
    def has_failed(self) -> bool:
        """Can nothing more be checked, or was something wrong?"""
        return self._failure is not None

    async def finish(self) -> None:
        """Check what is left. Raises as ``follow`` does."""
        await self._idle.wait()
        if self._waiting and self._failure is None:
            self._idle = trio.Event()
            await self._check_waiting()
        if self._failure is not None:
            raise self._failure

    async def _check_waiting(self) -> None:
        try:
            waiting = self._waiting
            self._waiting = []
            self._n_waiting = 0
            with trio.CancelScope() as self._checking:
                for sent, out in merge_cropped(waiting) if not self._is_stopped else ():
                    await self._check_op(sent, out)
        except SwarmError as error:
            self._failure = error
        except BaseException:
            self._failure = SwarmUnavailable("what checks this session failed")
            raise
        finally:
            self._idle.set()

    async def _check_op(self, sent: SentOp, out: torch.Tensor) -> None:
        """Compute one op again. Raises WrongAnswer with the first token that differs."""
        second = await self._second_session()
        step = StepInput(sent.hidden, sent.positions, sent.edits, sent.mask, sent.record_past)
        recomputed = await second.step(step)
        self._n_checked -= count_cropped(sent.edits)
        if recomputed is None or sent.hidden is None:
            return
        inputs, outputs, expected = (t.detach().float().numpy() for t in (sent.hidden, out, recomputed))
        bound = self._total_bound()
        deviations = measure_errors(inputs, outputs, expected, bound)
        deviations[np.isnan(outputs).all(axis=(0, 2))] = 0.0  # what the client did not want did not come
        comparison = is_equal(deviations, bound)
        if not comparison.action:
            first_wrong = int(np.argmax(deviations > min(bound.token, bound.typical)))
            token = self._n_checked + first_wrong
            raise WrongAnswer(
                f"token {token + 1} of the session is not what {second.chain} computes: {comparison.reason}; it came "
                f"through {self._first.chain}",
                token,
            )
        self._n_checked += sent.hidden.shape[1]

    async def _second_session(self) -> ChainSession:
        """The second chain, of none who are in the first. Raises SwarmUnavailable once a repair brought one over."""
        used = frozenset(link.hop.peer for link in self._first.chain.links)
        checking = self._session.chain.links if self._session is not None else []
        if any(link.hop.peer in used for link in checking):
            raise SwarmUnavailable("a server of the first chain took over in the one that checks it: ask again")
        if self._session is None:
            excluded = self._first.terms.without | used
            self._session = await self._open(
                replace(self._first.terms, route=(), without=excluded, verify=0.0, head=False)
            )
        return self._session

    def _total_bound(self) -> Bound:
        """What honest answers stay below: a hop rounds, and the next one computes with that."""
        links = list(self._first.chain.links)
        if self._session is not None:
            links += self._session.chain.links
        peers = {link.hop.peer for link in links}
        view = self._first.chain.swarm.view()
        spans = view.serving(self._first.terms.model)
        formats = {span.quantize for span in spans if span.peer in peers}
        quantize = "none" if formats <= {"none"} else "any"
        bound = bound_of(self._first.terms.dtype, quantize)
        return widen_bound(bound, len(self._first.chain.links))


def _mask_unwanted(out: torch.Tensor | None, want: int | None) -> torch.Tensor:
    """An answer [b, t, d] with NaN where no numbers were asked for; a checked answer holds no other NaN."""
    if out is None:
        return torch.empty(0)
    if want is None or want >= out.shape[1]:
        return out
    n_unwanted = out.shape[1] - want
    unwanted = torch.full_like(out[:, :n_unwanted], float("nan"))
    return torch.cat([unwanted, out[:, n_unwanted:]], 1)


def merge_cropped(
    ops: list[tuple[SentOp, torch.Tensor]],
) -> list[tuple[SentOp, torch.Tensor]]:
    """Leave out tokens that were cropped again, and join what follows them into one op: [b, t, d] each."""
    merged: list[tuple[SentOp, torch.Tensor]] = []
    for sent, out in ops:
        n_cropped = count_cropped(sent.edits)
        has_rows = any(edit.rows is not None for edit in sent.edits)
        last = merged[-1] if merged else None
        if last is None or has_rows or not _can_drop(last[0], n_cropped) or sent.hidden is None:
            merged.append((sent, out))
        else:
            merged[-1] = _merge_pair(last, n_cropped, sent, out)
    return merged


def _can_drop(sent: SentOp, n_tokens: int) -> bool:
    return sent.hidden is not None and n_tokens < sent.hidden.shape[1]


def _merge_pair(
    last: tuple[SentOp, torch.Tensor], n_cropped: int, sent: SentOp, out: torch.Tensor
) -> tuple[SentOp, torch.Tensor]:
    previous, previous_out = last
    assert previous.hidden is not None
    assert previous.positions is not None
    assert sent.hidden is not None
    assert sent.positions is not None
    remaining = slice(0, previous.hidden.shape[1] - n_cropped)
    mask = None
    if previous.mask is not None or sent.mask is not None:
        mask = torch.cat([_mask_of(previous)[:, remaining], _mask_of(sent)], 1)
    joined = replace(
        previous,
        seq=sent.seq,
        hidden=torch.cat([previous.hidden[:, remaining], sent.hidden], 1),
        positions=torch.cat([previous.positions[:, remaining], sent.positions], 1),
        mask=mask,
        record_past=previous.record_past or sent.record_past,
    )
    return joined, torch.cat([previous_out[:, remaining], out], 1)


def _mask_of(sent: SentOp) -> torch.Tensor:
    """The mask [b, t] of an op; all ones where it has none."""
    assert sent.hidden is not None
    if sent.mask is not None:
        return sent.mask
    return torch.ones(sent.hidden.shape[:2], dtype=torch.uint8)
