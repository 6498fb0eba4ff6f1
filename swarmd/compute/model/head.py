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
    """The norm and head of one model, beside a span that ends it. ``arity`` is what its layers return.

    Raises ConfigError where the checkpoint has none, or it cannot be computed.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        device: torch.device,
        arity: int,
    ) -> None:
        self._ends = Ends(folder, dtype, device=str(device))
        self._device = device
        self._arity = arity
        try:
            self.largest([torch.zeros(1, self._ends.hidden_size, dtype=dtype)])
        except (RuntimeError, ValueError, TypeError) as error:
            raise ConfigError(f"head = true: a trial fails: {error}: say head = false") from None

    @torch.inference_mode()
    def largest(self, rows: Sequence[torch.Tensor]) -> list[bytes]:
        """Turn what the last block gave, [t, d] each, into the largest logits of each token, packed (wire.top)."""
        # Rows are put together and cut anew, so that each pass through the head is as large as memory allows.
        hidden = torch.cat(list(rows)).to(self._device)
        tops = []
        for part in torch.split(hidden, MOST_ROWS):
            logits = self._ends.logits(part, self._arity)
            tops.append(top.largest(logits, MOST_LOGITS))
        sizes = [len(row) for row in rows]
        values = torch.split(torch.cat([part.values for part in tops]), sizes)
        ids = torch.split(torch.cat([part.ids for part in tops]), sizes)
        log_sums = torch.split(torch.cat([part.log_sum for part in tops]), sizes)
        of_rows = zip(values, ids, log_sums, strict=True)
        return [top.pack(top.Top(*parts)) for parts in of_rows]
