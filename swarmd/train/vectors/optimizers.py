"""How an update changes the parameters: the recipe's (outer) optimizer, the same bits on every machine.

Everything is plain IEEE arithmetic in numpy, elementwise and in one order, or exact in whatever order (``orthogonal``),
so that peers with different processors and devices come to the same bits; whatever is not (a norm, a schedule) travels
in the commit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from swarmd.protocol.runs.recipe import MUON_LENGTH, Diloco, Optimizer, Recipe, is_matrix_of_layer
from swarmd.train.vectors.orthogonal import orthogonalise

Vector = npt.NDArray[np.floating]


@dataclass(frozen=True, slots=True)
class MatrixRange:
    """Where a tensor of two or more dimensions lies in the vector; ``is_of_layer``: Muon is for it."""

    start: int
    end: int
    shape: tuple[int, ...]
    is_of_layer: bool


def matrix_ranges(tensors: Iterable[tuple[str, tuple[int, ...], int, int]]) -> list[MatrixRange]:
    """Say where matrices lie, of tensors by name, shape, start and end (``VectorLayout.tensor_ranges``)."""
    return [
        MatrixRange(start, end, shape, is_matrix_of_layer(name, shape))
        for name, shape, start, end in tensors
        if len(shape) > 1
    ]


class OuterOptimizer:
    """Steps of all members alike on ``parameters``, with ``moments`` that all keep; ``matrices`` are what decays.

    An update is ``step`` for one block of the vector after the other, and then ``finish``.
    """

    def __init__(
        self, recipe: Recipe, parameters: Vector, moments: Mapping[str, Vector], matrices: Sequence[MatrixRange]
    ) -> None:
        self._recipe = recipe
        self._parameters = parameters
        self._moments = moments
        self._matrices = matrices
        has_muon = recipe.optimizer.kind == "muon" and not recipe.steps_inside
        self._of_muon = [matrix for matrix in matrices if matrix.is_of_layer] if has_muon else []

    def step(self, block: slice, gradient: Vector, learning_rate: float, steps: int) -> None:
        """Change one block of the parameters by its gradient, which is used up; ``steps`` counts this one."""
        recipe = self._recipe
        parameters = self._parameters[block]
        moments = {name: vector[block] for name, vector in self._moments.items()}
        if recipe.steps_inside:
            _step_nesterov(recipe.diloco, parameters, gradient, moments)
            return
        self._decay_block(block, learning_rate)
        update = _UPDATES[recipe.optimizer.kind]
        for part in self._parts_without_muon(block):
            moments_of_part = {name: vector[part] for name, vector in moments.items()}
            update(recipe.optimizer, parameters[part], gradient[part], moments_of_part, learning_rate, steps)

    def finish(self, gradient_of: Callable[[slice], Vector], learning_rate: float) -> None:
        """Change the matrices that are changed as a whole; ``gradient_of`` gives that of a range of the vector."""
        for matrix in self._of_muon:
            whole = slice(matrix.start, matrix.end)
            _step_muon(
                self._recipe.optimizer,
                self._parameters[whole].reshape(-1, *matrix.shape[-2:]),
                gradient_of(whole).reshape(-1, *matrix.shape[-2:]),
                self._moments["moment1"][whole].reshape(-1, *matrix.shape[-2:]),
                learning_rate,
            )

    def _parts_without_muon(self, block: slice) -> list[slice]:
        """The parts of a block, counted from its start, that are changed element by element."""
        parts = []
        low = block.start
        for matrix in self._of_muon:
            if matrix.end <= low or matrix.start >= block.stop:
                continue
            if matrix.start > low:
                parts.append(slice(low - block.start, matrix.start - block.start))
            low = matrix.end
        if low < block.stop:
            parts.append(slice(low - block.start, block.stop - block.start))
        return parts

    def _decay_block(self, block: slice, learning_rate: float) -> None:
        """Decay the weights of matrices, decoupled (Loshchilov & Hutter 2019, algorithm 2)."""
        weight_decay = self._recipe.optimizer.weight_decay
        if not weight_decay:
            return
        for matrix in self._matrices:
            low = max(matrix.start, block.start)
            high = min(matrix.end, block.stop)
            if low < high:
                self._parameters[low:high] *= 1 - learning_rate * weight_decay


def outer_moments(recipe: Recipe) -> tuple[str, ...]:
    """Name the vectors that all members keep beside the parameters."""
    if recipe.steps_inside:
        return ("momentum",) if recipe.diloco.momentum else ()
    return recipe.optimizer.moments


def centre_of(
    recipe: Recipe,
    moments: Mapping[str, Vector],
    steps: int,
    block: slice = slice(None),
) -> Vector:
    """Compute what the gradients of ``steps`` updates so far have been, lately: the same bits everywhere."""
    optimizer = recipe.optimizer
    is_adamw = optimizer.kind == "adamw"
    name = "moment1" if is_adamw else "momentum"
    decay = optimizer.beta1 if is_adamw else optimizer.momentum
    if name not in moments or not steps:
        return np.zeros(1, recipe.precision)
    weight = 1.0 if is_adamw else 1 - decay  # of each gradient: torch's momentum adds them up as they are
    return moments[name][block] * (weight / (1 - power_by_squaring(decay, steps)))


def _step_sgd(
    optimizer: Optimizer,
    parameters: Vector,
    gradient: Vector,
    moments: dict[str, Vector],
    rate: float,
    steps: int,
) -> None:
    """Step as torch.optim.SGD does without dampening."""
    if optimizer.momentum:
        moments["momentum"] *= optimizer.momentum
        moments["momentum"] += gradient
        gradient = moments["momentum"]
    parameters -= gradient * rate


def _step_muon(optimizer: Optimizer, parameters: Vector, gradient: Vector, momentum: Vector, rate: float) -> None:
    """Step as torch.optim.Muon does, with Nesterov's momentum and steps as long as AdamW's; all are [n, rows, columns].

    The gradients of earlier updates are added up as they are: only the direction counts.
    """
    momentum *= optimizer.momentum
    momentum += gradient
    length = MUON_LENGTH * math.sqrt(max(parameters.shape[-2:])) * rate
    for index in range(len(parameters)):
        direction = orthogonalise(gradient[index] + momentum[index] * optimizer.momentum)
        parameters[index] -= (direction * length).astype(parameters.dtype)


def _step_nesterov(
    outer: Diloco,
    parameters: Vector,
    gradient: Vector,
    moments: dict[str, Vector],
) -> None:
    """Step as torch.optim.SGD does with nesterov=True."""
    if outer.momentum:
        momentum = moments["momentum"]
        momentum *= outer.momentum
        momentum += gradient
        gradient += momentum * outer.momentum
    gradient *= outer.learning_rate
    parameters -= gradient


def _step_adamw(
    optimizer: Optimizer,
    parameters: Vector,
    gradient: Vector,
    moments: dict[str, Vector],
    rate: float,
    steps: int,
) -> None:
    """Step by Kingma & Ba 2015, algorithm 1, with both corrections; powers by squaring, the same on every machine."""
    first = moments["moment1"]
    second = moments["moment2"]
    # In place, and each operation over the whole block: no temporary as large as the model, and the same order of
    # operations on every machine. ``gradient`` holds in turn its square, then the denominator, then the step.
    share = gradient * (1 - optimizer.beta1)
    first *= optimizer.beta1
    first += share
    numerator = first
    correction = 1 - power_by_squaring(optimizer.beta1, steps)
    if optimizer.nesterov:  # what the first moment would be after one more gradient like this one
        share *= (1 - power_by_squaring(optimizer.beta1, steps + 1)) / correction
        numerator = first * optimizer.beta1 + share
        correction = 1 - power_by_squaring(optimizer.beta1, steps + 1)
    second *= optimizer.beta2
    gradient *= gradient
    gradient *= 1 - optimizer.beta2
    second += gradient
    np.sqrt(second, out=gradient)
    gradient /= math.sqrt(1 - power_by_squaring(optimizer.beta2, steps))
    gradient += optimizer.epsilon
    np.divide(numerator, gradient, out=gradient)
    gradient *= rate / correction
    parameters -= gradient


def power_by_squaring(base: float, exponent: int) -> float:
    """Compute ``base ** exponent`` by squaring: pow() of libm differs between machines in the last bit."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


_Update = Callable[[Optimizer, Vector, Vector, dict[str, Vector], float, int], None]
_UPDATES: dict[str, _Update] = {"sgd": _step_sgd, "adamw": _step_adamw, "muon": _step_adamw}
