"""Forward and backward through two servers, against one local process and against what these parts allow.

    python benchmarks/tuning.py [--rounds 5] [--rows 8] [--tokens 128] [--hidden 512]
    python benchmarks/tuning.py --curves     # what codecs on the wire do to the loss of a LoRA
    python benchmarks/tuning.py --beside     # what a decoding stream and another user's fine-tuning feel of each other

The checkpoint is serving.py's (Llama, hidden 512, 8 layers, vocabulary 32,000, float32), each server holds half of the
layers, every process has one thread. A step is ``model(inputs_embeds=..., labels=...).loss.backward()`` down to the
gradient of the embeddings, as in prompt tuning. The ceiling is made of parts measured in the same round: what a client
does itself (head and loss, both ways) and half of two forwards and a backward of the layers. *together* is the same
batch in two halves by two threads, so that one half's layers are computed beside the other's head.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

import swarmd

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.serving import make_checkpoint
from tests.real.harness import local_swarm

CODECS = ("raw", "float16", "int8", "int4", "aqsgd")


def seconds(work: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def step(model: Any, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """One forward and backward; returns the gradient of the embeddings."""
    entering = embeddings.clone().requires_grad_()
    model(inputs_embeds=entering, labels=labels, use_cache=False).loss.backward()
    assert entering.grad is not None
    return entering.grad


def together(model: Any, embeddings: torch.Tensor, labels: torch.Tensor, n: int = 2) -> None:
    pairs = zip(embeddings.chunk(n), labels.chunk(n), strict=True)
    threads = [threading.Thread(target=step, args=(model, *pair)) for pair in pairs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def parts(model: Any, embeddings: torch.Tensor, labels: torch.Tensor) -> tuple[float, float, float]:
    """Seconds of the client's own work, and of a forward and a backward of the layers."""
    hidden = embeddings.clone().requires_grad_()

    def own() -> None:
        logits = model.lm_head(model.model.norm(hidden))
        model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size).backward()

    entering = embeddings.clone().requires_grad_()
    outs: list[torch.Tensor] = []
    forward_s = seconds(lambda: outs.append(model.model(inputs_embeds=entering, use_cache=False).last_hidden_state))
    backward_s = seconds(lambda: torch.autograd.backward(outs[0], torch.randn_like(outs[0])))
    own()  # the first one pays for memory that the others find
    return seconds(own), forward_s, backward_s


def curves(n_steps: int = 60) -> None:
    """Tune a LoRA of the bundled model on examples/caesar.jsonl through two servers, codec by codec."""
    from transformers import AutoTokenizer

    from swarmd.client.tuning.dataset import Encoding, read_dataset
    from swarmd.client.tuning.fine_tuning import Tuner, with_peft
    from swarmd.client.tuning.tuning_recipe import TuningRecipe
    from swarmd.home.models import bundled_folder

    tokenizer = AutoTokenizer.from_pretrained(bundled_folder())
    encoding = Encoding(lambda text: tokenizer(text).input_ids, (), (), len(tokenizer), 256)
    data = read_dataset(Path(__file__).parent.parent / "examples" / "caesar.jsonl", encoding)
    recipe = TuningRecipe("demo", steps=n_steps, learning_rate=5e-3)
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm:
        swarm.serving((0, 3), (3, 6))
        with swarmd.connect(home=swarm.volunteers[0].home.folder) as client:
            local = AutoModelForCausalLM.from_pretrained(bundled_folder(), dtype=torch.float32)
            models = {"local": local, **{c: client.model("demo", codec=c) for c in CODECS}}
            for name, model in models.items():
                tuner = Tuner(with_peft(model, recipe), recipe, data, Path(folder) / name)
                tuner.run(n_steps, lambda _: None)
                found[name] = tuner.losses
    for name, losses in found.items():
        off = max(abs(a - b) / b for a, b in zip(losses, found["local"], strict=True))
        print(f"{name:8} loss {losses[0]:.3f} -> {losses[-1]:.4f} in {n_steps} steps; at most {100 * off:.2g} % off")


def load(home: str) -> None:
    """Another user's process: fine-tuning without end; prints a line after each step."""
    torch.set_num_threads(1)
    with swarmd.connect(home=home) as client:
        model = client.model("bench", lookup=False)
        while True:
            step(model, torch.randn(8, 128, 512), torch.randint(3, 300, (8, 128)))
            print("step", flush=True)


def decode(model: Any, n_tokens: int = 200) -> list[float]:
    """Milliseconds of each token of one stream."""
    times: list[float] = []
    last = [time.perf_counter()]

    def note(ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> bool:
        now = time.perf_counter()
        times.append(1000 * (now - last[0]))
        last[0] = now
        return False

    ids = torch.arange(3, 19).unsqueeze(0)
    length = {"max_new_tokens": n_tokens, "min_new_tokens": n_tokens}
    model.generate(ids, attention_mask=torch.ones_like(ids), stopping_criteria=[note], **length)
    return sorted(times[1:])


def beside(home: Path, model: Any, n_rounds: int) -> None:
    """One stream decodes alone, and beside a process that fine-tunes; and how far that gets meanwhile."""
    ratios: dict[str, list[float]] = {"median": [], "p95": []}
    decode(model)
    command = [sys.executable, __file__, "--load", str(home)]
    for number in range(n_rounds):
        alone = decode(model)
        user = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert user.stdout is not None
        try:
            for _ in range(3):
                user.stdout.readline()
            free = [time.perf_counter()]
            while len(free) < 4 and user.stdout.readline():
                free.append(time.perf_counter())
            busy = decode(model)
        finally:
            user.kill()
            n_steps = sum(1 for _ in user.stdout)
            user.wait()
        for name, place in (("median", 0.5), ("p95", 0.95)):
            ratios[name].append(busy[int(len(busy) * place)] / alone[int(len(alone) * place)])
        step_s, p95 = (free[-1] - free[0]) / 3, int(0.95 * len(alone))
        print(
            f"  round {number + 1}: a token alone {alone[len(alone) // 2]:.1f} ms (p95 {alone[p95]:.1f}), beside "
            f"{busy[len(busy) // 2]:.1f} ({busy[p95]:.1f}); fine-tuning did {n_steps} steps in the "
            f"{sum(busy) / 1000:.1f} s, one takes {step_s:.2f} s by itself"
        )
    print(f"a token beside fine-tuning / alone: median {spread(ratios['median'])}, p95 {spread(ratios['p95'])}")


def spread(values: list[float]) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--beside", action="store_true")
    parser.add_argument("--curves", action="store_true")
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.load:
        load(options.load)
    if options.curves:
        curves()
        return
    found: dict[str, list[float]] = {name: [] for name in ("local", "ceiling", "swarm", "together")}
    with tempfile.TemporaryDirectory() as folder, local_swarm(Path(folder)) as swarm:
        checkpoint = make_checkpoint(Path(folder) / "llama", options.hidden)
        first, second = swarm.serving((0, 4), (4, 8), model="bench", models={"bench": checkpoint})
        local = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).requires_grad_(False)
        embeddings = torch.randn(options.rows, options.tokens, options.hidden)
        labels = torch.randint(3, 300, (options.rows, options.tokens))
        n_tokens = options.rows * options.tokens
        with swarmd.connect(home=first.home.folder) as client:
            remote = client.model("bench", lookup=False, chain=swarm.hops((first, 0, 4), (second, 4, 8)))
            if options.beside:
                beside(first.home.folder, remote, options.rounds)
                return
            expected, got = (step(model, embeddings, labels) for model in (local, remote))
            print(f"gradients differ by {((got - expected).norm() / expected.norm()).item():.1g}")
            for number in range(options.rounds):
                own_s, forward_s, backward_s = parts(local, embeddings, labels)
                local_s = seconds(lambda: step(local, embeddings, labels))
                swarm_s = seconds(lambda: step(remote, embeddings, labels))
                together_s = seconds(lambda: together(remote, embeddings, labels))
                ceiling_s = own_s + (2 * forward_s + backward_s) / 2
                for name, value in zip(found, (local_s, ceiling_s, swarm_s, together_s), strict=True):
                    found[name].append(n_tokens / value)
                print(
                    f"  round {number + 1}: client's own {1000 * own_s:.0f} ms, layers forward {1000 * forward_s:.0f}, "
                    f"backward {1000 * backward_s:.0f}; local {1000 * local_s:.0f}, swarm {1000 * swarm_s:.0f}, "
                    f"together {1000 * together_s:.0f}"
                )
    for name, values in found.items():
        print(f"{name:9} tokens/s {spread(values)}")
    for name in ("swarm", "together"):
        ratios = {of: [a / b for a, b in zip(found[name], found[of], strict=True)] for of in ("local", "ceiling")}
        print(f"{name} / local {spread(ratios['local'])}, / ceiling {spread(ratios['ceiling'])}")
    ceilings = [a / b for a, b in zip(found["ceiling"], found["local"], strict=True)]
    print(f"ceiling / local {spread(ceilings)}")


if __name__ == "__main__":
    main()
