"""Other ways to go on than an op's own: tokens behind a part of a session that no cache keeps (``messages.Op``)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec

from swarmd.protocol.fields import Count

MOST_ALTERNATIVES = 16  # of one op: as many as it has tokens that were tried
MOST_ALTERNATIVE_TOKENS = 16  # of one alternative


class Alternative(msgspec.Struct, frozen=True, array_like=True):
    """``n`` tokens that go on behind the first ``n_before`` of a session in another way: computed, and not kept."""

    n_before: Count
    n: Annotated[int, msgspec.Meta(ge=1, le=MOST_ALTERNATIVE_TOKENS)]


def count_alternative_tokens(alternatives: Sequence[Alternative]) -> int:
    """How many of an op's last tokens belong to alternatives."""
    return sum(alternative.n for alternative in alternatives)
