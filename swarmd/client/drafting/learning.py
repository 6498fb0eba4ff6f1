"""How a draft block learns from examples, and how good it is.

It learns what the model thought of the next token, at the places of the text and at some beyond, where it goes on from
its own outputs. The rows that judge it are none of those that it learned from.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from swarmd.client.drafting.block_draft import REACH, BlockDraft, BlockModel, Embed
from swarmd.client.drafting.draft_block import DraftBlock
from swarmd.client.drafting.examples import Examples

MOST_STEPS = 5  # that a batch looks ahead, 1 at least: deeper ones are as the last
STEP_WEIGHT = 0.8  # of each further one
BATCH_ROWS = 2  # many small steps teach more than few large ones: docs/decisions/0020
RATE, LAST_RATE = 1e-3, 2e-5
WARM_STEPS = 50  # until the rate is reached: a new head jumps at first
MOST_NORM = 1.0  # of a gradient
UNKNOWN_SHARE = 0.5  # of a row, at most, that comes without hidden states, as a prompt does
JUDGED_PLACES = 8  # as many as speculation tells apart


@dataclass(frozen=True, slots=True)
class LearningStep:
    """``done``: the share of the time; ``loss``: bits that the draft's tokens take beyond those of the model's own."""

    n_steps: int
    done: float
    loss: float


def learn(
    block: DraftBlock, embed: Embed, examples: Examples, seconds: float, clock: Callable[[], float] = time.monotonic
) -> Iterator[LearningStep]:
    """Learn for so long; yields after each step. Rows have at least REACH + MOST_STEPS + 1 tokens."""
    optimizer = torch.optim.AdamW(block.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01)
    targets = _Targets(block, examples)
    generator = torch.Generator().manual_seed(examples.n_tokens)
    started_at = clock()
    n_steps, loss = 0, 0.0
    is_quick = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # in bfloat16
    block.train()
    while (done := (clock() - started_at) / seconds) < 1:
        rate = LAST_RATE + (RATE - LAST_RATE) * (1 + math.cos(math.pi * done)) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (n_steps + 1) / WARM_STEPS)
        batch = draw_batch(examples, generator)
        with torch.autocast("cpu", torch.bfloat16, enabled=is_quick):
            batch_loss, excess = targets.loss(block, embed, batch, generator)
        optimizer.zero_grad()
        batch_loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(block.parameters(), MOST_NORM)
        optimizer.step()
        n_steps += 1
        loss = excess if n_steps == 1 else 0.98 * loss + 0.02 * excess
        yield LearningStep(n_steps, done, loss)
    block.eval()


def draw_batch(examples: Examples, generator: torch.Generator) -> Examples:
    """Some rows, from a random place on, long enough for REACH places and what follows."""
    n, t = examples.tokens.shape
    length = REACH + MOST_STEPS + 1
    rows = torch.randint(n, (BATCH_ROWS, 1), generator=generator)
    first = torch.randint(t - length + 1, (BATCH_ROWS, 1), generator=generator)
    places = first + torch.arange(length)
    return Examples(
        examples.tokens[rows, places],
        examples.hidden[rows, places],
        examples.top[rows, places],
        examples.chances[rows, places],
    )


class _Targets:
    """What the block should say, in its own vocabulary."""

    def __init__(self, block: DraftBlock, examples: Examples) -> None:
        n_tokens = 1 + max(int(block.tokens.max()), int(examples.top.max()))
        self._numbers = torch.full((n_tokens,), -1)
        self._numbers[block.tokens.long()] = torch.arange(len(block.tokens))

    def loss(
        self, block: DraftBlock, embed: Embed, batch: Examples, generator: torch.Generator
    ) -> tuple[torch.Tensor, float]:
        """The loss of a batch, and how many bits it is above the least that there could be, in the first step."""
        n, t = batch.tokens.shape[0], REACH
        with torch.no_grad():
            embedded = embed(batch.tokens[:, 1:]).float()
        n_unknown = torch.randint(int(UNKNOWN_SHARE * t), (n, 1), generator=generator)
        is_known = torch.arange(t) >= n_unknown
        known = block.enter(embedded[:, :t], batch.hidden[:, :t].float())
        entered = torch.where(is_known[..., None], known, block.enter_unknown(embedded[:, :t]))
        total = torch.zeros(())
        excess = 0.0
        n_steps = 1 + int(torch.randint(MOST_STEPS, (), generator=generator))
        for step, logits in enumerate(block.unroll(embedded, entered, n_steps)):
            places = slice(step + 1, step + 1 + t)
            numbers = self._numbers[batch.top[:, places]]
            chances = batch.chances[:, places].float() * (numbers >= 0)
            surprise = -logits.float().log_softmax(-1).gather(-1, numbers.clamp(min=0))
            loss = ((surprise * chances).sum(-1) * is_known).sum() / is_known.sum()
            total = total + STEP_WEIGHT**step * loss
            if not step:
                least = (-chances * chances.clamp(min=1e-6).log()).sum(-1)
                excess = (float(loss.detach()) - float((least * is_known).sum() / is_known.sum())) / math.log(2)
        return total, excess


@dataclass(frozen=True, slots=True)
class DraftQuality:
    """``acceptance``: by place, the share right where those before were; ``second``: as in ``DraftSettings``."""

    acceptance: tuple[float, ...]
    second: float


def judge(block: DraftBlock, embed: Embed, examples: Examples, n_before: int = 32) -> DraftQuality:
    """Propose at each place of each row from ``n_before`` on, where the text is what the model found likeliest."""
    right, tried = [0] * JUDGED_PLACES, [0] * JUDGED_PLACES
    n_second = n_wrong = 0
    model = BlockModel(block, embed)
    for row in range(examples.tokens.shape[0]):
        text: list[int] = examples.tokens[row].tolist()
        likeliest: list[int] = examples.top[row, :, 0].tolist()
        draft = BlockDraft(model)
        draft.begin(text[:n_before])
        draft.end()
        for n_known in range(n_before, len(text) - 1):
            draft.hear(n_known - 1, examples.hidden[row, n_known - 1])
            for place, token in enumerate(draft.propose(text[: n_known + 1], (), JUDGED_PLACES, 0.0)):
                at = n_known + 1 + place  # the proposed token's place in the text
                if at > len(text):
                    break
                tried[place] += 1
                if token != likeliest[at - 1]:
                    n_wrong += 1
                    n_second += draft.second_choice(at) == likeliest[at - 1]
                    break
                right[place] += 1
                if at == len(text) or text[at] != token:
                    break  # a text that was drawn goes on otherwise
    acceptance = tuple(r / n for r, n in zip(right, tried, strict=True) if n)
    return DraftQuality(acceptance, n_second / n_wrong if n_wrong else 0.0)
