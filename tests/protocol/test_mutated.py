"""Valid bytes, changed a little: what fuzzing with random bytes never reaches, since that fails at the first key.

Each case begins with something that an honest peer sends (every message, records, certificates, catalogs, manifests,
recipes, commits, frames and whole streams), decoded, changed in a few places and encoded again, or changed in a few
bytes. Whatever comes of it is a value or the one error of its reader. Counters show how deep the cases came.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, get_args

import msgspec
import pytest

from swarmd.errors import IntegrityError, Refused, RemoteProtocolError
from swarmd.home.models import bundled_folder
from swarmd.net.libp2p.yamux_core import YamuxCore, YamuxError
from swarmd.protocol.fields import Message, TensorMeta
from swarmd.protocol.membership import records
from swarmd.protocol.membership.catalog import Catalog, read_catalog_untrusted, sign_catalog
from swarmd.protocol.membership.identity import certify, verify_certificate_untrusted
from swarmd.protocol.membership.records import RunRecord, SpanRecord
from swarmd.protocol.models import manifest
from swarmd.protocol.runs import commit as commits
from swarmd.protocol.runs import recipe
from swarmd.protocol.wire import frames, messages, worker
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.messages import Edit, Op, Unknown
from swarmd.protocol.wire.tensors import layout_untrusted
from swarmd.values import ModelId
from tests.protocol.test_untrusted import FOUNDER, KEYS, MEMBER, peer_record

N_CASES = 3_000
EXTREMES: tuple[Any, ...] = (
    0, 1, -1, 2**31, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, 0.0, -0.0, 1e308, float("inf"), float("nan"),
    "", "x", "x" * 129, "x" * 5_000, "\0", "é" * 40, b"", b"\0", b"\xff" * 16, b"x" * 20_000, None, True, False, [], {},
    [[]], {"t": "op"}, [0] * 2_000, ["x"] * 70, {"x": {"x": {}}},
)  # fmt: skip


def changed(value: Any, rng: random.Random) -> Any:
    """A value with one place of it changed, however deep."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(list(value))
        what = rng.random()
        if what < 0.1:
            return {k: v for k, v in value.items() if k != key}
        if what < 0.15:
            return {**value, rng.choice(("later", "id", "seq", "start", "model")): rng.choice(EXTREMES)}
        return {**value, key: changed(value[key], rng)}
    if isinstance(value, list | tuple) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        what = rng.random()
        if what < 0.1:
            return [*value[:at], *value[at + 1 :]]
        if what < 0.2:
            return [*value, *value]
        return [*value[:at], changed(value[at], rng), *value[at + 1 :]]
    if isinstance(value, bool):
        return not value
    if isinstance(value, int) and rng.random() < 0.8:
        return value + rng.choice((-1, 1, 7, 2**16, -(2**16)))
    if isinstance(value, float) and rng.random() < 0.8:
        return value * rng.choice((0.5, 2.0, -1.0))
    if isinstance(value, str) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return value[:at] + chr(rng.randrange(1, 0x250)) + value[at + 1 :]
    if isinstance(value, bytes) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        return value[:at] + bytes([value[at] ^ 1 << rng.randrange(8)]) + value[at + 1 :]
    return rng.choice(EXTREMES)


def flipped(data: bytes, rng: random.Random) -> bytes:
    """Bytes with a few of them changed, cut, or said twice."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(len(out)) if out else 0
        what = rng.randrange(4)
        if what == 0 and out:
            out[at] ^= 1 << rng.randrange(8)
        elif what == 1:
            del out[at:]
        elif what == 2:
            out[at:at] = out[at : at + rng.randint(1, 64)]
        elif out:
            out[at] = rng.randrange(256)
    return bytes(out)


def mutants(raw: bytes, rng: random.Random, n: int) -> Iterator[bytes]:
    """Changes of an encoded value: in what it says, and in its bytes."""
    whole = msgspec.msgpack.decode(raw)
    for number in range(n):
        if number % 3 == 2:
            yield flipped(raw, rng)
            continue
        value = whole
        for _ in range(rng.choice((1, 1, 1, 2, 4))):
            value = changed(value, rng)
        try:
            yield msgspec.msgpack.encode(value)
        except (OverflowError, msgspec.ValidationError):
            continue


def full(kind: type[Message]) -> Message:
    """One message of a kind with something in every field that has a plain one."""
    filled: dict[str, Any] = {
        "tensor": TensorMeta(2, 3, 8),
        "edits": (Edit(crop=2), Edit(rows=(1, 0))),
        "needs": ("crop",),
        "certificate": (b"x" * 60,),
        "session": b"s" * 16,
        "round": b"r" * 16,
        "parent": b"p" * 32,
        "refs": ((0, 0), (1, 4)),
    }
    names = {field.name for field in msgspec.structs.fields(kind)}
    numbers = {"id": 7, "re": 7, "seq": 3, "start": 1, "end": 4, "epoch": 2, "settled": 1}
    return kind(**{k: v for k, v in {**filled, **numbers}.items() if k in names})


KINDS = sorted(get_args(messages.Known), key=lambda kind: kind.__name__)


def test_every_message_changed_in_a_few_places_is_read_or_refused() -> None:
    rng, depth = random.Random(1), Counter[str]()
    for kind in KINDS:
        raw = messages.encode(full(kind))
        assert type(messages.decode_untrusted(raw)) is kind
        for mutant in mutants(raw, rng, N_CASES // 10):
            try:
                read = messages.decode_untrusted(mutant)
            except RemoteProtocolError as error:
                depth["in a field" if "$" in str(error) else "at once"] += 1
                continue
            depth["unknown" if isinstance(read, Unknown) else "read"] += 1
            again = messages.encode(read) if not isinstance(read, Unknown) else b""
            assert len(again) <= len(mutant) + 64, "what is read is no larger than what came"
            if isinstance(read, Op) and read.tensor is not None:
                depth["with a tensor"] += 1
                try:
                    layout_untrusted(read.tensor, rng.choice((0, 96, 192, 2**20)))
                    depth["layout"] += 1
                except RemoteProtocolError:
                    pass
    assert depth["read"] > 0.2 * depth.total(), depth
    assert depth["in a field"] > 0.2 * depth.total(), depth
    assert depth["with a tensor"] > 20, depth


def test_what_workers_say_is_read_or_refused() -> None:
    rng, n_read = random.Random(2), 0
    for kind in sorted(get_args(worker.WorkerMessage), key=lambda kind: kind.__name__):
        for mutant in mutants(messages.encode(full(kind)), rng, 60):
            try:
                worker.decode(mutant)
                n_read += 1
            except RemoteProtocolError:
                pass
    assert n_read > 200


def signed(body: Any, identity: Any = MEMBER) -> bytes:
    """A record's envelope with a true signature over whatever body: only what is inside can be wrong."""
    raw = msgspec.msgpack.encode(body) if not isinstance(body, bytes) else body
    return msgspec.msgpack.encode(records.Envelope(raw, identity.sign(b"swarmd record 1\0", raw)))


def some_records() -> list[records.AnyRecord]:
    common = {f: getattr(peer_record(), f) for f in ("peer", "sequence", "issued_at", "expires_at", "certificate")}
    return [
        peer_record(addresses=("/ip4/1.2.3.4/tcp/1",), holds={"m" * 64: ((0, 3), (4, 5))}),
        SpanRecord(**common, model="m" * 64, start=0, end=4, batch_tokens_per_s={4: 10.0}, round_trip_ms={"p": 1.5}),
        RunRecord(**common, run="r" * 64, name="run", head=b"h" * 32, state_epoch=4, order=b"o"),
    ]


def test_records_changed_inside_a_true_signature_are_read_or_refused() -> None:
    rng, depth = random.Random(3), Counter[str]()
    for record in some_records():
        body = msgspec.msgpack.encode(record)
        for mutant in mutants(body, rng, N_CASES // 3):
            for raw in (signed(mutant), flipped(signed(mutant), rng)):
                try:
                    records.read_untrusted(raw, KEYS.founder_key, 120)
                    depth["counts"] += 1
                except Refused:
                    depth["does not count"] += 1
                except IntegrityError as error:
                    depth["signature" if "signature" in str(error) else "inside"] += 1
    assert depth["counts"] > 100, depth
    assert depth["inside"] > 100, depth
    assert depth["signature"] > 100, depth


def test_certificates_and_catalogs_changed_a_little_are_read_or_refused() -> None:
    rng, depth = random.Random(4), Counter[str]()
    ticket = certify(FOUNDER, MEMBER.public_key, "member", 10_000)
    catalog = Catalog(
        version=3, models={"m": ("a" * 64, 6)}, revoked=(b"k" * 32,), adapters={"l": ("b" * 64, "a" * 64)}
    )
    as_founder = sign_catalog(catalog, FOUNDER)
    for _ in range(N_CASES):
        if (mutant := flipped(ticket, rng)) == ticket:
            continue
        try:
            verify_certificate_untrusted((mutant,), KEYS.founder_key, MEMBER.peer_id, 0.0)
            depth["certificate"] += 1
        except (IntegrityError, Refused):
            depth["no certificate"] += 1
        try:
            read_catalog_untrusted(flipped(as_founder, rng), KEYS.founder_key)
            depth["catalog"] += 1
        except IntegrityError:
            depth["no catalog"] += 1
    for mutant in mutants(msgspec.msgpack.encode(catalog), rng, N_CASES):
        raw = msgspec.msgpack.encode((mutant, FOUNDER.sign(b"swarmd catalog 1\0", mutant)))
        try:
            read_catalog_untrusted(raw, KEYS.founder_key)
            depth["signed catalog"] += 1
        except IntegrityError:
            depth["no signed catalog"] += 1
    assert not depth["certificate"], "no changed byte goes unnoticed"
    assert min(depth["signed catalog"], depth["no signed catalog"]) > 100, depth


def test_manifests_changed_under_their_own_hash_are_read_or_refused() -> None:
    rng, depth = random.Random(5), Counter[str]()
    raw = manifest.encode(manifest.read_folder(bundled_folder()))
    for mutant in mutants(raw, rng, N_CASES):
        try:
            manifest.read_untrusted(mutant, ModelId(hashlib.sha256(mutant).hexdigest()))
            depth["read"] += 1
        except IntegrityError as error:
            depth["in a field" if "parse" not in str(error) else "shape"] += 1
    assert depth["in a field"] > 100, depth


@pytest.mark.parametrize("what", ["run", "order", "commit"])
def test_what_a_run_signs_changed_a_little_is_read_or_refused(what: str) -> None:
    rng, n_refused = random.Random(6), 0
    run = recipe.start_run(recipe.Recipe("r", "0" * 64, "1" * 64, anchors=(MEMBER.peer_id,)), MEMBER, 1)
    order = recipe.sign_order(recipe.RunOrder(run.id, 1, anchors=(MEMBER.peer_id,)), MEMBER)
    counted = (commits.CountedContribution(MEMBER.peer_id, 0, 8, 9.5, 1.5),)
    body = commits.encode(commits.Commit(run.genesis, 1, run.genesis, 0, counted, b"a" * 32, b"s" * 32, 0.1))
    readers: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
        "run": (run.raw, recipe.read_run_untrusted),
        "order": (order, lambda raw: recipe.read_order_untrusted(raw, run)),
        "commit": (body, commits.read_body_untrusted),
    }
    raw, read = readers[what]
    read(raw)
    for mutant in mutants(raw, rng, N_CASES):
        try:
            read(mutant)
        except (IntegrityError, Refused):
            n_refused += 1
    assert n_refused > N_CASES // 4


def test_streams_of_frames_changed_a_little_give_frames_or_end() -> None:
    rng, depth = random.Random(7), Counter[str]()
    for _ in range(N_CASES // 3):
        chosen = [full(rng.choice(KINDS)) for _ in range(rng.randint(1, 6))]
        stream = b"".join(messages.encode_frame(message, bytes(rng.randrange(400))) for message in chosen)
        mutant, decoder, at = flipped(stream, rng), FrameDecoder(), 0
        try:
            while at < len(mutant):
                step = rng.randint(1, 300)
                for frame in decoder.feed_untrusted(mutant[at : at + step]):
                    depth["frame"] += 1
                    messages.decode_untrusted(frame.header)
                    depth["message"] += 1
                at += step
            depth["whole"] += 1
        except RemoteProtocolError:
            depth["ended"] += 1
        assert len(decoder._buffer) <= frames.MAX_HEADER_BYTES + frames.MAX_PAYLOAD_BYTES + 400
    assert depth["message"] > 400, depth
    assert min(depth["whole"], depth["ended"]) > 50, depth


def test_yamux_conversations_changed_a_little_end_or_go_on() -> None:
    rng, depth = random.Random(8), Counter[str]()
    for _ in range(N_CASES // 3):
        ours, theirs = YamuxCore(True), YamuxCore(False)
        stream, opening = ours.open()
        conversation = opening + ours.data(stream, memoryview(bytes(rng.randrange(1, 2_000)))) + ours.close(stream)
        try:
            theirs.receive_untrusted(flipped(conversation, rng), 0.0)
            depth["goes on"] += 1
        except YamuxError:
            depth["ends"] += 1
        depth["streams"] += len(theirs.streams)
    assert depth["goes on"] > 50, depth
    assert depth["streams"] > 50, depth


def test_what_is_wrong_with_a_header_is_told_in_few_words() -> None:
    with pytest.raises(RemoteProtocolError) as refused:
        messages.decode_untrusted(msgspec.msgpack.encode({"t": "x" * 60_000, "id": "not a number"}))
    assert len(str(refused.value)) < 300, "it goes into the log"
