#!/usr/bin/env bash
# torch 2.13.0 (CPU) and numpy 2.4.6: the norm of a long float32 vector comes out short, by more than rounding explains.
#
# Guess: sums over long vectors are made pairwise or in several accumulators, as numpy's sum is, so that a norm of 157
# million normal numbers is right to six digits; clipping gradients by it is as exact as float32.
# Seen (2026-11-28, x86-64, AVX2): torch's norm and linalg.vector_norm are 2 % short (squares: 4 %), torch.dot and
# numpy's dot and linalg.norm 0.3 % (squares: 0.5 %). numpy's sum of the squares, and torch's sum in float64, are right.
# So a tied embedding of 150,000 x 1,024, or all parameters in one vector, is clipped less than was asked.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --disable-pip-version-check torch==2.13.0 numpy==2.4.6
"$folder/venv/bin/python" - <<'PYTHON'
import math

import numpy as np
import torch

values = np.random.default_rng(0).standard_normal(157_000_000, dtype=np.float32)
tensor = torch.from_numpy(values)
exact = math.sqrt(math.fsum(float(np.dot(b, b)) for b in np.array_split(values.astype(np.float64), 2_400)))
found = {
    "torch norm": float(tensor.norm()),
    "torch vector_norm": float(torch.linalg.vector_norm(tensor)),
    "torch dot": math.sqrt(float(torch.dot(tensor, tensor))),
    "numpy dot": math.sqrt(float(np.dot(values, values))),
    "numpy norm": float(np.linalg.norm(values)),
    "numpy sum of squares": math.sqrt(float(np.sum(values * values))),
    "torch sum in float64": math.sqrt(float(tensor.square().sum(dtype=torch.float64))),
}
for name, norm in found.items():
    print(f"{name}: {100 * (norm / exact - 1):+.4f} %")
short = [name for name, norm in found.items() if norm < 0.999 * exact]
assert short == ["torch norm", "torch vector_norm", "torch dot", "numpy dot", "numpy norm"], short
assert all(abs(found[name] / exact - 1) < 1e-6 for name in ("numpy sum of squares", "torch sum in float64"))
PYTHON
