"""Followers as a daemon of another machine starts them, at seats on loopback."""

from __future__ import annotations

import socket
import subprocess
import sys

from swarmd.protocol.wire import messages, worker
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.teams import TeamSeat
from swarmd.protocol.wire.worker import FollowTeam, LoadSpan, Seated
from swarmd.wire.pinned_tls import SEND_BUFFER_BYTES

HOST = "127.0.0.1"
COMMAND = "from swarmd.compute.teams.far_follower import main; main()"


class FarFollower:
    """One process, and the daemon's end of its socket."""

    def __init__(self, load: LoadSpan) -> None:
        self._connection, theirs = socket.socketpair()
        command = [sys.executable, "-c", COMMAND, str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
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
        self.process.kill()
        self.process.wait()
        self._connection.close()
