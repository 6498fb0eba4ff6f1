"""Processes that fork from one with everything imported: the second start of a program takes a tenth of a second.

``python -m swarmd.node.worker.forkserver SOCKET MODULE...`` imports the modules and forks for each program that asks at
the socket (mode 0600: its owner only). A child lives as long as the connection that asked for it is open. Where
``SWARMD_FORK_SERVER`` names the socket of such a server with torch loaded, workers are started by it. The tests start
hundreds of them so.
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

VARIABLE = "SWARMD_FORK_SERVER"
MAX_REQUEST_BYTES = 256 * 1024  # read at a time; a request is a line: an environment and some arguments
LOOK_S = 0.02  # how late the end of a child is told at most
_INT = array.array("i").itemsize


class ForkedProcess:
    """A child of the fork server, as ``subprocess.Popen`` shows one: pid, poll, wait, send_signal."""

    def __init__(
        self,
        server: str,
        module: str,
        arguments: Sequence[str],
        files: Sequence[int],
        environment: Mapping[str, str],
        outputs: int = 0,
    ) -> None:
        """Run ``module.main()`` with ``arguments``; "{0}" stands for the child's number of the first of ``files``.

        The first ``outputs`` of them (1 or 2) become its standard output and error. Raises OSError when no server
        answers.
        """
        self.returncode: int | None = None
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(server)
        request = {"module": module, "arguments": [*arguments], "environment": {**environment}, "outputs": outputs}
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
        self._connection.sendmsg([json.dumps(request).encode() + b"\n"], [rights])
        self._received = b""
        self.pid = int(self._line())

    def poll(self) -> int | None:
        """The exit status once it has ended."""
        if self.returncode is None:
            has_ended, _, _ = select.select([self._connection], [], [], 0)
            if has_ended:
                self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end and return its exit status. Raises TimeoutError."""
        if self.returncode is None:
            self._connection.settimeout(timeout)
            self.returncode = int(self._line() or -signal.SIGKILL)
            self._connection.close()
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send a signal, unless it is known to have ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def _line(self) -> bytes:
        while b"\n" not in self._received:
            data = self._connection.recv(64)
            if not data:
                return b""
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line


#     caller --one line of JSON, with file descriptors (SCM_RIGHTS)--> server: fork
#     caller <--the child's pid---------------------------------------
#     caller <--its exit status, when it ends-------------------------
#     the caller closes the connection, or dies ---------------------> server: kill the child
#
# The server never becomes a thread or an event loop: a fork copies one thread only, and a lock that another one held
# would stay locked in the child. ``gc.freeze`` keeps the collector from touching, and so copying, the shared pages.
def serve(path: Path, modules: Sequence[str]) -> None:
    """Import, then fork for each caller, until standard input closes."""
    gc.disable()
    for module in modules:
        importlib.import_module(module)
    gc.freeze()
    with socket.socket(socket.AF_UNIX) as listener:
        os.umask(0o177)
        listener.bind(str(path))
        listener.listen(64)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # the daemon drains first, and closes standard input then
        print("ready", flush=True)
        server = os.getpid()
        children: dict[int, socket.socket] = {}
        try:
            _answer(listener, children)
        finally:
            if os.getpid() == server:  # however it ends: Ctrl-C in a terminal reaches this process too
                for pid in children:
                    _end(pid)


def _answer(listener: socket.socket, children: dict[int, socket.socket]) -> None:
    while True:
        sources = [sys.stdin, listener, *children.values()]
        ready, _, _ = select.select(sources, [], [], LOOK_S)
        for pid, connection in list(children.items()):
            if connection in ready:  # the caller is gone, and has no use for its child
                _end(pid)
        _tell_ends(children)
        if sys.stdin in ready and not os.read(0, 1):
            return
        if listener in ready:
            connection, _ = listener.accept()
            with contextlib.suppress(OSError, ValueError, KeyError):
                _fork(listener, connection, children)


def _end(pid: int) -> None:
    for number in (signal.SIGKILL, signal.SIGCONT):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _tell_ends(children: dict[int, socket.socket]) -> None:
    while children:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with children.pop(pid) as connection, contextlib.suppress(OSError):
            connection.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))


def _fork(
    listener: socket.socket,
    connection: socket.socket,
    children: dict[int, socket.socket],
) -> None:
    data, rights, _, _ = connection.recvmsg(MAX_REQUEST_BYTES, socket.CMSG_LEN(8 * _INT))
    files = array.array("i")
    for _, _, passed in rights:
        files.frombytes(passed[: len(passed) - len(passed) % _INT])
    while not data.endswith(b"\n"):
        data += connection.recv(MAX_REQUEST_BYTES)
    request = json.loads(data)
    pid = os.fork()
    if not pid:
        for inherited in (listener, connection, *children.values()):
            inherited.close()
        _become(request, list(files))
    for file in files:
        os.close(file)
    children[pid] = connection
    connection.sendall(b"%d\n" % pid)


def _become(request: dict[str, Any], files: list[int]) -> None:
    """Be the child, to the end."""
    status = 1
    try:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # a session of its own: no terminal's end reaches it
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)
        if outputs := files[: request["outputs"]]:
            os.dup2(outputs[0], 1)
            os.dup2(outputs[-1], 2)
        os.environ.clear()
        os.environ.update(request["environment"])
        arguments = [text.format(*files) for text in request["arguments"]]
        sys.argv = [request["module"], *arguments]
        random.seed()
        gc.enable()
        importlib.import_module(request["module"]).main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - what Python does at the end of a program
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    serve(Path(sys.argv[1]), sys.argv[2:])
