"""A layer of a cache that is elsewhere: at another server, or at any for a client."""

from __future__ import annotations

from typing import Any

from transformers.cache_utils import DynamicLayer


class AbsentLayer(DynamicLayer):  # type: ignore[misc]
    """Stands for a layer of the library's. What that keeps beside keys and values is not here, nor kept here.

    Some families keep what all blocks share in the first layer of a kind, wherever that is (Qwen 4 Exp's positions).
    """

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.is_sliding = getattr(original, "is_sliding", False)
        kept_beside = {name for name, value in vars(original).items() if value is None}
        self._kept_elsewhere = frozenset(kept_beside - vars(self).keys())

    def __getattr__(self, name: str) -> Any:
        if name in self.__dict__.get("_kept_elsewhere", ()):
            return None
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in self.__dict__.get("_kept_elsewhere", ()):
            super().__setattr__(name, value)
