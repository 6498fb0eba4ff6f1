"""The Hugging Face hub as one more donor: chunks of a model's own shards, by HTTP ranges, verified like any other's.

Only the bytes that are asked for travel, whatever shard they lie in. The hub is believed no more than a peer is.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import struct
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swarmd.errors import ConfigError, Unreachable
from swarmd.plan.links.download import Ref
from swarmd.protocol.models import shards
from swarmd.protocol.models.manifest import CHUNK_BYTES, INDEX_FILE, SINGLE_FILE, Manifest
from swarmd.protocol.models.shards import Place
from swarmd.values import PeerId

if TYPE_CHECKING:
    import httpx

HUB = PeerId("hub")
"""Stands for the hub among the donors of a download."""
TIMEOUT_S = 60.0  # a hub that answers nothing for so long is down
MOST_TRIES = 7  # to go on reading a file, one after the other, within half a minute
BACK_OFF_S = 0.25  # before the second of them, and twice as long before each further one
SHA256 = re.compile(r"[0-9a-f]{64}")
SIZE = re.compile(r"[0-9]{1,15}", re.ASCII)  # of a file: less than a petabyte
MAX_INDEX_BYTES = 32 * 2**20  # of a sharded checkpoint's index


def open_client() -> httpx.Client:
    """Open what asks the hub: through a proxy where the environment names one. Raises ConfigError where it cannot."""
    import httpx

    try:
        return httpx.Client(follow_redirects=True, timeout=TIMEOUT_S)
    except (OSError, ImportError, ValueError, httpx.InvalidURL) as error:  # a certificate, SOCKS, an address
        raise ConfigError(
            f"the hub cannot be asked with the settings of this environment ({error}): "
            "look at HTTPS_PROXY, ALL_PROXY, NO_PROXY and SSL_CERT_FILE"
        ) from None


# The hub's bytes go through the same check as a peer's: the sha256 of each chunk in the manifest. What is read here
# without one (the index, shards' headers) only says where to look; a lie there gives chunks that fail the check.
class Hub:
    """One model on the hub, ``org/name@revision``. No event loop: call it from a thread."""

    def __init__(self, source: str, manifest: Manifest) -> None:
        self._source = source
        self._repo = source.partition("@")[0]
        self._entries = manifest.entries
        self._n_files = len(manifest.files)
        self._client: Any = None
        self._places: dict[str, tuple[str, Place]] = {}

    def read_piece(self, refs: tuple[Ref, ...]) -> bytes:
        """Return the chunks, one after the other. Raises Unreachable."""
        return b"".join(self._read_chunk(index, chunk) for index, chunk in refs)

    def _read_chunk(self, index: int, chunk: int) -> bytes:
        """Return one chunk of a file or a tensor."""
        entry = self._entries[index]
        if index < self._n_files:
            name = entry.name
            start = 0
        else:
            name, place = self._find_tensor(entry.name)
            start = place.start
        first = start + chunk * CHUNK_BYTES
        return self._get_bytes(name, first, entry.chunk_bytes(chunk))

    def _find_tensor(self, tensor: str) -> tuple[str, Place]:
        """Return the shard that holds a tensor, and where; reads headers once."""
        if not self._places:
            try:
                index = json.loads(self._get_bytes(INDEX_FILE, 0, MAX_INDEX_BYTES))
                names = sorted({str(name) for name in index["weight_map"].values()})
            except (Unreachable, ValueError, KeyError, TypeError, AttributeError):
                names = [SINGLE_FILE]
            places: dict[str, tuple[str, Place]] = {}
            for name in names:
                if Path(name).name == name:
                    places |= {place.name: (name, place) for place in self._read_header(name)}
            self._places = places  # all at once: after one header that failed the next try begins anew
        if tensor not in self._places:
            raise Unreachable(f"{self._repo} on the hub has no tensor {tensor}")
        return self._places[tensor]

    def _read_header(self, name: str) -> list[Place]:
        """Read a shard's header: where its tensors are. Raises Unreachable."""
        (n_bytes,) = struct.unpack("<Q", self._get_bytes(name, 0, 8))
        if n_bytes > shards.MAX_HEADER_BYTES:
            raise Unreachable(f"{name} of {self._repo} on the hub is no safetensors file")
        raw = self._get_bytes(name, 0, 8 + n_bytes)
        try:
            header = json.loads(raw[8:])
            names = header.keys() - {"__metadata__"}
            data_bytes = max((header[tensor]["data_offsets"][1] for tensor in names), default=0)
            return shards.read_header(io.BytesIO(raw), Path(name), len(raw) + data_bytes)
        except (ConfigError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise Unreachable(f"{name} of {self._repo} on the hub: {error}") from None

    def _get_bytes(self, name: str, start: int, n_bytes: int) -> bytes:
        """Return bytes of a file, or fewer where it ends. Raises Unreachable."""
        import httpx
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        if self._client is None:
            try:
                self._client = open_client()
            except ConfigError as error:
                raise Unreachable(str(error)) from None
        url = url_on_hub(self._source, name)
        headers = {**build_hf_headers(), "Range": f"bytes={start}-{start + n_bytes - 1}"}
        try:
            with self._client.stream("GET", url, headers=headers) as response:
                if response.status_code not in (200, 206) or (response.status_code == 200 and start):
                    raise Unreachable(f"the hub answers {response.status_code} for {name} of {self._repo}")
                data = bytearray()
                for part in response.iter_bytes():
                    data += part
                    if len(data) >= n_bytes:
                        break
                return bytes(data[:n_bytes])
        except httpx.HTTPError as error:
            raise Unreachable(f"the hub does not give {name} of {self._repo}: {error}") from None


class HubFile:
    """A file of the hub at ``org/name@revision``, read once from its beginning on, and kept nowhere.

    A connection that breaks off is taken up where it ended. Raises Unreachable, and ConfigError for other bytes than
    the hub's own hash promises.
    """

    def __init__(self, source: str, name: str, client: httpx.Client) -> None:
        self._name = f"{name} of {source}"
        self._url = url_on_hub(source, name)
        self._client = client
        headers = self._look()
        size = headers.get("X-Linked-Size", headers.get("Content-Length", ""))
        if not SIZE.fullmatch(size):
            raise Unreachable(f"the hub does not say how large {self._name} is")
        self.n_bytes = int(size)
        etag = headers.get("X-Linked-ETag", headers.get("ETag", "")).removeprefix("W/").strip('"')
        self.sha256 = etag if SHA256.fullmatch(etag) else ""
        """That the hub promises; empty where it promises none."""
        self._hash = hashlib.sha256()
        self._stop = self.n_bytes  # where reading ends
        self._n_read = 0
        self._parts: Iterator[bytes] = iter(())
        self._held = bytearray()

    def read_places(self) -> list[Place]:
        """Where its tensors are, by its header; reading begins behind it anew. Raises ConfigError."""
        path = Path(self._name)
        try:
            self._stop = min(8, self.n_bytes)
            header_bytes = int.from_bytes(self.read(8), "little")
            self._rewind(min(8 + header_bytes, 8 + shards.MAX_HEADER_BYTES, self.n_bytes))
            return shards.read_header(self, path, self.n_bytes)
        finally:
            self._rewind(self.n_bytes)

    def read(self, n: int, /) -> bytes:
        """The next ``n`` bytes, or fewer where it ends."""
        import httpx

        n_failed = 0
        while len(self._held) < min(n, self._stop - self._n_read):
            try:
                part = next(self._parts, None)
                if part is None:  # at the beginning, and where a connection ended
                    self._parts = self._open(self._n_read + len(self._held))
                    part = next(self._parts, b"")
                self._held += part
                n_failed = 0 if part else n_failed + 1
            except (httpx.HTTPError, _Busy):
                self._parts = iter(())
                n_failed += 1
            if n_failed == MOST_TRIES:
                raise Unreachable(f"the hub does not give {self._name} beyond {self._n_read + len(self._held)} B")
            if n_failed:
                _wait(n_failed)
        data = bytes(self._held[:n])
        del self._held[:n]
        self._n_read += len(data)
        if self.sha256:
            self._hash.update(data)
        if self._n_read == self.n_bytes and self.sha256 not in ("", self._hash.hexdigest()):
            raise ConfigError(f"{self._name}: the hub gave other bytes than its own sha256 promises: try again")
        return data

    def _rewind(self, stop: int) -> None:
        self._parts, self._stop, self._n_read = iter(()), stop, 0
        self._held.clear()
        self._hash = hashlib.sha256()

    def _look(self) -> Mapping[str, str]:
        """The headers of the file, also where what it holds is given from another place. Raises Unreachable."""
        import httpx
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        reason = ""
        for n_failed in range(1, MOST_TRIES + 1):
            try:
                response = self._client.head(self._url, headers=headers, follow_redirects=False)
                if response.is_redirect and "X-Linked-Size" not in response.headers:
                    response = self._client.head(self._url, headers=headers)  # httpx keeps tokens from other hosts
                if response.status_code == 200 or response.is_redirect:
                    return response.headers
                reason = f"it answers {response.status_code}"
                if not _is_busy(response.status_code):
                    break
            except httpx.HTTPError as error:
                reason = str(error)
            if n_failed < MOST_TRIES:
                _wait(n_failed)
        raise Unreachable(f"the hub does not give {self._name}: {reason}")

    def _open(self, start: int) -> Iterator[bytes]:
        from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

        headers = {**build_hf_headers(), "Range": f"bytes={start}-{self._stop - 1}", "Accept-Encoding": "identity"}
        with self._client.stream("GET", self._url, headers=headers) as response:
            if _is_busy(response.status_code):
                raise _Busy
            if response.status_code != 206 and (response.status_code != 200 or start):
                raise Unreachable(f"the hub answers {response.status_code} for {self._name}")
            given = response.headers.get("Content-Range", "")
            if given and not given.startswith(f"bytes {start}-"):
                raise Unreachable(f"the hub gives {given[:64]} of {self._name}, and was asked for bytes {start} on")
            yield from response.iter_bytes()


class _Busy(Exception):
    """The hub has too much to do: asked again later it answers."""


def _wait(n_failed: int) -> None:
    """Before the next try, after so many that failed one after the other."""
    time.sleep(BACK_OFF_S * 2 ** (n_failed - 1))


def _is_busy(status: int) -> bool:
    return status == 429 or status >= 500


def url_on_hub(source: str, name: str) -> str:
    """Where the hub has a file of ``org/name@revision``."""
    from huggingface_hub import hf_hub_url

    repo, _, revision = source.partition("@")
    return hf_hub_url(repo, name, revision=revision or None, endpoint=os.environ.get("HF_ENDPOINT"))
