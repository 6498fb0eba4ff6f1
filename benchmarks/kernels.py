"""One linear layer by each kernel that torch has for it on this CPU, for the few rows of a decode pass.

python -m benchmarks.kernels

Weights are read from memory: so many layers take turns that no cache holds them. Microseconds a layer, one thread,
the median of several rounds; the error is that of one layer's output, relative.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from swarmd.compute.linear.formats import INT4, INT8
from swarmd.compute.linear.layers import QuantisedLinear
from swarmd.compute.linear.packed import HALF, ONEDNN, DynamicInt8Linear, PackedLinear
from swarmd.compute.linear.quantize import relative_error

SHAPES = ((576, 1536), (1536, 576), (576, 49_152), (2048, 5632), (4096, 4096))  # in x out
ROWS = (1, 2, 4, 8, 16)
RESIDENT_BYTES = 200 * 2**20
Kernel = Callable[[torch.Tensor], torch.Tensor]


def plain(weight: torch.Tensor) -> Kernel:
    return lambda hidden: functional.linear(hidden, weight)


def _layer(weight: torch.Tensor) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight = nn.Parameter(weight, requires_grad=False)
    return linear


def packed(weight: torch.Tensor) -> Kernel:
    return PackedLinear(_layer(weight), ONEDNN).compute


def half(weight: torch.Tensor) -> Kernel:
    return PackedLinear(_layer(weight), HALF).compute


def bfloat16(weight: torch.Tensor) -> Kernel:
    kept = weight.bfloat16()
    return lambda hidden: functional.linear(hidden.bfloat16(), kept)


def bfloat16_packed(weight: torch.Tensor) -> Kernel:
    compute = PackedLinear(_layer(weight.bfloat16()), ONEDNN).compute
    return lambda hidden: compute(hidden.bfloat16())


def int8(weight: torch.Tensor) -> Kernel:
    return QuantisedLinear(_layer(weight), INT8).compute


def dynamic_int8(weight: torch.Tensor) -> Kernel:
    return DynamicInt8Linear(QuantisedLinear(_layer(weight), INT8)).compute


def int4(weight: torch.Tensor) -> Kernel:
    return QuantisedLinear(_layer(weight), INT4).compute


KERNELS: dict[str, Callable[[torch.Tensor], Kernel]] = {
    "float32": plain,
    "float32 packed": packed,
    "float32, weights float16": half,
    "bfloat16": bfloat16,
    "bfloat16 packed": bfloat16_packed,
    "int8": int8,
    "int8, both": dynamic_int8,
    "int4": int4,
}


def microseconds(kernels: list[Kernel], hidden: torch.Tensor, rounds: int) -> float:
    taken = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        for kernel in kernels:
            kernel(hidden)
        taken.append((time.perf_counter() - begun) / len(kernels))
    return 1e6 * statistics.median(taken[1:])


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print("| in x out | kernel | " + " | ".join(f"{n} rows" for n in ROWS) + " | error |")
    print("|---|---|" + "---|" * (len(ROWS) + 1))
    for n_in, n_out in SHAPES:
        n_layers = max(1, RESIDENT_BYTES // (4 * n_in * n_out))
        weights = [torch.randn(n_out, n_in) / n_in**0.5 for _ in range(n_layers)]
        probe = torch.randn(16, n_in)
        expected = functional.linear(probe, weights[0])
        for name, make in KERNELS.items():
            kernels = [make(weight) for weight in weights]
            times = [microseconds(kernels, torch.randn(n, n_in), rounds) for n in ROWS]
            error = relative_error(kernels[0](probe), expected)
            shown = " | ".join(f"{t:.0f}" for t in times)
            print(f"| {n_in} x {n_out} | {name} | {shown} | {error:.1e} |", flush=True)


if __name__ == "__main__":
    main()
