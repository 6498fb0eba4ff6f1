"""The gateway of this home as a process beside the daemon: started, started again when it ends, ended with it.

It has torch and the daemon has not, so it is a program of its own; it ends by itself when the pipe to its standard
input closes, which the death of a daemon does.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import trio

from swarmd.config import SUPERVISED
from swarmd.status import GatewayStatus

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 1.0  # before it is started again; twice as long each time, up to
LONGEST_PAUSE_S = 60.0  # so often at least is tried again what may have been mended
STEADY_S = 60.0  # it ran so long: what ended it was not how it starts
END_WITHIN_S = 3.0  # once told to


def command(folder: Path) -> list[str]:
    """The command line of a home's gateway."""
    return [sys.executable, "-P", "-m", "swarmd_cli.main", "--home", str(folder), "gateway"]


#     run: start --> running --ends--> a pause --> start again
#
# The pause doubles each time it ends soon, so that a gateway that cannot start (a port that is taken, a broken setting)
# costs nothing, and is back within a minute once that is mended. The last line of its log says why it ended.
@dataclass(slots=True)
class GatewayProcess:
    """Runs one command for as long as the daemon lives; ``snapshot`` says how that goes."""

    command: Sequence[str]
    listen: str
    log: Path
    state: str = "starting"
    why: str = "the daemon has just started"
    pid: int | None = None
    restarts: int = 0

    def snapshot(self) -> GatewayStatus:
        return GatewayStatus(
            state=self.state,
            why=self.why,
            listen=self.listen,
            pid=self.pid,
            restarts=self.restarts,
        )

    async def run(self) -> None:
        """Keep it running until cancelled."""
        pause_s = FIRST_PAUSE_S
        while True:
            begun = trio.current_time()
            why = await self._run_once()
            if trio.current_time() - begun > STEADY_S:
                pause_s = FIRST_PAUSE_S
            self.state = "ended"
            self.pid = None
            self.why = f"{why}; it is started again in {pause_s:.0f} s"
            logger.warning("the gateway ended: %s", self.why)
            await trio.sleep(pause_s)
            pause_s = min(LONGEST_PAUSE_S, 2 * pause_s)
            self.restarts += 1

    async def _run_once(self) -> str:
        """Run it to its end; returns what it said last."""
        environment = {**os.environ, SUPERVISED: "1"}
        try:
            log = self.log.open("wb")
        except OSError as error:
            return f"{self.log} cannot be written: {error.strerror}"
        with log:
            process = await trio.lowlevel.open_process(
                list(self.command), stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment
            )
        self.state = "running"
        self.pid = process.pid
        self.why = f"see {self.log}"
        try:
            code = await process.wait()
        finally:
            with trio.CancelScope(shield=True):
                await _end(process)
        log_lines = self.log.read_text(errors="replace", encoding="utf-8").strip().splitlines()
        if code and log_lines:
            return log_lines[-1].removeprefix("swarmd: ")[:200]
        return f"it ended with {code}"


async def _end(process: trio.Process) -> None:
    if process.returncode is None:
        process.terminate()
        with trio.move_on_after(END_WITHIN_S):
            await process.wait()
    if process.returncode is None:
        process.kill()
        await process.wait()
    if process.stdin is not None:
        await process.stdin.aclose()
