"""A client's own parameters under training, for the blocks of one hop: LoRA matrices, and prefixes of keys and values.

They come as safetensors and live in memory only, as leaves that gradients are taken by. ``{module}.lora_A`` [r, in]
and ``{module}.lora_B`` [out, r] update a matrix (Hu et al. 2021; the client puts PEFT's scale into B);
``{block}.keys`` and ``{block}.values`` [1, heads, n, head size] precede a block's tokens (prefix tuning, Li and Liang
2021; P-tuning v2, Liu et al. 2021).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError

from swarmd.compute.cache.adapters import DTYPES, LoraUpdates
from swarmd.compute.passes.span import LoadedSpan
from swarmd.errors import Code, ConfigError, Refused
from swarmd.values import Span
from swarmd.wire.tensors import is_finite

MAX_PREFIX_TOKENS = 4_096  # each takes room in every block's cache
MAX_VERSIONS = 64  # of one client, each for one hop
MAX_UPLOADS = 256  # under way at a time, of all clients
_PREFIX = re.compile(r"(0|[1-9][0-9]{0,3})\.(keys|values)")


@dataclass(frozen=True, slots=True)
class ClientParameters:
    """Parameters of the blocks of one hop; ``leaves`` by block and name, as they came."""

    lora: LoraUpdates
    leaves: Mapping[int, dict[str, torch.Tensor]]
    n_prefix: int = 0
    n_bytes: int = 0

    def of_block(self, block: int) -> dict[str, torch.Tensor]:
        """Return a block's leaves by name; a block may have none."""
        return self.leaves.get(block, {})

    def fill(self, cache: Any, blocks: range, n_rows: int) -> None:
        """Put the prefix, if there is one, in front of an empty cache of ``blocks``."""
        if self.n_prefix:
            leaves = self.leaves
            prefix = {b: (leaves[b][f"{b}.keys"], leaves[b][f"{b}.values"]) for b in blocks}
            cache.begin_with(prefix, n_rows)


NOTHING = ClientParameters(LoraUpdates(), {})


Key = tuple[bytes, bytes, Span]  # client, version, hop
READ_ERRORS = (ConfigError, RuntimeError, ValueError, TypeError, LookupError, AttributeError)


@dataclass(slots=True)
class _Upload:
    """Parameters of which some pieces have come. Once refused, the rest is taken and thrown away."""

    version: bytes
    pieces: list[bytes] = field(default_factory=list)
    refusal: Refused | None = None


# What a client could do, and what keeps it from it: upload without end (pieces count against half of the memory while
# they come, and an upload that is refused takes none any more); hold many small versions (MAX_VERSIONS of one client);
# begin uploads and never end them (MAX_UPLOADS in all); push others' parameters out (the client that holds most gives
# way first); give matrices that do not fit or are not finite (checked before any pass sees them).
class ClientParameterStore:
    """What clients gave, within ``limit_bytes``: a client may hold half of it, and who holds most gives way first."""

    def __init__(self, span: LoadedSpan, limit_bytes: int) -> None:
        self._span = span
        self._limit_bytes = limit_bytes
        self._held: dict[Key, ClientParameters] = {}
        self._uploads: dict[tuple[bytes, Span], _Upload] = {}

    def find(self, client: bytes, version: bytes, hop: Span) -> ClientParameters:
        """Return a client's own parameters for a hop. Raises Refused where they are not held."""
        if not version:
            return NOTHING
        parameters = self._held.pop((client, version, hop), None)
        if parameters is None:
            raise Refused(Code.NOT_HELD, f"the parameters {version.hex()[:12]} for blocks {hop} are not held here")
        self._held[client, version, hop] = parameters  # the last used is dropped last
        return parameters

    def put(
        self,
        key: Key,
        part: tuple[int, int],
        piece: bytes,
    ) -> bool:
        """Take one piece; True once all are there. Raises Refused, at the latest for the last piece."""
        client, version, hop = key
        number, n_parts = part
        upload = self._uploads.get((client, hop))
        if number == 0:
            upload = _Upload(version)
            self._uploads[client, hop] = upload
        is_next = upload is not None and (upload.refusal is not None or number == len(upload.pieces))
        if upload is None or upload.version != version or not is_next:
            raise Refused(Code.OP_GAP, f"piece {number} of {n_parts} of parameters has no predecessor")
        if upload.refusal is None:
            upload.pieces.append(piece)
            upload.refusal = self._refusal(client)
        if upload.refusal is not None:
            upload.pieces.clear()
        if number + 1 < n_parts:
            return False
        del self._uploads[client, hop]
        if upload.refusal is not None:
            raise upload.refusal
        try:
            self._held[key] = read_tuned_untrusted(self._span, hop, b"".join(upload.pieces))
        except READ_ERRORS as error:
            raise Refused(Code.UNSUPPORTED, str(error)[:500]) from None
        self._make_room(client)
        return True

    def _refusal(self, client: bytes) -> Refused | None:
        """Say why no more pieces of this client are taken, if they are not."""
        uploads = [upload for (owner, _), upload in self._uploads.items() if owner == client]
        n_bytes = sum(len(piece) for upload in uploads for piece in upload.pieces)
        if n_bytes <= self._limit_bytes // 2 and len(self._uploads) <= MAX_UPLOADS:
            return None
        text = f"parameters of more than {self._limit_bytes >> 21} MiB of one client, or too many at a time"
        return Refused(Code.TOO_LONG, text)

    def _make_room(self, client: bytes) -> None:
        """Drop what was used longest ago: of this client beyond its half, then of the one that holds most."""
        while True:
            held_bytes: Counter[bytes] = Counter()
            count: Counter[bytes] = Counter()
            for (owner, _, _), tuned in self._held.items():
                held_bytes[owner] += tuned.n_bytes
                count[owner] += 1
            if held_bytes[client] > self._limit_bytes // 2 or count[client] > MAX_VERSIONS:
                owner = client
            elif held_bytes.total() > self._limit_bytes or len(self._held) > 16 * MAX_VERSIONS:
                owner = max(held_bytes, key=lambda c: (held_bytes[c], count[c]))
            else:
                return
            if count[owner] == 1 and owner == client:
                return  # what has just come stays
            del self._held[next(key for key in self._held if key[0] == owner)]


@dataclass(slots=True)
class _ParameterReader:
    """What was read so far: all leaves by block, matrices by module, and prefixes by block."""

    leaves: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    matrices: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    prefixes: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)


def read_tuned_untrusted(span: LoadedSpan, hop: Span, raw: bytes) -> ClientParameters:
    """Check a client's parameters for ``hop`` and make leaves of them. Raises ConfigError."""
    try:
        tensors = safetensors.torch.load(raw)
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise ConfigError(f"the parameters do not parse: {error}") from None
    reading = _ParameterReader()
    for name, tensor in tensors.items():
        is_prefix = _PREFIX.fullmatch(name) is not None
        if is_prefix and (tensor.dtype not in DTYPES or not is_finite(tensor)):  # matrices: Adapters.checked
            raise ConfigError(f"{name[:100]} is {tensor.dtype}, or holds values that are not finite")
        if not is_prefix and tensor.dtype not in (torch.float32, span.dtype):
            raise ConfigError(f"{name[:100]} is {tensor.dtype}, expected float32 or {span.dtype}")
        leaf = tensor.to(span.device, span.dtype if is_prefix else None).requires_grad_()
        block = _sort_tensor(span, reading, name, leaf)
        if block is None or not hop.start <= block < hop.end:
            raise ConfigError(f"{name[:100]} is no parameter of blocks {hop} of this model")
        reading.leaves.setdefault(block, {})[name] = leaf
    lora = LoraUpdates()
    for module, pair in reading.matrices.items():
        a, b = _checked_matrices(span, module, pair)
        lora.updates[module] = (a, b, 1.0)
    n_prefix = _check_prefixes(span, hop, reading.prefixes) if reading.prefixes else 0
    span.adapters.hook(lora)
    return ClientParameters(lora, reading.leaves, n_prefix, len(raw))


def _sort_tensor(
    span: LoadedSpan,
    reading: _ParameterReader,
    name: str,
    leaf: torch.Tensor,
) -> int | None:
    """Note what a tensor is for; returns its block."""
    if (match := _PREFIX.fullmatch(name)) is not None:
        reading.prefixes.setdefault(int(match[1]), {})[match[2]] = leaf
        return int(match[1])
    module, _, matrix = name.rpartition(".")
    if matrix not in ("lora_A", "lora_B"):
        return None
    reading.matrices.setdefault(module, {})[matrix] = leaf
    return span.adapters.block_of(module)


def _checked_matrices(
    span: LoadedSpan, module: str, pair: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [r, in] and B [out, r] of one module. Raises ConfigError where they do not fit it."""
    if len({matrix.dtype for matrix in pair.values()}) > 1 or "lora_A" not in pair:
        raise ConfigError(f"{module} needs lora_A and lora_B of the same dtype")
    return span.adapters.checked(module, pair["lora_A"], pair.get("lora_B"))


def _check_prefixes(
    span: LoadedSpan,
    hop: Span,
    prefixes: dict[int, dict[str, torch.Tensor]],
) -> int:
    """Return the number of tokens of a prefix that fits every block of the hop. Raises ConfigError."""
    is_complete = all(set(prefix) == {"keys", "values"} for prefix in prefixes.values())
    if set(prefixes) != set(hop.blocks()) or not is_complete:
        raise ConfigError(f"a prefix needs keys and values for each of the blocks {hop}")
    tensors = [tensor for prefix in prefixes.values() for tensor in prefix.values()]
    counts = {tensor.shape[2] if tensor.ndim == 4 else 0 for tensor in tensors}
    n = counts.pop()
    if counts or not 1 <= n <= MAX_PREFIX_TOKENS:
        raise ConfigError(f"a prefix has the same number of tokens, at most {MAX_PREFIX_TOKENS}, in all blocks")
    layers = span.example_cache(hop).owned
    if len(layers) != len(hop):
        raise ConfigError("this family's blocks keep the keys and values of several layers: no prefixes")
    for block, layer in zip(hop.blocks(), layers, strict=True):
        for name in ("keys", "values"):
            example = getattr(layer, name, None)
            if not torch.is_tensor(example) or example.ndim != 4:
                raise ConfigError("this family's layers keep more than plain keys and values: no prefixes")
            shape = tuple(prefixes[block][name].shape)
            expected = (1, span.count_heads(block, example.shape[1]), n, example.shape[3])
            if shape != expected:
                raise ConfigError(f"{block}.{name} is {shape}, expected {expected}")
    return n
