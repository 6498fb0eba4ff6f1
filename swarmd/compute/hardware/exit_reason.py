"""The reason that a worker gives when it ends, to the daemon that will start it again: else nobody would know it."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from swarmd.protocol.wire import messages
from swarmd.protocol.wire.worker import Ending

MOST_WORDS = 500  # characters: a message of the library's and where it came from


@contextmanager
def last_words(connection: socket.socket) -> Iterator[None]:
    """Send why this process ends, and let it end; without a word where the daemon has gone."""
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception as error:
        with suppress(OSError):
            connection.sendall(messages.encode_frame(Ending(reason=f"{type(error).__name__}: {error}"[:MOST_WORDS])))
        raise
