"""A team's followers on this machine: processes of the worker's own, which end with it.

When one of them is gone the worker ends, too: its daemon starts another, with new followers, and sessions are replayed
as after any worker's death.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys

import msgspec

from swarmd.compute.hardware.device import use_threads
from swarmd.compute.teams.orders import Order, Take, encode, send
from swarmd.compute.teams.shared_sums import SharedSums, make_shared
from swarmd.compute.teams.sums import TeamBroken
from swarmd.protocol.wire.worker import LoadSpan
from swarmd.resources import count_processors


class LocalFollowers:
    """Processes of this machine that follow this one."""

    def __init__(self, request: LoadSpan) -> None:
        self.weights = tuple(request.team)
        n = len(self.weights)
        memory = make_shared(n)
        self.sums = SharedSums(memory, 0, n, self._is_whole)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        shares = thread_shares(request.threads or count_processors(), self.weights)
        use_threads(shares[0])
        for member in range(1, n):
            ours, theirs = socket.socketpair()
            numbers = (theirs.fileno(), memory)
            command = [sys.executable, "-m", "swarmd.compute.teams.follower", *map(str, numbers)]
            self._processes.append(subprocess.Popen(command, pass_fds=numbers))
            theirs.close()
            self._connections.append(ours)
            load = msgspec.structs.replace(request, threads=shares[member])
            send(ours, encode(Take(load, member, self.weights)))
        os.close(memory)

    def _is_whole(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def wait_until_ready(self) -> tuple[int, ...]:
        """See led_span.Followers: their memory is the leader's."""
        return ()

    def close(self) -> None:
        """See led_span.Followers."""
        for process in self._processes:
            process.kill()
            process.wait()

    def tell(self, order: Order) -> None:
        """See led_span.Followers."""
        data = encode(order)
        try:
            for connection in self._connections:
                send(connection, data)
        except OSError as error:
            raise TeamBroken(f"a member of the team is gone ({error})") from None


def thread_shares(n_threads: int, weights: tuple[float, ...]) -> list[int]:
    """How many threads each member has of those that a worker may use: by its weight, one at least."""
    return [max(1, round(n_threads * weight / sum(weights))) for weight in weights]
