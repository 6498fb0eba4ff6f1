"""When two machines' outputs for the same input count as equal: errors and bounds.

Machines differ in the last bits, so that bytes prove nothing; but the error of one token, relative to what the span
itself added to it, lies far below that of other weights, skipped blocks or another context. What each bound sees and
does not see was measured: docs/trust.md. numpy only; values are float32 [b, t, d].
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from swarmd.values import Decision

Floats = NDArray[np.float32]
N_PROJECTED = 16  # numbers of a token, 64 bytes: errors of projections are those of the whole within a factor of 2


@dataclass(frozen=True, slots=True)
class Bound:
    """What honest machines stay below: one ``token``'s error, and that of all but a tenth (``typical``).

    What adds less than ``floor`` of a token's own size is held against that: there rounding alone is as large.
    """

    token: float
    typical: float
    floor: float


MOST_TOKENS = 16  # from so many tokens on a tenth of them is more than an accident
# In half precision single tokens of honest mixtures of experts go another way: up to 4 % beyond 5e-2, 0.28 at most.
BOUNDS: Mapping[str, Bound] = {
    "float32": Bound(1e-4, 1e-4, 1e-3),
    "float16": Bound(0.1, 1e-2, 1e-2),
    "bfloat16": Bound(0.5, 5e-2, 5e-2),
}
LARGEST = 0.5  # of a bound, through however many hops
ROUNDED = Bound(0.5, 0.15, 5e-2)  # weights rounded on both sides: one by one is not what a prefill computes


# Between stages of a run. With weights that were off by a hundred-thousandth (float32 rounds by less) the largest error
# of a token was 4e-3 as they are and in float16, 7e-3 in int8, 7e-2 in int4; results of other blocks are off by 1.
OF_CODECS: Mapping[str, Bound] = {
    "none": Bound(1e-2, 5e-3, 1e-2),
    "float16": Bound(1e-2, 5e-3, 1e-2),
    "int8": Bound(5e-2, 2e-2, 1e-2),
    "int4": Bound(0.2, 0.1, 1e-2),
}


def bound_of_codec(activations: str) -> Bound:
    """The bound for two holders of a stage in float32, between which and their drivers values travel in a codec."""
    return OF_CODECS[activations]


def bound_of(dtype: str, quantize: str) -> Bound:
    """The bound for two servers of one dtype and one format of weights."""
    return BOUNDS[dtype] if quantize == "none" else ROUNDED


def widen_bound(bound: Bound, n_hops: int) -> Bound:
    """The bound for a chain: each hop rounds, and the next one computes with that."""
    token = min(LARGEST, n_hops * bound.token)
    typical = min(LARGEST, n_hops * bound.typical)
    return replace(bound, token=token, typical=typical)


def measure_errors(inputs: Floats, outputs: Floats, reference: Floats, bound: Bound) -> Floats:
    """The error of each token [t], the largest of its rows: outputs less ``reference``, by what the span added.

    ``inputs``, ``outputs`` and ``reference`` (the outputs that were computed again): [b, t, d].
    """
    # A residual stream: outputs = inputs + what the blocks add. Honest rounding grows with what is added, so
    #
    #     error = |outputs - reference| / |reference - inputs|
    #
    # An error relative to the outputs would miss a skipped block in the middle of a deep model, where the stream is
    # long and each block adds little to it.
    with np.errstate(all="ignore"):  # what is no number is an infinite error
        added = np.linalg.norm(reference - inputs, axis=-1)
        size = np.linalg.norm(inputs, axis=-1)
        floor = np.maximum(bound.floor * size, np.float32(1e-30))
        error = np.linalg.norm(outputs - reference, axis=-1)
        ratio = np.nan_to_num(error / np.maximum(added, floor), nan=np.inf)
    largest: Floats = ratio.max(axis=0).astype(np.float32)
    return largest


def project_tokens(values: Floats, seed: int) -> Floats:
    """A seeded random projection of each token [b, t, d] to [b, t, 16], of about the same length."""
    d = values.shape[-1]
    directions = np.random.default_rng(seed).standard_normal((d, N_PROJECTED), dtype=np.float32)
    scale = np.float32(np.sqrt(N_PROJECTED))
    projection: Floats = (values @ directions / scale).astype(np.float32)
    return projection


def is_equal(token_errors: Floats, bound: Bound) -> Decision[bool]:
    """Are tokens with these errors the same?"""
    n = len(token_errors)
    worst = float(token_errors.max(initial=0.0))
    if worst > bound.token:
        n_beyond = int((token_errors > bound.token).sum())
        return Decision(False, f"{n_beyond} of {n} tokens differ, by {worst:.2g}; bound {bound.token:g}")
    tenth = float(np.quantile(token_errors, 0.9)) if n >= MOST_TOKENS else 0.0
    if tenth > bound.typical:
        return Decision(False, f"a tenth of {n} tokens differ by {tenth:.2g} and more; bound {bound.typical:g}")
    return Decision(True, f"{n} tokens, the largest error {worst:.2g}; bound {bound.token:g}")
