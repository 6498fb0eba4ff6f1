"""How far to trust ``swarmd plan what-if``: the same scenario by the model, by real code, and by real processes.

    python -m benchmarks.what_if --virtual 50 200    real daemons and clients in virtual time, on a simulated network
    python -m benchmarks.what_if --processes         three real servers of a small Llama on this machine
    python -m benchmarks.what_if --day               a thousand servers and ten thousand conversations in a virtual day

Each line says what was found and what the model says, and the difference. In virtual time workers compute a toy model,
each pass in ten milliseconds, with all sessions that are ready.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
import trio

from swarmd.client.links.ops import StepInput
from swarmd.net.sim import SimLink
from swarmd.values import Span
from swarmd.whatif.answer import answer_scenario
from swarmd.whatif.scenario import (
    AvailabilityTrace,
    Distance,
    Habit,
    LinkKind,
    Load,
    MachineKind,
    Scenario,
    ServedModel,
    Whereabouts,
    read_trace,
)
from swarmd.whatif.simulation import run_once

N_BLOCKS = 8  # of the toy model
SPANS = (Span(0, 2), Span(2, 4), Span(4, 6), Span(6, 8))
STEP_S = 0.01  # of a pass, in virtual time
TRIP_S = 0.02  # one way between any two
PROMPT, NEW = 5, 60  # tokens of a conversation
N_CLIENTS = 8  # that share the conversations
BUSY = 0.5  # of all passes that servers could make, that conversations ask for


@dataclass
class Measured:
    """What conversations were found to take."""

    tokens_per_s: list[float]
    first_token_s: list[float]

    def rows(self) -> dict[str, float]:
        """The figures that are compared."""
        return {
            "tokens/s of a stream, half": float(np.median(self.tokens_per_s)),
            "tokens/s of a stream, worst 5 %": float(np.percentile(self.tokens_per_s, 5)),
            "s to the first token, half": float(np.median(self.first_token_s)),
            "s to the first token, worst 5 %": float(np.percentile(self.first_token_s, 95)),
        }


def show(name: str, found: Measured, said: Measured, took_s: tuple[float, float]) -> None:
    """Print both, and how far they are apart."""
    print(f"{name}: {len(found.tokens_per_s)} conversations in {took_s[0]:.0f} s, modelled in {took_s[1]:.1f} s")
    print("| | found | what-if | difference |")
    print("|---|---|---|---|")
    for (what, value), guess in zip(found.rows().items(), said.rows().values(), strict=True):
        print(f"| {what} | {value:.3g} | {guess:.3g} | {100 * (guess / value - 1):+.0f} % |", flush=True)


# --- real code in virtual time ---------------------------------------------------------------------------------------


async def run_virtual(n: int, sessions_per_s: float, seconds: float) -> Measured:
    """Let clients converse with a simulated swarm of real daemons."""
    from tests.sim.swarm import HIDDEN, SimSwarm

    found = Measured([], [])
    async with trio.open_nursery() as nursery:
        swarm = SimSwarm(nursery, N_BLOCKS, seed=1)
        swarm.world.link = SimLink(TRIP_S, 12.5e6)
        swarm.can_batch = True
        for number in range(n):
            await swarm.add(SPANS[number % len(SPANS)], step_s=STEP_S)
            await trio.sleep(0.05)
        clients = [await swarm.client() for _ in range(N_CLIENTS)]
        while any(sum(s.state == "online" for s in client.view().spans) < n for client in clients):
            await trio.sleep(1)
        rng = random.Random(1)

        async def converse(number: int) -> None:
            client = clients[number % N_CLIENTS]
            begun = trio.current_time()
            session = await client.open_session(swarm.terms(PROMPT + NEW))
            hidden = torch.zeros(1, PROMPT, HIDDEN)
            for token in range(NEW):
                out = await session.step(StepInput(hidden, torch.zeros(1, hidden.shape[1], dtype=torch.int32)))
                assert out is not None
                hidden = out[:, -1:]
                if not token:
                    first_s = trio.current_time()
            found.first_token_s.append(first_s - begun)
            found.tokens_per_s.append((NEW - 1) / (trio.current_time() - first_s))
            await client.close_session(session)

        async with trio.open_nursery() as conversations:
            until = trio.current_time() + seconds
            number = 0
            while trio.current_time() < until:
                conversations.start_soon(converse, number)
                number += 1
                await trio.sleep(rng.expovariate(sessions_per_s))
        nursery.cancel_scope.cancel()
    return found


def virtual_scenario(n: int, sessions_per_s: float, seconds: float) -> Scenario:
    """The same for the model."""
    per_block_ms = 1e3 * STEP_S / len(SPANS[0])
    card = MachineKind("toy", n, memory_gb=2.2, link="line", block_ms=per_block_ms, row_ms=0.001, prefill_ms=0.001)
    return Scenario(
        models=(ServedModel("toy", N_BLOCKS, block_parameters=0.25e9, hidden=4, cache_numbers=4),),
        machines=(card,),
        links=(LinkKind("line", up_mbit=100, down_mbit=100, access_ms=0),),
        places=(Whereabouts("here", within_ms=1e3 * TRIP_S),),
        load=tuple(
            Load(
                "toy",
                3_600 * sessions_per_s / N_CLIENTS,
                prompt_tokens=PROMPT,
                new_tokens=NEW,
                spread=0,
                link="line",
                client_ms=0,
            )
            for _ in range(N_CLIENTS)
        ),
        hours=seconds / 3_600,
        warm_up_hours=1,
        lead_hours=0,
        runs=1,
    )


def compare_virtual(sizes: Sequence[int], seconds: float) -> None:
    """Compare swarms of some sizes, each as busy as the others."""
    from tests.virtual_time import in_virtual_time

    for n in sizes:
        sessions_per_s = BUSY * n / len(SPANS) / STEP_S / NEW
        begun = time.perf_counter()
        found = in_virtual_time(1, run_virtual, n, sessions_per_s, seconds)
        middle = time.perf_counter()
        tally = run_once(virtual_scenario(n, sessions_per_s, seconds), {}, 1).tally
        took_s = (middle - begun, time.perf_counter() - middle)
        show(f"{n} servers in virtual time", found, Measured(tally.tokens_per_s, tally.first_token_s), took_s)


# --- real processes --------------------------------------------------------------------------------------------------


def compare_processes(n_streams: int) -> None:
    """Compare three real servers of a random Llama, whose speeds the model is told as they announce them."""
    import swarmd
    from benchmarks.serving import make_checkpoint
    from tests.real.harness import local_swarm

    torch.set_num_threads(1)
    prompt, new = 32, 64
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm:
        checkpoint = make_checkpoint(Path(folder) / "llama", 512)
        first, *_ = swarm.serving((0, 3), (3, 6), (6, 8), model="bench", models={"bench": checkpoint})
        found = Measured([], [])
        with swarmd.connect(home=first.home.folder) as client:
            model = client.model("bench", lookup=False)
            ids = torch.arange(prompt).unsqueeze(0)
            heads_s = _head_s(model)
            spans = [s for s in client.view().spans if s.state == "online"]
            for turn in range(n_streams + 1):
                times: list[float] = []
                begun = time.perf_counter()
                model.generate(
                    ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, min_new_tokens=new,
                    streamer=_Clock(times),
                )  # fmt: skip
                if turn:  # the first one opens channels and compiles
                    found.first_token_s.append(times[0] - begun)
                    found.tokens_per_s.append((new - 1) / (times[-1] - times[0]))
        kinds = []
        for number, span in enumerate(spans):
            n_held = span.end - span.start
            block_ms = 1e3 / (span.decode_tokens_per_s or 1.0) / n_held
            prefill_ms = 1e3 / (span.prefill_tokens_per_s or 1.0) / n_held
            kinds.append(
                MachineKind(
                    f"server {number}", 1, memory_gb=2.0 * n_held * 0.1 + 0.3, link="loopback",
                    block_ms=block_ms, row_ms=block_ms, prefill_ms=prefill_ms,
                )
            )  # fmt: skip
        asked = Scenario(
            models=(ServedModel("bench", 8, block_parameters=0.05e9, hidden=512, cache_numbers=1_024),),
            machines=tuple(kinds),
            links=(LinkKind("loopback", up_mbit=10_000, down_mbit=10_000, access_ms=0.05),),
            places=(Whereabouts("here", within_ms=0),),
            load=(
                Load(
                    "bench", 60, prompt_tokens=prompt, new_tokens=new, spread=0, link="loopback",
                    client_ms=1e3 * heads_s,
                ),
            ),
            hours=1,
            runs=1,
        )  # fmt: skip
        begun = time.perf_counter()
        tally = run_once(asked, {}, 1).tally
    took_s = (sum(found.first_token_s) + sum((new - 1) / r for r in found.tokens_per_s), time.perf_counter() - begun)
    show("3 real servers, one stream", found, Measured(tally.tokens_per_s, tally.first_token_s), took_s)


class _Clock:
    """Notes when each token came."""

    def __init__(self, times: list[float]) -> None:
        self._times = times
        self._is_prompt = True

    def put(self, value: object) -> None:
        if not self._is_prompt:
            self._times.append(time.perf_counter())
        self._is_prompt = False

    def end(self) -> None:
        """Nothing is left to do."""


def _head_s(model: object) -> float:
    """Seconds of a token's norm and head on this machine's one thread."""
    head = model.get_output_embeddings()  # type: ignore[attr-defined]
    hidden = torch.randn(1, 1, head.in_features)
    times = []
    for _ in range(30):
        begun = time.perf_counter()
        head(hidden).argmax()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


# --- a day -----------------------------------------------------------------------------------------------------------


def spot_trace(rng: random.Random) -> AvailabilityTrace:
    """A trace in SkyPilot's form, drawn from what fits its 45 days of V100s: up 1.8 h, down 1.3 h (Weibull)."""
    data: list[int] = []
    gap_s = 300
    while len(data) < 45 * 86_400 // gap_s:
        data += [1] * max(1, round(rng.weibullvariate(1.8 * 3_600, 0.74) / gap_s))
        data += [0] * max(1, round(rng.weibullvariate(1.3 * 3_600, 0.85) / gap_s))
    return read_trace(msgspec.json.encode({"metadata": {"gap_seconds": gap_s}, "data": data}).decode(), "spot")


def day_scenario() -> Scenario:
    """A thousand machines on three continents: always on, evenings, and spot cards; a model of seventy billion."""
    by_hour = (1, 1, 1, 1, 1, 1, 2, 3, 4, 4, 4, 4, 4, 4, 4, 4, 5, 6, 8, 9, 9, 7, 4, 2)
    shares = {"europe": 0.6, "america": 0.25, "asia": 0.15}
    return Scenario(
        name="a thousand",
        models=(
            ServedModel("llama-3-70b", 80, block_parameters=856e6, hidden=8_192, cache_numbers=2_048, bits=4.5),
        ),
        machines=(
            MachineKind("home server", 200, 24, "fibre", 936, 70, habit="always on", places=shares),
            MachineKind("gaming PC", 600, 12, "cable", 360, 25, habit="evenings", places=shares),
            MachineKind("spot card", 200, 16, "fibre", 900, 100, habit="spot", places=shares),
        ),
        links=(
            LinkKind("cable", 25, 250, access_ms=8, spread=0.5),
            LinkKind("fibre", 300, 500, access_ms=2, spread=0.3),
        ),
        places=(Whereabouts("europe", 1, 10), Whereabouts("america", -5, 15), Whereabouts("asia", 8, 15)),
        distances=(
            Distance(("europe", "america"), 45), Distance(("europe", "asia"), 90), Distance(("america", "asia"), 75),
        ),
        habits=(
            Habit("always on", stay_h=72, away_h=0.5, crashes=0.5),
            Habit("evenings", hours="16:00-24:00", stay_h=3, away_h=0.5, shape=0.7, jitter_h=1, crashes=0.2),
            Habit("spot", trace="spot.json", crashes=0.5),
        ),
        load=tuple(
            Load("llama-3-70b", 417 * share, place, prompt_tokens=300, new_tokens=200, by_hour=by_hour)
            for place, share in shares.items()
        ),
        runs=1,
    )  # fmt: skip


def show_day() -> None:
    """Run the day, and print what became of it."""
    begun = time.perf_counter()
    answer = answer_scenario(day_scenario(), {"spot": spot_trace(random.Random(1))})
    took_s = time.perf_counter() - begun
    load = answer.load
    assert load is not None
    n_machines = sum(kind.count for kind in day_scenario().machines)
    print(f"{n_machines} machines, {load.n_begun} conversations, a day in {took_s / 60:.1f} minutes")
    print(f"served {100 * answer.models[0].served_share:.2f} % of the time")
    print(f"lost {load.n_lost}, while all blocks had holders {load.n_lost_while_held}")
    print(f"repairs {load.n_repairs}, {100 * load.replayed_share:.2f} % of the tokens computed again")
    slow, usual, fast = load.tokens_per_s
    print(f"tokens/s of a stream: worst 5 % {slow:.2f}, half {usual:.2f}, best 5 % {fast:.2f}")
    first = load.first_token_s
    print(f"s to the first token: best 5 % {first[0]:.2f}, half {first[1]:.2f}, worst 5 % {first[2]:.2f}")
    print(f"moves {answer.n_moves_a_day:.0f}, weights fetched {answer.fetched_gb_a_day / 1e3:.1f} TB a day")
    n_leaves = sum(with_goodbye + without for with_goodbye, without in answer.leaves.values())
    print(f"leaves {n_leaves:.0f}; {'; '.join(answer.models[0].limits)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--virtual", type=int, nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--processes", action="store_true")
    parser.add_argument("--streams", type=int, default=7)
    parser.add_argument("--day", action="store_true")
    options = parser.parse_args()
    compare_virtual(options.virtual, options.seconds)
    if options.processes:
        compare_processes(options.streams)
    if options.day:
        show_day()


if __name__ == "__main__":
    main()
