"""The largest logits of a few tokens, and the log of the sum of all: what a client takes in place of a head of its own.

Greedy decoding and top-k sampling look at no others. With the sum the probabilities of those that came are right too;
what is left of 1 is shared by all others alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from swarmd.errors import RemoteProtocolError
from swarmd.protocol.fields import MOST_LOGITS, MOST_LOGITS_BYTES

LOGIT_BYTES = 8  # float32, and an int32 that says whose it is
SUM_BYTES = 4  # float32
MOST_WITH_LOGITS = MOST_LOGITS_BYTES // (LOGIT_BYTES * MOST_LOGITS + SUM_BYTES)  # of one op
SLACK = 1e-4  # nats by which sums of the same numbers differ, added in another order


@dataclass(frozen=True, slots=True)
class Top:
    """Of each of n tokens the k largest logits, the largest first.

    ``values`` float32 [n, k], ``ids`` int64 [n, k], ``log_sum`` float32 [n]: the log-sum-exp of all logits.
    """

    values: torch.Tensor
    ids: torch.Tensor
    log_sum: torch.Tensor

    def filled(self, vocabulary: int) -> torch.Tensor:
        """Logits [n, vocabulary], the same where they came; the others share what is left of the probability."""
        n_others = max(1, vocabulary - self.ids.shape[1])
        known = self.values.logsumexp(-1) - self.log_sum
        rest = self.log_sum + torch.log1p(-known.exp().clamp(max=1.0)) - math.log(n_others)
        rest = torch.minimum(rest, self.values[:, -1])
        return rest.unsqueeze(1).repeat(1, vocabulary).scatter_(1, self.ids, self.values)


def largest(logits: torch.Tensor, n: int) -> Top:
    """Of float32 logits [t, vocabulary] the largest ``n`` of each token, or all."""
    values, ids = logits.topk(min(n, logits.shape[1]))
    return Top(values, ids, logits.logsumexp(-1))


def pack(top: Top) -> bytes:
    """Values, ids and sums, one after the other."""
    parts = (top.values.float(), top.ids.to(torch.int32), top.log_sum.float())
    return b"".join(part.contiguous().cpu().numpy().tobytes() for part in parts)


def unpack_untrusted(raw: bytes, n_tokens: int, vocabulary: int) -> Top:
    """Read what ``pack`` made of MOST_LOGITS, or all. Raises RemoteProtocolError for what cannot be logits."""
    k = min(MOST_LOGITS, vocabulary)
    expected = n_tokens * (LOGIT_BYTES * k + SUM_BYTES)
    if len(raw) != expected:
        raise RemoteProtocolError(f"expected {k} logits of {n_tokens} tokens, {expected} B, got {len(raw)} B")
    data = torch.frombuffer(bytearray(raw), dtype=torch.float32)
    values, ids = data[: n_tokens * k], data[n_tokens * k : -n_tokens].view(torch.int32)
    top = Top(values.view(-1, k), ids.view(-1, k).long(), data[-n_tokens:])
    if not (torch.isfinite(top.values).all() and torch.isfinite(top.log_sum).all()):
        raise RemoteProtocolError("logits that are not finite")
    if (top.values.diff(dim=1) > 0).any() or (top.values.logsumexp(-1) > top.log_sum + SLACK).any():
        raise RemoteProtocolError("logits that do not fall, or exceed their sum")
    if top.ids.min() < 0 or top.ids.max() >= vocabulary or (top.ids.sort(1)[0].diff(dim=1) == 0).any():
        raise RemoteProtocolError(f"logits of tokens that are named twice, or beyond the {vocabulary} there are")
    return top
