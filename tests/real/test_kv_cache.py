"""Servers that keep keys and values in 8 bits: they say so, take over from each other, and hand over what they keep."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import swarmd
from tests.real.faults import Blow, check_identical, check_recovery, disturbed, generate, inputs_for
from tests.real.harness import Volunteer, local_swarm

pytestmark = pytest.mark.slow
VOCABULARY = 1024
N_TOKENS = 24


def test_a_server_is_followed_by_its_like_bit_for_bit(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with local_swarm(tmp_path) as swarm:
        volunteers = swarm.serving((0, 3), (3, 6), (3, 6), SWARMD_KV_CACHE="int8")
        swarm.wait(lambda: all(map(_tells_the_cost, volunteers)), "what 8 bits cost, which is measured while idle")
        chain = swarm.hops((volunteers[0], 0, 3), (volunteers[1], 3, 6))
        with swarmd.connect(swarm.invite()) as client:
            swarm.wait(lambda: all(s.quantization_error for s in client._swarm.view().spans), "records that tell it")
            for span in client._swarm.view().spans:
                assert span.quantize == "none+kv_int8"
                assert span.quantization_error is not None
                assert 0 < span.quantization_error < 0.05
            model, inputs = client.model("demo", exact=True, chain=chain), inputs_for("greedy", VOCABULARY, 1)
            expected = generate(model, "greedy", inputs, N_TOKENS, 1)
            blows = (Blow(12, (1,)),)
            outcome = disturbed(model, volunteers, "greedy", inputs, N_TOKENS, 1, blows)
            check_recovery(outcome, volunteers, blows)
            check_identical(outcome.out, expected)
            with pytest.raises(swarmd.errors.ConfigError, match=r"none\+kv_int8"):
                client.model("demo", quantize="kv_int8")


def _tells_the_cost(volunteer: Volunteer) -> bool:
    return bool(re.search(r"8 or 4 bits put it [\d.]+ % off on a probe", volunteer.ask("status")["worker"]["why"]))
