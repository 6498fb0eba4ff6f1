"""A draft block at work: it proposes tokens for one text, from the hidden states that come back from the swarm."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from swarmd.client.drafting.draft_block import DraftBlock
from swarmd.client.drafting.recent_median import RecentMedian
from swarmd.protocol.models.draft import HEAD_WIDTH

logger = logging.getLogger(__name__)

REACH = 256  # places that a query sees: as many as rows had that it learned from

Embed = Callable[[torch.Tensor], torch.Tensor]


class BlockModel:
    """A draft block for any number of texts, with the model's own embedding, and what a token of it takes."""

    def __init__(self, block: DraftBlock, embed: Embed) -> None:
        self.block = block
        self.dtype = block.head.weight.dtype
        self._embed = embed
        self._token_s = RecentMedian()

    @property
    def each_s(self) -> float:
        """Seconds of a token, 0 before one was measured."""
        return self._token_s.value

    def embed(self, tokens: Sequence[int]) -> torch.Tensor:
        """Embeddings [1, t, e]."""
        return self._embed(torch.tensor([tokens])).to(self.dtype)

    def note(self, took_s: float) -> None:
        """A token took so long."""
        self._token_s.add(took_s)


@dataclass(slots=True)
class _Guess:
    """What the block says after a place: its output [1, 1, d], the two likeliest tokens, how likely the first is."""

    out: torch.Tensor
    token: int
    second: int
    chance: float


# The row of place i takes in token i + 1, and the hidden state of place i where the swarm has sent it; its output
# proposes token i + 2. Rows of the text itself are *settled*; those of tokens that are tried go on from the block's own
# outputs, and are settled again once the text has come so far:
#
#     tokens   t0  t1  t2  t3 | d4  d5            t3 is known, d4 and d5 are tried
#     rows         0   1   2    3   4             0 to 2 are settled; row 4 proposes d6
class BlockDraft:
    """Proposes the likeliest tokens of a draft block, one after the other; for one text."""

    takes_time = True

    def __init__(self, model: BlockModel) -> None:
        self._model = model
        heads = model.block.settings.width // HEAD_WIDTH
        self._keys = torch.zeros(1, heads, 2 * REACH, HEAD_WIDTH, dtype=model.dtype)
        self._values = torch.zeros_like(self._keys)
        self._first = 0  # the place of the first row
        self._taken: list[int] = []  # the token that each row took in
        self._n_settled = 0
        self._states: dict[int, torch.Tensor] = {}  # hidden states [d] by place, of rows that are not settled
        self._guesses: dict[int, _Guess] = {}  # by place: of the last settled row, and of those behind it
        self._reader: threading.Thread | None = None
        self._is_broken = False

    @property
    def each_s(self) -> float:
        """Seconds of a token, 0 before one was measured."""
        return self._model.each_s

    def begin(self, prompt: Sequence[int]) -> None:
        """Read the end of a prompt, in a thread of its own."""
        self._first = max(0, len(prompt) - REACH)
        self._reader = threading.Thread(target=self._read_prompt, args=(list(prompt),), name="swarmd draft")
        self._reader.start()

    def end(self) -> None:
        """Wait until the prompt is read."""
        if self._reader is not None:
            self._reader.join()

    def hear(self, place: int, hidden: torch.Tensor) -> None:
        """Keep the hidden state [d] that left the model's last block at a place."""
        self._states[place] = hidden
        if len(self._states) > REACH:
            del self._states[next(iter(self._states))]

    def second_choice(self, place: int) -> int | None:
        """Return the second likeliest token where it proposed the likeliest."""
        guess = self._guesses.get(place - 2)
        return None if guess is None else guess.second

    @torch.inference_mode()
    def propose(self, text: Sequence[int], tried: Sequence[int], max_tokens: int, min_chance: float) -> list[int]:
        """At most ``max_tokens`` tokens; it ends before one that follows the text with less than ``min_chance``."""
        if self._is_broken or (self._reader is not None and self._reader.is_alive()):
            return []
        if not self.each_s:
            max_tokens = min(2, max_tokens)  # it measures what each takes
        self._make_room(len(text) + len(tried) + max_tokens)
        self._forget_wrong(text, tried)
        started_at = time.perf_counter()
        self._settle(text)
        if not self.each_s:
            self._model.note(time.perf_counter() - started_at)
        n_known = len(text) + len(tried)
        for place in range(self._first + len(self._taken), n_known - 1):  # tried by others
            self._go_on(place, tried[place + 1 - len(text)])
        places = range(len(text) - 2, n_known - 2)
        chance = math.prod(self._guesses[place].chance for place in places if place in self._guesses)
        proposed: list[int] = []
        while len(proposed) < max_tokens:
            place = n_known - 2 + len(proposed)
            guess = self._guesses[place]
            chance *= guess.chance
            if chance < min_chance:
                break
            proposed.append(guess.token)
            if len(proposed) < max_tokens:
                self._go_on(place + 1, guess.token)
        return proposed

    @torch.inference_mode()
    def _read_prompt(self, prompt: list[int]) -> None:
        try:
            if len(prompt) > 1:
                self._settle(prompt)
        except (RuntimeError, IndexError):
            logger.exception("the draft cannot read the prompt: it proposes nothing")
            self._is_broken = True

    def _make_room(self, n_tokens: int) -> None:
        """Forget the oldest rows where so many tokens need more than there is room for."""
        n_needed = n_tokens - self._first
        if n_needed <= self._keys.shape[2]:
            return
        n_gone = n_needed - REACH
        if n_gone > self._n_settled:  # nobody has asked for long
            self._taken.clear()
            self._n_settled = 0
        else:
            for kept in (self._keys, self._values):
                kept[:, :, : kept.shape[2] - n_gone] = kept[:, :, n_gone:].clone()
            del self._taken[:n_gone]
            self._n_settled -= n_gone
        self._first += n_gone

    def _forget_wrong(self, text: Sequence[int], tried: Sequence[int]) -> None:
        """Keep the rows whose tokens text and tries begin with."""
        n = self._n_settled
        n_known = len(text) + len(tried)
        while n < len(self._taken) and (token := self._first + n + 1) < n_known:
            if self._taken[n] != (text[token] if token < len(text) else tried[token - len(text)]):
                break
            n += 1
        del self._taken[n:]
        self._guesses = {place: guess for place, guess in self._guesses.items() if place < self._first + n}

    def _settle(self, text: Sequence[int]) -> None:
        """Compute the rows of the text anew, with the hidden states that have come."""
        first = self._first + self._n_settled
        last = len(text) - 2
        if first > last:
            return
        block = self._model.block
        tokens = list(text[first + 1 : last + 2])
        embedded = self._model.embed(tokens)
        entered = block.enter_unknown(embedded)
        known = [place for place in range(first, last + 1) if place in self._states]
        if known:
            hidden = torch.stack([self._states.pop(place) for place in known]).to(self._model.dtype)[None]
            rows = torch.tensor(known) - first
            entered[:, rows] = block.enter(embedded[:, rows], hidden)
        out = self._pass(entered, self._n_settled)[:, -1:]
        self._taken[self._n_settled : self._n_settled + len(tokens)] = tokens
        self._n_settled += len(tokens)
        self._guesses = {place: guess for place, guess in self._guesses.items() if place > last}
        self._guesses[last] = self._guess(out)

    def _go_on(self, place: int, token: int) -> None:
        """Compute the row of a place that takes in a token which is tried."""
        started_at = time.perf_counter()
        entered = self._model.block.go_on(self._model.embed([token]), self._guesses[place - 1].out)
        out = self._pass(entered, place - self._first)
        self._taken.append(token)
        self._guesses[place] = self._guess(out)
        self._model.note(time.perf_counter() - started_at)

    def _pass(self, entered: torch.Tensor, row: int) -> torch.Tensor:
        """Compute rows [1, t, d] from ``row`` on, and keep their keys and values."""
        block = self._model.block
        t = entered.shape[1]
        q, k, v = block.attend(entered, self._first + row)
        self._keys[:, :, row : row + t] = k
        self._values[:, :, row : row + t] = v
        keys, values = self._keys[:, :, : row + t], self._values[:, :, : row + t]
        mask = None
        if t > 1:
            seen = torch.ones(t, row + t, dtype=torch.bool).tril(row)
            mask = seen & ~seen.tril(row - REACH)
        elif row >= REACH:
            keys, values = keys[:, :, row + 1 - REACH :], values[:, :, row + 1 - REACH :]
        return block.leave(entered, F.scaled_dot_product_attention(q, keys, values, mask))

    def _guess(self, out: torch.Tensor) -> _Guess:
        chances = self._model.block.score(out)[0, -1].float().softmax(-1).topk(2)
        token, second = self._model.block.tokens[chances.indices].tolist()
        return _Guess(out, token, second, float(chances.values[0]))
