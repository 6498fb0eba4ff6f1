"""What a client trains of the remote blocks: PEFT's LoRA layers inside the stubs, and prefixes of keys and values.

The stubs of a remote model hold the family's own modules without their weights, so that PEFT finds its targets, makes
its own parameters beside them, and saves and loads them. Only these parameters travel, known by a version: servers
cache them and give gradients back; the client keeps the only copy that counts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import safetensors.torch
import torch
from torch import nn

from swarmd.errors import ConfigError
from swarmd.net.rpc import Rpc
from swarmd.plan.chains.routing import Hop
from swarmd.protocol.wire.tuning import PutTuned
from swarmd.values import ModelId, Span
from swarmd.wire.micro_batches import pieces

GIVE_TIMEOUT_S = 120.0  # a client's parameters, up to some 100 MB, on a home's uplink
BlockTensors = dict[str, tuple[int, torch.Tensor]]
"""Tensors by name, each with the block that it belongs to."""


@dataclass(slots=True)
class TunedParameters:
    """Parameters for remote blocks at one moment, by the names that servers know, with the block of each."""

    tensors: dict[str, torch.Tensor]
    blocks: dict[str, int]
    n_prefix: int = 0
    _raw: dict[Span, bytes] = field(default_factory=dict)
    _version: bytes = b""

    @property
    def version(self) -> bytes:
        """The sha256 of all of it; b"" of nothing."""
        if self.tensors and not self._version:
            digest = hashlib.sha256()
            for name, tensor in sorted(self.tensors.items()):
                raw = tensor.detach().contiguous().view(torch.uint8)
                digest.update(f"{name}{tuple(tensor.shape)}".encode())
                digest.update(raw.numpy().data)
            self._version = digest.digest()
        return self._version

    def names(self, span: Span) -> list[str]:
        """Return the names of the parameters whose blocks are in ``span``."""
        return [name for name, block in self.blocks.items() if span.start <= block < span.end]

    def raw(self, span: Span) -> bytes:
        """The part for a hop, as safetensors."""
        if span not in self._raw:
            names = self.names(span)
            parts = {name: self.tensors[name].detach().contiguous() for name in names}
            self._raw[span] = safetensors.torch.save(parts)
        return self._raw[span]


async def upload_parameters(rpc: Rpc, model: ModelId, hop: Hop, parameters: TunedParameters) -> None:
    """Give a hop its part of a client's parameters, and wait until it holds them. Raises PeerError."""
    channel = await rpc.channel(hop.peer, "training")

    def piece(number: int, n: int) -> PutTuned:
        return PutTuned(
            version=parameters.version,
            start=hop.span.start,
            end=hop.span.end,
            part=(number, n),
            model=model,
        )

    # all pieces but the last are sent without an answer: the hop answers once it holds the whole
    *leading, (last, n, payload) = pieces(parameters.raw(hop.span))
    for number, _, part in leading:
        await channel.send(piece(number, n), part)
    await channel.call(piece(last, n), payload, GIVE_TIMEOUT_S)


# operations on a weight on servers that read none of its numbers: their result stands for a weight on servers, too
PROPERTIES = {"__get__", "__set__", "requires_grad_", "detach", "detach_"}
CASTS = {"to", "cpu", "cuda", "type", "float", "double", "half", "bfloat16"}
VIEWS = {"view", "expand", "t", "transpose", "permute"}
COPIES = CASTS | {"contiguous", "clone"}  # which torch makes whole, of one number that is seen from everywhere
SAFE_OPERATIONS = PROPERTIES | VIEWS | COPIES
# PEFT's ways to begin matrices with base weights, their gradients or what they compute; "pissa" has variants
FROM_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga", "mica", "eva")
ALTERNATIVES = 'init_lora_weights=True, "gaussian" or "orthogonal", and no DoRA, need no base weights'


class RemoteWeight(torch.Tensor):
    """Stands for a weight on servers: it has a shape and a dtype, takes no memory, and gives no numbers.

    PEFT begins some of its methods with the base weights (PiSSA, OLoRA, DoRA's norms ...). Zeros in their place would
    be decomposed without a word, and something else trained than was meant.
    """

    @classmethod
    def __torch_function__(
        cls,
        function: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        name = getattr(function, "__name__", str(function))
        if name in COPIES and isinstance(args[0], RemoteWeight):
            return _copied(function, *args, **(kwargs or {}))
        try:
            result = super().__torch_function__(function, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        except RuntimeError:  # an expanded scalar cannot be written to
            result = None
            needs_numbers = True
        else:
            parts = result if isinstance(result, tuple) else (result,)
            has_tensor = any(isinstance(part, torch.Tensor) for part in parts)
            needs_numbers = has_tensor and name not in SAFE_OPERATIONS
        if needs_numbers:
            raise ConfigError(f"the weights of remote blocks are on servers: {name}() needs them here. {ALTERNATIVES}")
        return result

    def __deepcopy__(self, memo: Any) -> Any:
        return remote_weight(self.shape, self.dtype)


def _copied(
    function: Any,
    weight: torch.Tensor,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    """What stands for a weight in another dtype, or elsewhere: no memory is taken for it, either."""
    kwargs.pop("memory_format", None)
    one = function(weight.as_subclass(torch.Tensor)[(0,) * weight.ndim], *args, **kwargs)
    return one.expand(weight.shape).as_subclass(RemoteWeight)  # type: ignore[no-any-return]


def remote_weight(shape: Sequence[int], dtype: torch.dtype) -> nn.Parameter:
    """Make a parameter that stands for a weight on servers: one zero in memory, expanded to ``shape``."""
    zeros = torch.zeros((), dtype=dtype).expand(shape)
    return nn.Parameter(zeros.as_subclass(RemoteWeight), requires_grad=False)


def expose(model: Any, layers: Sequence[Any]) -> None:
    """Give each stub the modules of the layer that it stands for, without their weights, for PEFT to find."""
    dtype = model.dtype
    for layer in layers:
        for name, child in layer.original.named_children():
            _empty_module(child, dtype)
            setattr(layer, name, child)


def _empty_module(module: nn.Module, dtype: torch.dtype) -> None:
    """Replace parameters by remote weights, and buffers by one zero that is expanded to their shape."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                part._parameters[name] = remote_weight(parameter.shape, dtype)
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = torch.zeros((), dtype=buffer.dtype).expand(buffer.shape)


def lora_of(model: Any, layers: Sequence[Any], block_of: Callable[[int], int] = lambda layer: layer) -> BlockTensors:
    """The LoRA matrices that PEFT put into the stubs and that are active: name to (block, tensor).

    ``block_of``: the block that a layer is in. B is multiplied by PEFT's scale, so gradients flow to PEFT's own
    parameters. Raises ConfigError for what cannot be computed by servers.
    """
    matrices: BlockTensors = {}
    known = set[int]()
    layer_ids = {id(layer) for layer in layers}
    first_layer = next(name for name, module in model.named_modules() if id(module) in layer_ids)
    prefix = first_layer.rpartition(".")[0]
    _require_no_base(model)
    for index, layer in enumerate(layers):
        for name, module in layer.named_modules():
            if not _is_tuner(module):
                continue
            place = f"{prefix}.{index}.{name}"
            pairs = _scaled_pairs(place, module, known)
            if pairs:  # several adapters at once are one of all their ranks
                matrices[f"{place}.lora_A"] = block_of(index), torch.cat([a for a, _ in pairs])
                matrices[f"{place}.lora_B"] = block_of(index), torch.cat([b for _, b in pairs], 1)
        for name, parameter in layer.named_parameters():
            if parameter.requires_grad and id(parameter) not in known:
                raise ConfigError(f"{prefix}.{index}.{name} cannot be trained: of remote blocks only plain LoRA can")
    return matrices


def _require_no_base(model: Any) -> None:
    """Refuse matrices that should have begun with what is on servers: PEFT begins some of them otherwise, unsaid.

    Those of a saved adapter are whole where only their beginning came from the base (EVA). Raises ConfigError.
    """
    for config in getattr(model, "peft_config", {}).values():
        method = getattr(config, "init_lora_weights", None)
        is_whole = method == "eva" and config.inference_mode
        if isinstance(method, str) and method.startswith(FROM_BASE) and not is_whole:
            raise ConfigError(
                f'init_lora_weights="{method}" starts from base weights, which are on servers. {ALTERNATIVES}'
            )


def _is_tuner(module: nn.Module) -> bool:
    """Is this one of the modules that PEFT puts in the place of others? Raises ConfigError for a kind not computed."""
    if not (hasattr(module, "active_adapters") and hasattr(module, "disable_adapters")):
        return False
    if isinstance(getattr(module, "lora_A", None), nn.ModuleDict):
        return True
    raise ConfigError(f"servers compute plain LoRA in remote blocks, not PEFT's {type(module).__name__}")


def _scaled_pairs(
    name: str,
    module: Any,
    known: set[int],
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A and scaled B of each active adapter; ``known`` collects all parameters that are some adapter's."""
    for matrices in (module.lora_A, module.lora_B):
        known.update(id(parameter) for parameter in matrices.parameters())
    if module.merged:
        raise ConfigError(f"the adapter of {name} is merged, which a remote layer cannot be: call unmerge_adapter()")
    pairs = []
    for adapter in () if module.disable_adapters else module.active_adapters:
        if adapter not in module.lora_A:
            continue
        special = [option for option in ("use_dora", "lora_bias") if getattr(module, option, {}).get(adapter)]
        if adapter in getattr(module, "lora_variant", {}):
            special.append(type(module.lora_variant[adapter]).__name__)
        dropout = module.lora_dropout[adapter]
        if module.training and getattr(dropout, "p", 0.0):
            special.append("lora_dropout")
        if special:
            raise ConfigError(f"{name} uses {', '.join(special)}, which servers do not compute: leave it out")
        a = module.lora_A[adapter].weight
        b = module.lora_B[adapter].weight
        pairs.append((a, b * module.scaling[adapter]))
    return pairs


def prefix_of(cache: Any) -> BlockTensors:
    """The keys and values that PEFT's prefix tuning put into a cache: name to (block, tensor of one row).

    Raises ConfigError when rows differ: a prefix is the same for all.
    """
    tensors: BlockTensors = {}
    for block, layer in enumerate(cache.layers):
        for name in ("keys", "values"):
            tensor = getattr(layer, name, None)
            if not torch.is_tensor(tensor) or tensor.ndim != 4:
                raise ConfigError(f"expected keys and values of block {block} in the cache that was given")
            values = tensor.detach()
            if len(values) > 1 and not bool((values == values[:1]).all()):
                raise ConfigError("a prefix has to be the same for all rows; to go on from a cache, use new_cache()")
            tensors[f"{block}.{name}"] = block, tensor[:1]
    return tensors


def gather(parameters: BlockTensors, n_prefix: int) -> TunedParameters:
    """Parameters as they are now, cut off from autograd."""
    return TunedParameters(
        {name: tensor.detach() for name, (_, tensor) in parameters.items()},
        {name: block for name, (block, _) in parameters.items()},
        n_prefix,
    )
