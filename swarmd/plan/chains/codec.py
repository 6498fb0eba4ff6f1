"""How hidden states travel: as they are where links are fast, smaller where sending them takes too long.

Decided once for a session, by its slowest link. Errors of each codec: docs/protocol.md, "Codecs".
"""

from __future__ import annotations

from collections.abc import Sequence

from swarmd.errors import ConfigError
from swarmd.protocol.wire.tensors import CODECS, token_bytes
from swarmd.values import Decision

NEAR_TRIP_S = 0.005  # machines of one room: the network is not what takes time
HALF_BELOW_BYTES_PER_S = 15e6  # 120 Mbit/s: above, coding costs more time than it saves
INT8_BELOW_BYTES_PER_S = 2.5e6  # 20 Mbit/s: here the bytes are nearly all of a step


def choose_codec(
    requested: str,
    grade: str,
    dtype: str,
    trips_s: Sequence[float],
    bandwidths_bytes_per_s: Sequence[float],
    known_to_all: frozenset[str] = frozenset(CODECS),
) -> Decision[str]:
    """Choose a session's codec. ``requested`` is a codec or "auto"; trips and bandwidths are those that are known.

    What is not ``known_to_all`` hops of the chain is not chosen.

    Raises ConfigError for an unknown one.
    """
    if requested != "auto":
        if requested not in CODECS:
            raise ConfigError(f"codec is one of auto, {', '.join(CODECS)}, not {requested!r}")
        return Decision(requested, "asked for")
    if grade == "exact":
        return Decision("raw", "the exact grade is lossless")
    if all(trip < NEAR_TRIP_S for trip in trips_s):
        return Decision("raw", "all hops are near")
    if not bandwidths_bytes_per_s:
        return Decision("raw", "no link's bandwidth is measured")
    slowest = min(bandwidths_bytes_per_s)
    mbit = 8 * slowest / 1e6
    if slowest >= HALF_BELOW_BYTES_PER_S:
        return Decision("raw", f"the slowest link has {mbit:.0f} Mbit/s")
    half = dtype if dtype != "float32" else "float16"
    candidates = ["int8", half] if slowest < INT8_BELOW_BYTES_PER_S else [half]
    codec = next((c for c in candidates if c in known_to_all and c != dtype), "raw")
    share = token_bytes(1_024, dtype, codec) / token_bytes(1_024, dtype, "raw")
    return Decision(codec, f"the slowest link has {mbit:.0f} Mbit/s: {100 * share:.0f} % of the bytes")
