"""What a token takes alone and in a team of two, as it was predicted and as it is; and what ``team = "auto"`` takes.

    python -m benchmarks.team_tokens [--rounds 3] [--only NAME]

Two members of one thread each: of one machine, and as if of two, over TLS on loopback. Alone is one thread, with the
fastest backend that a server finds. Models are SmolLM2, and blocks of other shapes with random weights.
"""

from __future__ import annotations

import argparse
import os
import re
import tempfile
from contextlib import closing
from pathlib import Path

import msgspec
import torch

from swarmd.compute.hardware.device import use_threads
from swarmd.compute.serving import team_engine
from swarmd.compute.serving.engine import LoadedEngine, LoadSignals
from swarmd.compute.serving.rates import decode_rates, last
from swarmd.compute.teams.far_followers import FarFollowers
from swarmd.compute.teams.local_followers import LocalFollowers
from swarmd.plan.teams.choice import BlockShape, MemberSpeed, choose_team
from swarmd.protocol.wire.worker import LoadSpan
from tests.compute.teams.far_team import FarFollower
from tests.real.smollm2 import smollm2

SIGNALS = LoadSignals(lambda: None, lambda stage, done, total: None)
BUDGET_S = 0.5
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 320}
SHAPES = {
    "Llama, 1,024 wide": ("llama", {**HEADS, "hidden_size": 1024, "intermediate_size": 4096}, 6),
    "Llama, 2,048 wide": ("llama", {**HEADS, "hidden_size": 2048, "intermediate_size": 8192}, 3),
    "Qwen3-MoE, 32 experts": (
        "qwen3_moe",
        {
            **HEADS,
            "hidden_size": 1024,
            "moe_intermediate_size": 768,
            "num_experts": 32,
            "num_experts_per_tok": 8,
        },
        4,
    ),
}


def make(name: str, folder: Path) -> tuple[Path, int]:
    """The model's folder, and how many blocks it has."""
    if name == "SmolLM2":
        return smollm2(), 30
    from transformers import AutoConfig, AutoModelForCausalLM

    family, shape, n_layers = SHAPES[name]
    place = folder / re.sub(r"\W+", "-", name)
    if not place.is_dir():
        torch.manual_seed(0)
        config = AutoConfig.for_model(family, num_hidden_layers=n_layers, **shape)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(place)
    return place, n_layers


def token_ms(loaded: LoadedEngine) -> float:
    return 1000 / last(decode_rates(loaded.engine, 1, BUDGET_S))


def compare(place: str, request: LoadSpan, alone_ms: float) -> str:
    """Measure the members, predict, and measure the team of both."""
    followers = FarFollowers(request) if request.seats else LocalFollowers(request, request.team)
    try:
        use_threads(1)
        measured = followers.measure()
        members = [MemberSpeed(each.fixed_s, each.block_s, sum_s, each.free_bytes) for each, sum_s in measured]
        shape = BlockShape(measured[0][0].sections, request.end - request.start, 0)
        choice = choose_team(members, shape, float("inf"), None).action
        followers.take(choice.weights)
        team_ms = token_ms(team_engine._lead(request, SIGNALS, followers, ""))
    finally:
        followers.close()
    predicted_ms = 1000 * choice.token_s
    taken = "the team" if predicted_ms <= 0.97 * alone_ms and team_ms <= alone_ms else "alone"
    sums = f"a sum {1e6 * members[1].sum_s:.0f} us"
    return f"{place}: predicted {predicted_ms:.1f}, takes {team_ms:.1f} ({team_ms / predicted_ms:.2f}); {sums}: {taken}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as temporary:
        for name in ("SmolLM2", *SHAPES):
            if options.only not in name:
                continue
            folder, n_blocks = make(name, Path(temporary))
            request = LoadSpan(
                path=str(folder), model="m", start=0, end=n_blocks, threads=1, spill_folder=temporary, team=(1.0, 1.0)
            )
            for _ in range(options.rounds):
                use_threads(1)
                _, alone_s = team_engine._measure_alone(request, SIGNALS)
                assert alone_s is not None
                print(f"{name}: alone {1000 * alone_s:.1f} ms", flush=True)
                here = msgspec.structs.replace(request, threads=2)
                print(f"  {compare('one machine', here, 1000 * alone_s)}", flush=True)
                with closing(FarFollower(request)) as follower:
                    there = msgspec.structs.replace(request, seats=(follower.seat(),))
                    print(f"  {compare('two machines', there, 1000 * alone_s)}", flush=True)


if __name__ == "__main__":
    main()
