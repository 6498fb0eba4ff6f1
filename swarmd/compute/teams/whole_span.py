"""Members that each hold all of some blocks, and share what a long prompt takes: each computes some of its tokens.

The leader computes everything else alone, as fast as it can: a team of one would decode no faster. What it has decoded
since goes to the others before they share the next tokens. A member that is gone costs the pass that it was in: the
leader computes that one again, and goes on alone.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.cache.session_cache import Tensors
from swarmd.compute.cache.span_cache import SpanCache
from swarmd.compute.passes.backend import RaggedBackend
from swarmd.compute.passes.family import PROBE_ERRORS
from swarmd.compute.passes.ragged import RaggedAttention
from swarmd.compute.passes.span import SELF_TEST_TOLERANCE, LoadedSpan, LoadOptions
from swarmd.compute.teams.links import Link
from swarmd.compute.teams.numbering import Numbering
from swarmd.compute.teams.orders import (
    Forget,
    KeepCopy,
    Order,
    PutTokens,
    ShareRows,
    read_numbers,
    tell,
    write_numbers,
)
from swarmd.compute.teams.row_exchange import RowExchange
from swarmd.compute.teams.sums import PassGivenUp, TeamBroken
from swarmd.plan.teams.slices import slices
from swarmd.values import Decision, Span

logger = logging.getLogger(__name__)

LEAST_ROWS = 32  # new tokens of each member: fewer are bound by reading the weights, which all of them do
PATIENCE_S = 3.0  # for a member that is done no sooner, beside AS_LONG times what the leader took for its own rows
AS_LONG = 2.0  # a machine that is half as fast, or busy
LOOK_EVERY_S = 0.3  # while a member computes
FORGOTTEN_AT_ONCE = 8  # copies that are told of together
COPIED_AT_ONCE = 1_024  # tokens of a layer: 8 MB where heads are many and wide
PROBE_PAST = 5  # tokens before those that are shared in the self-test


class CopiedCache(SpanCache):
    """A session's cache at the leader: members may have a copy of its first ``n_copied`` tokens, called by a number."""

    def __init__(self, *settings: Any) -> None:
        super().__init__(*settings)
        self.number = -1  # nobody has a copy yet
        self.n_copied = 0
        self.has_longer_copy = False  # what was taken back here is still there
        self.n_rows = 0

    def crop(self, n_tokens: int) -> None:
        """See SpanCache."""
        super().crop(n_tokens)
        self.n_copied = min(self.n_copied, int(self.owned[0].get_seq_length()))
        self.has_longer_copy = True

    def reorder(self, rows: torch.Tensor) -> None:
        """See SpanCache."""
        self.n_copied = 0
        super().reorder(rows)

    def take_over(self, other: SpanCache, start: int, end: int, may_share: bool) -> None:
        """See SpanCache."""
        self.n_copied = min(self.n_copied, start)
        super().take_over(other, start, end, may_share)

    def borrow(self, other: SpanCache, n_tokens: int) -> None:
        """See SpanCache."""
        self.n_copied = 0
        super().borrow(other, n_tokens)

    def restore_untrusted(self, state: Tensors, example: SpanCache, n_rows: int, n_tokens: int) -> None:
        """See SpanCache."""
        self.n_copied = 0
        super().restore_untrusted(state, example, n_rows, n_tokens)


class WholeSpan(LoadedSpan):
    """The leader's blocks. ``members`` are those that share long prompts; without them it is a span like any other."""

    def __init__(self, folder: Path, span: Span, dtype: torch.dtype, options: LoadOptions, *signals: Any) -> None:
        self._members: list[Link] = []
        self._numbers = Numbering()
        self._passes = itertools.count(1)
        super().__init__(folder, span, dtype, options, *signals)

    def share_with(self, members: Sequence[Link]) -> Decision[bool]:
        """Share long prompts from now on, if that gives what the span gives alone; the reason says why (not)."""
        if self.ragged is None or not self.new_cache().is_plain or self.options.kv_cache != "none":
            return Decision(False, "long prompts are not shared: its blocks keep more than plain keys and values")
        self._members = list(members)
        error = self._sharing_error()
        if not self._members:
            return Decision(False, "long prompts are not shared: a member was gone at once")
        if not error <= SELF_TEST_TOLERANCE[self.dtype]:
            self._members = []
            return Decision(False, f"long prompts are not shared: what comes of it differs by {error:.2g}")
        return Decision(True, f"long prompts are shared among {1 + len(members)} (self-test: {error:.1g} off)")

    @torch.inference_mode()
    def _sharing_error(self) -> float:
        """By how much a pass that is shared differs from one that is not; infinitely where it fails."""
        n_shared = LEAST_ROWS * (1 + len(self._members))
        n = PROBE_PAST + n_shared + 1
        hidden = self.family.random_hidden(1, n, torch.Generator().manual_seed(1))
        positions = torch.arange(n, device=self.device).unsqueeze(0)
        found = []
        for run in (super().run, self.run):
            cache = self.new_cache()
            outs = []
            for start, end in ((0, PROBE_PAST), (PROBE_PAST, n - 1), (n - 1, n)):
                piece = SessionTokens(hidden[:, start:end], positions[:, start:end], cache, start)
                try:
                    outs += run([piece], self.span)
                except PROBE_ERRORS as error:
                    logger.warning("a pass that is shared fails: %s", error)
                    return float("inf")
            found.append(torch.cat(outs, 1))
        alone, shared = found
        return float((shared - alone).abs().max() / alone.abs().max())

    def make_cache(self, *settings: Any) -> SpanCache:
        """See LoadedSpan."""
        return CopiedCache(*settings)

    @torch.inference_mode()
    def run(self, pieces: Sequence[SessionTokens], hop: Span | None = None) -> list[torch.Tensor]:
        """See LoadedSpan. The longest piece is shared, if it is long enough."""
        hop = hop or self.span
        longest = max(pieces, key=lambda piece: piece.hidden.shape[1])
        try:
            self._tell_forgotten()
            if self._can_share(pieces, longest):
                return self._run_shared(list(pieces), longest, hop)
        except TeamBroken as error:
            logger.warning("%s: the leader goes on alone", error)
            for member in self._members:
                member.close()
            self._members = []
            for piece in pieces:
                _forget_new_tokens(piece)
        return super().run(pieces, hop)

    def _tell_forgotten(self) -> None:
        """Have members give up copies of caches that are no more, now and then."""
        if self._numbers.n_forgotten >= FORGOTTEN_AT_ONCE:
            tell(self._members, Forget(self._numbers.take_forgotten()))

    def _can_share(self, pieces: Sequence[SessionTokens], longest: SessionTokens) -> bool:
        n_members = 1 + len(self._members)
        if n_members < 2 or longest.hidden.shape[1] < LEAST_ROWS * n_members:
            return False
        is_plain = isinstance(longest.cache, CopiedCache) and longest.cache.is_plain and longest.lora is None
        return is_plain and not any(piece.is_alone for piece in pieces)

    def _run_shared(self, pieces: list[SessionTokens], shared: SessionTokens, hop: Span) -> list[torch.Tensor]:
        """Have members compute rows of one piece, compute the first of them and all other pieces here."""
        assert self.ragged is not None
        cache = shared.cache
        number = next(self._passes)
        n_rows = [len(rows) for rows in slices(shared.hidden.shape[1], [1] * (1 + len(self._members)))]
        self._order_rows(shared, hop, number, n_rows)
        first = SessionTokens(shared.hidden[:, : n_rows[0]], shared.positions[:, : n_rows[0]], cache, shared.n_past)
        links = dict(enumerate(self._members, 1))
        exchange = RowExchange(links, 0, first, n_rows, number, [])
        at = next(index for index, piece in enumerate(pieces) if piece is shared)
        begun = time.monotonic()
        outs = run_with(self, self.ragged, exchange, [*pieces[:at], first, *pieces[at + 1 :]], hop)
        took_s = time.monotonic() - begun
        parts = [outs[at]]
        for member, link in links.items():
            self._wait_for(link, PATIENCE_S + AS_LONG * took_s)
            exchange.take_back(member)
            parts.append(exchange.outputs_of(member))
        outs[at] = torch.cat(parts, 1)
        cache.n_copied = shared.n_past + shared.hidden.shape[1]
        return outs

    def _wait_for(self, member: Link, most_s: float) -> None:
        """Wait for a member to be done with its rows, and show signs of life meanwhile. Raises TeamBroken."""
        deadline = time.monotonic() + most_s
        while not member.has_frame(LOOK_EVERY_S):
            self.on_block()
            if time.monotonic() > deadline:
                raise TeamBroken(f"{member.name} of the team has given nothing for {most_s:.0f} s")
        self.on_block()

    def _order_rows(self, shared: SessionTokens, hop: Span, number: int, n_rows: Sequence[int]) -> None:
        """Tell each member which rows are its, and what its copy of the cache lacks."""
        cache = shared.cache
        b = shared.hidden.shape[0]
        if cache.number < 0:
            cache.number = self._numbers.give(cache)
        if cache.n_rows != b:  # a copy is of so many rows as it was made for
            cache.n_copied, cache.n_rows = 0, b
        n_past = shared.n_past
        self._copy_tokens(cache, hop, n_past)
        cache.n_copied = 0  # until the pass is over
        end = n_rows[0]
        for member, n in zip(self._members, n_rows[1:], strict=True):
            rows = slice(end, end + n)
            end += n
            order = ShareRows(
                cache=cache.number,
                hop=hop,
                n_past=n_past,
                n_rows=tuple(n_rows),
                hidden=write_numbers(shared.hidden[:, rows]),
                positions=write_numbers(shared.positions[:, rows].long()),
                number=number,
            )
            tell([member], order)

    def _copy_tokens(self, cache: CopiedCache, hop: Span, n_past: int) -> None:
        """Have members' copies of a cache hold so many tokens."""
        if n_past and cache.n_copied == n_past and not cache.has_longer_copy:
            return
        cache.has_longer_copy = False
        tell(self._members, KeepCopy(cache.number, hop, cache.n_copied))
        for start in range(cache.n_copied, n_past, COPIED_AT_ONCE):
            for number, layer in enumerate(cache.owned):
                keys, values = layer.tokens(start, min(n_past, start + COPIED_AT_ONCE))
                tell(self._members, PutTokens(cache.number, number, write_numbers(keys), write_numbers(values)))
            self.on_block()


class WholeFollower:
    """A member's blocks, and copies of the leader's caches."""

    def __init__(self, span: LoadedSpan, links: dict[int, Link], member: int, orders: list[bytearray]) -> None:
        self._span = span
        self._links = links
        self._member = member
        self._orders = orders
        self._caches: dict[int, SpanCache] = {}

    @torch.inference_mode()
    def do(self, order: Order) -> None:
        """Do what the leader asks."""
        match order:
            case Forget(numbers):
                for number in numbers:
                    self._caches.pop(number, None)
            case KeepCopy():
                self._keep(order)
            case PutTokens(cache, layer, keys, values):
                self._caches[cache].owned[layer].put(read_numbers(keys), read_numbers(values))
            case ShareRows():
                with suppress(PassGivenUp):  # the leader begins the copy anew
                    self._share(order)

    def _keep(self, order: KeepCopy) -> None:
        if not order.n_tokens:
            self._caches[order.cache] = self._span.new_cache(order.hop)
            return
        cache = self._caches[order.cache]
        cache.crop(int(cache.owned[0].get_seq_length()) - order.n_tokens)

    def _share(self, order: ShareRows) -> None:
        """Compute this member's rows, while keys and values go to and fro."""
        assert self._span.ragged is not None
        cache = self._caches[order.cache]
        n_past = order.n_past + sum(order.n_rows[: self._member])
        piece = SessionTokens(read_numbers(order.hidden), read_numbers(order.positions), cache, n_past)
        exchange = RowExchange(self._links, self._member, piece, order.n_rows, order.number, self._orders)
        (outputs,) = run_with(self._span, self._span.ragged, exchange, [piece], order.hop)
        exchange.give_back(outputs)
        for other in range(self._member + 1, len(order.n_rows)):
            exchange.take_back(other)


def run_with(
    span: LoadedSpan, ragged: RaggedAttention, exchange: RowExchange, pieces: Sequence[SessionTokens], hop: Span
) -> list[torch.Tensor]:
    """Compute pieces in one row, of which one's keys and values are exchanged."""
    before = ragged.on_keys
    ragged.on_keys = exchange.on_keys
    try:
        return RaggedBackend(span.family, ragged, hop, span.adapters).run(pieces)
    finally:
        ragged.on_keys = before


def _forget_new_tokens(piece: SessionTokens) -> None:
    """Take back what a pass that broke off has left in the layers that it came to."""
    for layer in piece.cache.owned:
        n_new = int(layer.get_seq_length()) - piece.n_past
        if n_new > 0:
            layer.crop(-n_new)
