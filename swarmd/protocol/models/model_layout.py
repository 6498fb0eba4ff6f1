"""How the layers of a family become blocks, and what of each token travels between blocks beside hidden states.

Most families need nothing said: each layer is a block, and hidden states are all that a block takes. Of the others
``models add`` finds out what they need (compute.checkpoints.rehearsal), and says it in the model's configuration, under
``swarmd``, so that it is a part of the model and of its hash:

    "swarmd": {"first_layers": [0, 1, 2, 7], "sidebands": [{"name": "input_ids", "kind": "ids"}]}

What travels of a token is one row of numbers. Histories, audits, receipts and gradients are of rows, whatever is in
them:

    | hidden states, all streams | sidebands of numbers | zeros, up to a multiple of ALIGNMENT | digits of token ids |
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Annotated, Any, Literal

import msgspec

from swarmd.errors import IntegrityError
from swarmd.values import Span

KEY = "swarmd"
"""Of a configuration: where the layout stands."""
MOST_LAYERS = 1_024  # as many as a configuration may have
MOST_SIDEBANDS = 8  # no family needs more than one
MOST_NUMBERS = 1 << 20  # of one sideband and token
ALIGNMENT = 64  # numbers that share a scale in 8 or 4 bits: digits share theirs with nothing else
DIGIT_BASE = 4  # in 4 bits a number is off by a fourteenth of the largest: digits up to 3 are still told apart
ID_DIGITS = 12  # ids up to 16 million: more than any vocabulary has


OTHERWISE_GIVEN = ("hidden_states", "attention_mask", "position_ids", "past_key_values", "cache_params")
"""What layers are given by another way."""


class Sideband(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a layer takes beside hidden states, by the name of its argument. ``size``: numbers of a token.

    ``ids``: whole numbers of the vocabulary, [b, t], the same for all layers; ``all``: numbers [b, t, size], the same
    for all; ``each``: numbers [b, t, size] for each layer; these three are computed by the client. ``next``: numbers
    [b, t, size] that each layer returns for the next one, as its ``place``-th value behind the hidden states.
    """

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=64, pattern=r"^[a-z][a-z0-9_]*$")]
    kind: Literal["ids", "all", "each", "next"]
    size: Annotated[int, msgspec.Meta(ge=0, le=MOST_NUMBERS)] = 0
    place: Annotated[int, msgspec.Meta(ge=0, le=8)] = 0

    def n_numbers(self, n_layers: int) -> int:
        """How many numbers of a token's row it takes."""
        if self.kind == "ids":
            return ID_DIGITS
        return self.size * n_layers if self.kind == "each" else self.size


class ModelLayout(msgspec.Struct, frozen=True, omit_defaults=True):
    """See the module. ``first_layers``: the first layer of each block; empty where each layer is a block."""

    first_layers: Annotated[tuple[int, ...], msgspec.Meta(max_length=MOST_LAYERS)] = ()
    sidebands: Annotated[tuple[Sideband, ...], msgspec.Meta(max_length=MOST_SIDEBANDS)] = ()

    def n_blocks(self, n_layers: int) -> int:
        """How many blocks so many layers are."""
        return len(self.first_layers) or n_layers

    def layers(self, blocks: Span, n_layers: int) -> Span:
        """The layers of some blocks."""
        if not self.first_layers:
            return blocks
        bounds = (*self.first_layers, n_layers)
        return Span(bounds[blocks.start], bounds[blocks.end])

    def block_of(self, layer: int) -> int:
        """The block that a layer is in."""
        if not self.first_layers:
            return layer
        return sum(first <= layer for first in self.first_layers) - 1

    def describe(self) -> str:
        """Say what is unusual about its blocks, in words; empty where nothing is."""
        parts = []
        if self.first_layers:
            parts.append(f"they begin at layers {', '.join(map(str, self.first_layers))}")
        if self.sidebands:
            parts.append(f"beside hidden states travel {', '.join(band.name for band in self.sidebands)}")
        return "; ".join(parts)


EACH_LAYER = ModelLayout()
"""Of most families."""


def read_layout(config: Mapping[str, Any], n_layers: int) -> ModelLayout:
    """Read it from a configuration, which anybody may have written. Raises IntegrityError."""
    written = config.get(KEY)
    if written is None:
        return EACH_LAYER
    try:
        layout = msgspec.convert(written, ModelLayout)
    except msgspec.ValidationError as error:
        raise IntegrityError(f"{KEY} in the configuration: {error}") from None
    firsts = layout.first_layers
    if firsts and (firsts[0] != 0 or firsts[-1] >= n_layers or any(a >= b for a, b in pairwise(firsts))):
        raise IntegrityError(f"{KEY}: blocks begin at layers {firsts[:8]}, expected 0 and rising, of {n_layers} layers")
    names = [band.name for band in layout.sidebands]
    n_numbers = sum(band.n_numbers(n_layers) for band in layout.sidebands)
    if given := set(names).intersection(OTHERWISE_GIVEN):
        raise IntegrityError(f"{KEY}: {min(given)} is no sideband: layers are given it by another way")
    if len(set(names)) < len(names) or n_numbers > MOST_NUMBERS:
        raise IntegrityError(f"{KEY}: a sideband twice, or {n_numbers} numbers of a token; at most {MOST_NUMBERS}")
    if sum(band.kind == "ids" for band in layout.sidebands) > 1:
        raise IntegrityError(f"{KEY}: several sidebands of ids, and a row ends with the digits of one")
    if any((band.kind == "ids") != (band.size == 0) for band in layout.sidebands):
        raise IntegrityError(f"{KEY}: ids have no size, and other sidebands have one")
    return layout


def write_layout(config: Mapping[str, Any], layout: ModelLayout) -> dict[str, Any]:
    """Return a configuration that says it."""
    plain = {key: value for key, value in config.items() if key != KEY}
    return plain if layout == EACH_LAYER else {**plain, KEY: msgspec.to_builtins(layout)}
