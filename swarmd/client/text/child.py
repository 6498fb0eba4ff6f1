"""A process of its own for what may hang, end its process or eat memory: JSON lines in, JSON lines out.

Whatever it does harms nobody but the one question: a child that is late or has ended is killed, and started anew for
the next one. What it reads and answers is its module's affair; limits of memory are set by the child (``limit``).
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from typing import Any

import psutil
import trio

from swarmd.errors import SwarmUnavailable

MOST_LINE_BYTES = 64 * 2**20  # of one answer: the ids of the longest prompt, written out


class ChildFailed(Exception):
    """No answer came: it took too long (``is_late``), or the process ended."""

    def __init__(self, is_late: bool) -> None:
        super().__init__("late" if is_late else "ended")
        self.is_late = is_late


# The child runs what anybody may have written, so nothing it does is trusted but a line of JSON in time. Questions and
# answers have no numbers. So an answer that is late would be taken for that of the next question: whenever one question
# does not end with its own answer (too late, ended, cancelled), the child is killed, and started anew for the next.
class Child:
    """One child process, for one question at a time; its user takes care of that.

    ``module`` is run as a program with ``arguments``, and says hello in one line once it can answer.
    """

    def __init__(self, module: str, *arguments: str) -> None:
        self._command = [sys.executable, "-P", "-m", module, *arguments]
        self._process: trio.Process | None = None
        self._buffer = bytearray()

    @property
    def is_running(self) -> bool:
        """False before it was started, and after it failed."""
        return self._process is not None

    async def start(self, within_s: float) -> dict[str, Any]:
        """Start it and return its hello. Raises ChildFailed, and SwarmUnavailable where no process can be had now."""
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        self._buffer.clear()
        try:
            self._process = await trio.lowlevel.open_process(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
            )
        except OSError as error:  # no memory or no process is free at this moment
            raise SwarmUnavailable(f"no process can be started now: {error}") from None
        return await self._exchange_lines(b"", within_s)

    async def ask(
        self,
        question: dict[str, Any],
        within_s: float,
    ) -> dict[str, Any]:
        """Have one question answered. Raises ChildFailed."""
        return await self._exchange_lines(json.dumps(question).encode() + b"\n", within_s)

    async def end(self) -> None:
        """Kill it, if it runs."""
        process = self._process
        self._process = None
        if process is None:
            return
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    await pipe.aclose()

    async def _exchange_lines(self, line: bytes, within_s: float) -> dict[str, Any]:
        """Send a line and take one; a caller that is cancelled leaves no answer for the next one's question."""
        try:
            with trio.fail_after(within_s):
                answer = await self._send_and_receive(line)
        except trio.TooSlowError:
            await self.end()
            raise ChildFailed(is_late=True) from None
        except (OSError, ValueError, trio.BrokenResourceError, trio.ClosedResourceError):
            await self.end()
            raise ChildFailed(is_late=False) from None
        except trio.Cancelled:
            await self.end()
            raise
        return answer

    async def _send_and_receive(self, line: bytes) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if line:
            await self._process.stdin.send_all(line)
        searched = 0
        while (end := self._buffer.find(b"\n", searched)) < 0:
            searched = len(self._buffer)
            part = await self._process.stdout.receive_some()
            if not part or searched > MOST_LINE_BYTES:
                raise ValueError("no answer")
            self._buffer += part
        answer = bytes(self._buffer[:end])
        self._buffer = self._buffer[end + 1 :]
        return dict(json.loads(answer))


def limit(n_bytes: int) -> None:
    """Have this process end rather than take ``n_bytes`` more than it has, and leave no core behind."""
    max_bytes = psutil.Process().memory_info().vms + n_bytes
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
