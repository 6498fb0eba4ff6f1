"""Whatever arrives, ``_untrusted`` functions return a value or raise their one error; nothing else, and no growth."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swarmd.errors import ConfigError, IntegrityError, Refused, RemoteProtocolError
from swarmd.net.libp2p.yamux_core import YamuxCore, YamuxError
from swarmd.protocol.fields import TensorMeta
from swarmd.protocol.membership import invite, records
from swarmd.protocol.membership.catalog import read_catalog_untrusted
from swarmd.protocol.membership.identity import Identity, certify, public_key_of_untrusted, verify_certificate_untrusted
from swarmd.protocol.membership.invite import SwarmKeys
from swarmd.protocol.wire import frames, messages
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.messages import Op, OpenSession
from swarmd.protocol.wire.tensors import layout_untrusted

FOUNDER, MEMBER = Identity(b"\1" * 32), Identity(b"\2" * 32)
KEYS = SwarmKeys("test", FOUNDER.public_key, b"\3" * 32)


@given(st.lists(st.binary(max_size=200), max_size=10))
def test_frame_decoder_takes_any_bytes(parts: list[bytes]) -> None:
    decoder = FrameDecoder()
    with contextlib.suppress(RemoteProtocolError):
        for part in parts:
            list(decoder.feed_untrusted(part))


@given(st.lists(st.tuples(st.binary(max_size=300), st.binary(max_size=3000)), max_size=8), st.integers(1, 400))
def test_frames_survive_any_cutting(wanted: list[tuple[bytes, bytes]], step: int) -> None:
    stream = b"".join(frames.encode(h, p) for h, p in wanted)
    decoder = FrameDecoder()
    got = [f for at in range(0, len(stream), step) for f in decoder.feed_untrusted(stream[at : at + step])]
    assert [(f.header, bytes(f.payload)) for f in got] == wanted
    assert b"".join(f.raw for f in got) == stream
    assert decoder.is_between_frames


def test_absurd_lengths_are_refused_before_anything_is_buffered() -> None:
    decoder = FrameDecoder()
    with pytest.raises(RemoteProtocolError, match="the limits are"):
        list(decoder.feed_untrusted(b"\1\0\0\5\xff\xff\xff\xff"))


@given(st.binary(max_size=400))
def test_headers_take_any_bytes(data: bytes) -> None:
    with contextlib.suppress(RemoteProtocolError):
        messages.decode_untrusted(data)


@pytest.mark.parametrize(
    "header",
    [
        {"t": "op", "session": b"short"},
        {"t": "op", "session": b"x" * 16, "start": -1},
        {"t": "op", "session": b"x" * 16, "tensor": [0, 1, 1, "float32", False]},
        {"t": "op", "session": b"x" * 16, "edits": [{"rows": [70_000]}]},
        {"t": "open", "batch": 10**9},
        {"t": 7},
        {"t": "x" * 200, "id": 1},
        {"t": "hello", "certificate": [b"x"] * 100},
    ],
)
def test_values_out_of_bounds_are_refused(header: dict[str, object]) -> None:
    with pytest.raises(RemoteProtocolError):
        messages.decode_untrusted(msgspec.msgpack.encode(header))


def test_unknown_fields_are_ignored_and_unknown_needs_are_named() -> None:
    newer = msgspec.msgpack.encode({"t": "op", "session": b"x" * 16, "seq": 3, "invented_later": [1, 2]})
    read = messages.decode_untrusted(newer)
    assert isinstance(read, Op)
    assert read.seq == 3
    assert messages.unknown_needs(OpenSession(needs=("crop", "telepathy")).needs) == ["telepathy"]


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.text(max_size=10), st.integers(0, 10**6))
def test_a_payload_fits_its_shape_or_is_refused(b: int, t: int, d: int, dtype: str, n_bytes: int) -> None:
    with contextlib.suppress(RemoteProtocolError):
        layout = layout_untrusted(TensorMeta(b, t, d, dtype), n_bytes)
        assert layout.total_bytes == n_bytes
    exact = b * t * d * 4 + 4 * b * t
    assert layout_untrusted(TensorMeta(b, t, d, "float32"), exact).hidden.stop == b * t * d * 4


@given(st.binary(max_size=400), st.integers(0, 2**40))
def test_records_take_any_bytes(data: bytes, now: int) -> None:
    with contextlib.suppress(IntegrityError, Refused):
        records.read_untrusted(data, KEYS.founder_key, now)
    with contextlib.suppress(IntegrityError):
        read_catalog_untrusted(data, KEYS.founder_key)


@given(st.lists(st.binary(max_size=120), max_size=6).map(tuple), st.text(max_size=80))
def test_certificates_and_peer_ids_take_anything(certificate: tuple[bytes, ...], peer: str) -> None:
    with contextlib.suppress(IntegrityError, Refused):
        verify_certificate_untrusted(certificate, KEYS.founder_key, peer, 0.0)
    with contextlib.suppress(IntegrityError):
        public_key_of_untrusted(peer)


@given(st.text(max_size=300))
def test_invites_take_any_text(text: str) -> None:
    with pytest.raises(ConfigError):
        invite.decode_untrusted(text, 0.0)
    with contextlib.suppress(ConfigError):
        invite.decode_untrusted(f"swarmd1-{text}", 0.0)


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=64), max_size=12))
def test_yamux_takes_any_bytes_and_buffers_no_more_than_its_credit(parts: list[bytes]) -> None:
    core = YamuxCore(False)
    with contextlib.suppress(YamuxError):
        for part in parts:
            core.receive_untrusted(part, 0.0)
    assert sum(len(s.readable) for s in core.streams.values()) <= sum(map(len, parts))


def peer_record(**changes: object) -> records.PeerRecord:
    certificate = (certify(FOUNDER, MEMBER.public_key, "member", 10_000),)
    fields = {"peer": MEMBER.peer_id, "sequence": 1, "issued_at": 100, "expires_at": 160, "certificate": certificate}
    return records.PeerRecord(**{**fields, **changes})  # type: ignore[arg-type]


def test_a_record_counts_only_from_its_owner_in_its_time_and_membership() -> None:
    good = records.sign(peer_record(), MEMBER)
    assert records.read_untrusted(good, KEYS.founder_key, 120).record.peer == MEMBER.peer_id
    with pytest.raises(IntegrityError, match="signature"):
        records.read_untrusted(records.sign(peer_record(), FOUNDER), KEYS.founder_key, 120)
    with pytest.raises(IntegrityError):
        records.read_untrusted(good[:-1] + bytes([good[-1] ^ 1]), KEYS.founder_key, 120)
    with pytest.raises(Refused, match="expired or from the future"):
        records.read_untrusted(good, KEYS.founder_key, 161)
    with pytest.raises(Refused, match="expired or from the future"):
        records.read_untrusted(records.sign(peer_record(issued_at=900, expires_at=950), MEMBER), KEYS.founder_key, 100)
    with pytest.raises(IntegrityError, match="may live"):
        records.read_untrusted(records.sign(peer_record(expires_at=9_000), MEMBER), KEYS.founder_key, 120)


def test_certificates_follow_the_roles() -> None:
    ticket = invite.create(KEYS, FOUNDER, (), 1_000)
    guest = Identity(b"\4" * 32)
    by_invite = ticket.admit(guest.public_key, "client", 500)
    assert verify_certificate_untrusted(by_invite, KEYS.founder_key, guest.peer_id, 100).role == "client"
    with pytest.raises(Refused, match="expired 1 s ago, by a clock that says 1970-01-01 00:08 UTC"):
        verify_certificate_untrusted(by_invite, KEYS.founder_key, guest.peer_id, 501)
    chain = (*by_invite, certify(guest, MEMBER.public_key, "member", 500))
    with pytest.raises(IntegrityError, match="cannot certify"):
        verify_certificate_untrusted(chain, KEYS.founder_key, MEMBER.peer_id, 100)
    with pytest.raises(IntegrityError, match="was issued to"):
        verify_certificate_untrusted(by_invite, KEYS.founder_key, MEMBER.peer_id, 100)


def test_an_invite_says_what_is_wrong_with_it() -> None:
    text = invite.encode(invite.create(KEYS, FOUNDER, ("/ip4/127.0.0.1/tcp/1/p2p/x",), 1_000))
    assert invite.decode_untrusted(text, 500.0).swarm == KEYS
    for broken, reason in [
        (text[:-9], "cut short or mistyped"),
        (text.replace("swarmd1-", "swarmd2-"), "of version '2'"),
        ("hello", "expected an invite that starts with"),
    ]:
        with pytest.raises(ConfigError, match=reason):
            invite.decode_untrusted(broken, 500.0)
    with pytest.raises(ConfigError, match="expired 2 hours ago"):
        invite.decode_untrusted(text, 1_000.0 + 7_300)


def test_a_record_of_a_later_kind_counts_for_nothing_and_costs_nobody_anything() -> None:
    """Who passes it on is honest: only its own author can have signed it."""
    known = msgspec.msgpack.decode(msgspec.msgpack.encode(peer_record()))
    for later in ({**known, "kind": "aura"}, {**known, "addresses": "elsewhere"}):
        body = msgspec.msgpack.encode(later)
        signed = msgspec.msgpack.encode(records.Envelope(body, MEMBER.sign(b"swarmd record 1\0", body)))
        with pytest.raises(Refused, match="what this version cannot read"):
            records.read_untrusted(signed, KEYS.founder_key, 120)
        forged = msgspec.msgpack.encode(records.Envelope(body, FOUNDER.sign(b"swarmd record 1\0", body)))
        with pytest.raises(IntegrityError, match="signature"):
            records.read_untrusted(forged, KEYS.founder_key, 120)
