"""What a daemon says of the members that it knows, over its control socket."""

from __future__ import annotations

from swarmd.status import Blocks, StandingRow, Status


class SpanRow(Status, frozen=True, kw_only=True):
    """What a member serves, by its own record; None is not measured. ``head``: with norm and head behind the blocks."""

    model: str
    blocks: Blocks
    head: bool
    state: str
    decode_tokens_per_s: float | None
    prefill_tokens_per_s: float | None
    free_cache_tokens: int
    training_bytes: int
    training_share: float


class PeerRow(Status, frozen=True, kw_only=True):
    """A member of the swarm, by its own record; None is not measured. ``name`` is what its owner calls it, "" is none.

    ``reach``: unknown, open or closed to dialling; ``way``: direct or relayed, as this daemon is connected with it.
    ``voucher``: the key of the invite that brought it in, in hex; "" is the founder himself. What it ``may`` do (use,
    serve, train, give) it may until ``ends_at`` (unix seconds). With other guests of its invite it ``gave`` this
    machine's clients so much, and ``took`` from its server: tokens times blocks, by the bills of 30 days that both
    signed. So many others say that they found its blocks right, or wrong.
    """

    peer: str
    is_self: bool
    addresses: tuple[str, ...]
    version: str
    protocol: int
    codecs: tuple[str, ...]
    device: str | None
    device_memory_bytes: int | None
    memory_bytes: int | None
    cores: int | None
    free_disk_bytes: int | None
    up_bytes_per_s: float | None
    down_bytes_per_s: float | None
    round_trip_ms: float | None
    spans: tuple[SpanRow, ...]
    reach: str = "unknown"
    way: str | None = None
    standing: StandingRow | None = None
    voucher: str = ""
    may: tuple[str, ...] = ()
    ends_at: int = 0
    gave: int = 0
    took: int = 0
    found_right: int = 0
    found_wrong: int = 0
    name: str = ""


class WaitingRow(Status, frozen=True, kw_only=True):
    """Somebody whose invite (its key, in hex) waits for approval, and how long ago it last knocked here."""

    peer: str
    voucher: str
    knocked_s: float


class PeersAnswer(Status, frozen=True, kw_only=True):
    peers: tuple[PeerRow, ...]
    waiting: tuple[WaitingRow, ...] = ()
