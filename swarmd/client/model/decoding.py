"""One sequence, greedy or sampled: transformers' ``generate`` up to its loop, then this one, which tries draft tokens.

Each token is chosen from its own logits with one draw, as in transformers' loop: a seed gives the same text whatever is
tried. Beams, batches, scores to return, candidates of others and models that PEFT has changed stay the library's.
"""

from __future__ import annotations

import functools
import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, GenerationMixin

from swarmd.client.model.draft import Draft, DraftModel
from swarmd.client.model.speculation import Costs, DraftSource, Lookup, Speculation
from swarmd.client.model.swarm_head import SwarmHead, is_enough
from swarmd.client.model.traced_pass import StepPass

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
    """The draft sources of one model, and what passes through its chain take."""

    def __init__(self, looks_up: bool, draft: DraftModel | None = None) -> None:
        self.costs = Costs()
        self._looks_up = looks_up
        self._draft = draft

    def speculation(self) -> Speculation:
        """Make the speculation of one text."""
        sources: list[DraftSource] = [Lookup()] if self._looks_up else []
        if self._draft is not None:
            sources.append(Draft(self._draft))
        return Speculation(self.costs, sources)


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


@dataclass(frozen=True, slots=True)
class LogitsSource:
    """What computes the logits of one text: a swarm head, else a trace of the client's part, else the family's forward.

    A trace is of passes with few tokens. ``cache`` is the model's argument ``cache_name``.
    """

    model: Any
    cache: Any
    cache_name: str
    traced: StepPass | None
    head: SwarmHead | None

    def compute_logits(self, sent: torch.Tensor, n: int, is_prompt: bool) -> torch.Tensor:
        """Compute logits of the tokens sent, or of the last ``n`` only."""
        if self.head is not None:
            return self.head.logits(sent, self.cache, n)
        if self.traced is not None and not is_prompt:
            positions, through_swarm = self.cache.prepare_append(sent.shape[1])
            return self.traced.compute(sent, positions, through_swarm)
        options = {self.cache_name: self.cache}
        if _keeps_logits(self.model.__class__):
            options["logits_to_keep"] = n
        output = self.model(input_ids=sent.to(self.model.device), use_cache=True, **options)
        logits: torch.Tensor = output.logits
        return logits


# One round of the loop. The last token that is known travels with draft tokens behind it, in one pass:
#
#     sent       t9 | d10 d11 d12           the cache holds t1 to t8
#     logits     of   t10 t11 t12 t13
#     chosen          t10 t11               t10 = d10 is right; t11 differs from d11: what follows is worthless
#     kept       t9 | t10                   the cache is cropped by two, t11 is sent in the next round
#
# Each token is chosen from its own logits, with one draw, after exactly the tokens before it. So the text is the one
# that a loop without draft tokens gives. The invariant: the cache holds all tokens but the last one.
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
        cache = options[cache_name]
        ids = input_ids
        tokens = input_ids[0].tolist()
        sent = input_ids
        draft_tokens: list[int] = []
        samples = bool(generation_config.do_sample)
        usable_head = head if is_enough(logits_processor, samples) else None
        source = LogitsSource(model, cache, cache_name, traced, usable_head)
        speculation.begin(tokens)
        while True:
            started_at = time.perf_counter()
            is_prompt = ids is input_ids
            n_wanted = 1 + len(draft_tokens)
            out = source.compute_logits(sent, n_wanted, is_prompt)
            if not is_prompt:
                speculation.costs.measured(sent.shape[1], time.perf_counter() - started_at)
            logits = out[:, -n_wanted:].to(ids.device, torch.float32, copy=True)
            is_done = False
            n_right = -1
            for n_right in range(n_wanted):
                token = _choose_token(logits_processor(ids, logits[:, n_right]), samples)
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
            draft_tokens = speculation.propose_tokens(tokens, generation_config.max_length - len(tokens) - 1)
            sent = torch.tensor([[tokens[-1], *draft_tokens]])
        if streamer is not None:
            streamer.end()
        return ids

    return decode


@functools.cache
def _keeps_logits(family: type) -> bool:
    """Can its forward be told how many logits are wanted?"""
    return "logits_to_keep" in inspect.signature(family.forward).parameters  # type: ignore[attr-defined]


def _choose_token(scores: torch.Tensor, is_sampled: bool) -> torch.Tensor:
    """One token a row of [1, vocabulary] scores."""
    if is_sampled:
        return torch.multinomial(scores.softmax(-1), 1)[:, 0]
    return scores.argmax(-1)
