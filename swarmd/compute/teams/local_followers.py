"""A team's followers on this machine: processes of the worker's own, which end with it.

When one of them is gone the worker ends, too: its daemon starts another, with new followers, and sessions are replayed
as after any worker's death.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence

import msgspec

from swarmd.compute.hardware.device import use_threads
from swarmd.compute.teams.measuring import SliceTimes, measure_slices, read_times, time_sums
from swarmd.compute.teams.orders import Measure, Order, Take, encode, receive, send
from swarmd.compute.teams.shared_sums import SharedSums, make_shared
from swarmd.compute.teams.sums import Adding, TeamBroken
from swarmd.protocol.wire.worker import LoadSpan
from swarmd.resources import count_processors
from swarmd.wire.tensors import DTYPES


class LocalFollowers:
    """Processes of this machine that follow this one: as many as there are weights, of threads in their proportion."""

    def __init__(self, request: LoadSpan, weights: Sequence[float]) -> None:
        self.weights = tuple(weights)
        self.seats: tuple[int, ...] = ()
        self.missing: list[str] = []
        self._request = request
        self._n = len(weights)
        memory = make_shared(self._n)
        self.sums: Adding = SharedSums(memory, 0, self._n, self._is_whole)
        self._processes: list[subprocess.Popen[bytes]] = []
        self._connections: list[socket.socket] = []
        self._threads = thread_shares(request.threads or count_processors(), self.weights)
        for member in range(1, self._n):
            ours, theirs = socket.socketpair()
            files = (theirs.fileno(), memory)
            numbers = map(str, (*files, member, self._n))
            command = [sys.executable, "-m", "swarmd.compute.teams.follower", *numbers]
            self._processes.append(subprocess.Popen(command, pass_fds=files))
            theirs.close()
            self._connections.append(ours)
        os.close(memory)

    def measure(self) -> list[tuple[SliceTimes, float]]:
        """See Followers."""
        for member, connection in enumerate(self._connections, 1):
            self._send(connection, Measure(self._of(member), member, self._n))
        use_threads(self._threads[0])
        times = [measure_slices(self._request, self._n, has_own_memory=False)]
        for connection in self._connections:
            times.append(read_times(self._receive(connection)))
        sum_s = time_sums(self.sums, times[0].width, DTYPES[self._request.dtype])
        return [(each, sum_s if member else 0.0) for member, each in enumerate(times)]

    def take(self, weights: Sequence[float]) -> None:
        """See Followers. Processes of one machine are taken all, or none."""
        assert len(weights) == self._n
        self.weights = tuple(weights)
        use_threads(self._threads[0])
        for member, connection in enumerate(self._connections, 1):
            self._send(connection, Take(self._of(member), member, self.weights))

    def _of(self, member: int) -> LoadSpan:
        return msgspec.structs.replace(self._request, threads=self._threads[member])

    def _is_whole(self) -> bool:
        return all(process.poll() is None for process in self._processes)

    def wait_until_ready(self) -> tuple[int, ...]:
        """See Followers: their memory is the leader's."""
        return ()

    def close(self) -> None:
        """See Followers."""
        for process in self._processes:
            process.kill()
            process.wait()

    def tell(self, order: Order) -> None:
        """See Followers."""
        for connection in self._connections:
            self._send(connection, order)

    def _send(self, connection: socket.socket, order: Order) -> None:
        try:
            send(connection, encode(order))
        except OSError as error:
            raise TeamBroken(f"a member of the team is gone ({error})") from None

    def _receive(self, connection: socket.socket) -> bytes:
        try:
            return receive(connection)
        except (OSError, EOFError):
            raise TeamBroken("a member of the team is gone") from None


def thread_shares(n_threads: int, weights: tuple[float, ...]) -> list[int]:
    """How many threads each member has of those that a worker may use: by its weight, one at least."""
    return [max(1, round(n_threads * weight / sum(weights))) for weight in weights]
