"""Signed, expiring records: what a peer says of itself. Only the peer named inside can make one.

A record is ``Envelope(body, signature)``; the signature is checked over the bytes received. Within a key
(peer, kind, model) the higher sequence number wins. See docs/protocol.md, "Records".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Literal

import msgspec

from swarmd.errors import Code, IntegrityError, Refused
from swarmd.names import MAX_MEMBER_NAME
from swarmd.protocol.fields import Addresses, Block, Certificate, Count, Digest, Name, Needs, Stage, Text
from swarmd.protocol.membership.beats import HASH_BYTES, MAX_SKEW_S, MOST_BEATS, ChainBeat, ChainName, Life
from swarmd.protocol.membership.identity import (
    Identity,
    Membership,
    Signature,
    follow_untrusted,
    public_key_of_untrusted,
    verify,
)
from swarmd.protocol.untrusted import decode

MAX_RECORD_BYTES = 8_192  # so that an exchange of 20,000 stays small
RECORD_LIFETIME_S = 60  # who vanished is believed in for so long at most
MAX_LIFETIME_S = 3_600  # nobody can leave a record that outlives an hour, where no beats are to prove it
MAX_BEAT_S = 120  # of a swarm of 36,000 members: who is gone is believed in for three beats
MAX_PROVED_S = MOST_BEATS * MAX_BEAT_S  # of a record that beats prove
MOST_SENT_BEATS = 20_000  # in one message: of all members of a large swarm, half a MiB
_DOMAIN = b"swarmd record 1\0"
Rate = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
Blocks = Annotated[int, msgspec.Meta(ge=1, le=1_024)]
BatchSize = Annotated[int, msgspec.Meta(ge=1, le=4096)]
BatchRates = Annotated[dict[BatchSize, Rate], msgspec.Meta(max_length=8)]
GroupRanges = Annotated[tuple[tuple[Block, Block], ...], msgspec.Meta(max_length=8)]


FIRST_NEEDS = ("adapter", "codec", "crop", "exact", "padding", "record_past", "reorder", "replay", "tuned")


class Record(msgspec.Struct, tag_field="kind", frozen=True, omit_defaults=True):
    """What all records share. Times are unix seconds; ``sequence`` grows with every announcement.

    A record with a ``chain`` of beats counts for as long as these are shown: one from ``begun_at`` on each ``beat_s``.
    """

    peer: Name
    sequence: Count
    issued_at: Count
    expires_at: Count
    certificate: Certificate
    chain: Annotated[bytes, msgspec.Meta(max_length=HASH_BYTES)] = b""
    begun_at: Count = 0
    beat_s: Annotated[int, msgspec.Meta(ge=0, le=MAX_BEAT_S)] = 0


class ProbeFinding(msgspec.Struct, frozen=True, array_like=True):
    """What a member found of another's blocks, by computing the same (plan.trust.reputation says what ``name`` is of).

    Of who was wrong ``voucher`` is the beginning of the key that brought it in: whose guests are wrong again and again
    is known by it.
    """

    peer: Name
    name: Annotated[bytes, msgspec.Meta(max_length=8)]
    is_right: bool
    voucher: Annotated[bytes, msgspec.Meta(max_length=8)] = b""


class PeerRecord(Record, tag="peer", frozen=True):
    """A machine: where it is and what it can do. Unmeasured values are None and shown as unknown.

    ``minor``, ``codecs`` and ``needs`` say what it understands, so that others use nothing else with it; the defaults
    are those of versions that did not say so. ``holds``: of which models it gives away which groups, as ranges
    [start, end) (weights.folder says what a group is). ``reach``: whether others can dial it (unknown, open or closed,
    as measured); ``relays``: it connects members that nobody can dial to others. ``found``: whose blocks it has probed.
    ``name``: what its owner calls it; two may have the same.
    """

    addresses: Addresses = ()
    version: Name = ""
    minor: Count = 0
    codecs: Annotated[tuple[Name, ...], msgspec.Meta(max_length=32)] = ("raw", "float16", "bfloat16", "int8")
    needs: Needs = FIRST_NEEDS
    device: Text | None = None
    device_memory_bytes: Count | None = None
    memory_bytes: Count | None = None
    cores: Count | None = None
    free_disk_bytes: Count | None = None
    up_bytes_per_s: Rate | None = None
    down_bytes_per_s: Rate | None = None
    up_since: Count = 0
    reach: Name = ""
    relays: bool = False
    found: Annotated[tuple[ProbeFinding, ...], msgspec.Meta(max_length=32)] = ()
    holds: Annotated[dict[Name, GroupRanges], msgspec.Meta(max_length=32)] = {}
    name: Annotated[str, msgspec.Meta(max_length=MAX_MEMBER_NAME)] = ""


class SpanRecord(Record, tag="span", frozen=True):
    """Blocks that a peer serves: state is joining, online or draining; speeds are measured on this span.

    ``decode_tokens_per_s`` is one stream's, ``batch_tokens_per_s`` the total of so many streams in one pass;
    ``quantization_error`` is that of the span's output on a probe, relative to the same blocks unquantised.
    ``training_bytes`` it keeps for fine-tuning (0: it takes no such work), and ``training_share`` of its time that may
    take while sessions decode. ``n_decoding`` sessions decode there now.
    ``moves_left``: how often it may still take other blocks today; with ``any_model`` those may be another model's.
    ``head``: it ends the model, and gives the largest logits to those who ask (``Op.top``).
    ``slot`` tells apart the workers of one peer that serve the same model.
    ``leaves_at``: when its owner's hours end, in seconds since 1970 (0: no end is known).
    ``team``: other peers who compute slices of these blocks, and see what passes through them.
    ``point``: where it is in the net, from which round trips are estimated (plan.links.coordinates).
    """

    model: Name = ""
    start: Block = 0
    end: Block = 0
    state: Name = "joining"
    dtype: Name = "float32"
    numerics: Name = ""
    quantize: Name = "none"
    head: bool = False
    quantization_error: Rate | None = None
    decode_tokens_per_s: Rate | None = None
    prefill_tokens_per_s: Rate | None = None
    batch_tokens_per_s: BatchRates = {}
    moves_left: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    any_model: bool = False
    slot: Annotated[int, msgspec.Meta(ge=0, le=63)] = 0
    n_decoding: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0
    free_cache_tokens: Count = 0
    training_bytes: Count = 0
    training_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    round_trip_ms: Annotated[dict[Name, Rate], msgspec.Meta(max_length=32)] = {}
    leaves_at: Count = 0
    team: Annotated[tuple[Name, ...], msgspec.Meta(max_length=63)] = ()
    point: Annotated[tuple[float, ...], msgspec.Meta(max_length=8)] = ()


class RunRecord(Record, tag="run", frozen=True):
    """A peer's part in a training run: which commit it knows, how far it is towards the next, what it can give.

    ``role`` is train, reduce or anchor. ``head`` is the digest of commit ``epoch``; its state is that of
    ``state_epoch`` (None: it has none), with the hash ``state``, and ``n_averages`` earlier ones are kept.
    ``order`` is the owner's latest, signed by it. ``audit_left``: samples of others that it computes again before more
    of its own, at ``samples_per_s``. In a run of stages ``run`` is the stage's ledger, ``whole`` the run;
    ``passes_per_s``: samples/s that its holder computes while it waits for nothing.
    """

    run: Name = ""
    name: Name = ""
    role: Literal["train", "reduce", "anchor"] = "train"
    status: Text = ""
    epoch: Count = 0
    head: Digest = b""
    state_epoch: Count | None = None
    state: Digest = b""
    n_averages: Annotated[int, msgspec.Meta(ge=0, le=65_536)] = 0
    n_samples: Count = 0
    samples_per_s: Rate = 0.0
    can_be_dialled: bool = True
    order: Annotated[bytes, msgspec.Meta(max_length=4_096)] = b""
    audit_left: Count = 0
    whole: Name = ""
    stage: Stage | None = None
    passes_per_s: Rate = 0.0


AnyRecord = PeerRecord | SpanRecord | RunRecord


class Envelope(msgspec.Struct, frozen=True, array_like=True):
    """A record, encoded, and its author's signature over those bytes."""

    body: Annotated[bytes, msgspec.Meta(max_length=MAX_RECORD_BYTES)]
    signature: Signature


class _Author(msgspec.Struct, frozen=True):
    """What is read of a record before its signature is checked."""

    peer: Name


class ExchangeBody(msgspec.Struct, frozen=True, omit_defaults=True):
    """Payload of a records frame: envelopes, encoded, what the sender wants back, and its catalog if newer.

    ``beats``: those that are new, and the last ones of the envelopes' chains. ``want_beats``: chains whose last beats
    the sender wants. ``buckets`` differ: ``digest`` has sequence numbers by short names of what is in them there, and
    ``numbers`` those of the last beats of the chains in them.
    """

    envelopes: Annotated[list[bytes], msgspec.Meta(max_length=4_096)] = []
    want: Annotated[list[Text], msgspec.Meta(max_length=4_096)] = []
    catalog: bytes | None = None
    beats: Annotated[list[ChainBeat], msgspec.Meta(max_length=MOST_SENT_BEATS)] = []
    want_beats: Annotated[list[ChainName], msgspec.Meta(max_length=MOST_SENT_BEATS)] = []
    buckets: Annotated[list[Count], msgspec.Meta(max_length=4_096)] = []
    digest: dict[Text, Count] = {}
    numbers: Annotated[list[tuple[ChainName, Count]], msgspec.Meta(max_length=MOST_SENT_BEATS)] = []


@dataclass(frozen=True, slots=True)
class VerifiedRecord:
    """A record whose signature, ownership, membership and times were checked, with the bytes to pass on.

    ``life``: what was known of its chain of beats when it was checked.
    """

    record: AnyRecord
    membership: Membership
    raw: bytes
    life: Life | None = None

    @property
    def is_for_all(self) -> bool:
        """May members that know no beats have it? They take a longer life for forged."""
        return self.record.expires_at - self.record.issued_at <= MAX_LIFETIME_S

    @property
    def key(self) -> str:
        """Under which key it is kept; a newer record of the same key replaces it."""
        return key_of(self.record)


def key_of(record: AnyRecord) -> str:
    """Peer, kind, and what of that kind: a model and a worker's slot, or a run."""
    if isinstance(record, RunRecord):
        return _join_key(record.peer, "run", run=record.run)
    if isinstance(record, SpanRecord):
        return _join_key(record.peer, "span", model=record.model, slot=record.slot)
    return _join_key(record.peer, "peer")


def _join_key(
    peer: str,
    kind: str,
    model: str = "",
    run: str = "",
    slot: int = 0,
) -> str:
    if kind == "span":
        place = f"span/{model}/{slot}" if slot else f"span/{model}"
    elif kind == "run":
        place = f"run/{run}"
    else:
        place = "peer"
    return f"{peer}/{place}"


def expiry_of(now: int, until: int, lifetime_s: int = RECORD_LIFETIME_S) -> int:
    """When a record of one's own that is issued now ends: with one's membership at the latest."""
    return max(now + 1, min(now + lifetime_s, until))


def life_of(record: AnyRecord, now: float) -> Life | None:
    """The life that beats are to prove of a record that has come now; None for one that ends when it says."""
    return Life(record.peer, record.chain, record.begun_at, record.beat_s, now) if record.chain else None


def sign(record: AnyRecord, identity: Identity) -> bytes:
    """A record in its signed envelope, as it is passed on."""
    body = msgspec.msgpack.encode(record)
    return msgspec.msgpack.encode(Envelope(body, identity.sign(_DOMAIN, body)))


class Claim(msgspec.Struct, frozen=True):
    """What a record says of where it belongs, before anything of it is checked."""

    peer: Name
    sequence: Count
    certificate: Certificate
    kind: Name
    model: Name = ""
    run: Name = ""
    slot: Count = 0

    @property
    def key(self) -> str:
        """As that of the record, once it is verified."""
        return _join_key(self.peer, self.kind, self.model, self.run, self.slot)


def read_claim(raw: bytes) -> Claim:
    """What an unchecked record says of where it belongs, for a cheap refusal. Raises IntegrityError."""
    envelope = decode(raw, Envelope, "a record", IntegrityError)
    return decode(envelope.body, Claim, "a record", IntegrityError)


def read_untrusted(
    raw: bytes, issuers: bytes | tuple[bytes, ...], now: float, beats: Mapping[bytes, ChainBeat] = MappingProxyType({})
) -> VerifiedRecord:
    """Check one record from anywhere; whether its author is a member now is for plan.trust.admission to say.

    ``beats``, by their chains, came with it, and may prove that its author is there.

    Raises IntegrityError for forged or malformed bytes, which cost their sender standing, and Refused for an honest
    record that does not count (expired, skewed, of a later version), which costs nobody anything.
    """
    # What is wrong falls into two kinds. IntegrityError: no honest peer would pass this on, for it verifies records
    # itself. Refused: an honest peer may, as its clock or its version differs from this one's; either clock may be
    # years off. So the signature comes first, and only then whether this version can read all of it.
    envelope = decode(raw, Envelope, "a record", IntegrityError)
    author = decode(envelope.body, _Author, "a record", IntegrityError).peer
    verify(public_key_of_untrusted(author), _DOMAIN, envelope.body, envelope.signature, f"the record of {author}")
    try:
        record: AnyRecord = decode(envelope.body, AnyRecord, "a record", IntegrityError)  # type: ignore[arg-type]
    except IntegrityError as error:  # its author's own words, perhaps of a later version: who passes them on is honest
        raise Refused(Code.UNSUPPORTED, f"{author} announces what this version cannot read: {error}") from None
    lifetime_s = record.expires_at - record.issued_at
    most_s = MAX_PROVED_S if record.chain else MAX_LIFETIME_S
    if lifetime_s > most_s:
        raise IntegrityError(f"a record may live {most_s} s, this one wants {lifetime_s}")
    if lifetime_s <= 0:
        raise IntegrityError(f"a record that ends {-lifetime_s} s before it begins")
    if isinstance(record, SpanRecord) and record.start >= record.end:
        raise IntegrityError(f"a span needs start < end, got {record.start}:{record.end}")
    life = _read_life_untrusted(record, beats, now)
    ends_at = record.expires_at if life is None else min(record.expires_at, life.is_due_until + MAX_SKEW_S)
    if ends_at <= now or record.issued_at > now + MAX_SKEW_S:
        raise Refused(Code.REFUSED, f"the record of {record.peer} is expired or from the future")
    membership = follow_untrusted(record.certificate, issuers, record.peer)
    if membership.role == "client" and not isinstance(record, RunRecord):
        raise Refused(Code.NOT_A_MEMBER, "clients announce nothing but their part in a training run")
    return VerifiedRecord(record, membership, raw, life)


def _read_life_untrusted(record: AnyRecord, beats: Mapping[bytes, ChainBeat], now: float) -> Life | None:
    """The life of a record's chain, with the beat that came with it. Raises IntegrityError for one that cannot be."""
    life = life_of(record, now)
    if life is None:
        return None
    if len(record.chain) != HASH_BYTES or not record.beat_s or record.begun_at > record.issued_at:
        raise IntegrityError(f"a chain of beats of {len(record.chain)} B, each {record.beat_s} s, that begins later")
    beat = beats.get(life.chain)
    if beat is not None and life.take_untrusted(beat.number, beat.value, now) is None:
        raise IntegrityError(f"a beat that is not of the chain of {record.peer}")
    return life
