"""Norm and head behind the last block, for clients that take the largest logits and need no head of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from swarmd.compute.model.ends import MOST_ROWS, Ends
from swarmd.errors import ConfigError
from swarmd.protocol.fields import MOST_LOGITS
from swarmd.wire import top


class LogitsHead:
    """That of one model, beside a span that ends it. ``arity`` is what its layers return.

    Raises ConfigError where the checkpoint has none, or it cannot be computed.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, device: torch.device, arity: int) -> None:
        self._ends = Ends(folder, dtype, device=str(device))
        self._device, self._arity = device, arity
        try:
            self.largest([torch.zeros(1, self._ends.width, dtype=dtype)])
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(f"head = true: a trial fails: {error}: say head = false") from None

    @torch.inference_mode()
    def largest(self, rows: Sequence[torch.Tensor]) -> list[bytes]:
        """What the last block gave, [t, d] each, to the largest logits of each token, packed (wire.top)."""
        hidden, sizes = torch.cat(list(rows)).to(self._device), [len(row) for row in rows]
        found = [
            top.largest(self._ends.logits(part, self._arity), MOST_LOGITS) for part in torch.split(hidden, MOST_ROWS)
        ]
        whole = (torch.cat(of) for of in zip(*((f.values, f.ids, f.log_sum) for f in found), strict=True))
        parts = (torch.split(of, sizes) for of in whole)
        return [top.pack(top.Top(*part)) for part in zip(*parts, strict=True)]
