"""Slices of a family's blocks: of attention whole groups of heads that share keys, of MLPs and experts some columns.

transformers says of most families how their matrices may be cut (see ``slicing_plans``). Its labels are read here; its
process groups, which ask for equal parts and hang when one is lost, are not used. A *section* is a module whose results
are added up over the members: what lies between its matrices is computed by the family's own code, of narrower ones.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from swarmd.compute.model.slicing_plans import plan_of
from swarmd.errors import ConfigError
from swarmd.plan.teams.slices import count_columns, slices

LAYERS = "layers.*."  # what names of parts of a layer begin with in the library's plans
ADDED_UP = "moe_tp_experts"  # a module whose result is a sum over members
OF_HEADS = "local_params"  # a module that holds a number for each head
STAY_WHOLE = ("replicated_with_grad_allreduce", "mla_kv_a_proj")
GATHERED = ("colwise_gather_output", "rowwise_split_input")
"""Something between them needs all heads at once: each member computes all of the section, and nothing is added up."""
CUTS = {
    **{"colwise": (-2, 1), "packed_colwise": (-2, 2), "rowwise": (-1, 1), "packed_rowwise": (-1, 2)},
    **{"transposed_colwise": (-1, 1), "transposed_rowwise": (-2, 1)},  # of matrices [.., in, out]
}
"""Which dimension of a matrix [.., out, in] is cut, and how many pieces lie there one behind the other."""
FUSED = {"gate_up_proj": "packed_colwise", "down_proj": "rowwise"}
"""An MLP whose first two matrices are one; between its matrices nothing needs all of it."""
ATTENTION = re.compile(r"(^|_)(q|k|v|qkv)_|_b_proj$|^query_key_value$")
PER_HEAD = re.compile(r"_b_proj$|^query_key_value$")  # keys and values of each head are its own


@dataclass(frozen=True, slots=True)
class SliceCut:
    """A member's part of a parameter: of each of ``n_pieces`` along ``dim`` some of ``n_units`` units.

    ``dim`` counts from the last. ``is_once``: what only the first member has, for others zeros.
    """

    dim: int
    n_pieces: int
    extent: int
    n_units: int
    units: range
    is_once: bool = False

    @property
    def is_of_rows(self) -> bool:
        """Of a matrix [out, in]: are these some of its rows, so that some of what leaves it is computed?"""
        return self.dim == CUTS["colwise"][0]

    def places(self) -> list[slice]:
        """Where the part lies along its dimension."""
        piece = self.extent // self.n_pieces
        unit = piece // self.n_units
        starts = range(0, self.extent, piece)
        return [slice(start + self.units.start * unit, start + self.units.stop * unit) for start in starts]

    def take(self, tensor: Any, n_dims: int) -> torch.Tensor:
        """The part of a tensor, or of a stored one of so many dimensions, of which no more is read."""
        every = [slice(None)] * n_dims
        if self.is_once:
            whole: torch.Tensor = tensor[tuple(every)]
            return whole if not self.units.start else torch.zeros_like(whole)
        at = n_dims + self.dim
        parts: list[torch.Tensor] = [tensor[(*every[:at], place, *every[at + 1 :])] for place in self.places()]
        return parts[0].clone() if len(parts) == 1 else torch.cat(parts, at)

    def of_stored(self, name: str, shape: Iterable[int]) -> SliceCut:
        """The same part of a stored tensor, which may be one of the pieces. Raises ConfigError."""
        extent = [*shape][self.dim]
        if extent == self.extent:
            return self
        if extent * self.n_pieces == self.extent:
            return replace(self, n_pieces=1, extent=extent)
        raise ConfigError(f"{name} has {extent} where {self.extent} were expected: it cannot be cut into slices")


class StoredPart:
    """A part of a stored tensor; transformers reads it as it reads a slice of safetensors."""

    def __init__(self, stored: Any, cut: SliceCut) -> None:
        self._stored = stored
        self._cut = cut

    def get_shape(self) -> list[int]:
        """The shape of the part."""
        shape = list(self._stored.get_shape())
        if not self._cut.is_once:
            shape[self._cut.dim] = sum(place.stop - place.start for place in self._cut.places())
        return shape

    def get_dtype(self) -> str:
        """What kind of numbers are stored, by safetensors' name."""
        return str(self._stored.get_dtype())

    def __getitem__(self, index: Any) -> torch.Tensor:
        return self._cut.take(self._stored, len(self._stored.get_shape()))[index]


class Slicing:
    """One member's slices of layers: found while its hollow model is built, and used to read no more than these."""

    def __init__(self, weights: tuple[float, ...], member: int) -> None:
        self.weights = weights
        self.member = member
        self.sections: dict[str, tuple[int, int]] = {}
        """Modules whose results are added up, by name in the model, in their order: their units, and whole numbers."""
        self._cuts: dict[str, SliceCut] = {}

    def narrow(self, layers: Mapping[str, nn.Module], config: PretrainedConfig) -> None:
        """Make the matrices of hollow layers as narrow as the slices are. Raises ConfigError for what cannot be cut.

        ``layers`` by their names in the model, ``config`` of its decoder.
        """
        plan = plan_of(config)
        if not plan:
            raise ConfigError(f"it is not known how matrices of {config.model_type} may be cut into slices")
        for name, layer in layers.items():
            for section, labels in _sections(layer, plan).items():
                module = layer.get_submodule(section)
                cuts = _cuts_of(module, labels, config, self.weights, self.member)
                n_numbers = 0
                for parameter, cut in cuts.items():
                    n_numbers += _narrow(module, parameter, cut)
                    self._cuts[f"{name}.{section}.{parameter}"] = cut
                if cuts:
                    self.sections[f"{name}.{section}"] = (next(iter(cuts.values())).n_units, n_numbers)
        if not self._cuts:
            raise ConfigError(f"blocks of {config.model_type} are computed whole: nothing of them can be cut")

    def cut_of(self, parameter: str) -> SliceCut | None:
        """This member's part of a parameter, by its name in the model; None for what it has whole."""
        return self._cuts.get(parameter)

    def cut_of_heads(self, layer: str) -> SliceCut | None:
        """How a matrix of a layer's attention is cut, by its name in the model; None where none is."""
        of_layer = ((name.split(".")[-2], cut) for name, cut in self._cuts.items() if name.startswith(f"{layer}."))
        return next((cut for name, cut in of_layer if ATTENTION.search(name)), None)

    def is_added_up(self, module: str) -> bool:
        """Is what a module gives a part of a section, so that members have a part each of what comes of it?"""
        return any(f"{module}.".startswith(f"{section}.") for section in self.sections)

    def part_of(self, target: str, key: str, stored: Any) -> Any:
        """What of a stored tensor, which becomes (a part of) the parameter ``target``, is this member's."""
        cut = self._cuts.get(target)
        if cut is None:
            return stored
        return StoredPart(stored, cut if cut.is_once else cut.of_stored(key, stored.get_shape()))


def _sections(layer: nn.Module, plan: Mapping[str, str]) -> dict[str, dict[str, str]]:
    """The modules of a layer that can be cut, and the labels of what they hold, by names in them."""
    names = [*(name for name, _ in layer.named_modules()), *(name for name, _ in layer.named_parameters())]
    labels: dict[str, str] = {}
    for pattern, label in plan.items():
        if pattern.startswith(LAYERS):
            of_layer = re.escape(pattern.removeprefix(LAYERS)).replace(r"\*", r"[^.]+")
            labels |= {name: label for name in names if re.fullmatch(of_layer, name)}
    sections: dict[str, dict[str, str]] = {name: {} for name, label in labels.items() if label == ADDED_UP}
    for name, label in labels.items():
        if label == OF_HEADS:
            own = layer.get_submodule(name).named_parameters(recurse=False)
            sections.setdefault(name, {}).update((parameter, label) for parameter, _ in own)
        elif label != ADDED_UP:
            section, _, member = name.rpartition(".")
            sections.setdefault(section, {})[member] = label
    return {name: found for name, each in sections.items() if (found := _read_labels(each))}


def _read_labels(labels: dict[str, str]) -> dict[str, str]:
    """What is cut in a section; nothing where something in it needs the whole. Raises ConfigError for a new label."""
    if any(label in GATHERED for label in labels.values()):
        return dict(FUSED) if labels.keys() == FUSED.keys() else {}
    unknown = sorted(set(labels.values()) - {*CUTS, *STAY_WHOLE, OF_HEADS})
    if unknown:
        raise ConfigError(f"transformers' plan says {unknown[0]} of {min(labels)}, which is not known here")
    return {name: label for name, label in labels.items() if label not in STAY_WHOLE}


def _cuts_of(
    module: Any, labels: Mapping[str, str], config: Any, weights: tuple[float, ...], member: int
) -> dict[str, SliceCut]:
    """How the parameters of a section are cut for a member; nothing where it has fewer units than members."""
    n_units = _count_units(module, labels, config)
    if not {"rowwise", "colwise", "transposed_rowwise"}.intersection(labels.values()) or n_units < len(weights):
        return {}
    units = slices(n_units, weights)[member]
    cuts: dict[str, SliceCut] = {}
    for name, label in labels.items():
        held: Any = getattr(module, name)
        is_module = isinstance(held, nn.Module)
        bias_name = f"{name}.bias" if is_module else f"{name}_bias"
        bias: Any = getattr(held, "bias", None) if is_module else getattr(module, bias_name, None)
        cuts[f"{name}.weight" if is_module else name] = _cut(
            name, held.weight if is_module else held, label, n_units, units
        )
        if bias is not None:
            cuts[bias_name] = _cut(bias_name, bias, label, n_units, units, is_bias=True)
    return cuts


def _count_units(module: Any, labels: Mapping[str, str], config: Any) -> int:
    """How many units a section has: groups of heads that share keys, or columns that stay together."""
    if any(map(ATTENTION.search, labels)):
        if any(map(PER_HEAD.search, labels)):
            return int(config.num_attention_heads)
        width = getattr(module, "head_dim", None)
        if width and "k_proj" in labels:  # layers of a family may differ
            return int(module.k_proj.weight.shape[0] // width)
        return int(getattr(config, "num_key_value_heads", None) or config.num_attention_heads)
    name, label = next((item for item in labels.items() if "rowwise" in item[1] or item[0] == "down_proj"), ("", ""))
    if not name:
        return 0
    held: Any = getattr(module, name)
    weight: Any = held.weight if isinstance(held, nn.Module) else held
    return count_columns(int(weight.shape[-1 if label == "rowwise" else -2]))


def _cut(name: str, parameter: torch.Tensor, label: str, n_units: int, units: range, is_bias: bool = False) -> SliceCut:
    """Of what is added up one member adds the bias; any other bias is cut as the rows of its matrix."""
    dim, n_pieces = CUTS.get(label, (-1, 1))
    if is_bias and "rowwise" in label:
        return SliceCut(-1, 1, parameter.shape[-1], n_units, units, is_once=True)
    if is_bias or parameter.ndim == 1:
        dim = -1
    extent = parameter.shape[dim]
    if extent % (n_pieces * n_units):
        raise ConfigError(f"{name} of {extent} cannot be cut into {n_units} units")
    return SliceCut(dim, n_pieces, extent, n_units, units)


def _narrow(module: nn.Module, name: str, cut: SliceCut) -> int:
    """Replace a parameter of a section by its part; returns how many numbers the whole has."""
    path, _, last = name.rpartition(".")
    owner = module.get_submodule(path)
    whole = getattr(owner, last).data
    part = cut.take(whole, whole.ndim)
    setattr(owner, last, nn.Parameter(part, requires_grad=False))
    if isinstance(owner, nn.Linear) and last == "weight":
        owner.out_features, owner.in_features = part.shape
    return int(whole.numel())
