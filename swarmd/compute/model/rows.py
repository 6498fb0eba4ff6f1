"""What travels of each token as one row of numbers: hidden states in all their streams, and sidebands behind them.

The layout is ``protocol.models.model_layout``'s. For most families a row is the hidden states, and nothing is copied.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from swarmd.errors import ConfigError
from swarmd.protocol.models.model_layout import ALIGNMENT, DIGIT_BASE, ID_DIGITS, ModelLayout, Sideband

MOST_ROUNDING = 0.3  # that coding in few bits may add to a digit
POWERS = DIGIT_BASE ** torch.arange(ID_DIGITS)


@dataclass(frozen=True)
class RowFormat:
    """The rows of one family: ``hidden`` numbers of hidden states, then what the layout says."""

    layout: ModelLayout
    hidden: int
    n_layers: int
    vocabulary: int

    @property
    def width(self) -> int:
        """How many numbers a row has."""
        return self._places[-1][1].stop if self._places else self.hidden

    @property
    def n_digits(self) -> int:
        """How many of the last numbers are digits of an id."""
        return ID_DIGITS if any(band.kind == "ids" for band in self.layout.sidebands) else 0

    def pack(self, hidden: torch.Tensor, given: Sequence[Mapping[str, Any]]) -> torch.Tensor:
        """Make rows [b, t, width] of hidden states [b, t, hidden] and what layers were ``given``, by name.

        That of the first layer is enough where no sideband is of kind ``each``. What only a layer returns is zeros
        before the first one. Raises ConfigError for a sideband that is not there, or has another shape.
        """
        if not self.layout.sidebands:
            return hidden
        shape = hidden.shape[:2]
        parts = [hidden]
        end = self.hidden
        for band, place in self._places:
            if place.start > end:
                parts.append(hidden.new_zeros(*shape, place.start - end))
            end = place.stop
            values: list[Any] = [layer.get(band.name) for layer in (given if band.kind == "each" else given[:1])]
            if values[0] is None:
                if band.kind != "next":
                    raise ConfigError(f"{band.name} is needed beside hidden states, and inputs_embeds do not say it")
                parts.append(hidden.new_zeros(*shape, end - place.start))
                continue
            numbers = _digits_of(values[0]) if band.kind == "ids" else torch.cat(values, 2)
            if numbers.shape != (*shape, end - place.start):
                raise ConfigError(f"{band.name} is {tuple(numbers.shape)}, expected {(*shape, end - place.start)}")
            parts.append(numbers.to(hidden.dtype))
        return torch.cat(parts, 2)

    def hidden_of(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the hidden states [b, t, hidden] of rows [b, t, width]."""
        return rows[..., : self.hidden]

    def band_of(self, rows: torch.Tensor, band: Sideband, layer: int) -> torch.Tensor:
        """Return a sideband of rows as a layer takes it: [b, t, size], or ids [b, t]."""
        place = next(place for other, place in self._places if other == band)
        if band.kind == "each":
            place = slice(place.start + layer * band.size, place.start + (layer + 1) * band.size)
        numbers = rows[..., place]
        return _ids_of(numbers) if band.kind == "ids" else numbers

    def pass_on(self, rows: torch.Tensor, hidden: torch.Tensor, returned: Sequence[Any]) -> torch.Tensor:
        """Make the rows that leave a block, of those that entered it and what it returned behind its hidden states."""
        if not self.layout.sidebands:
            return hidden
        parts = [hidden]
        end = self.hidden
        for band, place in self._places:
            if band.kind == "next":
                parts += [rows[..., end : place.start], returned[band.place]]
                end = place.stop
        return torch.cat([*parts, rows[..., end:]], 2)

    def refuses(self, rows: torch.Tensor) -> str:
        """Say what is wrong with rows [b, t, width] from elsewhere; empty if nothing is."""
        for band, place in self._places:
            if band.kind != "ids":
                continue
            digits = rows[..., place].float()
            is_digit = ((digits - digits.round()).abs() <= MOST_ROUNDING) & (digits.round() >= 0)
            if not bool((is_digit & (digits.round() < DIGIT_BASE)).all()):
                return f"{band.name} holds what is no id of a token"
            largest = int(_ids_of(digits).max())
            if largest >= self.vocabulary:
                return f"{band.name} holds id {largest}, and the vocabulary has {self.vocabulary} tokens"
        return ""

    def fill_ids(self, rows: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
        """Put random ids into random rows: not every number is a digit."""
        for band, place in self._places:
            if band.kind == "ids":
                ids = torch.randint(0, self.vocabulary, rows.shape[:2], generator=rng)
                rows[..., place] = _digits_of(ids).to(rows.dtype)
        return rows

    @cached_property
    def _places(self) -> list[tuple[Sideband, slice]]:
        """Where each sideband lies in a row: ids behind all others."""
        places = []
        end = self.hidden
        for band in sorted(self.layout.sidebands, key=lambda band: band.kind == "ids"):
            if band.kind == "ids":
                end = math.ceil(end / ALIGNMENT) * ALIGNMENT
            start, end = end, end + band.n_numbers(self.n_layers)
            places.append((band, slice(start, end)))
        return places


def replace_argument(
    names: Sequence[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    value: Any,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call with another value for ``name``; ``names`` are those of all, in their order."""
    index = names.index(name) if name in names else len(args)
    if index < len(args):
        return (*args[:index], value, *args[index + 1 :]), kwargs
    return args, {**kwargs, name: value}


def argument_of(names: Sequence[str], args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str) -> Any:
    """Return the value for ``name`` in a call; None where it is not given."""
    return kwargs[name] if name in kwargs else dict(zip(names, args, strict=False)).get(name)


def _digits_of(ids: torch.Tensor) -> torch.Tensor:
    """[b, t] whole numbers to their digits [b, t, ID_DIGITS], the lowest first."""
    return (ids.unsqueeze(-1) // POWERS.to(ids.device)) % DIGIT_BASE


def _ids_of(digits: torch.Tensor) -> torch.Tensor:
    """Digits [b, t, ID_DIGITS], rounded or not, to whole numbers [b, t]."""
    return (digits.float().round().long() * POWERS.to(digits.device)).sum(-1)
