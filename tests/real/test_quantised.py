"""Models that are quantised as they are published, on two real servers: the tokens are those of the plain weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

import swarmd
from swarmd.compute.model import skeleton
from tests import families
from tests.quantised_files import write_experts, write_quantised
from tests.real.harness import local_swarm

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # what a family warns of is its own affair
N_TOKENS = 24
CASES: dict[str, tuple[str, Callable[[Path, Path], Path]]] = {
    "FP8, experts": ("deepseek_v3", partial(write_quantised, form="fp8")),
    "MXFP4": ("gpt_oss", write_experts),
    "AWQ": ("llama", partial(write_quantised, form="awq")),
    "GPTQ": ("qwen3_moe", partial(write_quantised, form="gptq")),
    "compressed-tensors": ("minimax_m2", partial(write_quantised, form="packed with zero points")),
}
IN_CI = ("FP8, experts", "MXFP4")


@pytest.mark.parametrize("case", [c if c in IN_CI else pytest.param(c, marks=pytest.mark.prove) for c in CASES])
def test_the_tokens_are_those_of_the_plain_weights(case: str, tmp_path: Path) -> None:
    family, write = CASES[case]
    plain = families.make_named(family, tmp_path / "plain")
    folder = tmp_path / "quantised"
    assert_tokens_are_those_of(write(plain, folder), folder, tmp_path / "swarm")


def assert_tokens_are_those_of(plain: Path, folder: Path, root: Path) -> None:
    """Two servers, each of which fetches its own half, give the tokens that the plain weights give here."""
    local = skeleton.load_whole(plain, torch.float32)
    n = skeleton.count_layers(local.config)
    ids = torch.randint(3, families.VOCABULARY, (1, 12), generator=torch.Generator().manual_seed(3))
    options = {"do_sample": False, "max_new_tokens": N_TOKENS, "pad_token_id": 0}
    expected = local.generate(ids, **options)  # type: ignore[operator]
    with local_swarm(root) as swarm:
        swarm.add("--no-serve", models={"model": folder})
        first, second = swarm.serving((0, n // 2), (n // 2, n), model="model")  # each fetches its own blocks
        with swarmd.connect(home=second.home.folder) as client:
            assert torch.equal(client.model("model").generate(ids, **options), expected)
        (held,) = (each for each in first.home.weights.iterdir() if each.is_dir())
        names = {path.name for path in held.glob("*.safetensors")}
        assert names == {f"block-{block:04d}.safetensors" for block in range(n // 2)}, "no other blocks, and no head"
