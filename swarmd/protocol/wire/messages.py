"""The headers of frames, each a bounded msgspec struct with a tag. docs/protocol.md tells their story.

Unknown fields are ignored, so that an older peer reads a newer one's informational additions; whatever must be
understood is listed in ``needs`` and refused as UNSUPPORTED when it is not. Unknown tags are refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, get_args

import msgspec

from swarmd.errors import Code, Refused, RemoteProtocolError
from swarmd.protocol.fields import (
    Absent,
    Addresses,
    Blob,
    Block,
    Certificate,
    Count,
    Digest,
    HopTimes,
    Logits,
    Message,
    Name,
    Needs,
    Request,
    Rows,
    SessionKey,
    TensorMeta,
    Text,
    Weight,
)
from swarmd.protocol.wire import frames, rounds, stages, teams, tuning
from swarmd.protocol.wire.alternatives import MOST_ALTERNATIVES, Alternative

MAX_TOLD = 200  # characters of what is wrong with a header: it quotes what came, as long as that was
PIECE_BYTES = 64 * 1024  # of zeros: one record of Noise
ChunkRef = tuple[Count, Count]
"""An entry of the manifest, and one of its chunks."""
KNOWN_NEEDS = frozenset(
    {"crop", "reorder", "padding", "replay", "record_past", "exact", "codec", "adapter", "tuned", "changes", "absent"}
)


class Hello(Message, tag="hello", frozen=True):
    """First frame on every stream, each way: who I am and why I may be here. ``now``: seconds since 1970; 0: untold."""

    certificate: Certificate = ()
    agent: Text = ""
    needs: Needs = ()
    now: Count = 0


class Refusal(Message, tag="refusal", frozen=True):
    """No, and why. ``re`` names the request; session and op are named where there is one.

    Who refuses a member tells in ``now`` what its clock says: one of the two may be wrong.
    """

    re: Count = 0
    code: Name = Code.REFUSED.value
    message: Text = ""
    retry_after_ms: Count | None = None
    session: SessionKey | None = None
    start: Block = 0
    seq: Count = 0
    epoch: Count = 0
    now: Count = 0


class Ping(Request, tag="ping", frozen=True):
    """Measure a link: the payload is discarded, and ``want_bytes`` of zeros come back."""

    want_bytes: Annotated[int, msgspec.Meta(ge=0, le=4 * 2**20)] = 0


class Pong(Message, tag="pong", frozen=True):
    """The answer to a ``Ping``; its payload is the zeros that were asked for."""

    re: Count = 0


class ExchangeDigest(Request, tag="digest", frozen=True):
    """What is known: a msgpack map of record keys (``is_short``: their short names) to sequence numbers, or by buckets.

    ``is_bucketed``: the payload is a plan.members.buckets.BucketDigest. ``minor`` is the sender's.
    """

    catalog_version: Count = 0
    catalog_root: Count = 0
    is_short: bool = False
    catalog_charters: Count = 0
    is_bucketed: bool = False
    minor: Count = 0


class ExchangeReply(Message, tag="digest_reply", frozen=True):
    """What differs, named as the digest does (of buckets: all in those that do): the payload is an ``ExchangeBody``.

    ``now`` is as in ``Hello``: clocks are set while members are connected.
    """

    re: Count = 0
    now: Count = 0


class Records(Message, tag="records", frozen=True):
    """Records and beats that the receiver asked for or that are new, and what is wanted; payload: ``ExchangeBody``."""


class WantManifest(Request, tag="want_manifest", frozen=True):
    """What does this model consist of? The answer's payload is the manifest in its canonical encoding."""

    model: Name = ""


class ManifestIs(Message, tag="manifest", frozen=True):
    """The payload is the manifest that was asked for."""

    re: Count = 0


class WantChunks(Request, tag="want_chunks", frozen=True):
    """Send these chunks of a model, (entry, chunk) each, of 4 MiB together at most."""

    model: Name = ""
    refs: Annotated[tuple[ChunkRef, ...], msgspec.Meta(min_length=1, max_length=256)] = ((0, 0),)


class ChunksAre(Message, tag="chunks", frozen=True):
    """The payload is the chunks that were asked for, one after the other."""

    re: Count = 0


class OpenSession(Request, tag="open", frozen=True):
    """Reserve a place in a chain: blocks [start, end) of a model for one session.

    ``client`` and ``weight`` are set by the daemon for its worker, whatever came: the key that answers for the session,
    and how much of what is short it gets beside one of weight 1. With
    ``inherit`` the hop starts with the caches that this peer will send. ``tuned`` is the version of the client's own
    parameters (``PutTuned``) that the session's tokens pass through. With ``receipts`` the hop signs what passes.
    """

    session: SessionKey = b"\0" * 16
    model: Name = ""
    start: Block = 0
    end: Block = 0
    epoch: Count = 0
    batch: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 1
    max_tokens: Annotated[int, msgspec.Meta(ge=1, le=2**22)] = 1
    dtype: Name = "float32"
    grade: Name = "replayed"
    numerics: Name = ""
    predecessor: Name = ""
    successor: Name = ""
    successor_addresses: Addresses = ()
    client: Blob = b""
    codec: Name = "raw"
    inherit: Name = ""
    adapter: Name = ""
    tuned: Digest = b""
    receipts: bool = False
    needs: Needs = ()
    weight: Weight = 1.0


class Opened(Message, tag="opened", frozen=True):
    """Yes. ``push`` is false when the successor could not be reached: outputs then return to the client."""

    re: Count = 0
    push: bool = True
    why: Text = ""
    numerics: Name = ""
    layer_arity: Count = 0


class Edit(msgspec.Struct, frozen=True, omit_defaults=True):
    """A change of the cache before tokens are appended: drop the last ``crop`` tokens, or gather ``rows``."""

    crop: Annotated[int, msgspec.Meta(ge=0, le=2**22)] | None = None
    rows: Rows | None = None


def count_changes(edits: Sequence[Edit], has_tokens: bool) -> int:
    """How much work and memory an op is beside its tokens: of one without any, itself, too."""
    return len(edits) + (not has_tokens)


def count_cropped(edits: Sequence[Edit]) -> int:
    """How many of the last tokens some edits drop."""
    return sum(edit.crop or 0 for edit in edits)


def is_reordered(edits: Sequence[Edit]) -> bool:
    """Do some edits put rows elsewhere than they were?"""
    orders = [tuple(edit.rows) for edit in edits if edit.rows is not None]
    return any(order != tuple(range(len(order))) for order in orders)


class Op(Message, tag="op", frozen=True):
    """One change of a session, addressed to the hop that starts at block ``start`` (or, past the last, the client).

    ``seq`` is consecutive from 1. ``settled`` is the highest op whose answer the client holds. Ops up to
    ``silent_through`` rebuild state and end at block ``replay_end``; ``base`` (part, parts) marks history that
    was merged, whose ``seq`` is the op it reaches. Of the last block's output the client uses the last ``want`` tokens
    of each row (None: all). ``times`` (None: nobody asks) is what each hop took: its first block, microseconds of
    waiting, of computing. With ``top`` the last hop is asked for the largest logits of each wanted token, too:
    ``logits`` (wire.top), or nothing where it computes no head. After its tokens ``absent`` ones follow: they count
    as others do, nobody has computed them, and a crop takes them away before tokens are put behind them (``Void``).
    The last tokens of the tensor are those of ``alternatives``, one after the other: their outputs travel on as others'
    do, beside the ``want`` ones. A hop that cannot compute them leaves them out.
    Payload: hidden states, int32 positions [b, t], with ``has_mask`` one byte a token [b, t].
    """

    session: SessionKey = b"\0" * 16
    start: Block = 0
    epoch: Count = 0
    seq: Count = 0
    settled: Count = 0
    edits: Annotated[tuple[Edit, ...], msgspec.Meta(max_length=8)] = ()
    tensor: TensorMeta | None = None
    record_past: bool = False
    silent_through: Count = 0
    replay_end: Block = 0
    base: tuple[Count, Count] | None = None
    want: Count | None = None
    times: HopTimes | None = None
    top: bool = False
    logits: Logits = b""
    absent: Absent = 0
    alternatives: Annotated[tuple[Alternative, ...], msgspec.Meta(max_length=MOST_ALTERNATIVES)] = ()
    needs: Needs = ()


class Void(Message, tag="void", frozen=True):
    """Client to each of its hops: ops ``first`` to ``last`` are void, whether they have come yet or not.

    A hop computes none of them that it has not begun: their tokens are ``absent`` from there on.
    """

    session: SessionKey = b"\0" * 16
    start: Block = 0
    epoch: Count = 0
    first: Count = 0
    last: Count = 0


class Progress(Message, tag="progress", frozen=True):
    """Sent by a hop to its predecessor while work is under way: what it received, what its worker finished."""

    session: SessionKey = b"\0" * 16
    start: Block = 0
    epoch: Count = 0
    received: Count = 0
    finished: Count = 0


class Suspect(Message, tag="suspect", frozen=True):
    """A hop tells the client that its direct successor, the hop starting at ``start``, gives no sign of life."""

    session: SessionKey = b"\0" * 16
    start: Block = 0
    epoch: Count = 0
    seq: Count = 0
    reason: Text = ""


class Reroute(Request, tag="reroute", frozen=True):
    """The client gives a surviving hop its neighbours in a new epoch and asks how far it has come."""

    session: SessionKey = b"\0" * 16
    start: Block = 0
    epoch: Count = 0
    settled: Count = 0
    predecessor: Name = ""
    successor: Name = ""
    successor_addresses: Addresses = ()


class Rerouted(Message, tag="rerouted", frozen=True):
    re: Count = 0
    received: Count = 0
    push: bool = True
    why: Text = ""


class Replay(Request, tag="replay", frozen=True):
    """Send your successor what it lacks: everything (``have`` is None) or the ops after ``have``."""

    session: SessionKey = b"\0" * 16
    start: Block = 0
    epoch: Count = 0
    have: Count | None = None
    silent_through: Count = 0
    replay_end: Block = 0


class Replayed(Message, tag="replayed", frozen=True):
    """A replay has left this hop: how many ops, and how many tokens of merged history."""

    re: Count = 0
    ops: Count = 0
    tokens: Count = 0


class Leaving(Message, tag="leaving", frozen=True):
    """A hop tells its client that it will stop serving: find another holder, and have the caches handed over."""

    session: SessionKey = b"\0" * 16
    start: Block = 0
    epoch: Count = 0


class HandOver(Request, tag="hand_over", frozen=True):
    """The client asks a hop that leaves to send its caches to ``to``, where the session is open with ``inherit``."""

    session: SessionKey = b"\0" * 16
    start: Block = 0
    epoch: Count = 0
    to: Name = ""
    addresses: Addresses = ()


class HandedOver(Message, tag="handed_over", frozen=True):
    """The caches have left: how many bytes."""

    re: Count = 0
    n_bytes: Count = 0


class CachePart(Message, tag="cache_part", frozen=True):
    """Part ``part`` of ``n_parts`` of a hop's caches (safetensors); ``seq`` is the op that they reach.

    ``digest`` is the sha256 of the whole, checked by the receiver before any of it counts.
    """

    session: SessionKey = b"\0" * 16
    start: Block = 0
    epoch: Count = 0
    part: Annotated[int, msgspec.Meta(ge=0, le=65_535)] = 0
    n_parts: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 1
    seq: Count = 0
    digest: Digest = b""


class Inherited(Message, tag="inherited", frozen=True):
    """The caches that were sent, of ``tokens``, are in place; the hop, opened in ``epoch``, has come to op ``seq``."""

    session: SessionKey = b"\0" * 16
    start: Block = 0
    epoch: Count = 0
    seq: Count = 0
    tokens: Count = 0


class CloseSession(Message, tag="close", frozen=True):
    """The client is done with a hop: its cache is freed."""

    session: SessionKey = b"\0" * 16
    start: Block = 0


class WantReceipt(Request, tag="want_receipt", frozen=True):
    """The client asks a hop to sign what has passed since its last receipt."""

    session: SessionKey = b"\0" * 16
    start: Block = 0


class ReceiptIs(Message, tag="receipt", frozen=True):
    """A hop's receipt (protocol.accounts.receipt), which is the payload; unasked (``re`` 0) every so many ops.

    With it comes its ``bill`` (protocol.accounts.usage_receipt) so far, as the hop has signed it.
    """

    re: Count = 0
    session: SessionKey = b"\0" * 16
    start: Block = 0
    signature: Annotated[bytes, msgspec.Meta(max_length=64)] = b""
    bill: Annotated[bytes, msgspec.Meta(max_length=1_024)] = b""
    given: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class Taken(Message, tag="taken", frozen=True):
    """The client signs the last bill of a hop, too; the payload is the bill."""

    session: SessionKey = b"\0" * 16
    start: Block = 0
    taken: Annotated[bytes, msgspec.Meta(max_length=64)] = b""


class WantTokens(Request, tag="want_tokens", frozen=True):
    """The client asks a hop for what left it: ``n`` tokens of each row from ``first`` on, of those that it holds."""

    session: SessionKey = b"\0" * 16
    start: Block = 0
    first: Annotated[int, msgspec.Meta(ge=0, le=2**22)] = 0
    n: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = 1


class TokensAre(Message, tag="tokens", frozen=True):
    """Hidden states, not coded, with their positions."""

    re: Count = 0
    tensor: TensorMeta | None = None


class Accuse(Request, tag="accuse", frozen=True):
    """A client found a hop wrong: a holder of the blocks computes them before believing it. Payload: ``Evidence``."""

    model: Name = ""
    peer: Name = ""
    slot: Annotated[int, msgspec.Meta(ge=0, le=63)] = 0


class Believed(Message, tag="believed", frozen=True):
    """What the one who computed it found: is the accused wrong?"""

    re: Count = 0
    is_wrong: bool = False
    why: Text = ""


Known = (
    Hello
    | Refusal
    | Ping
    | Pong
    | ExchangeDigest
    | ExchangeReply
    | Records
    | WantManifest
    | ManifestIs
    | WantChunks
    | ChunksAre
    | OpenSession
    | Opened
    | Op
    | Void
    | Progress
    | Suspect
    | Reroute
    | Rerouted
    | Replay
    | Replayed
    | Leaving
    | HandOver
    | HandedOver
    | CachePart
    | Inherited
    | CloseSession
    | WantReceipt
    | teams.JoinTeam
    | teams.SeatIs
    | ReceiptIs
    | Taken
    | WantTokens
    | TokensAre
    | Accuse
    | Believed
    | tuning.OpenLane
    | tuning.CloseLane
    | tuning.Forward
    | tuning.Backward
    | tuning.Gradients
    | tuning.PutTuned
    | tuning.TunedHeld
    | rounds.WantRun
    | rounds.RunIs
    | rounds.WantCommits
    | rounds.Commits
    | rounds.WantState
    | rounds.StateIs
    | rounds.Prepare
    | rounds.Promised
    | rounds.Propose
    | rounds.Accepted
    | rounds.JoinRound
    | rounds.Joined
    | rounds.Group
    | rounds.Contribution
    | rounds.Subtotal
    | rounds.Reduced
    | rounds.Beat
    | rounds.Check
    | rounds.Pulse
    | rounds.Contradict
    | stages.StageForward
    | stages.StageBackward
    | stages.StageWatch
    | stages.StageCopy
    | stages.StageDone
    | stages.StageForget
    | stages.WantActivations
    | stages.ActivationsAre
)


class Unknown(msgspec.Struct, frozen=True):
    """A well-formed header with a tag that this version does not know: refused, and held against nobody."""

    t: Name
    id: Count = 0
    re: Count = 0
    session: SessionKey | None = None
    start: Block = 0
    seq: Count = 0
    epoch: Count = 0


AnyMessage = Known | Unknown
"""What may come from a peer."""

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Known] = msgspec.msgpack.Decoder(Known)
_unknown_decoder = msgspec.msgpack.Decoder(Unknown)
TAGS = frozenset(kind.__struct_config__.tag for kind in get_args(Known))


def encode(message: Message) -> bytes:
    """A message as the header of a frame."""
    return _encoder.encode(message)


def encode_frame(message: Message, payload: bytes | memoryview = b"") -> bytes:
    """Encode a message as one whole frame."""
    return frames.encode(encode(message), payload)


def encode_zeros_frame(message: Message, n_bytes: int) -> Iterator[bytes]:
    """Encode a message with ``n_bytes`` zeros as one frame, bit by bit: nobody holds them all."""
    yield frames.encode_head(encode(message), n_bytes)
    zeros = bytes(min(n_bytes, PIECE_BYTES))
    for start in range(0, n_bytes, PIECE_BYTES):
        yield zeros[: n_bytes - start]


def decode_untrusted(header: bytes) -> AnyMessage:
    """Read one header. Raises RemoteProtocolError and nothing else."""
    # Versions differ while a swarm is updated: a well-formed header with an unknown tag is ``Unknown``, and is refused
    # without blame. A known tag whose fields break their bounds is no other version, but a fault of its sender.
    try:
        return _decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        unknown = _read_unknown(header)
        if unknown is None:
            raise RemoteProtocolError(f"a header does not parse: {str(error)[:MAX_TOLD]}") from None
        return unknown


def _read_unknown(header: bytes) -> Unknown | None:
    """A message of a newer version, if that is what it is; of known ones the bounds hold."""
    try:
        message = _unknown_decoder.decode(header)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    return None if message.t in TAGS else message


def refuse_unhandled(message: AnyMessage) -> None:
    """Refuse a request that nobody here handles; what asks for nothing may come late, and is met with nothing.

    Raises Refused.
    """
    if isinstance(message, Unknown):
        if message.id or (message.session is not None and not message.re):
            raise Refused(Code.UNSUPPORTED, f"this version does not know {message.t!r}")
    elif getattr(message, "id", 0):
        for attribute in ("run", "model"):
            name = getattr(message, attribute, "")
            if name:
                raise Refused(Code.NOT_HERE, f"the {attribute} {name[:12]} is not here")
        raise Refused(Code.UNSUPPORTED, f"this peer does not answer {type(message).__name__}")


def refusal_for(message: msgspec.Struct, error: Refused, now: int = 0) -> Refusal:
    """Build the refusal that answers ``message``, naming the request or the op it is about; ``now``: see there."""
    return Refusal(
        re=getattr(message, "id", 0),
        code=error.code.value,
        message=str(error)[:500],
        retry_after_ms=None if error.retry_after_s is None else int(error.retry_after_s * 1000),
        session=getattr(message, "session", None),
        start=getattr(message, "start", 0),
        seq=getattr(message, "seq", 0),
        epoch=getattr(message, "epoch", 0),
        now=now,
    )


def unknown_needs(
    needs: tuple[str, ...],
    known_needs: frozenset[str] = KNOWN_NEEDS,
) -> list[str]:
    """Name what a message needs and this version does not know."""
    return [need for need in needs if need not in known_needs]
