"""A stage of a model in a training worker: some of its blocks, or its ends, with the gradients that they add up.

Backward passes compute a block's activations again from what entered it (Chen et al. 2016), block by block, so that no
more than one block's graph and gradients are in memory beside the stage's parameters and their sum.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec
import torch
from torch import nn
from transformers import PreTrainedModel

from swarmd.compute.model import skeleton
from swarmd.compute.passes.family import MOST_ARITY, PROBE_ERRORS, FamilyForward
from swarmd.compute.runs.expert_balance import balance_factor
from swarmd.compute.runs.shared_vectors import DTYPES, SharedVectors
from swarmd.errors import ConfigError, RemoteProtocolError
from swarmd.plan.trust.equality import bound_of_codec, measure_errors
from swarmd.protocol.models.configuration import count_layers, layout_of
from swarmd.protocol.models.manifest import read_config
from swarmd.protocol.runs.recipe import CHECKED, ENDS, PREVIOUS, Recipe
from swarmd.protocol.wire.worker import ComputeStage, StageErrors, StageInputs
from swarmd.values import Span
from swarmd.wire.activations import decode_untrusted, encode_activations, encode_gradient

KEPT_BYTES = 256 * 2**20  # of what entered blocks, between a micro-batch's forward and its backward


class _FirstBlockReached(Exception):
    """Ends a forward where the blocks begin."""


# Where the parts of a model are, and what passes between them, of one micro-batch:
#
#     ends      token ids --> embedding ------+            +--> norm, head --> loss
#                                 ^           | forward    |         |
#                                 | backward  v            |         v backward
#     stage 1                   blocks 0 .. 3 --> stage 2: blocks 4 .. 7
#
# The ends are computed twice: ``head`` gives the loss and what goes back from there; ``add`` adds the gradients of head
# and embedding together, once all blocks have theirs. So a micro-batch is in the sum of the ends whole, or not at all.
class TrainedStage:
    """See the module. ``layout``: names and shapes of its parameters, in the order in which they lie in a vector."""

    def __init__(self, folder: Path, recipe: Recipe, stage: int, device: str) -> None:
        self._recipe = recipe
        self._dtype = DTYPES[recipe.precision]
        self._device = torch.device(device)
        self._part: _Blocks | _Ends
        if stage == ENDS:
            self._part = _Ends(folder, self._dtype, device)
        else:
            self._part = _Blocks(folder, span_of_stage(folder, recipe, stage), self._dtype, device)
        self._vectors = SharedVectors(self._part.model, recipe.precision, device)
        self.layout = self._vectors.layout
        self._places = {id(parameter): place for place, (_, parameter) in enumerate(self._vectors.parameters)}

    def map(self, path: Path, init: bool) -> None:
        """Use shared memory (Recipe.shared_vectors). With ``init`` the parameters go there, else come from it."""
        self._vectors.map(path, self._recipe.shared_vectors, "parameters", init)

    def compute(self, message: ComputeStage, inputs: StageInputs) -> tuple[float, bytes]:
        """Compute one pass; returns the summed loss, of a head, and what goes on. Raises RemoteProtocolError."""
        self._vectors.use(PREVIOUS if message.on_previous else "parameters")
        self._vectors.fetch_parameters()
        if message.act == "check":
            return self._check(message, inputs)
        total = self._vectors.shared[f"sum{message.into}"]
        if message.is_fresh:
            total.zero_()
        return self._pass(message.act, message, inputs, partial(self._add, self._vectors.cut(total)))

    def _pass(self, act: str, message: ComputeStage, inputs: StageInputs, add: Add) -> tuple[float, bytes]:
        torch.manual_seed(message.seed)
        shape = self._shape(inputs.n)
        forward = self._decode(inputs.forward, shape)
        backward = self._decode(inputs.backward, shape)
        codec = self._recipe.activations
        if isinstance(self._part, _Blocks):
            if act == "forward":
                return 0.0, encode_activations(self._part.forward(message.batch, forward, message.seed), codec)
            gradient = self._part.backward(message.batch, forward, backward, message.seed, add)
            return 0.0, encode_gradient(gradient, codec)
        ids = torch.frombuffer(bytearray(inputs.ids), dtype=torch.int32).long().to(self._device).view(inputs.n, -1)
        if act == "embed":
            return 0.0, encode_activations(self._part.embed(ids), codec)
        if act == "head":
            loss, gradient = self._part.head(ids, forward)
            return loss, encode_gradient(gradient, codec)
        return self._part.add(ids, forward, backward, add), b""

    # What another holder's passes take, and what has come of them there, is computed and compared here. Both sides
    # have gone through the run's codec:
    #
    #     blocks   forward --> given_forward      backward --> given_backward, and gradients to the sum
    #     ends     ids ------> given_forward      forward ---> given_backward; then gradients, of all three
    def _check(self, message: ComputeStage, inputs: StageInputs) -> tuple[float, bytes]:
        """Compute another holder's passes again, add to a sum of their own, and say by how much it is off."""
        total = self._vectors.shared[CHECKED]
        if message.is_fresh:
            total.zero_()
        add = partial(self._add, self._vectors.cut(total))
        if isinstance(self._part, _Blocks):
            entered = inputs.forward, inputs.backward
            _, forward = self._pass("forward", message, inputs, add)
            loss, backward = self._pass("backward", message, inputs, add)
        else:
            entered = b"", b""
            _, forward = self._pass("embed", message, inputs, add)
            _, backward = self._pass("head", message, inputs, add)
            loss, _ = self._pass("add", message, inputs, add)
        errors = StageErrors(
            self._measure(inputs.n, entered[0], inputs.given_forward, forward),
            self._measure(inputs.n, entered[1], inputs.given_backward, backward),
        )
        return loss, msgspec.msgpack.encode(errors)

    def _measure(self, n: int, entered: bytes, given: bytes, own: bytes) -> tuple[float, ...]:
        """Measure by how much each token of a result is off, by what was added to what ``entered``; () of none."""
        if not given:
            return ()
        shape = self._shape(n)
        inputs = self._decode(entered, shape) if entered else torch.zeros(shape)
        try:
            outputs = self._decode(given, shape)
        except RemoteProtocolError:
            return (math.inf,) * shape[1]
        of, there, here = (v.cpu().numpy() for v in (inputs, outputs, self._decode(own, shape)))
        return tuple(measure_errors(of, there, here, bound_of_codec(self._recipe.activations)).tolist())

    def _shape(self, n: int) -> tuple[int, int, int]:
        return n, self._recipe.batch.tokens, self._part.width

    def _decode(self, raw: bytes, shape: tuple[int, int, int]) -> torch.Tensor:
        return decode_untrusted(raw, shape).to(self._device) if raw else torch.zeros(0)

    def _add(
        self, sums: list[torch.Tensor], parameters: list[nn.Parameter], gradients: list[torch.Tensor | None]
    ) -> None:
        """Add gradients of some parameters to the pieces of a sum."""
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                sums[self._places[id(parameter)]] += gradient.to("cpu")


Add = Callable[[list[nn.Parameter], list[torch.Tensor | None]], None]


class _Blocks:
    """Some blocks in a row; ``width``: the numbers that travel of a token."""

    def __init__(self, folder: Path, span: Span, dtype: torch.dtype, device: str) -> None:
        written = read_config(folder)
        layers = layout_of(written).layers(span, count_layers(written))
        self.model = skeleton.load(folder, layers, dtype, device=device)
        require_plain(self.model)
        self._family = FamilyForward(self.model, span, dtype, torch.device(device), lambda: None)
        self.width = self._family.hidden_size
        self._span = span
        self._wants_mask = self._find_mask()
        self.model.train().requires_grad_(True)
        self._kept: OrderedDict[str, list[torch.Tensor]] = OrderedDict()
        of_model = skeleton.decoder_layers(self.model)
        self._parameters = {
            block: [
                p for i in self._family.layers_of(Span(block, block + 1)).blocks() for p in of_model[i].parameters()
            ]
            for block in span.blocks()
        }

    def forward(self, batch: str, hidden: torch.Tensor, seed: int) -> torch.Tensor:
        """Compute all blocks of hidden states [b, t, d], and keep what entered each."""
        entered = []
        with torch.no_grad():
            for block in self._span.blocks():
                entered.append(hidden)
                hidden = self._compute_block(block, hidden, seed)
        self._kept[batch] = entered
        while len(self._kept) > 1 and self._kept_bytes() > KEPT_BYTES:
            self._kept.popitem(last=False)
        return hidden

    def backward(self, batch: str, hidden: torch.Tensor, gradient: torch.Tensor, seed: int, add: Add) -> torch.Tensor:
        """Add the gradients of all parameters, and return that by what entered the stage: all are [b, t, d]."""
        if batch not in self._kept:
            self.forward(batch, hidden, seed)
        entered = self._kept.pop(batch)
        for block in reversed(self._span.blocks()):
            inputs = entered.pop().requires_grad_(True)
            parameters = self._parameters[block]
            outputs = self._compute_block(block, inputs, seed)
            gradient, *of_parameters = torch.autograd.grad(outputs, [inputs, *parameters], gradient, allow_unused=True)
            add(parameters, list(of_parameters))
        return gradient

    def _compute_block(self, block: int, hidden: torch.Tensor, seed: int) -> torch.Tensor:
        torch.manual_seed(seed + block)  # what drops out of a block does so in each of its passes
        positions = torch.arange(hidden.shape[1], device=hidden.device).expand(hidden.shape[0], -1)
        mask = torch.ones_like(positions) if self._wants_mask else None
        return self._family.compute(hidden, positions, mask, None, 0, Span(block, block + 1))

    @torch.inference_mode()
    def _find_mask(self) -> bool:
        """Does the family compute rows only with a mask, though it masks nothing? Raises ConfigError."""
        if self.width != self._family.embedding_size:
            raise ConfigError(f"{type(self.model).__name__}: its streams of hidden states cannot be trained in stages")
        for wants_mask in (False, True):
            self._wants_mask = wants_mask
            try:
                self._compute_block(self._span.start, torch.zeros(1, 2, self.width, device=self._family.device), 0)
            except PROBE_ERRORS:
                continue
            return wants_mask
        raise ConfigError(f"{type(self.model).__name__}: its blocks cannot be computed apart: unsupported family")

    def _kept_bytes(self) -> int:
        return sum(hidden.nbytes for entered in self._kept.values() for hidden in entered)


class _Ends:
    """Embedding, last norm and head: everything of a model but its blocks."""

    def __init__(self, folder: Path, dtype: torch.dtype, device: str) -> None:
        self.model = skeleton.load(folder, None, dtype, device=device)
        require_plain(self.model)
        self.model.train().requires_grad_(True)
        self.model.get_input_embeddings().padding_idx = None  # no row is padded, as in compute.runs.gradients
        self.width = int(skeleton.text_config(self.model.config).hidden_size)
        self._remote = skeleton.remote_layer_of(self.model)
        self._parameters = list(self.model.parameters())
        self._find_arity()

    @torch.inference_mode()
    def _find_arity(self) -> None:
        """Learn whether this family's layers return a tensor or a tuple, and of how many. Raises ConfigError."""
        ids = torch.zeros(2, 3, dtype=torch.long, device=self._parameters[0].device)
        self._remote.call = lambda hidden: hidden
        for arity in range(MOST_ARITY + 1):
            for layer in skeleton.decoder_layers(self.model).children():
                if isinstance(layer, skeleton.Stub):
                    layer.returns_tuple = arity
            try:
                if self.model(input_ids=ids, use_cache=False).logits.shape[:2] == ids.shape:
                    return
            except PROBE_ERRORS:
                continue
        raise ConfigError(f"{type(self.model).__name__}: its ends cannot be computed apart: unsupported family")

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute what enters the first block, [b, t, d], of rows of tokens [b, t + 1]."""
        entering: list[torch.Tensor] = []

        def stop(hidden: torch.Tensor) -> torch.Tensor:
            entering.append(hidden)
            raise _FirstBlockReached

        self._remote.call = stop
        try:
            with torch.no_grad():
                self.model(input_ids=ids[:, :-1], use_cache=False)
        except _FirstBlockReached:
            return entering[0]
        raise ConfigError("the model's decoder passes over its first block: unsupported family")

    def head(self, ids: torch.Tensor, left: torch.Tensor) -> tuple[float, torch.Tensor]:
        """Compute the summed loss, and its gradient by what left the last block, [b, t, d]."""
        left = left.requires_grad_(True)
        loss, _ = self._summed_loss(ids, left)
        (gradient,) = torch.autograd.grad(loss, [left])
        return float(loss.detach()), gradient

    def add(self, ids: torch.Tensor, left: torch.Tensor, gradient: torch.Tensor, add: Add) -> float:
        """Add the gradients of embedding, norm and head; ``gradient`` is that by what enters the first block."""
        loss, entering = self._summed_loss(ids, left)
        gradients = torch.autograd.grad(
            [loss, entering], self._parameters, [torch.ones_like(loss), gradient], allow_unused=True
        )
        add(self._parameters, list(gradients))
        return float(loss.detach())

    def _summed_loss(self, ids: torch.Tensor, left: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the summed loss of rows, each its tokens' mean, and what would enter the first block."""
        entering: list[torch.Tensor] = []

        def pass_on(hidden: torch.Tensor) -> torch.Tensor:
            entering.append(hidden)
            return left

        self._remote.call = pass_on
        logits = self.model(input_ids=ids[:, :-1], use_cache=False).logits.flatten(0, 1)
        losses = nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="none")
        return losses.view(len(ids), -1).mean(1).sum(), entering[0]


def span_of_stage(folder: Path, recipe: Recipe, stage: int) -> Span:
    """Return the blocks of a stage, counted from 1. Raises ConfigError for blocks that the model does not have."""
    written = read_config(folder)
    n_blocks = layout_of(written).n_blocks(count_layers(written))
    if recipe.first_blocks[-1] >= n_blocks:
        raise ConfigError(f"the run's stages begin at blocks {recipe.first_blocks}: the model has {n_blocks}")
    return recipe.blocks_of_stage(stage, n_blocks)


def parameters_of_stages(model: PreTrainedModel, folder: Path, recipe: Recipe) -> list[list[nn.Parameter]]:
    """Return the parameters of each stage of a whole model, in the order in which they lie in the stage's vector."""
    written = read_config(folder)
    layout = layout_of(written)
    n_layers = count_layers(written)
    stage_of = {}
    for stage in range(1, len(recipe.first_blocks) + 1):
        for index in layout.layers(span_of_stage(folder, recipe, stage), n_layers).blocks():
            for parameter in skeleton.decoder_layers(model)[index].parameters():
                stage_of[id(parameter)] = stage
    stages: list[list[nn.Parameter]] = [[] for _ in range(len(recipe.first_blocks) + 1)]
    for parameter in model.parameters():
        stages[stage_of.get(id(parameter), ENDS)].append(parameter)
    return stages


def require_plain(model: PreTrainedModel) -> None:
    """Refuse a family whose blocks take more than hidden states, or balance experts. Raises ConfigError."""
    family = type(model).__name__
    if skeleton.layout_of(model.config).sidebands:
        raise ConfigError(f"{family}: its layers are given more than hidden states: it cannot be trained in stages")
    if balance_factor(model):
        raise ConfigError(f"{family}: its experts are balanced over all blocks: it cannot be trained in stages")
