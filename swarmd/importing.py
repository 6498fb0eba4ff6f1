"""Importing torch and transformers makes hundreds of thousands of objects, all of which stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import what is large: looking for cycles among what stays takes a fifth of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
