"""The swarm trains its own bundled model further, while volunteers come and go.

    python benchmarks/retrain.py --out /tmp/retrained [--recipe examples/bundled.toml]

Four daemons on loopback; one is killed and comes back, one is stopped for a while, one joins late. Prints what happened
and the loss of both models on the same rows of the text, which both were trained on; writes the loss curve and a record
beside the model.
"""

from __future__ import annotations

import argparse
import json
import runpy
import shutil
import signal
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from swarmd.home.models import bundled_folder
from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.training import check_ledgers, check_states, command, ledger_of, run_of, wait_know, wait_update

EXAMPLES = Path(__file__).parent.parent / "examples"
PATIENCE_S = 1_800


def loss_on(folder: Path, text: str, n_rows: int = 200) -> float:
    """Mean loss in nats a token on evenly spread rows of 256."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    rows = ids[: len(ids) // 257 * 257].view(-1, 257)
    rows = rows[:: max(1, len(rows) // n_rows)]
    with torch.inference_mode():
        logits = model.float()(rows[:, :-1]).logits
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


def wait_long(swarm: LocalSwarm, volunteer: Volunteer, update: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while run_of(volunteer, "bundled")["update"] < update:
        assert time.monotonic() < deadline, swarm.logs()
        time.sleep(0.5)


def live(swarm: LocalSwarm, recipe: Path, steps: int) -> Volunteer:
    begun = time.monotonic()

    def note(text: str) -> None:
        print(f"{time.monotonic() - begun:5.0f} s, update {run_of(a, 'bundled')['update']:3d}: {text}", flush=True)

    a, b, c = (swarm.add("--no-serve") for _ in range(3))
    command(a, "train", "start", str(recipe))
    for volunteer in (b, c):
        wait_know(swarm, volunteer, "bundled")
        command(volunteer, "train", "join", "bundled")
    note("three peers train")
    wait_long(swarm, a, steps // 5)
    b.stop()
    note("one is killed")
    wait_long(swarm, a, 2 * steps // 5)
    late = swarm.add("--no-serve")
    wait_know(swarm, late, "bundled")
    command(late, "train", "join", "bundled")
    note("a new one joins")
    b.start()
    note("the killed one comes back")
    wait_long(swarm, a, 3 * steps // 5)
    c.signal(signal.SIGSTOP)
    note("one is stopped")
    wait_long(swarm, a, 4 * steps // 5)
    c.signal(signal.SIGCONT)
    note("and goes on")
    wait_long(swarm, a, steps)
    wait_update(swarm, [a, b, c, late], steps, "bundled")
    note("done")
    everybody = [a, b, c, late]
    check_states(everybody, "bundled")
    ledger = check_ledgers(everybody, "bundled")
    n = {v.peer: sum(e.n for s in ledger.sealed for e in s.commit.contributors if e.peer == v.peer) for v in everybody}
    print("samples counted by peer: " + ", ".join(str(x) for x in n.values()))
    wasted = sum(run_of(v, "bundled")["samples_wasted"] for v in everybody)
    print(f"{sum(n.values())} samples counted, {wasted} computed and not counted; all hold the same bits")
    return a


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", type=Path, default=EXAMPLES / "bundled.toml")
    options = parser.parse_args()
    from swarmd.protocol.runs.recipe import read_toml

    source = runpy.run_path(str(EXAMPLES / "train_bundled_model.py"))
    text = source["corpus"]()
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm:
        recipe = Path(folder) / "bundled.toml"
        shutil.copy(options.recipe, recipe)
        (Path(folder) / "corpus.txt").write_text(text)
        a = live(swarm, recipe, read_toml(recipe).stop.steps)
        ledger = ledger_of(a, "bundled")
        options.out.mkdir(parents=True, exist_ok=True)
        print(command(a, "train", "status", "bundled", "--plot", str(options.out / "loss.png")))
        print(command(a, "train", "export", "bundled", "--out", str(options.out)))
    torch.set_num_threads(2)
    before, after = loss_on(bundled_folder(), text), loss_on(options.out, text)
    print(f"loss on the same rows: {before:.4f} before, {after:.4f} after")
    record = json.loads((bundled_folder() / "training.json").read_text())
    record["trained_further_by_the_swarm"] = {
        "recipe": options.recipe.name,
        "updates": ledger.epoch,
        "samples": ledger.n_samples,
        "loss_nats_per_token": {"before": round(before, 4), "after": round(after, 4)},
    }
    (options.out / "training.json").write_text(json.dumps(record, indent=2) + "\n")
    AutoModelForCausalLM.from_pretrained(options.out).to(torch.bfloat16).save_pretrained(options.out)


if __name__ == "__main__":
    main()
