"""Fine-tune a remote model: PEFT's parameters here, its frozen blocks on servers. What can be resumed is exact.

A step's samples, learning rate and sums depend on the recipe, the data and the step alone, and everything that a step
changes is in a checkpoint: a run that is killed and resumed ends with the same weights as one that was not, on
servers of the same numerics and with the same codec.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import random
import shutil
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from swarmd.client.tuning.dataset import IGNORED, Dataset, DatasetRow
from swarmd.client.tuning.tuning_recipe import PREFIX, TuningRecipe, checkpoints
from swarmd.compute.model.packed_config import refuse_tuning
from swarmd.compute.runs.lora import with_lora
from swarmd.errors import ConfigError

logger = logging.getLogger(__name__)

KEPT_CHECKPOINTS = 2  # the newest, and one that is whole while it is written
STATE_FILE = "state.json"
TENSORS_FILE = "state.safetensors"
ADAMW = ("step", "exp_avg", "exp_avg_sq")  # what torch's AdamW remembers of a parameter


class CheckpointState(msgspec.Struct):
    """The part of a checkpoint that is no tensor: what was asked for, the data's hash, and the loss of each step."""

    recipe: dict[str, Any]
    data: str
    losses: list[float]


@dataclass(frozen=True, slots=True)
class Step:
    """One step that was taken."""

    number: int
    loss: float
    tokens: int
    seconds: float


def learning_rate(recipe: TuningRecipe, step: int) -> float:
    """The rate of step 1, 2, ...: it rises over ``warmup`` steps, then falls to a tenth along a cosine."""
    if step <= recipe.warmup:
        return recipe.learning_rate * step / max(1, recipe.warmup)
    done = (step - recipe.warmup) / max(1, recipe.steps - recipe.warmup)
    cosine = (1 + math.cos(math.pi * min(1.0, done))) / 2  # from 1 to 0
    return recipe.learning_rate * (0.1 + 0.9 * cosine)


def choose_rows(recipe: TuningRecipe, n_rows: int, step: int) -> list[int]:
    """Which rows step 1, 2, ... takes: each pass over the data is another seeded order of all rows."""
    chosen = []
    orders: dict[int, list[int]] = {}
    for place in range((step - 1) * recipe.batch, step * recipe.batch):
        epoch, index = divmod(place, n_rows)
        if epoch not in orders:
            orders[epoch] = random.Random(f"{recipe.seed}/{epoch}").sample(range(n_rows), n_rows)
        chosen.append(orders[epoch][index])
    return chosen


def pad_batch(
    rows: Sequence[DatasetRow],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Ids, mask and labels of a batch [b, t]; short rows are filled up at their ends, where nothing counts."""
    b = len(rows)
    t = max(len(row.ids) for row in rows)
    ids = torch.zeros(b, t, dtype=torch.int64)
    mask = torch.zeros(b, t, dtype=torch.int64)
    labels = torch.full((b, t), IGNORED)
    for i, row in enumerate(rows):
        n = len(row.ids)
        ids[i, :n] = torch.tensor(row.ids)
        mask[i, :n] = 1
        labels[i, :n] = torch.tensor(row.labels)
    return ids, mask, labels


def _first_counted(model: Any) -> int:
    """The first token of a row that the loss counts: the second, unless the tokens of a tuned prompt predict the first.

    PEFT puts a prompt in front of the row's own vectors. Keys and values (a prefix) predict nothing.
    """
    config = getattr(model, "active_peft_config", None)
    precedes = config is not None and config.is_prompt_learning and config.peft_type != "PREFIX_TUNING"
    return 0 if precedes else 1


# Two parts of a batch are computed side by side, by two threads:
#
#     part 1   embed | swarm forward | head, loss | swarm backward | embed
#     part 2         embed | swarm forward | head, loss | swarm backward | embed
#
# While one part is on servers, this machine computes the other's head. A part counts by its share of the labels, so
# the sum is the mean loss of the whole batch. Gradients are summed in the order of the parts, and not as they come:
# sums of floats depend on their order, and a resumed run must give the same weights.
def loss_and_gradients(
    model: Any,
    parameters: Sequence[torch.nn.Parameter],
    rows: Sequence[DatasetRow],
    n_parts: int = 2,
) -> tuple[float, list[torch.Tensor | None]]:
    """The mean loss of a batch and its gradients, as one backward gives them.

    The batch goes in parts, side by side, so that servers have one part's blocks to compute while the client computes
    another part's head. Sums run in the order of the parts. Raises SwarmError.
    """
    ids, mask, labels = pad_batch(rows)
    counts = (labels[:, _first_counted(model) :] != IGNORED).sum(1)
    n_parts = min(n_parts, len(rows))
    starts = [len(rows) * i // n_parts for i in range(n_parts + 1)]
    cuts = [slice(start, end) for start, end in itertools.pairwise(starts)]
    cuts = [cut for cut in cuts if bool(counts[cut].any())]

    def part(cut: slice) -> tuple[float, tuple[torch.Tensor | None, ...]]:
        share = int(counts[cut].sum()) / int(counts.sum())
        output = model(input_ids=ids[cut], attention_mask=mask[cut], labels=labels[cut])
        loss = output.loss * share
        return loss.item(), torch.autograd.grad(loss, list(parameters), allow_unused=True)

    pool = ThreadPoolExecutor(len(cuts))
    try:
        results = list(pool.map(part, cuts))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    sums: list[torch.Tensor | None] = []
    for gradients in zip(*(g for _, g in results), strict=True):
        present = [g for g in gradients if g is not None]
        sums.append(torch.stack(present).sum(0) if present else None)
    return sum(loss for loss, _ in results), sums


def _with_virtual_tokens(model: Any, recipe: TuningRecipe) -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT imports it, and it has opinions
    try:
        from peft import PrefixTuningConfig, PromptTuningConfig, TaskType, get_peft_model
    except ImportError:
        raise ConfigError("fine-tuning needs PEFT: pip install -e '.[tune]' in swarmd's repository") from None
    kind = PromptTuningConfig if recipe.method == "prompt" else PrefixTuningConfig
    try:
        with warnings.catch_warnings(action="ignore"):  # about names that do not concern anybody here
            return get_peft_model(model, kind(num_virtual_tokens=recipe.virtual_tokens, task_type=TaskType.CAUSAL_LM))
    except ValueError as error:
        raise ConfigError(f"PEFT cannot tune this model so: {error}") from None


def with_peft(model: Any, recipe: TuningRecipe) -> Any:
    """Wrap a remote model in PEFT's own, with parameters drawn from the recipe's seed. Raises ConfigError."""
    refuse_tuning(model.config)
    torch.manual_seed(recipe.seed)
    model = model.requires_grad_(False)
    if recipe.method == "lora":
        tuned = with_lora(model, recipe.rank, recipe.alpha, recipe.targets, key="--targets")
    else:
        tuned = _with_virtual_tokens(model, recipe)
    return tuned.eval()  # frozen blocks have no dropout to train with


class Tuner:
    """One run: a model with its trainable parameters, an optimizer, and a folder that it can be resumed from."""

    def __init__(self, model: Any, recipe: TuningRecipe, data: Dataset, folder: Path) -> None:
        self.model = model
        self.recipe = recipe
        self.losses: list[float] = []
        self._data = data
        self._folder = folder
        self._trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._optimizer = torch.optim.AdamW(self._trained.values(), lr=recipe.learning_rate, foreach=False)

    def run(self, checkpoint_interval: int, on_step: Callable[[Step], None]) -> None:
        """Take the steps that are left; a checkpoint after each ``checkpoint_interval``, and the result at the end.

        Raises SwarmError; what was done until the last checkpoint can be resumed then.
        """
        while len(self.losses) < self.recipe.steps:
            on_step(self.step())
            if len(self.losses) % checkpoint_interval == 0 or len(self.losses) == self.recipe.steps:
                self.save_checkpoint()
        _replace_folder(self._folder / "adapter", self._write_adapter)

    def step(self) -> Step:
        """Take one step. Raises SwarmError, ConfigError when the loss is not finite."""
        number = len(self.losses) + 1
        started_at = time.perf_counter()
        chosen = choose_rows(self.recipe, len(self._data.rows), number)
        rows = [self._data.rows[i] for i in chosen]
        loss, gradients = loss_and_gradients(self.model, list(self._trained.values()), rows)
        if not math.isfinite(loss):
            raise ConfigError(f"the loss of step {number} is {loss}: the training diverges; try a lower --lr")
        for parameter, gradient in zip(self._trained.values(), gradients, strict=True):
            parameter.grad = gradient
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate(self.recipe, number)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss)
        n_tokens = sum(len(row.ids) for row in rows)
        return Step(number, loss, n_tokens, time.perf_counter() - started_at)

    # --- what is kept ----------------------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """Write everything that the next step depends on, whole or not at all."""
        _replace_folder(self._folder / f"{PREFIX}{len(self.losses)}", self._write_state)
        for old in checkpoints(self._folder)[KEPT_CHECKPOINTS:]:
            shutil.rmtree(old)

    def _write_adapter(self, folder: Path) -> None:
        self.model.save_pretrained(folder, save_embedding_layers=False)  # else PEFT asks the hub about the model

    def _write_state(self, folder: Path) -> None:
        tensors: dict[str, torch.Tensor] = {}
        for name, parameter in self._trained.items():
            tensors[f"parameter.{name}"] = parameter.detach().contiguous()
            for kind, value in self._optimizer.state[parameter].items():
                tensors[f"{kind}.{name}"] = torch.as_tensor(value).contiguous()
        save_file(tensors, folder / TENSORS_FILE)
        state = {
            "recipe": asdict(self.recipe),
            "data": self._data.digest,
            "losses": self.losses,
        }
        (folder / STATE_FILE).write_text(json.dumps(state), encoding="utf-8")

    def resume(self) -> int:
        """Go back to the newest checkpoint that is whole; returns its step, 0 without one. Raises ConfigError."""
        for folder in checkpoints(self._folder):
            try:
                state = msgspec.convert(json.loads((folder / STATE_FILE).read_text(encoding="utf-8")), CheckpointState)
                tensors = load_file(folder / TENSORS_FILE)
            except (OSError, ValueError, msgspec.ValidationError, SafetensorError) as error:
                logger.warning("%s is damaged (%s): an older one is tried", folder, error)
                continue
            self._require_same(state, folder)
            self._restore_state(tensors)
            self.losses = state.losses
            return len(self.losses)
        return 0

    def _require_same(self, state: CheckpointState, folder: Path) -> None:
        """A run goes on with what it began with. Raises ConfigError."""
        mine = json.loads(json.dumps(asdict(self.recipe)))
        saved = state.recipe
        names = [field.name for field in fields(TuningRecipe)]
        changed = [name for name in names if saved.get(name) != mine[name]]
        if changed:
            changes = ", ".join(f"{name} was {saved.get(name)!r}, is {mine[name]!r}" for name in changed)
            raise ConfigError(f"{folder} is of another run: {changes}: take the same options, or another --out")
        if state.data != self._data.digest:
            raise ConfigError(f"{folder} was made with other data: take the same file, or another --out")

    def _restore_state(self, tensors: dict[str, torch.Tensor]) -> None:
        for name, parameter in self._trained.items():
            parameter.data.copy_(tensors[f"parameter.{name}"])
            state = {kind: tensors[f"{kind}.{name}"] for kind in ADAMW if f"{kind}.{name}" in tensors}
            if state:
                self._optimizer.state[parameter] = state


# A crash may come between any two of these steps. The new folder is filled under a name that nobody reads, and synced
# to disk before it gets its own name. So a folder that has its name is whole. For a moment there is none: that is why
# KEPT_CHECKPOINTS is two, and ``resume`` takes the newest that can be read.
def _replace_folder(folder: Path, write: Callable[[Path], object]) -> None:
    """Fill a folder beside, and put it in place when it is on disk; a crash leaves no half of it there."""
    new = folder.with_name(f".{folder.name}.new")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    write(new)
    for path in [*new.iterdir(), new]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)
    old = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
