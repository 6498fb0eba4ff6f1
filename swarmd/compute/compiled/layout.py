"""How a span is described to compiled code: plain numbers, which it takes as constants."""

from __future__ import annotations

from typing import Any

LEVELS = 127  # of int8, of each sign
GROUP = 32  # of a row's weights in 4 bits, as in GGUF's own formats
LEVEL_OF_ZERO = 8  # what a group's zero stands for

# Of a unit for matrices (``tiles``).
SIDE = 16  # rows of a weight that are multiplied at a time, and tokens
STEP = 32  # numbers of each
LEVEL_STEP = 64  # levels
LEVEL_TERMS = 2  # of a token's level: its upper byte and its lower one
MOST_LEVELS = 65_536  # of a row: products of so many bytes, 255 and 127 at most, fit in 32 bits
TERMS = 3  # numbers of bfloat16 for any float32: 8 bits each

# How numbers lie in memory. int8 has a scale for each row; int4 as torch packs it: ROWS rows (``registers``) beside
# each other, byte by byte row i and row i + ROWS / 2; for each GROUP of theirs ROWS scales and ROWS zeros.
FLOAT32, BFLOAT16, FLOAT16, INT8, INT4 = range(5)

SCALE_BYTES = 4  # of keys and values in 8 bits: a float32 lies behind the levels of a token's head
TINIEST = 1e-30  # the largest number of what is rounded, where there is nothing but zeros

# The activation of an MLP's gate.
SILU, GELU_TANH = range(2)

# What a block's row of the table of addresses holds; 0 is nothing. A weight's scales and bias stand further on.
NORM, QUERY, KEY, VALUE, OUT, MLP_NORM, GATE, UP, DOWN, QUERY_NORM, KEY_NORM = range(11)
SCALES, BIAS, N_ADDRESSES = 11, 22, 33

# What the numbers of a span's shape are: heads, heads that are kept, how wide one is and the MLP; how weights are
# stored, and what is kept; the activation.
HEADS, KEPT_HEADS, HEAD, INNER, STORED, KEPT, CURVE = range(7)


def n_shared(shape: Any) -> int:
    """Numbers of a token that threads share: queries and what they mix, keys and values, gate and what goes up."""
    heads, kept_heads, head, inner = (int(n) for n in shape[:STORED])
    return 2 * (heads * head + kept_heads * head + inner)
