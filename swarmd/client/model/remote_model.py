"""An ordinary transformers model whose decoder layers happen to be remote.

The class is the family's own. Embedding, final norm, head, ``generate()``, sampling, beams, stopping and streaming are
the library's, the loop for one sequence is in ``decoding``; layer 0 hands the hidden states to a chain session, the
other layers pass them on.
A ``RemoteCache`` stands for the caches on the servers: what generation does to it becomes edits of the next op.
"""

from __future__ import annotations

import functools
import inspect
import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn
from transformers import DynamicCache

from swarmd.client.drafting.speculation import Speculation
from swarmd.client.links import client_parameters
from swarmd.client.model import decoding
from swarmd.client.model.decoding import ModelSpeculation
from swarmd.client.model.remote_cache import OpenSession, RemoteCache
from swarmd.client.model.shared_head import SharedHead
from swarmd.client.model.swarm_head import HeadBy, HeadChecks, SwarmHead
from swarmd.client.model.traced_pass import trace_model
from swarmd.client.tuning.remote_layers import AutogradLanes, TokenPositions, through_lanes
from swarmd.compute.linear.kernels import quicken_layer
from swarmd.compute.model import skeleton
from swarmd.compute.model.client_part import load_client_part
from swarmd.compute.model.ends import all_look_back, put_int8_head
from swarmd.compute.model.mapped_vocabulary import map_vocabulary
from swarmd.compute.runs.expert_balance import FLAG, is_balanced
from swarmd.errors import CacheExhausted, ConfigError
from swarmd.values import Decision

logger = logging.getLogger(__name__)

OWN_HEAD = Decision("own", "no server is asked")


KEPT_ON_SERVERS = {"output_hidden_states": "hidden states between blocks", "output_attentions": "attention weights"}
"""What a caller may ask transformers' models for, and servers keep."""


class _Call(threading.local):
    """The forward that the current thread computes. ``cache`` None: it goes through lanes, without caches."""

    cache: RemoteCache | None = None
    positions: torch.Tensor
    mask: torch.Tensor | None = None
    want: int | None = None
    tuned: Mapping[str, tuple[int, torch.Tensor]] = MappingProxyType({})
    n_prefix: int = 0
    is_step: bool = False  # of a session that goes on
    wants_cache: bool = False
    generating: RemoteCache | None = None
    side_caches: tuple[RemoteCache, ...] = ()  # of other texts that a call of ``generate`` has the model compute


# How the family's own class comes to compute on servers. Nothing in the family's code is replaced but these calls:
#
#     model.generate  ->  generate_remotely     makes the session's cache, chooses the decoding loop, frees the cache
#     model.forward   ->  forward_remotely      finds the cache, the positions and the client's own parameters
#       layers[0].call -> through_the_swarm     hidden [b, t, d] -> the swarm -> hidden [b, t, d]
#       layers[1:]                              pass hidden states on
#       norm, head                              computed here
#
# transformers hands a layer nothing but hidden states and masks. So what a forward knows beside them goes through a
# thread-local ``_Call``: several threads may use one model at a time. A pass without gradients goes through a session,
# whose servers keep caches; one with gradients goes through lanes, which keep none.
def remote_model(
    folder: Path,
    open_session: OpenSession,
    lanes: AutogradLanes,
    dtype: torch.dtype = torch.float32,
    speculation: ModelSpeculation | None = None,
    head: HeadBy = None,
    is_exact: bool = False,
    card: torch.device | None = None,
) -> Any:
    """Load the client's part of a checkpoint and connect its layer 0 to the swarm.

    Returns the family's own class (a PreTrainedModel) with more attributes: ``new_cache()``, for loops of one's own;
    ``last_session`` and ``lanes``, whose statistics tell what happened in the last ``generate`` and in fine-tuning;
    ``last_head``, whose head it used, and why;
    ``speculation``, whose sources propose draft tokens (None: nobody does), and ``last_speculation``, which ones were
    tried in the last ``generate``; and ``micro_batch_rows``, how many rows of a batch travel together in fine-tuning
    (0 chooses). Threads that generate at once share a head, which rounds their logits as those of a batch, unless
    ``is_exact``: then the head is torch's own, too. A ``card`` computes it where that is faster. Raises ConfigError for
    a head in 8 bits that cannot be.
    """
    model: Any = load_client_part(folder, dtype)
    layers: list[Any] = list(skeleton.decoder_layers(model).children())
    remote = skeleton.remote_layer_of(model)
    model.generation_config.update(**skeleton.read_generation(folder))
    client_parameters.expose(model, layers)
    _choose_head(model, head, folder, is_exact, card)
    limit = skeleton.longest_context(model.config)
    model.max_session_tokens = limit
    model.micro_batch_rows = 0
    model.lanes = lanes
    call = _Call()

    def through_the_swarm(hidden: torch.Tensor) -> torch.Tensor:
        has_trained = hidden.requires_grad or any(tensor.requires_grad for _, tensor in call.tuned.values())
        trains = torch.is_grad_enabled() and has_trained
        if trains and call.is_step:
            raise ConfigError("no gradients flow through a session: call the model without a cache, or under no_grad()")
        if trains or (call.tuned and not call.is_step and not call.wants_cache):
            call.cache = None
            places = TokenPositions(
                positions=call.positions.to(torch.int32).expand(hidden.shape[:2]),
                mask=_mask_of_new(call.mask, hidden.shape[1]),
            )
            sent = hidden.to(dtype)
            out = through_lanes(lanes, sent, places, dict(call.tuned), call.n_prefix, model.micro_batch_rows)
            arity = lanes.layer_arity
        else:
            assert call.cache is not None
            out = call.cache.append(hidden, call.positions, call.mask, call.want)
            assert call.cache.session is not None
            arity = call.cache.session.layer_arity
        if remote.returns_tuple != arity:
            for layer in layers:
                layer.returns_tuple = arity
        return out.to(hidden.device, hidden.dtype)

    remote.call = through_the_swarm

    def new_cache(max_tokens: int = limit) -> RemoteCache:
        return RemoteCache(model.config, open_session, min(max_tokens, limit), dtype)

    model.new_cache = new_cache
    for name in KEPT_ON_SERVERS:  # a checkpoint may ask for them in each pass
        setattr(model.config, name, False)
    layout = skeleton.layout_of(model.config)
    _wrap_forward(model, call, lambda: client_parameters.lora_of(model, layers, layout.block_of))
    model.speculation = speculation or ModelSpeculation(looks_up=False)
    _wrap_generate(model, layers, call, head, is_exact)
    return model


def _choose_head(model: Any, head: HeadBy, folder: Path, is_exact: bool, card: torch.device | None) -> None:
    """Have the head computed by what is fastest here, in 8 bits, or hardly ever. Raises ConfigError.

    What is fastest depends on what was measured: nothing does in the exact grade.
    """
    if isinstance(head, Path):
        put_int8_head(model, head)
    elif head is not None and head.is_needed:
        map_vocabulary(model, folder)
    elif not is_exact:
        own_head = model.get_output_embeddings()
        if type(own_head) is nn.Linear:
            found = quicken_layer(own_head, card)
            logger.info("the head of %s: %s (%s)", folder.name, found.action, found.reason)


def _wrap_forward(
    model: Any,
    call: _Call,
    lora: Callable[[], client_parameters.BlockTensors],
) -> None:
    """Give each forward a remote cache, or lanes, and explicit positions; afterwards close what was only for it.

    In place of the method itself, because PEFT calls that and not the module.
    """
    forward = model.forward
    parameters = inspect.signature(type(model).forward).parameters
    takes_positions = "position_ids" in parameters
    cache_name = _cache_name(model)

    @functools.wraps(forward)
    def forward_remotely(*args: Any, **kwargs: Any) -> Any:
        _require_no_server_outputs(model, kwargs)
        if args:
            kwargs["input_ids"] = args[0]
            args = args[1:]
        _require_no_routers(model, kwargs)
        if FLAG in parameters:
            kwargs[FLAG] = False
        inputs = kwargs.get("input_ids")
        if inputs is None:
            inputs = kwargs["inputs_embeds"]
        n_new = int(inputs.shape[1])
        wants_cache = kwargs.get("use_cache", getattr(model.config, "use_cache", True)) is not False
        cache = kwargs.get(cache_name)
        call.n_prefix = 0
        call.tuned = {} if isinstance(cache, RemoteCache) and cache.session is not None else lora()
        if isinstance(cache, DynamicCache) and cache.get_seq_length():
            call.n_prefix = int(cache.get_seq_length())
            if skeleton.layout_of(model.config).first_layers:
                raise ConfigError(
                    "blocks of this model are of several layers, and a prefix is of one: no prefix tuning"
                )
            call.tuned |= client_parameters.prefix_of(cache)
        elif isinstance(cache, RemoteCache):
            cache.tuned = cache.tuned or client_parameters.gather(call.tuned, 0)
        elif cache is not None and not isinstance(cache, DynamicCache):
            raise ConfigError(f"expected a RemoteCache of this model as {cache_name}, got {type(cache).__name__}")
        call.is_step = isinstance(cache, RemoteCache) or call.generating is not None
        call.wants_cache = bool(kwargs.get("use_cache"))
        if not isinstance(cache, RemoteCache):
            cache = _make_cache(model, call, wants_cache, n_new)
            cache.use_parameters(client_parameters.gather(call.tuned, call.n_prefix))
        positions = kwargs.get("position_ids")
        if positions is None:
            first = cache.n_tokens
            positions = torch.arange(first, first + n_new, device=model.device).unsqueeze(0)
        if takes_positions:
            kwargs["position_ids"] = positions
        mask = kwargs.get("attention_mask")
        if mask is not None and mask.ndim != 2:
            raise ConfigError("a remote model takes attention masks of shape [batch, tokens]")
        kwargs[cache_name] = cache
        kwargs["use_cache"] = True
        call.cache = cache
        call.positions = _one_part(positions)
        call.mask = mask
        logits_to_keep = kwargs.get("logits_to_keep")
        call.want = logits_to_keep if isinstance(logits_to_keep, int) and logits_to_keep > 0 else None
        try:
            output = forward(*args, **kwargs)
            if (call.cache is None or not wants_cache) and not isinstance(output, tuple):
                output[cache_name] = None
            return output
        finally:
            if not wants_cache:
                cache.close()
            call.cache = None
            call.tuned = {}

    model.forward = forward_remotely


def _one_part(positions: torch.Tensor) -> torch.Tensor:
    """Positions as servers take them, [b, t]; of several parts, [p, b, t], all are the same for texts."""
    if positions.ndim < 3:
        return positions
    if not bool((positions == positions[:1]).all()):
        raise ConfigError("positions of several parts that differ are those of pictures, and only texts are served")
    return positions[0]


def _require_no_routers(model: Any, kwargs: dict[str, Any]) -> None:
    """Refuse what needs the numbers of experts' routers, which stay on servers. Raises ConfigError."""
    is_asked = bool(kwargs.get(FLAG))
    is_default = kwargs.get(FLAG) is None and kwargs.get("labels") is not None and is_balanced(model)
    if is_asked or is_default:
        raise ConfigError(
            "the loss that balances experts (output_router_logits) needs numbers of routers, which stay on servers: "
            "set model.config.output_router_logits = False to train without it"
        )


def _require_no_server_outputs(model: Any, kwargs: Mapping[str, Any]) -> None:
    """Refuse a pass that asks for what servers keep. Raises ConfigError."""
    for name, outputs in KEPT_ON_SERVERS.items():
        requested = kwargs.get(name)
        if requested or (requested is None and getattr(model.config, name, False)):
            raise ConfigError(
                f"{name}: {outputs} stay on the servers that compute them: leave it out (what leaves the last "
                "block is model.get_decoder()(...).last_hidden_state), or load the model with transformers alone"
            )


def _make_cache(model: Any, call: _Call, wants_cache: bool, n_new: int) -> RemoteCache:
    """A cache for a pass that was given none.

    Within ``generate`` the first such pass begins its text, and goes on as its session. What comes later without a
    cache is another text, as guidance has one without the prompt: its session lasts as long as the call.
    """
    if call.generating is None:
        return model.new_cache(model.max_session_tokens if wants_cache else n_new + call.n_prefix)  # type: ignore[no-any-return]
    if call.generating.session is None:
        return call.generating
    cache: RemoteCache = model.new_cache(max(call.generating.max_tokens, n_new))
    if wants_cache:
        call.side_caches = (*call.side_caches, cache)
    return cache


def _mask_of_new(mask: torch.Tensor | None, n_new: int) -> torch.Tensor | None:
    """The mask of the new tokens, where it says anything."""
    if mask is None:
        return None
    of_new = mask[:, -n_new:].to(torch.uint8)
    return None if bool(of_new.all()) else of_new


def _cache_name(model: Any) -> str:
    """What this family calls the argument: recurrent ones have a name of their own."""
    return "cache_params" if "cache_params" in inspect.signature(type(model).forward).parameters else "past_key_values"


def _wrap_generate(model: Any, layers: list[Any], call: _Call, head: HeadBy, is_exact: bool) -> None:
    """Give ``generate`` a remote cache of the right size, and free it on the servers afterwards."""
    generate = model.generate
    cache_name = _cache_name(model)
    can_crop = all_look_back(skeleton.text_config(model.config))
    is_line = can_crop and not skeleton.remote_layer_of(model).bands
    own_head = model.get_output_embeddings()
    traced = trace_model(model, layers, cache_name, own_head if is_exact else SharedHead(own_head)) if is_line else None
    swarm_head = SwarmHead(model, traced, head) if traced is not None and isinstance(head, HeadChecks) else None
    if isinstance(head, HeadChecks) and head.is_needed and swarm_head is None:
        logger.warning("%s computes its head here: steps of its family are no straight line", type(model).__name__)

    def generate_remotely(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get(cache_name) is not None:
            return generate(*args, **kwargs)
        inputs = args[0] if args else _find_inputs(kwargs)
        config = kwargs.get("generation_config") or model.generation_config
        kwargs["use_cache"] = True  # a session is one, and the text is the same
        cache = model.new_cache(_count_reserved(inputs, config, kwargs, model.max_session_tokens))
        call.generating = cache
        cache.n_expected = 1 if inputs is None else int(inputs.shape[1])
        is_own = can_crop and len(args) < 2 and decoding.is_plain(model, inputs, config, kwargs)
        tries: ModelSpeculation = model.speculation
        speculation = tries.speculation() if is_own else Speculation(tries.costs, ())
        if is_own:
            usable_trace = traced if traced is not None and traced.is_current else None
            usable_head = swarm_head if usable_trace is not None and swarm_head is not None else None
            if usable_head is not None and not usable_head.is_current:
                usable_head = None
            streamer = kwargs.get("streamer")
            kwargs["custom_generate"] = decoding.make_loop(speculation, cache_name, streamer, usable_trace, usable_head)
        try:
            generated = generate(*args, **{**kwargs, cache_name: cache})
            if cache.session is not None:
                cache.session.finish()
            return generated
        finally:
            speculation.end()
            call.generating = None
            model.last_session = cache.session
            model.last_head = OWN_HEAD if swarm_head is None else swarm_head.explain(cache.session)
            model.last_speculation = speculation
            for closing in (cache, *call.side_caches):
                closing.close()
            call.side_caches = ()

    model.last_session = model.last_speculation = model.last_head = None
    model.generate = generate_remotely


def _find_inputs(kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return what a call of ``generate`` begins with, by whichever name it came."""
    for name in ("inputs", "input_ids", "inputs_embeds"):
        if name in kwargs:
            inputs: torch.Tensor | None = kwargs[name]
            return inputs
    return None


def _count_reserved(
    inputs: torch.Tensor | None,
    config: Any,
    kwargs: dict[str, Any],
    limit: int,
) -> int:
    """Count the tokens to reserve on every server: prompt, new tokens, and draft tokens beyond the end."""
    n_prompt = 1 if inputs is None else int(inputs.shape[1])
    n_new = kwargs.get("max_new_tokens", getattr(config, "max_new_tokens", None))
    total = kwargs.get("max_length", getattr(config, "max_length", None))
    if n_new is not None:
        total = n_prompt + n_new
    elif total is None:
        total = n_prompt + 20  # transformers' own default
    if total > limit:
        raise CacheExhausted(
            f"{n_prompt} prompt tokens and {total - n_prompt} to generate are {total}, the model's limit is {limit}"
        )
    n_looked_up = kwargs.get("prompt_lookup_num_tokens") or 0
    return int(min(limit, total + n_looked_up + 32))
