"""The loss that balances experts, where a model's configuration asks for it (``output_router_logits``).

Families add it to the loss of a batch, and it is no sum over rows: experts that one row uses more are balanced by
another row. So that gradients do not depend on how rows are divided among peers, it is taken of each row by itself,
as transformers does for a batch of one row.
"""

from __future__ import annotations

from typing import Any

from swarmd.errors import ConfigError

FLAG = "output_router_logits"
FACTORS = ("router_aux_loss_coef", "aux_loss_coef")  # as families call it


def is_balanced(model: Any) -> bool:
    """Does this model's configuration ask for the loss?"""
    return any(getattr(config, FLAG, False) for config in _configs(model))


def leave_out(model: Any) -> None:
    """Do without the loss."""
    for config in _configs(model):
        if hasattr(config, FLAG):
            setattr(config, FLAG, False)


def balance_factor(model: Any) -> float:
    """Return how much of the loss counts; 0: it is not asked for. Raises ConfigError if the family does not say."""
    if not is_balanced(model):
        return 0.0
    places = (model, *_configs(model))
    candidates = [getattr(place, name, None) for place in places for name in FACTORS]
    factor = next((f for f in candidates if f is not None), None)
    if factor is None:
        raise ConfigError(
            "config.json asks for the loss that balances experts (output_router_logits), and this family does not say "
            "how much of it counts: set output_router_logits to false to train without it"
        )
    return float(factor)


def _configs(model: Any) -> tuple[Any, ...]:
    return model.config.get_text_config(decoder=True), model.config
