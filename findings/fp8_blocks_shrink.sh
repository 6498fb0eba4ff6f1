#!/usr/bin/env bash
# transformers 5.23.0: FP8 weights whose rows are no multiple of a block are unpacked with other blocks than they have.
#
# Guess: with weight_block_size 128 a scale belongs to its 128 rows, and the last one to what is left: of 192 rows the
# second scale is for rows 128 to 191, as those who write such files mean it, and as DeepSeek's own reader has it.
# Seen (2026-11-29, CPU): the rows are divided by the rows of scales, so that both blocks have 96, and nothing is said.
# Where that leaves a rest (576 rows, five rows of scales) it raises.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 transformers==5.23.0
"$folder/venv/bin/python" - <<'PYTHON'
import torch
import transformers
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

print("transformers", transformers.__version__)
ones = torch.ones(192, 128).to(torch.float8_e4m3fn)
scales = torch.tensor([[1.0], [2.0]])  # of rows 0 to 127, and of rows 128 to 191
unpacked = Fp8Dequantize(None)._dequantize_one(ones, scales, torch.float32)
changes_at = int((unpacked[:, 0] == 2).nonzero()[0])
print("the second scale begins at row", changes_at, "and the second block at row 128")
assert changes_at == 96, "that has changed"
try:
    Fp8Dequantize(None)._dequantize_one(torch.ones(576, 128).to(torch.float8_e4m3fn), torch.ones(5, 1), torch.float32)
except ValueError as error:
    print("576 rows:", error)
else:
    raise AssertionError("that has changed")
PYTHON
