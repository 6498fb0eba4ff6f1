"""A TLS stream leaves others their turn and keeps its time, whatever the other side sends."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trio
import trio.testing
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from swarmd.net.tls import FILL_BYTES, Tls
from swarmd.wire.pinned_tls import listening_context

RECORD, HANDSHAKE, KEY_UPDATE = b"\x17\x03\x03", b"\x16", b"\x18\x00\x00\x01\x00"  # RFC 8446, 5.2, 4, 4.6.3


class Client:
    """The other side, by hand: what it has encrypted by keys of its own looks as OpenSSL's."""

    def __init__(self, stream: trio.SocketStream, log: Path) -> None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        context.keylog_filename = str(log)
        self._stream, self._log = stream, log
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self._incoming, self._outgoing)

    async def shake_hands(self) -> None:
        while True:
            try:
                self.tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                await self._stream.send_all(self._outgoing.read())
                self.take(await self._stream.receive_some())
        await self._stream.send_all(self._outgoing.read())

    async def send(self, data: bytes) -> None:
        self.tls.write(data)
        await self._stream.send_all(self._outgoing.read())

    def take(self, data: bytes) -> None:
        self._incoming.write(data)

    def new_keys(self, n: int) -> bytes:
        """So many records that say that other keys are used from now on, and nothing else."""
        (cipher, _, _) = self.tls.cipher() or ("", "", 0)
        kind, key_bytes = (hashes.SHA384(), 32) if "SHA384" in cipher else (hashes.SHA256(), 16)
        lines = self._log.read_text().splitlines()
        secret = bytes.fromhex(next(line.split()[2] for line in lines if line.startswith("CLIENT_TRAFFIC_SECRET_0")))

        def expanded(label: bytes, n_bytes: int) -> bytes:
            label = b"tls13 " + label
            info = n_bytes.to_bytes(2, "big") + bytes([len(label)]) + label + b"\0"
            return HKDFExpand(kind, n_bytes, info).derive(secret)

        records = bytearray()
        for _ in range(n):
            inner = KEY_UPDATE + HANDSHAKE
            header = RECORD + (len(inner) + 16).to_bytes(2, "big")
            records += header + AESGCM(expanded(b"key", key_bytes)).encrypt(expanded(b"iv", 12), inner, header)
            secret = expanded(b"traffic upd", kind.digest_size)
        return bytes(records)


async def pair(tmp_path: Path) -> tuple[Tls, Client, trio.SocketStream]:
    ours, theirs = map(trio.SocketStream, trio.socket.socketpair())
    tls, client = Tls(ours, listening_context()[0], is_server=True), Client(theirs, tmp_path / "keys")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tls.shake_hands)
        await client.shake_hands()
    return tls, client, theirs


async def test_who_sends_nothing_but_keys_keeps_nobody_from_his_turn_or_time(tmp_path: Path) -> None:
    tls, client, theirs = await pair(tmp_path)
    n_turns, records = 0, client.new_keys(6_000)
    assert len(records) > 2 * FILL_BYTES
    turns_at_the_end = 0

    async def count() -> None:
        nonlocal n_turns
        while True:
            n_turns += 1
            await trio.lowlevel.checkpoint()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(count)
        nursery.start_soon(theirs.send_all, records)
        with trio.move_on_after(0) as scope:  # it is over before anything was read
            await tls.receive(33)
        assert scope.cancelled_caught
        with trio.move_on_after(0.2) as scope:
            await tls.receive(33)
        assert scope.cancelled_caught
        turns_at_the_end = n_turns
        nursery.cancel_scope.cancel()
    assert turns_at_the_end >= len(records) // FILL_BYTES
    tls.close()


async def test_two_senders_are_a_mistake_that_is_told(tmp_path: Path) -> None:
    tls, _, theirs = await pair(tmp_path)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(tls.send, bytes(10_000_000))
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(AssertionError, match="two at a time"):
            await tls.send(b"x")
        nursery.cancel_scope.cancel()
    tls.close()
    await theirs.aclose()


async def test_a_goodbye_leaves_though_something_was_not_read(tmp_path: Path) -> None:
    tls, client, theirs = await pair(tmp_path)
    await client.send(b"x" * 100)
    assert await tls.receive(10) == b"x" * 10
    tls.say_goodbye()
    tls.close()
    client.take(await theirs.receive_some())
    assert client.tls.read(1) == b"", "a goodbye, where without one an error is raised"
