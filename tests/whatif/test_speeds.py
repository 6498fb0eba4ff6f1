"""What machines of a scenario hold, as servers choose it."""

from __future__ import annotations

import msgspec
import pytest

from swarmd.whatif.speeds import count_fitting
from tests.whatif.scenarios import CARD, MODEL


@pytest.mark.parametrize(("is_card", "n_blocks"), [(False, 10), (True, 14)])
def test_a_card_holds_more_than_half_of_its_memory(is_card: bool, n_blocks: int) -> None:
    kind = msgspec.structs.replace(CARD, memory_gb=4, is_card=is_card)
    assert count_fitting(kind, msgspec.structs.replace(MODEL, blocks=60)) == n_blocks
