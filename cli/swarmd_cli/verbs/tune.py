"""The verb that adapts a hosted model to someone's own text."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmd.importing import importing
from swarmd.values import count
from swarmd_cli.context import format_duration, home, membership, print_json
from swarmd_cli.preflight import require_answers
from swarmd_cli.terminal import rewrite_line
from swarmd_cli.verbs.look import Json

if TYPE_CHECKING:
    from swarmd.client.tuning.dataset import Dataset, Encoding
    from swarmd.client.tuning.fine_tuning import Step, Tuner
    from swarmd.client.tuning.tuning_recipe import TuningRecipe

METHOD = "lora (matrices in the blocks), prompt (virtual tokens in front) or prefix (keys and values in every block)."
TARGETS = "LoRA: modules to adapt, comma-separated, or all-linear; PEFT's own choice for the family if left out."
Lora = {"rank": "LoRA: rank of each update.", "alpha": "LoRA: the update counts alpha / rank."}

NOT_BALANCED = "the loss that balances experts (output_router_logits) is left out: its numbers stay on the servers"


def tune(
    model: Annotated[str, typer.Argument(help="A name of the swarm's catalog.")],
    data: Annotated[Path, typer.Option("--data", help="JSONL: text, or prompt and completion, or input_ids.")],
    method: Annotated[str, typer.Option("--method", help=METHOD)] = "lora",
    out: Annotated[Path, typer.Option("--out", help="Folder for checkpoints and the result.")] = Path("tuned"),
    steps: Annotated[int, typer.Option("--steps", help="How many steps to take.")] = 100,
    batch: Annotated[int, typer.Option("--batch", help="Rows in a step.")] = 8,
    rate: Annotated[float, typer.Option("--lr", help="Highest learning rate, of AdamW.")] = 1e-3,
    warmup: Annotated[int, typer.Option("--warmup", min=0, help="Steps until that rate is reached.")] = 10,
    rank: Annotated[int, typer.Option("--rank", help=Lora["rank"])] = 8,
    alpha: Annotated[int, typer.Option("--alpha", help=Lora["alpha"])] = 16,
    targets: Annotated[str, typer.Option("--targets", help=TARGETS)] = "",
    virtual_tokens: Annotated[int, typer.Option("--virtual-tokens", help="Of a prompt or prefix.")] = 16,
    max_length: Annotated[int, typer.Option("--max-length", help="Most tokens of a row.")] = 256,
    seed: Annotated[int, typer.Option("--seed", help="Of the parameters and the order of rows.")] = 0,
    every: Annotated[int, typer.Option("--every", min=1, help="Steps between checkpoints.")] = 10,
    codec: Annotated[str, typer.Option("--codec", help="auto, raw, float16, int8, int4 or aqsgd.")] = "auto",
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint in --out.")] = False,
    as_json: Json = False,
) -> None:
    """Adapt a hosted model to your own text; its blocks stay on the servers, what is learned stays here.

    Example: swarmd tune demo --data examples/caesar.jsonl --method lora --steps 60
    """
    membership().swarm()
    from swarmd.client.tuning.tuning_recipe import TuningRecipe, checkpoints
    from swarmd.errors import ConfigError

    chosen = tuple(name.strip() for name in targets.split(",") if name.strip())
    recipe = TuningRecipe(
        model=model,
        method=method,
        steps=steps,
        batch=batch,
        learning_rate=rate,
        warmup=warmup,
        seed=seed,
        rank=rank,
        alpha=alpha,
        targets=chosen,
        virtual_tokens=virtual_tokens,
        max_length=max_length,
        codec=codec,
    ).check()
    if checkpoints(out) and not resume:
        raise ConfigError(f"{out} holds a run already: --resume to go on with it, or another --out")
    if not data.is_file():
        raise ConfigError(f"{data} is no file: give rows of text as JSONL with --data")
    _require_extra()
    require_answers(model)
    print("starting ...", file=sys.stderr, flush=True)
    _tune(recipe, data, out, every, resume, as_json)


def _require_extra() -> None:
    from importlib.util import find_spec

    from swarmd.errors import ConfigError

    missing = [name for name in ("peft", "matplotlib") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"fine-tuning needs {' and '.join(missing)}: pip install -e '.[tune]' in swarmd's repository")


def _tune(
    recipe: TuningRecipe,
    data: Path,
    out: Path,
    every: int,
    resume: bool,
    as_json: bool,
) -> None:
    with importing():
        import swarmd.client.blocking
        from swarmd.client.tuning.fine_tuning import Tuner, with_peft
        from swarmd.compute.model.packed_config import refuse_tuning
        from swarmd.compute.runs.expert_balance import is_balanced, leave_out
    from swarmd.client.tuning.dataset import read_dataset
    from swarmd_cli.curve import save_png, terminal_curve

    with swarmd.connect(home=home().folder) as swarm:
        remote = swarm.model(recipe.model, codec=recipe.codec)
        refuse_tuning(remote.config)
        if is_balanced(remote):
            leave_out(remote)
            print(f"!! {NOT_BALANCED}", file=sys.stderr)
        n_virtual = 0 if recipe.method == "lora" else recipe.virtual_tokens
        max_tokens = min(recipe.max_length, remote.max_session_tokens - n_virtual)
        rows = read_dataset(data, make_encoding(swarm.tokenizer(recipe.model), remote, max_tokens))
        tuner = Tuner(with_peft(remote, recipe), recipe, rows, out)
        first = tuner.resume() if resume else 0
        _print_start(tuner, rows, recipe, first)
        began_at = time.perf_counter()
        progress = _Progress(recipe.steps, first, lambda: len(remote.lanes.statistics.retries))
        try:
            tuner.run(every, progress.show)
        except KeyboardInterrupt:
            raise SystemExit(_report_interrupt(tuner, out)) from None
        finally:
            progress.end()
            if tuner.losses:
                out.mkdir(parents=True, exist_ok=True)
                save_png(tuner.losses, out / "loss.png", f"{recipe.method} on {recipe.model}, {data.name}")
        seconds = time.perf_counter() - began_at
        retries = len(remote.lanes.statistics.retries)
    result = {
        "adapter": str(out / "adapter"),
        "method": recipe.method,
        "resumed_at": first,
        "losses": tuner.losses,
        "seconds": round(seconds, 2),
        "retries": retries,
        "doubts": remote.lanes.statistics.doubts,
    }
    if as_json:
        print_json(result)
        return
    print("\n".join(terminal_curve(tuner.losses)))
    retried = f"; {retries} micro-batches were sent again" if retries else ""
    print(f"{recipe.steps - first} steps in {format_duration(seconds)}{retried}")
    for doubt in result["doubts"]:
        print(f"!! {doubt}", file=sys.stderr)
    print(f"the result, in PEFT's format: {out / 'adapter'}\nthe loss curve: {out / 'loss.png'}")
    if recipe.method == "lora":
        print(f"to have the swarm serve it: swarmd models add {out / 'adapter'} --name NAME --base {recipe.model}")


def make_encoding(tokenizer: Any, model: Any, max_tokens: int) -> Encoding:
    """Make the encoding of texts: begun as the model's own tokenizer does, and ended by its end of text."""
    from swarmd.client.tuning.dataset import Encoding

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    # What the tokenizer puts in front of a text shows where the text's own tokens begin among all of them.
    plain = encode("a")
    with_special = list(tokenizer("a").input_ids)
    n_leading = 0
    for start in range(len(with_special)):
        if with_special[start : start + len(plain)] == plain:
            n_leading = start
            break
    end = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)
    vocabulary = int(model.get_input_embeddings().num_embeddings)
    return Encoding(encode, tuple(with_special[:n_leading]), end, vocabulary, max_tokens)


def _print_start(tuner: Tuner, rows: Dataset, recipe: TuningRecipe, first: int) -> None:
    n_parameters = sum(parameter.numel() for parameter in tuner.model.parameters() if parameter.requires_grad)
    n_tokens = sum(len(row.ids) for row in rows.rows)
    data = f"{count(len(rows.rows), 'row')}, {count(n_tokens, 'token')}"
    print(f"{data}; {recipe.method} with {n_parameters:,} parameters", file=sys.stderr)
    if first:
        print(f"going on after step {first}, where the last checkpoint is", file=sys.stderr)


def _report_interrupt(tuner: Tuner, out: Path) -> int:
    from swarmd.client.tuning.tuning_recipe import checkpoints, step_of

    last_step = max((step_of(folder) for folder in checkpoints(out)), default=0)
    print(f"\nstopped in step {len(tuner.losses) + 1}; --resume goes on after step {last_step}", file=sys.stderr)
    return 130


class _Progress:
    """One line that is written again and again on a terminal; a line now and then elsewhere."""

    def __init__(self, n_steps: int, first: int, retries: Any) -> None:
        self._n_steps = n_steps
        self._first = first
        self._retries = retries
        self._began_at = time.perf_counter()
        self._is_terminal = sys.stderr.isatty()

    def show(self, step: Step) -> None:
        """Say how far it is."""
        n_done = step.number - self._first
        left_s = (time.perf_counter() - self._began_at) / n_done * (self._n_steps - step.number)
        n_retries = self._retries()
        retries = f", {n_retries} sent again" if n_retries else ""
        speed = f"{step.tokens / step.seconds:.0f} tokens/s"
        place = f"step {step.number}/{self._n_steps}"
        line = f"{place}  loss {step.loss:.4f}  {speed}{retries}  {format_duration(left_s)} left"
        is_tenth = step.number % max(1, self._n_steps // 10) == 0
        if self._is_terminal:
            rewrite_line(line)
        elif is_tenth or step.number in (self._first + 1, self._n_steps):
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        """End the line."""
        if self._is_terminal:
            print(file=sys.stderr)
