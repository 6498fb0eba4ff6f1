"""Imported by the tests' fork server: what workers compile, or read from disk, when they load, is there already.

``python -m tests.real.warm`` has it on disk before the first of them loads: compiling takes half a minute.
"""

from __future__ import annotations

import tempfile
from contextlib import suppress
from pathlib import Path

from swarmd.compute.compiled.build import NotFused
from swarmd.compute.passes.precompile import compile_all

with suppress(NotFused):
    compile_all(Path(tempfile.gettempdir()))
