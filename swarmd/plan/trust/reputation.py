"""What holders of the same blocks say of each other, and whether a server may be routed to.

Each server probes some others: it sends the same seeded input through the same blocks. Findings are counted by voucher.
A server is proven if as many vouchers or more found it right as found it wrong. It is doubted if two or more found it
wrong, and fewer found it right. A server that alone holds its blocks cannot be probed, and is not held back.
A finding is a word without evidence. So it counts from servers of the same model only, which could have computed it. A
voucher that accuses several servers which others found right weighs less against each of them: two members cannot have
every honest server doubted by their word.
Blame climbs: if a voucher brings in liars again and again, all its guests are doubted.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from types import MappingProxyType

from swarmd.protocol.membership.records import PeerRecord, ProbeFinding, SpanRecord
from swarmd.values import PeerId, Span

PROBES_OF_EACH = 2  # holders that probe a server: one may be wrong itself
OTHERS_TURN_S = 60.0  # that the first have to probe a server and say so: records travel in seconds
MOST_PROBERS = 8  # of a server of which nobody says anything: a swarm of many is not to probe all day
PROBE_LIFETIME_S = 3_600.0  # memory breaks, and so do members
MAX_BLOCKS = 1_024  # of a model, as catalogs have them
WRONG_GUESTS = 3  # of one voucher: one may have bad memory, and two
AGREEING = 2  # vouchers who say so: nobody's guests are banned by one member's word
VOUCHER_BYTES = 8  # of a voucher's key, in records


NOTHING_UNSAID: Mapping[tuple[str, bytes], float] = MappingProxyType({})


class Trust(IntEnum):
    """How a server is regarded; the higher, the better."""

    DOUBTED = 0
    UNKNOWN = 1
    PROVEN = 2


def name_of(span: SpanRecord) -> bytes:
    """What a finding is about: these blocks, by these numerics."""
    description = f"{span.model}/{span.slot}/{span.start}:{span.end}/{span.numerics}"
    return hashlib.blake2b(description.encode(), digest_size=8).digest()


def _kind_of(span: SpanRecord) -> tuple[str, str, str]:
    """What must be alike for outputs to be compared: model, dtype, format of weights."""
    return span.model, span.dtype, span.quantize


def shared_blocks(first: SpanRecord, second: SpanRecord) -> Span | None:
    """The blocks that two servers can be compared on; None when they compute other things."""
    if first.peer == second.peer:
        return None
    if _kind_of(first) != _kind_of(second):
        return None
    start = max(first.start, second.start)
    end = min(first.end, second.end)
    return Span(start, end) if start < end else None


def choose_probes(
    me: PeerId,
    spans: Sequence[SpanRecord],
    voucher_of: Callable[[PeerId], bytes],
    probed_at: Mapping[tuple[str, bytes], float],
    now: float,
    silent_s: Mapping[tuple[str, bytes], float] = NOTHING_UNSAID,
) -> list[tuple[SpanRecord, SpanRecord]]:
    """Choose servers to probe now, each with the own span to compare with: where ``me`` comes first among all holders.

    Holders that another voucher brought in come first; then hashes decide, which nobody can choose.
    ``probed_at`` says when (peer, name) was probed, ``silent_s`` for how long fewer than enough have said anything of
    it: the next in order probe then, too, for the first may hold these blocks only in their records.
    """
    own_spans = [span for span in spans if span.peer == me and span.state == "online"]
    kinds = {_kind_of(span) for span in own_spans}
    online = [span for span in spans if span.state == "online" and _kind_of(span) in kinds]
    chosen = []
    for target in online:
        server = (target.peer, name_of(target))
        own_span = next((span for span in own_spans if shared_blocks(span, target) is not None), None)
        if own_span is None or now - probed_at.get(server, -PROBE_LIFETIME_S) < PROBE_LIFETIME_S:
            continue
        # All holders of the target's blocks stand in one order, the same for everybody. The first n_probers probe, so
        # this machine does unless so many come before it.
        rank = _prober_rank(me, target, voucher_of)
        n_late = int(silent_s.get(server, 0.0) / OTHERS_TURN_S)
        n_probers = min(MOST_PROBERS, PROBES_OF_EACH + n_late)
        earlier_probers = set[str]()
        for holder in online:  # most often two are found soon
            if holder.peer in earlier_probers or not shared_blocks(holder, target):
                continue
            if _prober_rank(holder.peer, target, voucher_of) < rank:
                earlier_probers.add(holder.peer)
                if len(earlier_probers) == n_probers:
                    break
        else:
            chosen.append((target, own_span))
    return chosen


def _prober_rank(
    peer: str,
    target: SpanRecord,
    voucher_of: Callable[[PeerId], bytes],
) -> tuple[bool, bytes]:
    is_kin = voucher_of(PeerId(peer)) == voucher_of(PeerId(target.peer))
    return is_kin, hashlib.blake2b(f"{peer}/{target.peer}".encode(), digest_size=8).digest()


def rate_servers(
    spans: Sequence[SpanRecord], peers: Iterable[PeerRecord], voucher_of: Callable[[PeerId], bytes]
) -> dict[tuple[str, int], Trust]:
    """How each server, as (peer, slot), is regarded by what all others announce; empty where nobody says anything.

    A server's own voucher counts only where no other one says anything. The voucher that a finding names counts only
    where ``voucher_of`` gives the same: of a server that is not known here nothing is believed.
    """
    speaking = [record for record in peers if record.found]
    if not speaking:
        return {}
    # What members could try, and what stops each:
    #   * praise each other: who came by the server's own voucher is kept apart (``kin``);
    #   * speak of blocks that they could not compute: only servers of the same model are heard;
    #   * speak with many keys: words are counted by voucher, not by peer;
    #   * call all honest servers wrong: each such word weighs the less, the more of them somebody says.
    testimonies: dict[tuple[str, bytes], Testimony] = defaultdict(Testimony)
    guests: dict[bytes, dict[bytes, set[str]]] = defaultdict(lambda: defaultdict(set))
    accused_by: dict[bytes, set[str]] = defaultdict(set)
    names = [(span.peer, name_of(span)) for span in spans]
    model_of = {name: span.model for name, span in zip(names, spans, strict=True)}
    models_of: dict[str, set[str]] = defaultdict(set)
    for span in spans:
        models_of[span.peer].add(span.model)
    for record in speaking:
        speaker = voucher_of(PeerId(record.peer))
        served_models = models_of[record.peer]
        for finding in record.found:
            host = voucher_of(PeerId(finding.peer))
            model = model_of.get((finding.peer, finding.name))
            # of a server that has left, any server may speak
            could_compute = model in served_models if model is not None else bool(served_models)
            if finding.peer == record.peer or not could_compute:
                continue
            testimonies[finding.peer, finding.name].add(finding.is_right, speaker, is_kin=host == speaker)
            if finding.is_right:
                continue
            accused_by[speaker].add(finding.peer)
            is_host_named = bool(finding.voucher) and host[:VOUCHER_BYTES] == finding.voucher
            if is_host_named and host != speaker:
                guests[finding.voucher][speaker].add(finding.peer)
    if not testimonies:
        return {}
    leaky = set()
    for host, accused_guests in guests.items():
        n_accusers = sum(len(accused) >= WRONG_GUESTS for accused in accused_guests.values())
        if n_accusers >= AGREEING:
            leaky.add(host)
    n_holders = _count_holders(spans)
    trust = {}
    for span, name in zip(spans, names, strict=True):
        kind = (span.model, span.dtype, span.quantize)
        blocks = range(span.start, min(span.end, MAX_BLOCKS))
        is_alone = all(n_holders[(*kind, block)] < 2 for block in blocks)
        is_leaky = voucher_of(PeerId(span.peer))[:VOUCHER_BYTES] in leaky
        testimony = testimonies.get(name, Testimony())
        trust[span.peer, span.slot] = Trust.DOUBTED if is_leaky else testimony.trust(is_alone, accused_by)
    return trust


@dataclass(slots=True)
class Testimony:
    """Vouchers that found a server right, and wrong; of its own voucher apart."""

    right: set[bytes] = field(default_factory=set)
    wrong: set[bytes] = field(default_factory=set)
    kin: set[bool] = field(default_factory=set)

    def add(self, is_right: bool, speaker: bytes, is_kin: bool) -> None:
        """Count what one voucher's guests say. Both words of one voucher count, each once."""
        if is_kin:
            self.kin.add(is_right)
        elif is_right:
            self.right.add(speaker)
        else:
            self.wrong.add(speaker)

    def trust(self, is_alone: bool, accused_by: Mapping[bytes, set[str]]) -> Trust:
        """One word against a server is no proof: then it is as if nobody had looked."""
        n_right = len(self.right)
        n_wrong = len(self.wrong)
        if not n_right and not n_wrong:
            is_known_right = self.kin == {True}
            return Trust.PROVEN if is_known_right or (is_alone and not self.kin) else Trust.UNKNOWN
        weight = sum(1 / len(accused_by[voucher]) for voucher in self.wrong) if n_right else n_wrong
        if n_wrong >= AGREEING and weight > n_right:
            return Trust.DOUBTED
        return Trust.PROVEN if n_right >= n_wrong or n_right > weight else Trust.UNKNOWN


def _count_holders(spans: Sequence[SpanRecord]) -> dict[tuple[str, str, str, int], int]:
    """How many peers hold each block, of one model, dtype and format."""
    holders: dict[tuple[str, str, str, int], set[str]] = defaultdict(set)
    for span in spans:
        for block in range(span.start, min(span.end, MAX_BLOCKS)):
            holders[span.model, span.dtype, span.quantize, block].add(span.peer)
    return {key: len(peers) for key, peers in holders.items()}


def count_speakers(
    spans: Iterable[SpanRecord],
    peers: Iterable[PeerRecord],
) -> dict[tuple[str, bytes], int]:
    """How many others say something of each server, by (peer, name)."""
    n_speakers = {(span.peer, name_of(span)): 0 for span in spans}
    for record in peers:
        findings = [finding for finding in record.found if finding.peer != record.peer]
        servers = {(finding.peer, finding.name) for finding in findings}
        for server in servers & n_speakers.keys():
            n_speakers[server] += 1
    return n_speakers


def make_finding(span: SpanRecord, is_right: bool, voucher: bytes = b"") -> ProbeFinding:
    """What is announced of a server."""
    named_voucher = b"" if is_right else voucher[:VOUCHER_BYTES]
    return ProbeFinding(PeerId(span.peer), name_of(span), is_right, named_voucher)
