"""Work that is begun for peers: none of it outlives its owner, and what goes wrong in it ends nothing else."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio

logger = logging.getLogger(__name__)


class Tasks:
    """A nursery that others may start work in at any time: before and after ``open`` nothing is begun.

    While the owner ends, connections that end around it may still ask for work: it is not begun. An error in work that
    a peer caused is logged, and never reaches the program.
    """

    def __init__(self) -> None:
        self._nursery: trio.Nursery | None = None

    @property
    def is_open(self) -> bool:
        """Can work be begun now?"""
        return self._nursery is not None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Take work until the block ends; what is still under way then is cancelled with it, or awaited."""
        async with trio.open_nursery() as self._nursery:
            try:
                yield
            finally:
                self._nursery = None  # before it closes

    def start_soon(
        self,
        function: Callable[..., Awaitable[object]],
        *arguments: Any,
    ) -> trio.CancelScope:
        """Begin work; the scope that is returned ends it alone."""
        scope = trio.CancelScope()
        if self._nursery is not None:
            self._nursery.start_soon(self._run_guarded, scope, function, arguments)
        return scope

    @staticmethod
    async def _run_guarded(
        scope: trio.CancelScope,
        function: Callable[..., Awaitable[object]],
        arguments: tuple[Any, ...],
    ) -> None:
        try:
            with scope:
                await function(*arguments)
        except Exception:
            logger.exception("%s failed", getattr(function, "__qualname__", function))
