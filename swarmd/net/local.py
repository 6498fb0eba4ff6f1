"""Ask a daemon on this machine by its control socket. Standard library only: every verb of the command line pays."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from swarmd.errors import DaemonNotRunning, SwarmError


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a Unix socket."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        super().__init__("swarmd", timeout=timeout_s)
        self._path = path

    def connect(self) -> None:
        """What the standard library's does for TCP, for a Unix socket."""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


def ask_daemon(
    path: Path,
    verb: str,
    query: Mapping[str, str] | None = None,
    method: str = "GET",
    timeout_s: float = 15.0,
) -> dict[str, Any]:
    """Ask one thing of the control API at the socket ``path``.

    Raises DaemonNotRunning when nobody answers there, and a SwarmError with the daemon's own exit code when it refuses.
    """
    connection = _UnixConnection(path, timeout_s)
    try:
        connection.request(method, f"/v1/{verb}?{urlencode(query or {})}")
        answer = connection.getresponse()
        body: dict[str, Any] = json.loads(answer.read())
    except TimeoutError:
        raise DaemonNotRunning(f"the daemon at {path} did not answer within {timeout_s:.0f} s") from None
    except (OSError, http.client.HTTPException, ValueError):
        raise DaemonNotRunning(f"no daemon answers at {path}: start it with swarmd up") from None
    finally:
        connection.close()
    if answer.status != 200:
        error = SwarmError(body.get("error", "the daemon refused"))
        error.exit_code = body.get("exit_code", 1)
        raise error
    return body
