"""One sequence, greedy or sampled: transformers' ``generate`` up to its loop, then this one, which tries draft tokens.

Each token is chosen from its own logits with one draw, as in transformers' loop: a seed gives the same text whatever is
tried. Beams, batches, scores to return, candidates of others and models that PEFT has changed stay the library's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin

from swarmd.client.drafting.lookup import Lookup
from swarmd.client.drafting.source import DraftSource
from swarmd.client.drafting.speculation import Costs, Speculation
from swarmd.client.model.passes import LogitsSource, Passes
from swarmd.client.model.swarm_head import SwarmHead, is_enough
from swarmd.client.model.traced_pass import StepPass
from swarmd.plan.chains.flight import Flight

PLAIN = frozenset(
    ("inputs", "input_ids", "attention_mask", "generation_config", "logits_processor", "stopping_criteria", "streamer")
)
"""What a call may have beside settings of a GenerationConfig."""
UNSUPPORTED_SETTINGS = (
    *("return_dict_in_generate", "output_scores", "output_logits", "output_attentions", "output_hidden_states"),
    *("use_mtp", "prefill_chunk_size", "guidance_scale", "penalty_alpha", "dola_layers", "constraints"),
    *("force_words_ids", "assistant_early_exit", "prompt_lookup_num_tokens", "cache_implementation"),
    *("watermarking_config",),
)
"""Settings that ask for more than this loop does."""


Loop = Callable[..., torch.Tensor]


class ModelSpeculation:
    """Who proposes tokens for one model, the first one first, and what passes through its chain take.

    ``sources`` make one for each text; more can be added.
    """

    def __init__(self, looks_up: bool) -> None:
        self.costs = Costs()
        self.sources: list[Callable[[], DraftSource]] = [Lookup] if looks_up else []

    def speculation(self) -> Speculation:
        """Make the speculation of one text."""
        return Speculation(self.costs, [make_source() for make_source in self.sources])


def is_plain(
    model: Any,
    inputs: Any,
    config: GenerationConfig,
    arguments: Mapping[str, Any],
) -> bool:
    """Is a call of ``generate`` with these arguments one sequence, greedy or sampled, and nothing else?"""
    mask = arguments.get("attention_mask")

    def setting(name: str) -> Any:
        """As ``generate`` finds it: an argument, else of the configuration passed, else of the model's own."""
        value = arguments.get(name)
        if value is None:
            value = getattr(config, name, None)
        if value is None:
            value = getattr(model.generation_config, name, None)
        return value

    prepare = getattr(model.prepare_inputs_for_generation, "__func__", None)
    return (
        torch.is_tensor(inputs)
        and not inputs.is_floating_point()
        and inputs.shape[0] == 1
        and (mask is None or bool(mask.all()))
        and all(name in PLAIN or hasattr(config, name) for name in arguments)
        and not any(setting(name) for name in UNSUPPORTED_SETTINGS)
        and {setting(name) or 1 for name in ("num_beams", "num_return_sequences")} == {1}
        and setting("use_cache") is not False
        and prepare is GenerationMixin.prepare_inputs_for_generation
    )


# One round of the loop. The last token that is known travels with draft tokens behind it, in one pass:
#
#     sent       t9 | d10 d11 d12           the cache holds t1 to t8
#     logits     of   t10 t11 t12 t13
#     chosen          t10 t11               t10 = d10 is right; t11 differs from d11: what follows is worthless
#     kept       t9 | t10                   the cache is cropped by two, t11 is sent in the next round
#
# Where windows fly (``plan.chains.flight``), what is tried further travels meanwhile, and is void at that point.
#
# Each token is chosen from its own logits, with one draw, after exactly the tokens before it. So the text is the one
# that a loop without draft tokens gives.
def make_loop(
    speculation: Speculation, cache_name: str, streamer: Any, traced: StepPass | None, head: SwarmHead | None
) -> Loop:
    """What ``generate`` takes as ``custom_generate``: decode until a stopping criterion holds."""

    def decode(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: GenerationConfig,
        **options: Any,
    ) -> torch.Tensor:
        if options.get("attention_mask") is not None:  # of a prompt in which transformers found padding
            options |= {"generation_config": generation_config, "streamer": streamer}
            return type(model)._sample(model, input_ids, logits_processor, stopping_criteria, **options)  # type: ignore[no-any-return]
        samples = bool(generation_config.do_sample)
        usable_head = head if is_enough(logits_processor, samples) else None
        source = LogitsSource(model, options[cache_name], cache_name, traced, usable_head)
        text = GeneratedText(input_ids, logits_processor, stopping_criteria, streamer, samples)
        speculation.begin(text.tokens)
        logits = source.compute_logits(input_ids, 1, is_prompt=True)
        speculation.hear(len(text.tokens) - 1, source.cache.returned[0, -1])
        text.tokens.append(text.choose(logits[:, -1]))
        if not text.is_done:
            passes = source.passes()
            flight = Flight(text.tokens, text.tokens[:-1], passes.next_number)
            started_at = time.perf_counter()
            speculation.start(flight, generation_config.max_length, passes.can_fly, started_at, tries_seconds=True)
            _decode(text, passes, speculation)
        if streamer is not None:
            streamer.end()
        return text.ids

    return decode


class GeneratedText:
    """A text that grows by tokens that are chosen from logits, until a stopping criterion holds."""

    def __init__(
        self, input_ids: torch.Tensor, logits_processor: Any, stopping_criteria: Any, streamer: Any, samples: bool
    ) -> None:
        self.ids = input_ids
        self.tokens: list[int] = input_ids[0].tolist()
        self.is_done = False
        self._logits_processor = logits_processor
        self._stopping_criteria = stopping_criteria
        self._streamer = streamer
        self._samples = samples

    def choose(self, logits: torch.Tensor) -> int:
        """Choose the next token from logits [1, vocabulary]; the caller adds it to ``tokens``."""
        scores = self._logits_processor(self.ids, logits.to(self.ids.device, torch.float32, copy=True))
        token = _choose_token(scores, self._samples)
        self.ids = torch.cat([self.ids, token[:, None]], 1)
        if self._streamer is not None:
            self._streamer.put(token.cpu())
        self.is_done = bool(self._stopping_criteria(self.ids, None).all())
        return int(token)


def _decode(text: GeneratedText, passes: Passes, speculation: Speculation) -> None:
    """Send windows and take their answers, until the text is done."""
    while not text.is_done:
        now = time.perf_counter()
        if speculation.is_due(now):
            passes.send(speculation.next_window(now), speculation.plan.flies)
            continue
        passed = passes.receive(speculation.patience_s(now))
        if passed is None:
            if speculation.can_draft:
                speculation.draft()
            continue
        window = speculation.begin_answer(passed.number, passed.cost)
        if window is None:
            continue
        n_before = len(text.tokens)
        for row in speculation.rows_to_decide(window):
            if row >= passed.logits.shape[1]:  # of a second choice that servers did not compute
                break
            speculation.hear(len(text.tokens) - 1, passed.hidden[0, row])
            speculation.take(text.choose(passed.logits[:, row]))
            if text.is_done:
                break
        n_tokens = len(text.tokens) - n_before
        void_from = speculation.stop() if text.is_done else speculation.end_answer(n_tokens, time.perf_counter())
        if void_from is not None:
            passes.void_from(void_from)


def _choose_token(scores: torch.Tensor, is_sampled: bool) -> torch.Tensor:
    """One token a row of [1, vocabulary] scores."""
    if is_sampled:
        return torch.multinomial(scores.softmax(-1), 1)[:, 0]
    return scores.argmax(-1)
