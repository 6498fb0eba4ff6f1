"""What an engine keeps of the past of one session at one hop, as sessions see it."""

from __future__ import annotations

from typing import Any, Protocol

import torch

Tensors = dict[str, torch.Tensor]


class SessionCache(Protocol):
    """The cache of one session: appended to by passes, edited by its client, handed over to other workers.

    What an engine cannot do is refused, and the session goes on: a client replays its tokens then.
    """

    @property
    def is_plain(self) -> bool:
        """Does it hold every token's part in its place, so that others can take over its first tokens?"""

    def record_past(self) -> None:
        """Keep what a later crop needs, where tokens are forgotten else."""

    def refuses_crop(self, n_tokens: int) -> str:
        """Return why the last ``n_tokens`` cannot be taken back; empty if they can."""

    def refuses_places(self, places: torch.Tensor, is_real: torch.Tensor | None, n_left: int, order: Any) -> str:
        """Return why new tokens cannot be at these places [b, t]; empty if they can. ``is_real`` [b, t]: else padding.

        Before them rows are cropped to ``n_left`` tokens, and row i becomes what row ``order[i]`` was.
        """

    def crop(self, n_tokens: int) -> None:
        """Take back the last ``n_tokens``, which ``refuses_crop`` must allow; 0: keep as little past as is needed."""

    def reorder(self, rows: torch.Tensor) -> None:
        """Have row i be what row ``rows[i]`` was."""

    def take_over(self, other: Any, start: int, end: int, may_share: bool) -> None:
        """Have tokens [start, end) of another plain cache; what is before them is the same in both."""

    def borrow(self, other: Any, n_tokens: int) -> None:
        """Begin with the first tokens of another plain cache, which keeps them and may go on; forget what was here."""

    def export_state(self) -> Tensors:
        """Return all that it keeps, by names. Raises Refused where it cannot be handed over."""

    def restore_untrusted(self, state: Tensors, example: Any, n_rows: int, n_tokens: int) -> None:
        """Take what another worker's cache of the same blocks exported; ``example`` is one of this engine's.

        Raises Refused or RemoteProtocolError for what does not fit; the cache is then not to be used.
        """

    def n_bytes(self) -> int:
        """Return the bytes of all that it keeps."""

    def recorded_bytes(self) -> int:
        """Return what a token takes beside, where the past is recorded."""
