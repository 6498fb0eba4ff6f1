"""Training together: what daemons and the library's own loops share. No torch here but in ``collaboration``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from swarmd.train.collaboration import Collaboration

__all__ = ["Collaboration"]


def __getattr__(name: str) -> Any:
    """``swarmd.train.Collaboration``, imported when it is asked for: daemons have no torch."""
    if name == "Collaboration":
        from swarmd.train.collaboration import Collaboration

        return Collaboration
    raise AttributeError(name)
