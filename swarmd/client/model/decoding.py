"""One sequence, greedy or sampled: transformers' ``generate`` up to its loop, then this one, which tries tokens ahead.

Each token is chosen from its own logits with one draw, as in transformers' loop: a seed gives the same text whatever is
tried. Beams, batches, scores to return, candidates of others and models that PEFT has changed stay the library's.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin

from swarmd.client.model.draft import Draft, DraftModel
from swarmd.client.model.speculation import Costs, DraftSource, Lookup, Speculation
from swarmd.client.model.swarm_head import SwarmHead, is_enough
from swarmd.client.model.traced_pass import TracedPass

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
    """What is tried ahead for one model, and what passes through its chain take."""

    def __init__(self, looks_up: bool, draft: DraftModel | None = None) -> None:
        self.costs = Costs()
        self._looks_up = looks_up
        self._draft = draft

    def speculation(self) -> Speculation:
        """For one text."""
        sources: list[DraftSource] = [Lookup()] if self._looks_up else []
        if self._draft is not None:
            sources.append(Draft(self._draft))
        return Speculation(self.costs, sources)


def is_plain(model: Any, inputs: Any, config: GenerationConfig, arguments: Mapping[str, Any]) -> bool:
    """Is a call of ``generate`` with these arguments one sequence, greedy or sampled, and nothing else?"""
    mask = arguments.get("attention_mask")

    def setting(name: str) -> Any:
        """As ``generate`` finds it: given, of the configuration given, of the model's own."""
        places = (arguments.get(name), getattr(config, name, None), getattr(model.generation_config, name, None))
        return next((value for value in places if value is not None), None)

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


def make_loop(
    speculation: Speculation, cache_name: str, streamer: Any, traced: TracedPass | None, head: SwarmHead | None
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
        cache, ids, tokens = options[cache_name], input_ids, input_ids[0].tolist()
        sent, draft_tokens, samples = input_ids, list[int](), bool(generation_config.do_sample)
        swarm_head = head if is_enough(logits_processor, samples) else None
        speculation.begin(tokens)
        while True:
            started_at = time.perf_counter()
            by_line = None if ids is input_ids else traced
            out = _compute_logits(model, sent, 1 + len(draft_tokens), cache_name, cache, by_line, swarm_head)
            if ids is not input_ids:
                speculation.costs.measured(sent.shape[1], time.perf_counter() - started_at)
            logits = out[:, -1 - len(draft_tokens) :].to(ids.device, torch.float32, copy=True)
            is_done, n_right = False, -1
            for n_right in range(1 + len(draft_tokens)):
                token = _choose(logits_processor(ids, logits[:, n_right]), samples)
                ids = torch.cat([ids, token[:, None]], 1)
                tokens.append(int(token))
                if streamer is not None:
                    streamer.put(token.cpu())
                is_done = bool(stopping_criteria(ids, None).all())
                if is_done or n_right == len(draft_tokens) or tokens[-1] != draft_tokens[n_right]:
                    break
            if n_right < len(draft_tokens):
                cache.crop(n_right - len(draft_tokens))
            speculation.learn(n_right)
            if is_done:
                break
            draft_tokens = speculation.ahead(tokens, generation_config.max_length - len(tokens) - 1)
            sent = torch.tensor([[tokens[-1], *draft_tokens]])
        if streamer is not None:
            streamer.end()
        return ids

    return decode


def _compute_logits(
    model: Any, sent: torch.Tensor, n: int, name: str, cache: Any, traced: TracedPass | None, head: SwarmHead | None
) -> torch.Tensor:
    """Logits of the tokens that are sent, or of the last n: by the swarm's head, a line, or the family's forward."""
    if head is not None:
        return head.logits(sent, cache, n)
    if traced is not None:
        return traced.compute(sent, *cache.at_its_end(sent.shape[1]))
    options = {"logits_to_keep": n} if _keeps_logits(model.__class__) else {}
    logits: torch.Tensor = model(input_ids=sent.to(model.device), use_cache=True, **{name: cache}, **options).logits
    return logits


@functools.cache
def _keeps_logits(family: type) -> bool:
    """Can its forward be told how many logits are wanted?"""
    return "logits_to_keep" in inspect.signature(family.forward).parameters  # type: ignore[attr-defined]


def _choose(scores: torch.Tensor, is_sampled: bool) -> torch.Tensor:
    """One token a row of [1, vocabulary] scores."""
    return torch.multinomial(scores.softmax(-1), 1)[:, 0] if is_sampled else scores.argmax(-1)
