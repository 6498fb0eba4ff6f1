"""How a span is described to compiled code: plain numbers, which it takes as constants.

A page of drawings of what lies where:

    a weight [m, k], row by row                    int8: k bytes a row; the scales [m] float32 lie elsewhere
    +--------- k numbers ---------+                int4: see below
    | row 0                       |
    | row 1                       |
    | ...                         |

    int4, as torch packs it: ROWS rows beside each other, column by column; each byte holds two rows of one column

              byte 0                byte 1                    byte ROWS / 2 - 1
    column 0  row 0 | row ROWS / 2  row 1 | row ROWS / 2 + 1  ...
    column 1  row 0 | row ROWS / 2  ...
              low 4 bits | high 4 bits

    its scales, for each GROUP of columns            ROWS scales, then ROWS zeros, all bfloat16
    value = scale * (quantised value - LEVEL_OF_ZERO) + zero

    a token's head of a key or value in int8         head bytes, then SCALE_BYTES of a float32 scale
"""

from __future__ import annotations

from typing import Any

LEVELS = 127  # of int8, of each sign
GROUP = 32  # of a row's weights in 4 bits, as in GGUF's own formats
LEVEL_OF_ZERO = 8  # the quantised value that stands for a group's zero

# The matrix unit multiplies tiles (``amx``).
SIDE = 16  # rows of a tile: rows of a weight, and tokens, that are multiplied at a time
STEP = 32  # columns of a weight in one step of floating-point numbers
LEVEL_STEP = 64  # columns of a weight in one step of int8
N_BYTE_PARTS = 2  # split parts of a token's quantised value of 16 bits: its upper byte and its lower one
MOST_LEVELS = 65_536  # of a row: products of so many bytes, 255 and 127 at most, fit in 32 bits
N_SPLIT_PARTS = 3  # numbers of bfloat16 for any float32: 8 bits each

# How numbers lie in memory.
FLOAT32, BFLOAT16, FLOAT16, INT8, INT4 = range(5)

SCALE_BYTES = 4  # of keys and values in 8 bits: a float32 lies behind the quantised values of a token's head
TINIEST = 1e-30  # the largest number of what is rounded, where there is nothing but zeros

# The activation of an MLP's gate.
SILU, GELU_TANH = range(2)

# The columns of a block's row in the table of addresses: its weights, then their scales, then their biases.
# An address of 0 says that there is none.
#
#     0    NORM QUERY KEY VALUE OUT MLP_NORM GATE UP DOWN QUERY_NORM KEY_NORM
#     11   SCALES + each of these
#     22   BIAS + each of these
NORM, QUERY, KEY, VALUE, OUT = range(5)
MLP_NORM, GATE, UP, DOWN = range(5, 9)
QUERY_NORM, KEY_NORM = range(9, 11)
SCALES, BIAS, N_ADDRESSES = 11, 22, 33

# The numbers of a span's shape: heads of queries, heads of keys, the width of a head and of the MLP; the formats of
# weights and of the cache; the activation.
HEADS, KEPT_HEADS, HEAD, INNER, STORED, KEPT, CURVE = range(7)


def n_shared(shape: Any) -> int:
    """Count the numbers of a token that threads share: queries and their results, keys and values, gate and up."""
    heads, kept_heads, head, inner = (int(n) for n in shape[:STORED])
    return 2 * (heads * head + kept_heads * head + inner)
