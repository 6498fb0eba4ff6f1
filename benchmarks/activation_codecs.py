"""What it costs a loss that hidden states and gradients travel between stages in few bits, in one process.

    python -m benchmarks.activation_codecs [--updates 200] [--seeds 0 1 2] [--layers 4] [--width 96]

The model and the texts are those of benchmarks.delay, with AdamW. What enters the first layer, what goes from one stage
to the next in the middle, and what leaves the last layer is coded and decoded again (wire.activations), and so are the
gradients that come back there.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial
from typing import Any

import torch

from benchmarks.delay import OPTIMIZERS, learn, read_rows
from swarmd.wire.activations import decode_untrusted, encode_activations, encode_gradient

CODECS = ("none", "float16", "int8", "int4")


class Border(torch.autograd.Function):
    """Hidden states [b, t, d] as they come through a codec, and their gradients on the way back."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, codec: str) -> torch.Tensor:
        ctx.codec = codec
        return decode_untrusted(encode_activations(hidden, codec), hidden.shape)  # type: ignore[arg-type]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return decode_untrusted(encode_gradient(gradient, ctx.codec), gradient.shape), None  # type: ignore[arg-type]


def cut(model: Any, codec: str) -> None:
    """Put borders before the first layer, in the middle, and behind the last one."""

    def enter(module: Any, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (Border.apply(inputs[0], codec), *inputs[1:])  # type: ignore[no-untyped-call]

    layers = model.model.layers
    for module in (layers[0], layers[len(layers) // 2], model.model.norm):
        module.register_forward_pre_hook(enter)


def main() -> None:
    """Print the table of docs/training-in-stages.md."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=200)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=96)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = read_rows()
    print("| activations | loss | more |\n|---|---|---|")
    first = 0.0
    for codec in CODECS:
        prepare = partial(cut, codec=codec)
        loss = statistics.mean(learn(OPTIMIZERS["adamw"], 0, options, seed, rows, prepare) for seed in options.seeds)
        first = first or loss
        print(f"| {codec} | {loss:.3f} | {100 * (loss / first - 1):+.1f} % |", flush=True)


if __name__ == "__main__":
    main()
