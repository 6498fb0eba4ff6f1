"""What a run could be like: the codecs that there are, as plan.synchronisation counts with them."""

from __future__ import annotations

from typing import get_args

from swarmd.plan.synchronisation import Way
from swarmd.protocol.recipe import CodecName, Parts
from swarmd.train.codecs import BLOCK, codec_of_parts

_MANY = 16 * 16 * BLOCK  # elements: whole blocks of every codec


def ways(precision: str, given: Parts | None = None) -> list[Way]:
    """Each codec, with a recipe's own settings for the one that it names."""
    found = []
    for name in get_args(CodecName):
        parts = given if given is not None and given.codec == name else Parts(codec=name)
        codec = codec_of_parts(parts, precision)
        found.append(Way(name, codec.n_bytes(_MANY) / _MANY, codec.forwards))
    return found
