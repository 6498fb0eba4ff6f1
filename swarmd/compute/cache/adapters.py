"""LoRA adapters on a span: hooks add each session's own update to what the blocks' matrices give.

Sessions with different adapters, and with none, share a pass: the base is computed once for all tokens, each update for
its session's tokens only. Equal to PEFT's results (tests/compute/cache/test_adapters.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from swarmd.errors import ConfigError, IntegrityError
from swarmd.protocol.models.adapter import CONFIG_FILE, PREFIX, LoraConfig, read_settings

MAX_ADAPTERS = 32  # loaded at a time; the oldest makes room
MAX_RANK = 4_096  # of low-rank matrices: beyond it they are no longer low
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class LoraUpdates:
    """One adapter's updates for a span, by module: A [r, in], B [out, r], scale. Each is itself only."""

    updates: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = field(default_factory=dict)


# Where updates are added. A pass holds the tokens of several sessions in one flattened row; the base matrix is
# multiplied with all of them at once, then each session's part gets its own low-rank product:
#
#     tokens       | session 1 |  session 2  | session 3 |
#     base output  |            W x                      |
#     updates      | + B1 A1 x |             | + B3 A3 x |       (session 2 uses no adapter)
#
# ``_sessions`` says who holds which tokens, for as long as ``using`` is open; a hook on each matrix reads it.
class SpanAdapters:
    """The adapters of one span. ``blocks``: the block of each of its layers. ``using`` says whose tokens it holds."""

    def __init__(
        self,
        model: nn.Module,
        layers: Any,
        blocks: Mapping[nn.Module, int],
        dtype: torch.dtype,
        device: torch.device,
        on_tensor: Callable[[], None] = lambda: None,
    ) -> None:
        names = {module: name for name, module in model.named_modules()}
        self._blocks = {f"{names[layer]}.": block for layer, block in blocks.items()}
        self._all_blocks = names[layers].rstrip(".") + "."
        self._model = model
        self._dtype = dtype
        self._device = device
        self._known: dict[str, LoraUpdates] = {}
        self._hooked: set[str] = set()
        self._sessions: list[tuple[int, LoraUpdates]] = []
        self._on_tensor = on_tensor  # reading takes a while, and is progress

    def __contains__(self, adapter: str) -> bool:
        return adapter in self._known

    def get(self, adapter: str) -> LoraUpdates | None:
        """Return an adapter that is loaded, else None."""
        return self._known.get(adapter)

    def load(
        self,
        adapter: str,
        shards: Sequence[Path],
        raw_config: bytes,
    ) -> None:
        """Read this span's part of an adapter. Raises ConfigError for one that cannot be used here."""
        while len(self._known) >= MAX_ADAPTERS:
            del self._known[next(iter(self._known))]  # the oldest; sessions that use it hold it
        try:
            self._known[adapter] = self.read(shards, raw_config)
        except ConfigError as error:
            raise ConfigError(f"adapter {adapter[:12]}: {error}") from None

    def read(self, shards: Sequence[Path], raw_config: bytes) -> LoraUpdates:
        """Read this span's part of an adapter and hook its modules. Raises ConfigError if it cannot be used here."""
        try:
            return self._read_tensors(shards, read_settings(msgspec.json.decode(raw_config)))
        except (IntegrityError, SafetensorError, msgspec.DecodeError, OSError, RuntimeError, ValueError) as error:
            raise ConfigError(str(error)) from None

    def _read_tensors(self, shards: Sequence[Path], config: LoraConfig) -> LoraUpdates:
        tensors: dict[str, torch.Tensor] = {}
        for shard in shards:
            with safe_open(shard, "pt") as file:
                for name in file.keys():  # noqa: SIM118
                    if self._is_here(name):
                        tensors[name] = file.get_tensor(name)
                        self._on_tensor()
        lora = LoraUpdates()
        for name in [n for n in tensors if n.endswith(".lora_A.weight")]:
            module = name.removeprefix(PREFIX).removesuffix(".lora_A.weight")
            partner = name.replace(".lora_A.", ".lora_B.")
            a, b = self.checked(module, tensors[name], tensors.get(partner))
            rank = config.rank(module)
            if a.shape[0] != rank:
                raise ConfigError(f"{module} has rank {a.shape[0]}, and {CONFIG_FILE} says {rank}")
            a = a.to(self._device, self._dtype)
            b = b.to(self._device, self._dtype)
            lora.updates[module] = (a, b, config.scale(module))
        self.hook(lora)
        return lora

    def hook(self, lora: LoraUpdates) -> None:
        """Have the modules that ``lora`` updates look at which sessions use a pass."""
        for module in lora.updates.keys() - self._hooked:
            self._model.get_submodule(module).register_forward_hook(partial(self._add_updates, module))
            self._hooked.add(module)

    def block_of(self, module: str) -> int | None:
        """Return the block that a module is part of, if it is one of this span."""
        for prefix, block in self._blocks.items():
            if module.startswith(prefix):
                return block
        return None

    @contextmanager
    def using(self, sessions: Sequence[tuple[int, LoraUpdates | None]]) -> Iterator[None]:
        """Have passes inside compute (tokens, adapter) of each session, one after the other in the flattened input."""
        if all(lora is None for _, lora in sessions):
            yield
            return
        self._sessions = [(n_tokens, lora or LoraUpdates()) for n_tokens, lora in sessions]
        try:
            yield
        finally:
            self._sessions = []

    def _is_here(self, name: str) -> bool:
        module = name.removeprefix(PREFIX)
        if not module.startswith(self._all_blocks):
            raise IntegrityError(f"it adapts {module}, which is no part of a block: unsupported adapter")
        return self.block_of(module) is not None

    def checked(
        self,
        module: str,
        a: torch.Tensor,
        b: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A [r, in] and B [out, r] if they fit the module and are finite. Raises ConfigError."""
        try:
            base: Any = self._model.get_submodule(module)
        except AttributeError:
            reason = self._explain_missing(module)
            raise ConfigError(f"the adapter changes {module}, which this model does not have{reason}") from None
        sizes = self._sizes_of(module, base)
        if b is None or not _fits(a, b, sizes):
            shapes = f"{tuple(a.shape)} and {None if b is None else tuple(b.shape)}"
            raise ConfigError(f"the adapter's matrices for {module} are {shapes}, for a layer of {sizes}")
        if a.dtype not in DTYPES or b.dtype not in DTYPES or a.shape[0] > MAX_RANK:
            raise ConfigError(f"the adapter's matrices for {module} are {a.dtype} of rank {a.shape[0]}")
        if not all(torch.isfinite(matrix).all() for matrix in (a, b)):
            raise ConfigError(f"the adapter's matrices for {module} hold values that are not finite")
        return a, b

    def _sizes_of(self, module: str, base: Any) -> tuple[Any, Any]:
        """The sizes of what enters a module and what leaves it; None for one that has none."""
        if type(base).__name__ == "Conv1D":  # GPT-2's linear layers
            return base.nx, base.nf
        return getattr(base, "in_features", None), getattr(base, "out_features", None)

    def _part_of(self, module: str, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What of an update's matrices is computed here: all of them."""
        return a, b

    def _explain_missing(self, module: str) -> str:
        """Return what more is known of a module that is not there; empty if nothing is."""
        experts, _, rest = module.rpartition(".experts.")
        if rest[:1].isdecimal() and f"{experts}.experts" in dict(self._model.named_modules()):
            return ": its experts are one tensor, and adapters of single ones are not read: leave them out, or merge it"
        return ""

    def _add_updates(
        self,
        module: str,
        _: nn.Module,
        args: tuple[Any, ...],
        out: torch.Tensor,
    ) -> torch.Tensor | None:
        """Add each session's update to what a module gave; None, for the hook, changes nothing."""
        if not self._sessions:
            return None
        inputs = args[0].reshape(-1, args[0].shape[-1])
        n_expected = sum(n_tokens for n_tokens, _ in self._sessions)
        if inputs.shape[0] != n_expected:
            raise RuntimeError(f"{module} sees {inputs.shape[0]} tokens of {n_expected}")
        parts = []
        offset = 0
        base_output = out.reshape(-1, out.shape[-1])
        for n_tokens, lora in self._sessions:
            part = base_output[offset : offset + n_tokens]
            update = lora.updates.get(module)
            if update is not None:
                *matrices, scale = update
                a, b = self._part_of(module, *matrices)
                x = inputs[offset : offset + n_tokens].to(a.dtype)
                change = (x @ a.T @ b.T) * scale
                part = part + change.to(part.dtype)
            parts.append(part)
            offset += n_tokens
        return torch.cat(parts).view(out.shape)


def _fits(
    a: torch.Tensor,
    b: torch.Tensor,
    sizes: tuple[Any, Any],
) -> bool:
    """Are these A [r, in] and B [out, r] for a layer of ``sizes``, (in, out)?"""
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[1]:
        return False
    return (a.shape[1], b.shape[0]) == sizes
