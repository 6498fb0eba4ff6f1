"""A draft block for a hosted model, from nothing: what it learns from is made, it learns, and is judged.

Its folder holds all of it: ``examples/``, the block itself, written anew each minute, and at last ``draft.json``. What
was interrupted goes on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from swarmd.client.drafting import learning
from swarmd.client.drafting.block_draft import Embed
from swarmd.client.drafting.draft_block import DraftBlock, load_block, make_block, save_block
from swarmd.client.drafting.examples import ExampleFolder, Examples, join
from swarmd.client.drafting.writing import ROW_TOKENS, TurnTokens, read_rows, write_rows
from swarmd.compute.model.ends import all_look_back
from swarmd.compute.model.skeleton import text_config
from swarmd.errors import CacheExhausted, ConfigError
from swarmd.folders import write_file
from swarmd.protocol.models.draft import (
    CONFIG_FILE,
    HEAD_WIDTH,
    WEIGHTS_FILE,
    DraftFile,
    DraftSettings,
    is_draft,
    read_file,
)
from swarmd.values import ModelId

EXAMPLES = "examples"
GATHERING_SHARE = 0.4  # of the time, in which text is made: what is lacking is text
ENOUGH_TOKENS = 2_000_000  # more would not be seen within an hour
MOST_ROWS = 32  # that are written side by side: half of the cache that a server has, at the usual limits
ROWS_AT_ONCE = 8  # that are read, for one file of examples
VOCABULARY = 8_192  # tokens: 97 % of those in code and documentation by SmolLM2's tokenizer
MOST_WIDTH = 1_024  # a home's processor reads such a block in some milliseconds
JUDGED_ROWS = 8  # 4,000 places: the share that is right is known to a hundredth
SAVE_INTERVAL_S = 60.0  # that an interruption loses at most

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class DraftTask:
    """What is to be made: for which model, where, how long it may take, and from what.

    ``rows`` of writing.ROW_TOKENS are read; what they lack the model writes, where ``turns`` say how.
    """

    base: ModelId
    folder: Path
    seconds: float
    rows: Sequence[Sequence[int]] = ()
    turns: TurnTokens | None = None


def train_draft(model: Any, task: DraftTask, report: Report) -> DraftFile:
    """Make a draft for a remote model; ``report`` is told how far it is. Raises ConfigError."""
    if not all_look_back(text_config(model.config)):
        raise ConfigError(f"nothing is tried ahead of the {model.config.model_type} family: its caches forget tokens")
    n_begun = len(task.turns.begin) if task.turns else 0
    if model.max_session_tokens < n_begun + ROW_TOKENS:
        raise ConfigError(
            f"a draft learns from rows of {ROW_TOKENS} tokens, and this model takes {model.max_session_tokens}"
        )
    if is_draft(task.folder) and (found := read_file(task.folder)).base != task.base:
        raise ConfigError(f"{task.folder} holds a draft for {found.base[:12]}: give another folder (--out)")
    examples = gather(model, task, report)
    if not examples:
        raise ConfigError(f"{task.seconds / 60:.0f} minutes are too short: not one row of text was made")
    of_all = join(examples)
    n_rows = of_all.tokens.shape[0]
    n_judged = min(JUDGED_ROWS, n_rows // 4)
    if not n_judged:
        raise ConfigError(f"{n_rows} rows of text are too few to learn from and to judge by: give it more time or data")
    judged, learned = of_all.rows(slice(n_judged)), of_all.rows(slice(n_judged, n_rows))  # the first are drawn greedily
    embed = model.get_input_embeddings()
    block = _begin_block(model, task, learned)
    path = task.folder / WEIGHTS_FILE
    _learn(block, embed, learned, task.seconds * (1 - GATHERING_SHARE), path, report)
    judgement = learning.judge(load_block(block.settings, path, embed.num_embeddings, torch.float32), embed, judged)
    settings = msgspec.structs.replace(block.settings, acceptance=judgement.acceptance, second=judgement.second)
    return _write_settings(task, settings)


def gather(model: Any, task: DraftTask, report: Report) -> list[Examples]:
    """Make what is to be learned from, until it is enough or its share of the time is over; with what is there."""
    began_at = time.monotonic()
    store = ExampleFolder(task.folder / EXAMPLES / task.base[:12])
    gathered = store.read()
    n_tokens = sum(examples.n_tokens for examples in gathered)

    def add(examples: Examples) -> None:
        nonlocal n_tokens
        store.add(examples)
        gathered.append(examples)
        n_tokens += examples.n_tokens

    rows = list(task.rows)[n_tokens // ROW_TOKENS :]  # what is there already begins with them

    def is_over() -> bool:
        return n_tokens >= ENOUGH_TOKENS or time.monotonic() - began_at > GATHERING_SHARE * task.seconds

    while rows and not is_over():
        add(read_rows(model, rows[:ROWS_AT_ONCE]))
        del rows[:ROWS_AT_ONCE]
        report(f"read {n_tokens:,} tokens")
    n_rows = MOST_ROWS
    generator = torch.Generator().manual_seed(n_tokens)
    while task.turns is not None and not is_over():
        try:
            for step in write_rows(model, task.turns, n_rows, generator):
                if isinstance(step, Examples):
                    add(step)
                elif not step // n_rows % 64:
                    report(f"{n_tokens + step:,} tokens written")
        except CacheExhausted:
            if n_rows == 1:
                raise
            n_rows //= 2
    return gathered


def _begin_block(model: Any, task: DraftTask, examples: Examples) -> DraftBlock:
    """The block of an interrupted training, or a new one for the tokens that occur most."""
    embed = model.get_input_embeddings()
    n_tokens = embed.num_embeddings
    path = task.folder / WEIGHTS_FILE
    if is_draft(task.folder):
        return load_block(read_file(task.folder).draft, path, n_tokens, torch.float32)
    hidden = examples.hidden.shape[-1]
    embedding = embed(torch.zeros(1, 1, dtype=torch.long)).shape[-1]
    counts = torch.bincount(examples.top[..., :2].flatten(), minlength=n_tokens)
    counts += torch.bincount(examples.tokens.flatten(), minlength=n_tokens)
    n_kept = max(2, min(VOCABULARY, int((counts > 0).sum())))
    tokens = counts.argsort(descending=True)[:n_kept].sort().values
    width = min(MOST_WIDTH, _round_up(hidden))
    settings = DraftSettings(hidden, embedding, width, _round_up(width * 8 // 3), n_kept)
    weight = getattr(model.get_output_embeddings(), "weight", None)
    is_plain = isinstance(weight, torch.Tensor) and weight.shape == (n_tokens, hidden) and weight.is_floating_point()
    head = weight[tokens] if is_plain else embed(tokens[None])[0]  # type: ignore[index]
    block = make_block(settings, tokens, head.detach())
    save_block(block, path)
    _write_settings(task, settings)
    return block


def _round_up(width: int) -> int:
    return -(-width // HEAD_WIDTH) * HEAD_WIDTH


def _write_settings(task: DraftTask, settings: DraftSettings) -> DraftFile:
    file = DraftFile(task.base, settings)
    write_file(task.folder / CONFIG_FILE, msgspec.json.format(msgspec.json.encode(file)) + b"\n")
    return file


def _learn(block: DraftBlock, embed: Embed, examples: Examples, seconds: float, path: Path, report: Report) -> None:
    saved_at = time.monotonic()
    for progress in learning.learn(block, embed, examples, seconds):
        if time.monotonic() - saved_at > SAVE_INTERVAL_S:
            saved_at = time.monotonic()
            save_block(block, path)
        if not progress.n_steps % 50:
            left_s = (1 - progress.done) * seconds
            report(f"step {progress.n_steps}, {progress.loss:.2f} bits from the model, {left_s / 60:.0f} minutes left")
    save_block(block, path)
