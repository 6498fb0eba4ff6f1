"""The two ends of a model, apart: tokens become hidden states, and hidden states become logits.

Both are the family's own forward, without a line for any family. On the way in, block 0 takes what it is given and
breaks off; on the way out it puts in what the swarm has answered. So rows of many sessions share one pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from transformers import DynamicCache

from swarmd.compute.linear.compiled_layers import Int8Head
from swarmd.compute.linear.kernels import NO_ROOM, choose_kernel, has_room_beside, quicken_layer
from swarmd.compute.model import skeleton
from swarmd.compute.model.client_part import load_client_part
from swarmd.compute.model.mapped_vocabulary import map_vocabulary
from swarmd.errors import ConfigError
from swarmd.values import Decision

logger = logging.getLogger(__name__)

MAX_EMBEDDED = 512  # tokens in one pass: families make a mask of this, squared
MOST_ROWS = 64  # tokens in one pass through the head: its logits are some 60 MB with a vocabulary of 256,000


class _BlockZeroReached(Exception):
    """Ends a forward at block 0, and carries the hidden states out of it."""

    def __init__(self, hidden: torch.Tensor) -> None:
        super().__init__()
        self.hidden = hidden


class EndLine(Protocol):
    """The family's forward as a straight line (client.model.traced_pass): ids and positions [1, n]."""

    enter: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    """Gives what block 0 is given, [1, n, d]."""

    def compute(
        self, ids: torch.Tensor, positions: torch.Tensor, remote: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Give logits [1, n, vocabulary]; ``remote`` is what the swarm does."""


# One forward of the family, used twice. Layer 0 is a RemoteLayer whose ``call`` is ``_at_block_0``:
#
#     embed:    ids ------> embedding, mask, rotary --> layer 0 raises with the hidden states
#     logits:   the swarm's output -------------------> layer 0 returns it --> norm --> head
#
# So scaled embeddings, position tables, norms and soft caps are the family's own, without a line for any family here.
class Ends:
    """Embedding before the blocks, norm and head after them. For one thread at a time.

    With a folder for what is compiled as ``int8_head`` the head is computed in 8 bits. Raises ConfigError when it
    cannot be. ``is_quick``: by what is fastest here, which may take another copy of its weight; else it stays on disk.
    On a CPU that may be a ``card`` beside.
    """

    def __init__(
        self,
        folder: Path,
        dtype: torch.dtype,
        int8_head: Path | None = None,
        device: str = "cpu",
        is_quick: bool = True,
        card: torch.device | None = None,
    ) -> None:
        self.model: Any = load_client_part(folder, dtype, device)
        if int8_head is not None:
            put_int8_head(self.model, int8_head)
        if int8_head is not None or not is_quick:
            map_vocabulary(self.model, folder)
        elif device == "cpu":
            found = _choose_kernel(self.model, card)
            logger.info("the head of %s: %s (%s)", folder.name, found.action, found.reason)
        layers: Any = skeleton.decoder_layers(self.model)
        self._layers = list(layers.children())
        self.remote = skeleton.remote_layer_of(self.model)
        self.remote.call = self._at_block_0
        self._swarm_output: torch.Tensor | None = None
        self.arity = 0  # how many values the blocks' stand-ins return now; 0 is a bare tensor
        self._line: EndLine | None = None
        self._line_arity = 0
        settings = skeleton.text_config(self.model.config)
        self.family = str(self.model.config.model_type)
        self.vocabulary = int(settings.vocab_size)
        self.width = int(settings.hidden_size)
        self.max_tokens = skeleton.longest_context(self.model.config)
        self.generation: dict[str, Any] = skeleton.read_generation(folder)
        self.can_crop = all_look_back(settings)
        sources = (
            self.generation.get("eos_token_id"),
            settings.eos_token_id,
            getattr(self.model.config, "eos_token_id", None),
        )
        end_tokens = frozenset[int]().union(*map(_read_ids, sources))
        self.eos = frozenset(token for token in end_tokens if 0 <= token < self.vocabulary)

    def use_line(self, line: EndLine | None) -> None:
        """Have rows of one token go through a line that was traced for blocks as their stand-ins are now."""
        self._line, self._line_arity = line, self.arity

    @property
    def input_embeddings(self) -> nn.Module:
        """What embeds tokens, before anything else that the family does to them."""
        embed: nn.Module = self.model.get_input_embeddings()
        return embed

    @cached_property
    def hidden_size(self) -> int:
        """How many numbers a token has as it travels: those of all its streams."""
        return self.embed([[0]], [0])[0].shape[2]

    @torch.inference_mode()
    def embed(
        self,
        rows: Sequence[Sequence[int]],
        starts: Sequence[int],
    ) -> list[torch.Tensor]:
        """Embed each row's tokens, the first of which is at position ``starts``: a tensor [1, t, d] each."""
        # Rows of one token, as decoding has them, share one forward. Longer ones go by themselves, part by part:
        # rows of different lengths would need padding, and a mask grows with the square of the length.
        embedded: list[torch.Tensor] = [torch.empty(0)] * len(rows)
        single = [i for i, ids in enumerate(rows) if len(ids) == 1]
        if single:
            batch = self._embed_rows([rows[i][0] for i in single], [starts[i] for i in single])
            for index, i in enumerate(single):
                embedded[i] = batch[index : index + 1].clone()
        for i, ids in enumerate(rows):
            if len(ids) <= 1:
                continue
            parts = []
            for offset in range(0, len(ids), MAX_EMBEDDED):
                part = list(ids[offset : offset + MAX_EMBEDDED])
                start = starts[i] + offset
                part_positions = list(range(start, start + len(part)))
                parts.append(self._embed_tokens([part], [part_positions]))
            embedded[i] = torch.cat(parts, 1)
        return embedded

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor, arity: int) -> torch.Tensor:
        """Turn what the last block gave, [n, d], into float32 logits [n, vocabulary].

        ``arity``: how many values this family's layers return.
        """
        if self._line is not None and arity == self._line_arity:
            zeros = torch.zeros(1, hidden.shape[0], dtype=torch.long)
            return self._line.compute(zeros, zeros, lambda _: hidden.unsqueeze(0))[0].float()
        return self._run_end(self.model, hidden, arity).logits[:, 0].float()  # type: ignore[no-any-return]

    @torch.inference_mode()
    def states(self, hidden: torch.Tensor, arity: int) -> torch.Tensor:
        """Turn what the last block gave, [n, d], into the model's last hidden states, float32 [n, d].

        They are behind the final norm, as transformers' models without a head return them; ``arity`` as in ``logits``.
        """
        out = self._run_end(self.model.base_model, hidden, arity)
        return out.last_hidden_state[:, 0].float()  # type: ignore[no-any-return]

    def return_values(self, arity: int) -> None:
        """Have the stand-ins for the blocks return as many values as the family's do."""
        self.arity = arity
        for layer in self._layers:
            layer.returns_tuple = arity

    def _run_end(self, model: Any, hidden: torch.Tensor, arity: int) -> Any:
        """Run a forward whose blocks give what the swarm computed."""
        self.return_values(arity)
        self._swarm_output = hidden.unsqueeze(1)
        donor = self._swarm_output[..., : self.width]  # of its shape
        zeros = torch.zeros(hidden.shape[0], 1, dtype=torch.long, device=hidden.device)
        entering = {"input_ids": zeros} if self.remote.bands else {"inputs_embeds": donor}
        try:
            return model(**entering, position_ids=zeros, use_cache=False)
        finally:
            self._swarm_output = None

    def _embed_rows(self, ids: list[int], positions: list[int]) -> torch.Tensor:
        """Embed a token of each row: [n, 1, d]."""
        if self._line is not None:
            return self._line.enter(torch.tensor([ids]), torch.tensor([positions])).transpose(0, 1)
        return self._embed_tokens([[token] for token in ids], [[position] for position in positions])

    def _embed_tokens(
        self,
        ids: list[list[int]],
        positions: list[list[int]],
    ) -> torch.Tensor:
        """Run the family's forward up to block 0, and return what that is given."""
        try:
            self.model(
                input_ids=torch.tensor(ids),
                position_ids=torch.tensor(positions),
                use_cache=False,
            )
        except _BlockZeroReached as reached:
            return reached.hidden
        raise AssertionError("a forward that does not reach block 0")

    def _at_block_0(self, hidden: torch.Tensor) -> torch.Tensor:
        """Stand in for the blocks: break off on the way in, give what the swarm computed on the way out."""
        if self._swarm_output is None:
            raise _BlockZeroReached(hidden)
        return self._swarm_output


def _choose_kernel(model: Any, card: torch.device | None) -> Decision[str]:
    """Have the ends computed by what is fastest here; where there is a card, the head alone."""
    head = model.get_output_embeddings()
    if type(head) is nn.Linear and card is not None:
        return quicken_layer(head, card)
    if type(head) is nn.Linear and not has_room_beside(head):
        return Decision("plain", NO_ROOM)
    return choose_kernel(model)


def put_int8_head(model: Any, compile_folder: Path) -> None:
    """Have a model's head computed in 8 bits. Raises ConfigError where that cannot be."""
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        raise ConfigError(f"head = int8 is for plain linear heads, not {type(head).__name__}: say head = own")
    model.set_output_embeddings(Int8Head(head, compile_folder))


def all_look_back(settings: Any) -> bool:
    """Can tokens be taken out of every block's cache again? Not where states forget, or windows have moved on."""
    kinds = set(getattr(settings, "layer_types", None) or ())
    if kinds:
        return kinds == {"full_attention"}
    return not any(DynamicCache(config=settings).is_sliding)


def _read_ids(value: Any) -> frozenset[int]:
    """Read one id, several or none, as configurations write them."""
    if value is None:
        return frozenset()
    return frozenset(value if isinstance(value, list | tuple) else [value])
