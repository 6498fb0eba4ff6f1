"""The client's part of a GGUF model at its own bits, as transformers' loops want a model.

Tokens and logits go through what ``llama_cpp.ends`` has of llama.cpp's library, between them is the swarm. It has no
parameters, so nothing of it can be trained.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from swarmd.compute.llama_cpp.ends import LlamaHead, PackedEmbedding
from swarmd.compute.llama_cpp.packed import PackedFolder
from swarmd.compute.model.packed_config import NOT_TUNED, PackedConfig
from swarmd.compute.model.plain_config import read_config
from swarmd.compute.model.skeleton import RemoteLayer, RemoteLayers, Stub
from swarmd.errors import ConfigError


class EmbeddingOfBytes(nn.Module):
    """Token ids [b, t] to hidden states [b, t, d]; rows are unpacked as they are asked for."""

    def __init__(self, embedding: PackedEmbedding, dtype: torch.dtype) -> None:
        super().__init__()
        self._rows = embedding.rows
        self._dtype = dtype
        self.num_embeddings = embedding.n_words

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        rows = torch.from_numpy(self._rows(ids.flatten().tolist()))
        return rows.view(*ids.shape, rows.shape[1]).to(self._dtype)


class HeadOfBytes(nn.Module):
    """Norm and head: hidden states [b, t, d] to logits [b, t, vocabulary]. Loaded when it is first used."""

    def __init__(self, folder: PackedFolder, config: PackedConfig) -> None:
        super().__init__()
        self.in_features = config.hidden_size
        self.out_features = config.vocab_size
        self._folder = folder
        self._head: LlamaHead | None = None
        self._using = threading.Lock()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        rows = hidden.detach().reshape(-1, self.in_features).float().numpy()
        with self._using:
            if self._head is None:
                self._head = LlamaHead(self._folder.packed.whole, self._folder.reader(), torch.get_num_threads())
            logits = torch.from_numpy(self._head.logits(rows))
        return logits.view(*hidden.shape[:-1], self.out_features)


class PackedDecoder(PreTrainedModel):  # type: ignore[misc]
    """Embedding, and the layers' stubs; the norm belongs to the head."""

    config_class = PackedConfig

    def __init__(self, config: PackedConfig, folder: PackedFolder, dtype: torch.dtype) -> None:
        super().__init__(config)
        self.embed_tokens = EmbeddingOfBytes(PackedEmbedding(folder.packed.whole, folder.reader()), dtype)
        behind = [Stub(nn.Module()) for _ in range(config.num_hidden_layers - 1)]
        self.layers = RemoteLayers([RemoteLayer(nn.Module()), *behind])

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        past_key_values: Any = None,
        **unused: Any,
    ) -> BaseModelOutputWithPast:
        hidden = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if hidden.requires_grad and torch.is_grad_enabled():
            raise ConfigError(NOT_TUNED)
        for layer in self.layers:
            hidden = layer(hidden)
        return BaseModelOutputWithPast(last_hidden_state=hidden, past_key_values=past_key_values)


class PackedCausalLM(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """See the module. Made by ``load_client_part``."""

    config_class = PackedConfig
    base_model_prefix = "model"

    def __init__(self, config: PackedConfig, folder: PackedFolder, dtype: torch.dtype) -> None:
        super().__init__(config)
        self.model = PackedDecoder(config, folder, dtype)
        self.lm_head = HeadOfBytes(folder, config)
        self.place = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)  # says device and dtype

    def get_input_embeddings(self) -> nn.Module:
        return self.model.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **unused: Any,
    ) -> CausalLMOutputWithPast:
        """As any model for causal language modelling; masks and positions are the layers' on the servers."""
        output = self.model(input_ids, inputs_embeds, past_key_values)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=output.past_key_values)


def load_packed(folder: Path, dtype: torch.dtype) -> PackedCausalLM:
    """Load the client's part of a packed model. Raises ConfigError."""
    weights = PackedFolder(folder)
    weights.require_ends()
    model: PackedCausalLM = PackedCausalLM(read_config(folder), weights, dtype).eval()
    return model
