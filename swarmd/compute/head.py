"""Norm and head behind the last block, for clients that take the largest logits and need no head of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from swarmd.compute.ends import Ends
from swarmd.wire import top


class Head:
    """That of one model, beside a span that ends it. Raises ConfigError where the checkpoint has none."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._ends = Ends(folder, dtype, device=str(device))

    @torch.inference_mode()
    def largest(self, rows: Sequence[torch.Tensor], arity: int, n: int) -> list[bytes]:
        """What the last block gave, [t, d] each, to the ``n`` largest logits of each token, packed (wire.top).

        All of them by one pass. ``arity`` is what the model's layers return.
        """
        found = top.largest(self._ends.logits(torch.cat(list(rows)), arity), n)
        sizes = [len(row) for row in rows]
        parts = (torch.split(of, sizes) for of in (found.values, found.ids, found.log_sum))
        return [top.pack(top.Top(*part)) for part in zip(*parts, strict=True)]
