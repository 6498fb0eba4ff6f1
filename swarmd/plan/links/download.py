"""Which piece of a model to ask which donor for next. Time and events are arguments.

A *piece* is what one request asks for: chunks of one group, up to 4 MiB together. The rarest group goes first, so
that a donor's death costs least; among equals the lowest, so that groups are complete one after the other. When
nothing is left to begin, an idle donor is given the piece that has been under way for longest elsewhere, if it is
likely to have it sooner: a donor that stalls holds up nothing. After BitTorrent (Cohen 2003, section 2.4).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from swarmd.values import Decision, PeerId

PIECE_BYTES = 4 * 2**20  # asked for at once: 0.3 s at 100 Mbit/s, so a slow donor holds up little
MAX_REFS = 256  # chunks in one request
SMOOTHING = 0.3  # weight of the newest piece in a donor's rate

Ref = tuple[int, int]
"""An entry of the manifest, and one of its chunks."""


@dataclass(frozen=True, slots=True)
class ChunkRequest:
    """What one request asks for."""

    group: int
    refs: tuple[Ref, ...]
    n_bytes: int


def cut_pieces(group: int, missing: Iterable[tuple[Ref, int]]) -> list[ChunkRequest]:
    """Put what is missing of a group, with its bytes, into pieces, in order."""
    pieces: list[ChunkRequest] = []
    refs: list[Ref] = []
    total = 0
    for ref, n_bytes in missing:
        if refs and (total + n_bytes > PIECE_BYTES or len(refs) >= MAX_REFS):
            pieces.append(ChunkRequest(group, tuple(refs), total))
            refs = []
            total = 0
        refs.append(ref)
        total += n_bytes
    return [*pieces, ChunkRequest(group, tuple(refs), total)] if refs else pieces


@dataclass(slots=True)
class DonorQueue:
    """A donor as the download sees it: what it holds, what it is asked for, how fast it was."""

    groups: frozenset[int]
    asked_at: dict[ChunkRequest, float] = field(default_factory=dict)
    bytes_per_s: float | None = None
    last_at: float = 0.0


class Download:
    """Pieces that are wanted, and who was asked for them."""

    def __init__(self, pieces: Sequence[ChunkRequest]) -> None:
        self.givers: dict[PeerId, DonorQueue] = {}
        self._open: dict[int, list[ChunkRequest]] = {}
        self._missing: set[ChunkRequest] = set(pieces)
        for piece in reversed(pieces):
            self._open.setdefault(piece.group, []).append(piece)

    @property
    def is_done(self) -> bool:
        """Has every piece arrived?"""
        return not self._missing

    def offers(self, peer: PeerId, groups: frozenset[int], now: float) -> None:
        """Note what a donor holds at present."""
        giver = self.givers.setdefault(peer, DonorQueue(groups, last_at=now))
        giver.groups = groups

    def leaves(self, peer: PeerId) -> None:
        """A donor is gone or lied: what it was asked for is open again."""
        giver = self.givers.pop(peer, None)
        for piece in giver.asked_at if giver else ():
            self._reopen_piece(piece)

    def next_piece(self, peer: PeerId, now: float) -> Decision[ChunkRequest | None]:
        """Choose what to ask ``peer`` for, and note that it is asked."""
        giver = self.givers[peer]
        available_groups = [g for g, pieces in self._open.items() if pieces and g in giver.groups]
        if available_groups:
            n_donors = Counter(group for donor in self.givers.values() for group in donor.groups)
            rarity = {group: n_donors[group] for group in available_groups}
            group = min(available_groups, key=lambda g: (rarity[g], g))
            piece = self._open[group].pop()
            reason = f"group {group}: {rarity[group]} of {len(self.givers)} donors hold it"
        else:
            late = self._latest_elsewhere(peer, giver, now)
            if late is None:
                return Decision(None, "nothing left that it holds and would have sooner")
            piece = late
            reason = "under way elsewhere for long"
        if not giver.asked_at:
            giver.last_at = now
        giver.asked_at[piece] = now
        return Decision(piece, reason)

    def arrived(self, peer: PeerId, piece: ChunkRequest, now: float) -> None:
        """Note a verified piece."""
        giver = self.givers.get(peer)
        if giver is not None:
            giver.asked_at.pop(piece, None)
            rate = piece.n_bytes / max(now - giver.last_at, 1e-6)
            old_rate = giver.bytes_per_s
            giver.bytes_per_s = rate if old_rate is None else old_rate + SMOOTHING * (rate - old_rate)
            giver.last_at = now
        self._missing.discard(piece)
        pieces = self._open.get(piece.group, [])
        if piece in pieces:
            pieces.remove(piece)

    def failed(self, peer: PeerId, piece: ChunkRequest, holds_group: bool) -> None:
        """A donor did not give a piece; without the group it is not asked for that again."""
        giver = self.givers.get(peer)
        if giver is not None:
            giver.asked_at.pop(piece, None)
            if not holds_group:
                giver.groups -= {piece.group}
        self._reopen_piece(piece)

    def without_donor(self) -> list[int]:
        """Groups with open pieces that nobody offers."""
        offered = frozenset[int]().union(*(giver.groups for giver in self.givers.values()))
        return sorted(g for g, pieces in self._open.items() if pieces and g not in offered)

    def _latest_elsewhere(self, peer: PeerId, giver: DonorQueue, now: float) -> ChunkRequest | None:
        """The piece that is under way for longest at others, if this donor is likely to give it sooner."""
        # The end game. A piece may be asked for twice, and the first answer counts; what comes second is verified and
        # thrown away. A donor that is slow, or pretends to be, so costs one piece and never the end of the download.
        piece_s = PIECE_BYTES / giver.bytes_per_s if giver.bytes_per_s else 1.0
        latest: tuple[float, ChunkRequest] | None = None
        for donor, queue in self.givers.items():
            if donor == peer:
                continue
            for piece, asked_at in queue.asked_at.items():
                queued_bytes = len(queue.asked_at) * piece.n_bytes
                due_s = queue.last_at + queued_bytes / (queue.bytes_per_s or 1.0) - now
                is_late = due_s > 2 * piece_s or now - asked_at > 4 * piece_s
                can_give = piece.group in giver.groups and piece not in giver.asked_at
                is_wanted = is_late and can_give and piece in self._missing
                if is_wanted and (latest is None or asked_at < latest[0]):
                    latest = (asked_at, piece)
        return latest[1] if latest else None

    def _reopen_piece(self, piece: ChunkRequest) -> None:
        is_asked = any(piece in giver.asked_at for giver in self.givers.values())
        pieces = self._open.setdefault(piece.group, [])
        if piece in self._missing and not is_asked and piece not in pieces:
            pieces.append(piece)
