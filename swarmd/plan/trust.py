"""What holders of the same blocks say of each other, and whether a server may be routed to.

Each probes some others: the same seeded input through the same blocks. Who was found right by one is proven; who more
vouchers found wrong than right is doubted; who nobody could ask, since nobody else holds its blocks, is not held back.
Blame climbs: whoever brings in liars again and again has all his guests doubted.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import IntEnum

from swarmd.protocol.records import Found, PeerRecord, SpanRecord
from swarmd.values import PeerId, Span

PROBES_OF_EACH = 2  # holders that probe a server: one may be wrong itself
PROBE_LIFETIME_S = 3_600.0  # memory breaks, and so do members
WRONG_GUESTS = 3  # of one voucher: one may have bad memory, and two
AGREEING = 2  # vouchers who say so: nobody's guests are banned by one member's word
VOUCHER_BYTES = 8  # of a voucher's key, in records


class Trust(IntEnum):
    """How a server is regarded; the higher, the better."""

    DOUBTED = 0
    UNKNOWN = 1
    PROVEN = 2


def name_of(span: SpanRecord) -> bytes:
    """What a finding is about: these blocks, by these numerics."""
    about = f"{span.model}/{span.slot}/{span.start}:{span.end}/{span.numerics}"
    return hashlib.blake2b(about.encode(), digest_size=8).digest()


def shared(one: SpanRecord, other: SpanRecord) -> Span | None:
    """The blocks that two servers can be compared on; None when they compute other things."""
    is_alike = (one.model, one.dtype, one.quantize) == (other.model, other.dtype, other.quantize)
    start, end = max(one.start, other.start), min(one.end, other.end)
    return Span(start, end) if is_alike and start < end and one.peer != other.peer else None


def to_probe(
    me: PeerId,
    spans: Sequence[SpanRecord],
    voucher_of: Callable[[PeerId], bytes],
    done: Mapping[tuple[str, bytes], float],
    now: float,
) -> list[tuple[SpanRecord, SpanRecord]]:
    """Whom to probe now, each with the own span to compare with: those for which ``me`` comes first among all holders.

    Others whom somebody else brought in come first, then the order is that of hashes, which nobody chooses. ``done``
    says when (peer, name) was probed.
    """
    own = [span for span in spans if span.peer == me and span.state == "online"]
    chosen = []
    for target in spans:
        mine = next((span for span in own if shared(span, target) is not None), None)
        if mine is None or target.state != "online":
            continue
        if now - done.get((target.peer, name_of(target)), -PROBE_LIFETIME_S) < PROBE_LIFETIME_S:
            continue
        able = {s.peer for s in spans if s.state == "online" and shared(s, target) is not None}
        if me in sorted(able, key=lambda peer: _rank(peer, target, voucher_of))[:PROBES_OF_EACH]:
            chosen.append((target, mine))
    return chosen


def _rank(peer: str, target: SpanRecord, voucher_of: Callable[[PeerId], bytes]) -> tuple[bool, bytes]:
    is_kin = voucher_of(PeerId(peer)) == voucher_of(PeerId(target.peer))
    return is_kin, hashlib.blake2b(f"{peer}/{target.peer}".encode(), digest_size=8).digest()


def trust_in(
    spans: Sequence[SpanRecord], peers: Iterable[PeerRecord], voucher_of: Callable[[PeerId], bytes]
) -> dict[tuple[str, int], Trust]:
    """How each server, as (peer, slot), is regarded by what all others announce; empty where nobody says anything."""
    said: dict[tuple[str, bytes], tuple[set[bytes], set[bytes]]] = defaultdict(lambda: (set(), set()))
    guests: dict[bytes, dict[bytes, set[str]]] = defaultdict(lambda: defaultdict(set))
    for record in peers:
        speaker = voucher_of(PeerId(record.peer))
        for found in record.found:
            if found.peer != record.peer:
                said[found.peer, found.name][found.is_right].add(speaker)
            if not found.is_right and found.voucher:
                guests[found.voucher][speaker].add(found.peer)
    if not said:
        return {}
    leaky = {host for host, by in guests.items() if sum(len(g) >= WRONG_GUESTS for g in by.values()) >= AGREEING}
    n_holders = _holders(spans)
    trust = {}
    for span in spans:
        wrong, right = said.get((span.peer, name_of(span)), (set(), set()))
        kind = (span.model, span.dtype, span.quantize)
        is_alone = all(n_holders[(*kind, block)] < 2 for block in range(span.start, span.end))
        if len(wrong) > len(right) or voucher_of(PeerId(span.peer))[:VOUCHER_BYTES] in leaky:
            trust[span.peer, span.slot] = Trust.DOUBTED
        else:
            trust[span.peer, span.slot] = Trust.PROVEN if right or is_alone else Trust.UNKNOWN
    return trust


def _holders(spans: Sequence[SpanRecord]) -> dict[tuple[str, str, str, int], int]:
    """How many peers hold each block, of one model, dtype and format."""
    holders: dict[tuple[str, str, str, int], set[str]] = defaultdict(set)
    for span in spans:
        for block in range(span.start, span.end):
            holders[span.model, span.dtype, span.quantize, block].add(span.peer)
    return {where: len(peers) for where, peers in holders.items()}


def finding(span: SpanRecord, is_right: bool, voucher: bytes = b"") -> Found:
    """What is announced of a server."""
    return Found(PeerId(span.peer), name_of(span), is_right, b"" if is_right else voucher[:VOUCHER_BYTES])
