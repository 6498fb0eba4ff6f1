"""Imported by the tests' fork server: what workers compile, or read from disk, when they load, is there already.

``python -m tests.real.warm`` has it on disk before the first of them loads: compiling takes half a minute.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

from torch import nn

from swarmd.compute.few_bits import Int8Head
from swarmd.compute.fused import NotFused, compiled_blocks

with suppress(NotFused):
    compiled_blocks(Path(tempfile.gettempdir()))
    Int8Head(nn.Linear(64, 64, bias=False), Path(tempfile.gettempdir()))
