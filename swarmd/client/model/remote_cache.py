"""The cache of a remote model: it holds nothing but one session, whose keys and values lie on servers."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, Protocol

import torch
from transformers import Cache, DynamicCache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

from swarmd.client.links.answers import WindowAnswer
from swarmd.client.links.client_parameters import TunedParameters
from swarmd.client.links.link import ServedLogits
from swarmd.client.links.ops import StepInput
from swarmd.compute.cache.absent_layer import AbsentLayer
from swarmd.compute.model import skeleton
from swarmd.errors import CacheExhausted
from swarmd.protocol.wire.alternatives import Alternative, count_alternative_tokens
from swarmd.protocol.wire.messages import Edit


class Session(Protocol):
    """A session as the model uses it: blocking calls from any thread."""

    @property
    def layer_arity(self) -> int: ...

    @property
    def chain(self) -> tuple[str, ...]: ...

    @property
    def hops_s(self) -> tuple[float, ...]: ...

    @property
    def can_fly(self) -> bool: ...

    @property
    def next_number(self) -> int: ...

    def step(self, step: StepInput) -> torch.Tensor | None: ...

    def send(self, number: int, step: StepInput) -> None: ...

    def receive(self, timeout_s: float | None) -> WindowAnswer | None: ...

    def void_from(self, number: int) -> None: ...

    @property
    def served_logits(self) -> ServedLogits | None: ...

    def reject_logits(self, logits: ServedLogits, reason: str) -> None: ...

    def finish(self) -> None: ...

    def close(self) -> None: ...


OpenSession = Callable[[int, int, TunedParameters | None], Session]
"""Open a session for (batch, max_tokens), and parameters of the client's own that its tokens pass through."""


class RemoteLayerCache(AbsentLayer):
    """One layer of a RemoteCache: reports the session's length and holds nothing, not even the cache itself.

    So a cache is freed, and its session closed, when its last user drops it, not when Python looks for cycles.
    """

    def __init__(self, owner: RemoteCache, original: Any) -> None:
        super().__init__(original)
        self.owner = weakref.proxy(owner)

    def get_seq_length(self) -> int:
        return int(self.owner.n_tokens)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return int(self.owner.n_tokens) + query_length, 0


class RemoteCache(Cache):  # type: ignore[misc]
    """The caches of one session, on the servers. Closing it frees them; so does dropping it."""

    def __init__(
        self, config: PretrainedConfig, open_session: OpenSession, max_tokens: int, dtype: torch.dtype = torch.float32
    ) -> None:
        n_layers = skeleton.text_config(config).num_hidden_layers
        originals = [*DynamicCache(config=config).layers, *(DynamicLayer() for _ in range(n_layers))][:n_layers]
        super().__init__(layers=[RemoteLayerCache(self, original) for original in originals])
        self.n_tokens = 0
        self.max_tokens = max_tokens
        self.dtype = dtype  # in which the swarm computes, whatever the client's part is in
        self.n_expected = 0  # prompt tokens that max_tokens reckons with, if that is known
        self.tuned: TunedParameters | None = None
        self.session: Session | None = None
        self._open_session = open_session
        self._edits: list[Edit] = []
        self._records_past = False
        self._has_padding = False
        self.returned = torch.empty(0)  # by the last ``append``, [b, n, d]

    @property
    def max_cache_len(self) -> int:
        """PEFT asks."""
        return self.max_tokens

    def crop(self, tokens_to_remove: int) -> None:
        """Forget the last tokens on all servers, with the next op."""
        removed = abs(tokens_to_remove)
        if removed > self.n_tokens:
            raise ValueError(f"cannot remove {removed} of {self.n_tokens} tokens")
        if removed or self._records_past:
            self._edits.append(Edit(crop=removed))
        self.n_tokens -= removed

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Put other rows in the places of rows on all servers, with the next op, as beams do."""
        rows = tuple(int(i) for i in beam_idx)
        if rows != tuple(range(len(rows))):
            self._edits.append(Edit(rows=rows))

    def activate_past_recording(self) -> None:
        """Have servers keep what a layer's cache would forget, so that it can be cropped."""
        self._records_past = True

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise NotImplementedError("a remote cache has a fixed batch: expand the prompts instead")

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        raise NotImplementedError("a remote cache has a fixed batch: keep all rows, or start anew with fewer")

    def use_parameters(self, parameters: TunedParameters) -> None:
        """Have the session's tokens pass through the client's own parameters, after their prefix."""
        self.tuned = parameters
        self.n_tokens += parameters.n_prefix
        self.max_tokens += parameters.n_prefix

    def append(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        mask: torch.Tensor | None,
        want: int | None = None,
        vocabulary: int = 0,
    ) -> torch.Tensor:
        """Send hidden states through the remote layers: [b, t, d] -> [b, t, d], true for the last ``want`` tokens.

        With a ``vocabulary`` the session may have their largest logits (``served_logits``), too.
        """
        b, t, _ = hidden.shape
        if self.session is None and self.n_expected:
            self.max_tokens += max(0, t - self.n_expected)  # tuned prompts come on top
        if self.n_tokens + t > self.max_tokens:
            raise CacheExhausted(
                f"{self.n_tokens} tokens and {t} more exceed the {self.max_tokens} that this session can hold"
            )
        if self.session is None:
            tuned = self.tuned if self.tuned and self.tuned.version else None
            self.session = self._open_session(b, self.max_tokens, tuned)
        chunk = None if mask is None else mask[:, -t:].to(torch.uint8)
        self._has_padding = self._has_padding or (chunk is not None and not bool(chunk.all()))
        step = StepInput(
            hidden.to(self.dtype),
            positions.to(torch.int32).expand(b, t),
            edits=tuple(self._edits),
            mask=chunk if self._has_padding else None,
            record_past=self._records_past,
            want=want,
            vocabulary=vocabulary,
        )
        self._edits = []
        out = self.session.step(step)
        assert out is not None
        self.n_tokens += t
        self.returned = out
        return out.to(hidden.dtype)

    @property
    def can_fly(self) -> bool:
        """May several windows of tokens be under way together?"""
        return self.session is not None and not self._has_padding and self.session.can_fly

    @property
    def next_number(self) -> int:
        """The number of the next window."""
        assert self.session is not None
        return self.session.next_number

    def send(
        self,
        number: int,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        want: int,
        vocabulary: int = 0,
        alternatives: tuple[Alternative, ...] = (),
    ) -> None:
        """Send hidden states [1, t, d] into the remote layers; ``receive`` gives what comes back.

        ``number`` counts on from ``next_number``. ``want``, ``vocabulary`` and ``alternatives``: see ``StepInput``.
        """
        n_kept = hidden.shape[1] - count_alternative_tokens(alternatives)
        if self.n_tokens + n_kept > self.max_tokens:
            raise CacheExhausted(
                f"{self.n_tokens} tokens and {n_kept} more exceed the {self.max_tokens} that this session can hold"
            )
        assert self.session is not None
        step = StepInput(
            hidden.to(self.dtype),
            positions.to(torch.int32),
            edits=tuple(self._edits),
            want=want,
            vocabulary=vocabulary,
            alternatives=alternatives,
        )
        self._edits = []
        self.session.send(number, step)
        self.n_tokens += n_kept

    def receive(self, timeout_s: float | None) -> WindowAnswer | None:
        """Wait for the next answer, as long as it takes or for so long; None where none came."""
        assert self.session is not None
        return self.session.receive(timeout_s)

    def prepare_append(
        self, n: int, want: int | None = None, vocabulary: int = 0
    ) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
        """Positions [1, n] of n new tokens of one row, and what takes their hidden states through the swarm.

        ``want`` (None: all) and ``vocabulary`` as in ``append``.
        """
        positions = torch.arange(self.n_tokens, self.n_tokens + n).unsqueeze(0)
        return positions, lambda hidden: self.append(hidden, positions, None, want or n, vocabulary)

    def __deepcopy__(self, memo: Any) -> RemoteCache:
        raise TypeError(
            "a remote cache is one session on servers, and is not copied: make another by model.new_cache()"
        )

    def close(self) -> None:
        """Close the session, which frees its caches on the servers."""
        if self.session is not None:
            self.session.close()
            self.session = None

    def __del__(self) -> None:
        if getattr(self, "session", None) is not None:
            self.close()
