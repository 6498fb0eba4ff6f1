"""A small model of the same vocabulary on the client's machine, which proposes how a text goes on."""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from swarmd.client.speculation import N_MEASURED
from swarmd.compute.kernels import choose
from swarmd.compute.skeleton import load_whole


def load_draft(folder: Path, dtype: torch.dtype) -> Any:
    """A whole model, to be shared by any number of drafts. Raises ConfigError."""
    model = load_whole(folder, dtype)
    choose(model)
    return model


class Draft:
    """Proposes a model's likeliest tokens, one after the other; for one text at a time."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._cache = DynamicCache(config=model.config)
        self._read: list[int] = []  # the tokens in the cache
        self._n_sure = 0  # so many of them are the text's, whatever became of what was proposed
        self._taken: deque[float] = deque(maxlen=N_MEASURED)
        self._beginning: threading.Thread | None = None
        self.each_s = 0.0

    def begin(self, prompt: Sequence[int]) -> None:
        """Read the prompt meanwhile, in a thread of its own."""
        self._beginning = threading.Thread(target=self._next, args=(list(prompt),), daemon=True)
        self._beginning.start()

    def propose(self, tokens: Sequence[int], most: int, least: float) -> tuple[list[int], float]:
        """At most ``most`` tokens; it ends before one that follows with less than the chance ``least``."""
        if self._beginning is not None and self._beginning.is_alive():
            return [], 0.0  # the prompt is being read
        self._forget_wrong(tokens)
        found: list[int] = []
        new, chance, begun = list(tokens[len(self._read) :]), 1.0, time.perf_counter()
        while len(found) < most:
            token, probability = self._next(new)
            chance *= probability
            if chance < least:
                break
            new = [token]
            found.append(token)
        return found, time.perf_counter() - begun

    @torch.inference_mode()
    def _next(self, new: list[int]) -> tuple[int, float]:
        """Read tokens; returns the likeliest one after them, and how likely it is."""
        begun = time.perf_counter()
        out = self._model(input_ids=torch.tensor([new]), past_key_values=self._cache, logits_to_keep=1)
        best, token = out.logits[0, -1].float().softmax(-1).max(-1)
        self._read += new
        if len(new) <= 2:  # what was proposed last, or that and what was right instead
            self._taken.append(time.perf_counter() - begun)
            self.each_s = statistics.median(self._taken)
        return int(token), float(best)

    def _forget_wrong(self, tokens: Sequence[int]) -> None:
        """Keep what the text begins with, except its last token, which is read for what follows."""
        n = self._n_sure
        while n < min(len(self._read), len(tokens) - 1) and self._read[n] == tokens[n]:
            n += 1
        if n < len(self._read):
            self._cache.crop(n - len(self._read))
            del self._read[n:]
        self._n_sure = n
