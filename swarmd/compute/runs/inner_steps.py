"""Steps of a recipe's optimizer in the worker, with torch's own, on vectors that it shares with the daemon.

Decayed are matrices only, as everywhere in swarmd; the moments lie where the daemon can read and reset them.
"""

from __future__ import annotations

import torch

from swarmd.protocol.runs.recipe import Optimizer

Tensors = list[torch.Tensor]


def take_step(
    settings: Optimizer,
    parameters: Tensors,
    moments: dict[str, Tensors],
    learning_rate: float,
    number: int,
) -> None:
    """Take step ``number``, counted from 1, by the gradients in ``parameters``; changes them and ``moments``."""
    if settings.clip_norm:
        torch.nn.utils.clip_grad_norm_(parameters, settings.clip_norm)
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer
    if settings.kind == "adamw":
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


def _decay_weights(groups: list[dict[str, object]], learning_rate: float) -> None:
    """Decay weights apart from the gradient, which torch's SGD does not."""
    with torch.no_grad():
        for parameter in groups[0]["params"]:  # type: ignore[attr-defined]
            parameter.mul_(1 - learning_rate * float(groups[0]["weight_decay"]))  # type: ignore[arg-type]
