"""Steps of a recipe's optimizer in the worker, with torch's own, on vectors that it shares with the daemon.

Decayed are matrices only, as everywhere in swarmd; the moments lie where the daemon can read and reset them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from swarmd.protocol.runs.recipe import (
    MUON_LENGTH,
    N_NEWTON_SCHULZ,
    NEWTON_SCHULZ,
    Optimizer,
    is_matrix_of_layer,
)

Tensors = list[torch.Tensor]


def take_step(
    settings: Optimizer,
    names: Sequence[str],
    parameters: Tensors,
    moments: dict[str, Tensors],
    learning_rate: float,
    number: int,
) -> None:
    """Take step ``number``, counted from 1, by the gradients in ``parameters``; changes them and ``moments``."""
    if settings.clip_norm:
        _clip(parameters, settings.clip_norm)
    if settings.kind == "muon":
        of_muon = [i for i, name in enumerate(names) if is_matrix_of_layer(name, tuple(parameters[i].shape))]
        for i in of_muon:
            _step_muon(settings, parameters[i], moments["moment1"][i], learning_rate)
        rest = [i for i in range(len(names)) if i not in set(of_muon)]
        moments = {name: [pieces[i] for i in rest] for name, pieces in moments.items()}
        parameters = [parameters[i] for i in rest]
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if settings.kind != "sgd":
        betas = (settings.beta1, settings.beta2)
        optimizer = torch.optim.AdamW(groups, learning_rate, betas, settings.epsilon)
        for i, parameter in enumerate(parameters):
            optimizer.state[parameter] = {
                "step": torch.tensor(float(number - 1)),
                "exp_avg": moments["moment1"][i],
                "exp_avg_sq": moments["moment2"][i],
            }
    else:
        _decay_weights(groups, learning_rate)
        optimizer = torch.optim.SGD(parameters, learning_rate, settings.momentum)
        for i, parameter in enumerate(parameters):
            if settings.momentum:
                optimizer.state[parameter] = {"momentum_buffer": moments["momentum"][i]}
    optimizer.step()
    for parameter in parameters:
        parameter.grad = None


def _clip(parameters: Tensors, limit: float) -> None:
    """Bring the norm of all gradients to ``limit``, where it is above.

    Torch's own norm of a float32 tensor is short where that is long: of 157 million numbers by 2 % on a CPU
    (findings/long_norms.sh).
    """
    squares = [p.grad.square().sum(dtype=torch.float64) for p in parameters if p.grad is not None]
    norm = float(torch.stack(squares).sum().sqrt())
    if norm > limit:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(limit / norm)


def _decay_weights(groups: list[dict[str, object]], learning_rate: float) -> None:
    """Decay weights apart from the gradient, which torch's SGD does not."""
    with torch.no_grad():
        for parameter in groups[0]["params"]:  # type: ignore[attr-defined]
            parameter.mul_(1 - learning_rate * float(groups[0]["weight_decay"]))  # type: ignore[arg-type]


@torch.no_grad()
def _step_muon(settings: Optimizer, parameter: torch.Tensor, momentum: torch.Tensor, rate: float) -> None:
    """Step as the swarm's own Muon does (train.vectors.optimizers), in the parameter's type."""
    gradient = parameter.grad
    assert gradient is not None
    momentum.mul_(settings.momentum).add_(gradient)
    direction = orthogonalise(gradient + settings.momentum * momentum)
    parameter.mul_(1 - rate * settings.weight_decay)
    parameter.sub_(direction, alpha=MUON_LENGTH * math.sqrt(max(parameter.shape[-2:])) * rate)
    parameter.grad = None


def orthogonalise(matrices: torch.Tensor) -> torch.Tensor:
    """Return U V^T, about, of matrices U S V^T [..., m, n], by five Newton-Schulz steps."""
    is_tall = matrices.shape[-2] > matrices.shape[-1]
    wide: torch.Tensor = matrices.mT if is_tall else matrices
    wide = wide / wide.norm(dim=(-2, -1), keepdim=True).clamp(min=torch.finfo(wide.dtype).tiny)
    a, b, c = NEWTON_SCHULZ
    for _ in range(N_NEWTON_SCHULZ):
        gram = wide @ wide.mT
        wide = a * wide + (b * gram + c * gram @ gram) @ wide
    return wide.mT if is_tall else wide
