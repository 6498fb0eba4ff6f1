"""Sets of experts in few bits: each expert's matrices are layers of their own, so that only those chosen are read.

What a family does between the two matrices, and with biases and weights of the choice, is its own: transformers says
how its sets of experts are made (``use_experts_implementation``), and this follows what that says.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from swarmd.compute.linear.layers import quantise_layer
from swarmd.plan.chains.memory import INT8_GROUP


class QuantisedExperts(nn.Module):
    """In place of a set of experts: hidden states [n, d], the experts of each [n, k] and their weights, to [n, d]."""

    def __init__(self, experts: Any, kind: str) -> None:
        super().__init__()
        self._n_experts = len(experts.down_proj)
        self.enter = _split(experts, _name_of_entry(experts), kind)
        self.leave = _split(experts, "down_proj", kind)
        self.rest = experts  # its activation and, in some families, a norm: no matrices any more

    def forward(self, hidden: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Compute each chosen expert once, for all tokens that chose it."""
        n, k = top_k_index.shape
        chosen = top_k_index.reshape(-1)
        order = chosen.argsort(stable=True)
        counts: list[int] = torch.bincount(chosen, minlength=self._n_experts).tolist()
        rows = hidden[order // k]
        weights = top_k_weights.reshape(-1, 1)[order]
        parts = []
        start = 0
        for expert, count in enumerate(counts[: self._n_experts]):
            if count:
                part = slice(start, start + count)
                parts.append(self._compute(expert, rows[part]) * weights[part])
                start += count
        out = torch.cat(parts) if parts else rows[:0]
        if start < n * k:  # chosen by nobody's numbers: experts that are elsewhere
            out = torch.cat([out, out.new_zeros(n * k - start, out.shape[1])])
        back = torch.empty_like(order)
        back[order] = torch.arange(n * k, device=order.device)
        return out[back].view(n, k, out.shape[1]).sum(1).to(hidden.dtype)

    def _compute(self, expert: int, rows: torch.Tensor) -> torch.Tensor:
        family = self.rest
        inner = self.enter[expert](rows)
        inner = family._apply_gate(inner) if family.has_gate else family.act_fn(inner)
        out: torch.Tensor = self.leave[expert](inner)
        return family.post_expert_norm(out) if family.has_post_expert_norm else out


def is_set_of_experts(module: nn.Module) -> bool:
    """Is it one that transformers computes by any implementation, with matrices that kernels of few bits take?"""
    if not hasattr(module, "_is_expert_parallel") or not hasattr(module, "is_transposed"):
        return False
    found = [getattr(module, name, None) for name in (_name_of_entry(module), "down_proj")]
    along = 1 if module.is_transposed else 2
    return all(isinstance(w, nn.Parameter) and w.ndim == 3 and w.shape[along] % INT8_GROUP == 0 for w in found)


def _name_of_entry(experts: Any) -> str:
    """What the first of a set's two tensors is called."""
    return "gate_up_proj" if experts.has_gate else "up_proj"


def _split(experts: Any, name: str, kind: str) -> nn.ModuleList:
    """Make layers of a tensor [experts, ...], which the set loses."""
    weights = experts._parameters.pop(name).detach()
    biases = experts._parameters.pop(f"{name}_bias", None) if experts.has_bias else None
    layers = nn.ModuleList()
    for expert, stored in enumerate(weights):
        weight = stored.T if experts.is_transposed else stored
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        linear.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        if biases is not None:
            linear.bias = nn.Parameter(biases[expert].detach().clone(), requires_grad=False)
        layers.append(quantise_layer(linear, kind))
    return layers
