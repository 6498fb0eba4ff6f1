"""Grammars of one model, made of schemas that strangers send: tried by a child process first, few at once.

A schema that the library never gets done with costs its sender one child for some seconds, and nobody else a turn: each
key has one schema tried at a time, and what was found is remembered.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import trio
from tokenizers import Tokenizer

from swarmd.client.text.child import Child, ChildFailed
from swarmd.errors import SwarmUnavailable
from swarmd.gateway.generation.grammar import Grammar
from swarmd.gateway.generation.json_schema import BadSchema, normalise_schema
from swarmd.gateway.generation.schema_compiler import Compiler
from swarmd.gateway.generation.turns import QueueFull

MOST_SCHEMA_BYTES = 65_536  # of a schema as text; compiling one takes a tenth of a second at most
MOST_S = 5.0  # of one schema, on a busy machine
STARTED_WITHIN_S = 60.0  # a vocabulary is read, on a busy machine
N_CHILDREN = 2  # of one model, each some 50 MiB: one goes on while a stranger's schema holds the other
MOST_WAITING_OF_KEY = 64  # schemas that wait to be tried: as many as requests that wait for a turn
MOST_REMEMBERED = 256  # schemas; agents send the same ones with every request
CHILD = "swarmd.gateway.generation.schema_compiler"


class Grammars:
    """Makes grammars for one vocabulary. A context manager: its children end on the way out."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        path: Path,
        vocabulary: int,
        eos: int,
        child: str = CHILD,
    ) -> None:
        """``path`` is the tokenizer's file."""
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._eos = eos
        self._compiler: Compiler | None = None
        make_child = partial(Child, child, str(path), str(vocabulary), str(eos))
        self._idle = [make_child() for _ in range(N_CHILDREN)]
        self._all = tuple(self._idle)
        self._room = trio.Semaphore(N_CHILDREN)
        self._lines: dict[str, trio.Lock] = {}
        self._in_line: Counter[str] = Counter()
        self._remembered: OrderedDict[bytes, str] = OrderedDict()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for child in self._all:
            await child.end()

    async def of_schema(
        self,
        schema: dict[str, Any],
        key: str = "",
        timeout_s: float = MOST_S,
    ) -> Grammar:
        """Make the grammar of what fits a JSON schema.

        Raises BadSchema, QueueFull, and SwarmUnavailable where this machine is too busy now. Cancelled, the child that
        tries the schema ends with it.
        """
        try:
            text = json.dumps(normalise_schema(schema))
        except RecursionError:
            raise BadSchema("its values go too deep") from None
        if len(text) > MOST_SCHEMA_BYTES:
            raise BadSchema(f"it has {len(text)} characters, at most {MOST_SCHEMA_BYTES} are taken")
        # What was found wrong is remembered as a text, "" where nothing was. Only then is it compiled here, where it
        # takes the same time and room as in the child.
        digest = hashlib.sha256(text.encode()).digest()
        if digest not in self._remembered:
            error_text = await self._try_schema(text, key, timeout_s)
            self._remembered[digest] = error_text
            if len(self._remembered) > MOST_REMEMBERED:
                self._remembered.popitem(last=False)
        self._remembered.move_to_end(digest)
        if self._remembered[digest]:
            raise BadSchema(self._remembered[digest])
        return await trio.to_thread.run_sync(self._compile, text)

    def _compile(self, text: str) -> Grammar:
        if self._compiler is None:
            self._compiler = Compiler(self._tokenizer, self._vocabulary, self._eos)
        return Grammar(self._compiler.compile(text), self._vocabulary)

    async def _try_schema(self, text: str, key: str, timeout_s: float) -> str:
        """Return what is wrong with a schema, "" if nothing. Raises BadSchema where that depends on the moment."""
        # A sender could send schemas that each hold a child for all of its time. His own turn bounds that: one child
        # at most is his, and the other one goes on for everybody else.
        async with self._turn(key), self._room:
            child = self._idle.pop()
            try:
                if not child.is_running:
                    await self._start(child)
                answer = await child.ask({"schema": text}, timeout_s)
            except ChildFailed as failure:
                if failure.is_late:
                    raise BadSchema(
                        f"compiling it took more than {timeout_s:g} s, and was given up: make it simpler"
                    ) from None
                raise BadSchema(
                    "compiling it ended the process that did it, most likely out of memory: make it simpler"
                ) from None
            finally:
                self._idle.append(child)
        return str(answer.get("error", ""))

    async def _start(self, child: Child) -> None:
        try:
            hello = await child.start(STARTED_WITHIN_S)
        except ChildFailed:
            raise SwarmUnavailable("the process that compiles schemas did not start: this machine is busy") from None
        if "error" in hello:
            await child.end()
            raise BadSchema(str(hello["error"]))

    @asynccontextmanager
    async def _turn(self, key: str) -> AsyncIterator[None]:
        """One schema of a key at a time. Raises QueueFull."""
        if self._in_line[key] >= MOST_WAITING_OF_KEY:
            raise QueueFull(f"{MOST_WAITING_OF_KEY} schemas of this key wait already")
        self._in_line[key] += 1
        try:
            async with self._lines.setdefault(key, trio.Lock()):
                yield
        finally:
            self._in_line[key] -= 1
            if not self._in_line[key]:
                del self._in_line[key]
                del self._lines[key]
