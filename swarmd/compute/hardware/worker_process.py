"""A process that computes for its daemon: how it is set up, and the reason that it gives when it ends.

The daemon starts it with one end of a Unix socketpair, and starts another when it ends. Nobody would know why it ended
if it did not say so itself.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from swarmd.logs import configure_child
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.worker import Ending

MOST_WORDS = 500  # characters: a message of the library's and where it came from


def serve_daemon(name: str, serve: Callable[[socket.socket], None]) -> None:
    """Set this process up and serve the socket whose number is its first argument. ``name`` stands before its logs."""
    gc.freeze()  # what importing made stays, and need not be looked at again
    gc.enable()
    configure_child(f"{name} %(process)d: %(message)s", logging.WARNING)
    os.environ["HF_HUB_OFFLINE"] = "1"
    with socket.socket(fileno=int(sys.argv[1])) as connection, _last_words(connection):
        serve(connection)


def describe_error(error: Exception) -> str:
    """Say why a process ends, in MOST_WORDS at most."""
    return f"{type(error).__name__}: {error}"[:MOST_WORDS]


@contextmanager
def _last_words(connection: socket.socket) -> Iterator[None]:
    """Send why this process ends, and let it end; without a word where the daemon has gone."""
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        with suppress(OSError):
            connection.sendall(messages.encode_frame(Ending(reason=describe_error(error))))
        raise
