"""One decoder block that proposes how a text goes on, from the hidden states that leave a model's last block.

At place i of a text it takes the embedding of token i + 1 and the hidden state that chose it, and says which token is
likely to follow; then it goes on from its own output in place of hidden states that nobody knows yet. It has a head of
its own over the tokens that the model writes most. Source: EAGLE (Li et al. 2024, section 3.1), and for learning on its
own outputs EAGLE-3 (Li et al. 2025, section 3.2). Rotary positions, RMS norms and SwiGLU are Llama's, whatever family
the model is of.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from swarmd.errors import ConfigError
from swarmd.protocol.models.draft import HEAD_WIDTH, TOKENS, DraftSettings

ROTARY_BASE = 10_000.0  # Llama's
EPSILON = 1e-6  # of norms


class _Norm(nn.Module):
    """RMS norm in whichever dtype comes in."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), EPSILON)


class DraftBlock(nn.Module):
    """See the module. b rows of t places, width d; ``heads`` of HEAD_WIDTH each."""

    tokens: torch.Tensor

    def __init__(self, settings: DraftSettings) -> None:
        super().__init__()
        self.settings = settings
        d, inner = settings.width, settings.inner
        self.register_buffer(TOKENS, torch.zeros(settings.vocabulary, dtype=torch.int32))
        self.enter_embedding = nn.Linear(settings.embedding, d, bias=False)
        self.enter_hidden = nn.Linear(settings.hidden, d, bias=False)
        self.enter_own = nn.Linear(d, d, bias=False)
        self.unknown = nn.Parameter(torch.zeros(d))  # in place of a hidden state that did not come here
        self.embedding_norm = _Norm(settings.embedding)
        self.hidden_norm = _Norm(settings.hidden)
        self.own_norm = _Norm(d)
        self.attention_norm = _Norm(d)
        self.attention_in = nn.Linear(d, 3 * d, bias=False)
        self.attention_out = nn.Linear(d, d, bias=False)
        self.inner_norm = _Norm(d)
        self.inner_in = nn.Linear(d, 2 * inner, bias=False)
        self.inner_out = nn.Linear(inner, d, bias=False)
        self.head_norm = _Norm(d)
        self.head = nn.Linear(d, settings.vocabulary, bias=False)

    def enter(self, embedded: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Take embeddings [b, t, e] of the next tokens and hidden states [b, t, h]; returns [b, t, d]."""
        return self.enter_embedding(self.embedding_norm(embedded)) + self.enter_hidden(self.hidden_norm(hidden))  # type: ignore[no-any-return]

    def enter_unknown(self, embedded: torch.Tensor) -> torch.Tensor:
        """Take embeddings [b, t, e] at places whose hidden states did not come here."""
        return self.enter_embedding(self.embedding_norm(embedded)) + self.unknown  # type: ignore[no-any-return]

    def go_on(self, embedded: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """Take embeddings [b, t, e], and its own outputs [b, t, d] at the places before."""
        return self.enter_embedding(self.embedding_norm(embedded)) + self.enter_own(self.own_norm(own))  # type: ignore[no-any-return]

    def attend(self, x: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Queries, keys and values, each [b, heads, t, HEAD_WIDTH], of places from ``first`` on."""
        b, t, d = x.shape
        parts = self.attention_in(self.attention_norm(x)).view(b, t, 3, d // HEAD_WIDTH, HEAD_WIDTH)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        return _rotate(q, first), _rotate(k, first), v

    def leave(self, x: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
        """The block's output [b, t, d], of what came in and what attention [b, heads, t, HEAD_WIDTH] gave."""
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        up, gate = self.inner_in(self.inner_norm(x)).chunk(2, -1)
        return x + self.inner_out(up * F.silu(gate))  # type: ignore[no-any-return]

    def score(self, out: torch.Tensor) -> torch.Tensor:
        """Logits [b, t, vocabulary] over its own ``tokens``."""
        return self.head(self.head_norm(out))  # type: ignore[no-any-return]

    # The first step sees hidden states; each further one is what the block does when it goes on alone. In step s the
    # query at place i sees what hidden states gave up to place i - s, and behind it its own outputs of steps 1 to s:
    #
    #     step 0   places  0  1  2  3          step 2   keys of place 3:  hidden 0 1, own of step 1 at 2, of step 2 at 3
    #
    # So each further step adds one key a query to those of the first.
    def unroll(self, embedded: torch.Tensor, entered: torch.Tensor, n_steps: int) -> Iterator[torch.Tensor]:
        """Yield the logits [b, t, vocabulary] of ``n_steps`` steps, each one place further.

        ``entered`` is [b, t, d], what places take in in step 0; embeddings are [b, t + n_steps - 1, e].
        """
        t = entered.shape[1]
        causal = torch.ones(t, t, dtype=torch.bool, device=entered.device).tril()
        x = entered
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        for step in range(n_steps):
            q, k, v = self.attend(x, step)
            keys.append(k)
            values.append(v)
            scores = (q @ keys[0].transpose(-1, -2)).masked_fill(~causal, -math.inf)
            own_scores = [(q * own).sum(-1, keepdim=True) for own in keys[1:]]
            weights = (torch.cat([scores, *own_scores], -1) / math.sqrt(HEAD_WIDTH)).float().softmax(-1).to(v.dtype)
            attended = weights[..., :t] @ values[0]
            for number, own in enumerate(values[1:]):
                attended = attended + weights[..., t + number : t + number + 1] * own
            out = self.leave(x, attended)
            yield self.score(out)
            if step + 1 < n_steps:
                x = self.go_on(embedded[:, step + 1 : step + 1 + t], out)


def make_block(settings: DraftSettings, tokens: torch.Tensor, head: torch.Tensor) -> DraftBlock:
    """A block that has learned nothing yet; ``head`` [vocabulary, hidden] are the model's own rows for its tokens.

    They are what it begins with where its width allows it.
    """
    block = DraftBlock(settings)
    with torch.no_grad():
        block.tokens.copy_(tokens)
        for layer in (block.enter_embedding, block.attention_out, block.inner_out):
            layer.weight.normal_(std=0.02)
        if settings.width == settings.hidden:
            nn.init.eye_(block.enter_hidden.weight)
        nn.init.eye_(block.enter_own.weight)
        if head.shape == block.head.weight.shape:
            block.head.weight.copy_(head)
    return block


def save_block(block: DraftBlock, path: Path) -> None:
    """Write a block's tensors: bfloat16, and whole numbers for its tokens."""
    tensors = {name: tensor.detach() for name, tensor in block.state_dict().items()}
    halved = {name: t.to(torch.bfloat16) if t.is_floating_point() else t for name, t in tensors.items()}
    beside = path.with_name(f"{path.name}.new")
    save_file({name: tensor.contiguous() for name, tensor in halved.items()}, beside)
    beside.replace(path)


def load_block(settings: DraftSettings, path: Path, n_tokens: int, dtype: torch.dtype) -> DraftBlock:
    """Read a block's tensors, for a model with ``n_tokens`` in its vocabulary. Raises ConfigError."""
    with torch.device("meta"):  # a file that says more than it holds takes no memory
        block = DraftBlock(settings)
    try:
        block.load_state_dict(load_file(path), assign=True)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise ConfigError(f"{path} does not hold the tensors of this draft: {error}") from None
    low, high = int(block.tokens.min()), int(block.tokens.max())
    if low < 0 or high >= n_tokens:
        raise ConfigError(f"{path}: tokens from {low} to {high}, and the model has {n_tokens}")
    return block.to(dtype).eval()


def _rotate(x: torch.Tensor, first: int) -> torch.Tensor:
    """Rotary positions from ``first`` on, of [b, heads, t, HEAD_WIDTH]."""
    frequencies = ROTARY_BASE ** -(torch.arange(0, HEAD_WIDTH, 2, device=x.device) / HEAD_WIDTH)
    angles = torch.arange(first, first + x.shape[2], device=x.device)[:, None] * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
