"""A small model of the same vocabulary on the client's machine, which proposes how a text goes on."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import DynamicCache

from swarmd.client.drafting.recent_median import RecentMedian
from swarmd.compute.linear.kernels import choose_kernel
from swarmd.compute.model.ends import all_look_back
from swarmd.compute.model.skeleton import load_whole, longest_context, text_config
from swarmd.errors import ConfigError

logger = logging.getLogger(__name__)

CHUNK_TOKENS = 256  # of a prompt, between two looks whether it is still wanted


class DraftModel:
    """A whole model on this machine, for any number of texts at a time, and what a token of it takes.

    It proposes the first ``n_tokens`` of its vocabulary, which may have been filled up beyond those that there are.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, n_tokens: int) -> None:
        """Load it. Raises ConfigError, also for a family whose caches do not go back."""
        self.model = load_whole(folder, dtype)
        choose_kernel(self.model)
        if not all_look_back(text_config(self.model.config)):
            raise ConfigError(f"the {self.model.config.model_type} family cannot be a draft: its caches forget tokens")
        self.max_tokens = longest_context(self.model.config)
        self._n_tokens = n_tokens
        self._token_s = RecentMedian()

    @property
    def each_s(self) -> float:
        """Seconds of a token, 0 before one was measured."""
        return self._token_s.value

    @torch.inference_mode()
    def read(self, tokens: list[int], cache: DynamicCache) -> tuple[int, float, int]:
        """Add tokens to a text; returns the likeliest one after them, how likely it is, and the second one."""
        started_at = time.perf_counter()
        out = self.model(input_ids=torch.tensor([tokens]), past_key_values=cache, logits_to_keep=1)
        chances = out.logits[0, -1, : self._n_tokens].float().softmax(-1)
        best = chances.topk(2)
        if len(tokens) <= 2:  # what was proposed last, or that and what was right instead
            self._token_s.add(time.perf_counter() - started_at)
        token, second = best.indices.tolist()
        return token, float(best.values[0]), second


class Draft:
    """Proposes a model's likeliest tokens, one after the other; for one text."""

    takes_time = True

    def __init__(self, model: DraftModel) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.model.config)
        self._read: list[int] = []  # the tokens in the cache
        self._n_confirmed = 0  # so many of them are the text's, whatever became of what was proposed
        self._proposed: dict[int, tuple[float, int]] = {}  # by place in the text: how likely it was, the second choice
        self._reader: threading.Thread | None = None
        self._is_over = False

    @property
    def each_s(self) -> float:
        """Seconds of a token, 0 before one was measured."""
        return self._model.each_s

    def begin(self, prompt: Sequence[int]) -> None:
        """Read the prompt in a thread of its own; one that is too long for the model gets no proposals."""
        self._is_over = len(prompt) >= self._model.max_tokens
        self._reader = threading.Thread(target=self._read_prompt, args=(list(prompt),), name="swarmd draft")
        self._reader.start()

    def end(self) -> None:
        """Stop reading the prompt, and wait until the thread has ended."""
        self._is_over = True
        if self._reader is not None:
            self._reader.join()

    def hear(self, place: int, hidden: torch.Tensor) -> None:
        """Do nothing: tokens are all it reads."""

    def propose(self, text: Sequence[int], tried: Sequence[int], max_tokens: int, min_chance: float) -> list[int]:
        """At most ``max_tokens`` tokens; it ends before one that follows the text with less than ``min_chance``."""
        is_reading = self._reader is not None and self._reader.is_alive()
        n_known = len(text) + len(tried)
        if is_reading or self._is_over or n_known + max_tokens > self._model.max_tokens:
            return []
        if not self._model.each_s:
            max_tokens = 1  # it measures what each takes
        self._forget_wrong(text, tried)
        proposed: list[int] = []
        unread = [*text, *tried][len(self._read) :]
        chance = math.prod(self._proposed[place][0] for place in range(len(text), n_known) if place in self._proposed)
        while len(proposed) < max_tokens:
            token, probability, second = self._read_tokens(unread)
            chance *= probability
            if chance < min_chance:
                break
            self._proposed[n_known + len(proposed)] = probability, second
            unread = [token]
            proposed.append(token)
        return proposed

    def second_choice(self, place: int) -> int | None:
        """Return the second likeliest token where it proposed the likeliest."""
        _, second = self._proposed.get(place, (0.0, None))
        return second

    def _read_prompt(self, prompt: list[int]) -> None:
        try:
            for offset in range(0, len(prompt), CHUNK_TOKENS):
                if self._is_over:
                    return
                self._read_tokens(prompt[offset : offset + CHUNK_TOKENS])
        except (RuntimeError, IndexError, ValueError, TypeError):
            logger.exception("the draft cannot read the prompt: it proposes nothing")
            self._is_over = True

    def _read_tokens(self, tokens: list[int]) -> tuple[int, float, int]:
        likeliest = self._model.read(tokens, self._cache)
        self._read += tokens
        return likeliest

    def _forget_wrong(self, text: Sequence[int], tried: Sequence[int]) -> None:
        """Keep in the cache what text and tries begin with, except the last token: it is read for what follows."""
        n_known = len(text) + len(tried)
        n = self._n_confirmed
        while n < min(len(self._read), n_known - 1) and self._read[n] == _token_at(text, tried, n):
            n += 1
        if n < len(self._read):
            self._cache.crop(n - len(self._read))
            del self._read[n:]
        self._n_confirmed = min(n, len(text))
        self._proposed = {place: what for place, what in self._proposed.items() if len(text) <= place < n_known}


def _token_at(text: Sequence[int], tried: Sequence[int], place: int) -> int:
    return text[place] if place < len(text) else tried[place - len(text)]
