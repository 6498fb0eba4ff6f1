"""Followers as a daemon of another machine starts them, at seats on loopback."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys

from swarmd.node.worker.forkserver import ForkedProcess
from swarmd.protocol.wire import messages, worker
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.teams import TeamSeat
from swarmd.protocol.wire.worker import FollowTeam, LoadSpan, Seated
from swarmd.wire.pinned_tls import SEND_BUFFER_BYTES
from tests.real import forks

HOST = "127.0.0.1"
MODULE = "swarmd.compute.teams.far_follower"
COMMAND = f"from {MODULE} import main; main()"


class FarFollower:
    """One process, and the daemon's end of its socket."""

    def __init__(self, load: LoadSpan) -> None:
        self._connection, theirs = socket.socketpair()
        file = theirs.fileno()
        self.process: subprocess.Popen[bytes] | ForkedProcess
        if forks.IS_ON:
            self.process = ForkedProcess(forks.server(*forks.WORKER), MODULE, ["{0}"], [file], os.environ)
        else:
            self.process = subprocess.Popen([sys.executable, "-c", COMMAND, str(file)], pass_fds=[file])
        theirs.close()
        self._decoder = FrameDecoder()
        self._connection.sendall(messages.encode_frame(FollowTeam(load, (HOST,))))

    def seat(self) -> TeamSeat:
        said = self.next()
        assert isinstance(said, Seated)
        return TeamSeat(HOST, said.ticket)

    def next(self) -> worker.WorkerMessage:
        """What it says next."""
        while True:
            data = self._connection.recv(SEND_BUFFER_BYTES)
            assert data, "it has ended"
            for frame in self._decoder.feed_untrusted(data):
                return worker.decode(frame.header)

    def close(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._connection.close()
