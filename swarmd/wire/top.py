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
from swarmd.wire.tensors import is_finite

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
        """Return logits [n, vocabulary], the same where they came; the others share what is left of 1."""
        n_others = max(1, vocabulary - self.ids.shape[1])
        known = self.values.logsumexp(-1) - self.log_sum
        log_missing = torch.log1p(-known.exp().clamp(max=1.0))
        rest = self.log_sum + log_missing - math.log(n_others)
        rest = torch.minimum(rest, self.values[:, -1])
        logits = rest.unsqueeze(1).repeat(1, vocabulary)
        return logits.scatter_(1, self.ids, self.values)


def largest(logits: torch.Tensor, n: int) -> Top:
    """Return of float32 logits [t, vocabulary] the largest ``n`` of each token, or all."""
    values, ids = logits.topk(min(n, logits.shape[1]))
    return Top(values, ids, logits.logsumexp(-1))


def pack(top: Top) -> bytes:
    """Write values, ids and sums, one after the other."""
    parts = [top.values.float(), top.ids.to(torch.int32), top.log_sum.float()]
    arrays = [part.contiguous().cpu().numpy() for part in parts]
    return b"".join(array.tobytes() for array in arrays)


def unpack_untrusted(raw: bytes, n_tokens: int, vocabulary: int) -> Top:
    """Read what ``pack`` made of MOST_LOGITS, or all. Raises RemoteProtocolError for what cannot be logits."""
    # A server could send anything of the right size. What is refused here would break sampling in the client: numbers
    # that are not finite, a sum that is smaller than its terms (a probability over 1), tokens that do not exist or are
    # named twice. Whether the logits are the model's is not seen here: audits compute them again.
    k = min(MOST_LOGITS, vocabulary)
    expected = n_tokens * (LOGIT_BYTES * k + SUM_BYTES)
    if len(raw) != expected:
        raise RemoteProtocolError(f"expected {k} logits of {n_tokens} tokens, {expected} B, got {len(raw)} B")
    data = torch.frombuffer(bytearray(raw), dtype=torch.float32)
    values = data[: n_tokens * k].view(-1, k)
    ids = data[n_tokens * k : -n_tokens].view(torch.int32)
    ids = ids.view(-1, k).long()
    log_sum = data[-n_tokens:]
    if not all(is_finite(part) for part in (values, log_sum)):
        raise RemoteProtocolError("logits that are not finite")
    is_falling = not (values.diff(dim=1) > 0).any()
    is_within_sum = not (values.logsumexp(-1) > log_sum + SLACK).any()
    if not (is_falling and is_within_sum):
        raise RemoteProtocolError("logits that do not fall, or exceed their sum")
    in_order, _ = ids.sort(1)
    is_named_twice = (in_order.diff(dim=1) == 0).any()
    if ids.min() < 0 or ids.max() >= vocabulary or is_named_twice:
        raise RemoteProtocolError(f"logits of tokens that are named twice, or beyond the {vocabulary} there are")
    return Top(values, ids, log_sum)
