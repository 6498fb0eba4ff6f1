"""Real daemons as real processes on loopback, for tests that kill things.

Every process that is started here is ended here, by its id. Homes live in the test's own temporary folder.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from swarmd.home.founder import Founder
from swarmd.home.membership import MembershipFiles
from swarmd.home.models import ModelFolders
from swarmd.home.paths import Home
from swarmd.node.worker.forkserver import VARIABLE, ForkedProcess
from swarmd.plan.chains.routing import Hop
from swarmd.protocol.membership import invite as invites
from swarmd.values import ModelId, PeerId, Span
from tests.real import forks

COMMAND = "swarmd_cli.main"
READY_TIMEOUT_S = 60.0
MAX_INVITED_BY = 16  # addresses in an invite
INVITED_FOR_S = 86_400  # longer than any test or siege


@dataclass
class Volunteer:
    """One daemon process, of module ``program``, and its home. ``inside`` goes before it (tests.real.netlab)."""

    home: Home
    arguments: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    inside: tuple[str, ...] = ()
    program: str = COMMAND
    process: subprocess.Popen[bytes] | ForkedProcess | None = None

    @property
    def peer(self) -> PeerId:
        return MembershipFiles(self.home).identity().peer_id

    @property
    def worker_pid(self) -> int:
        return int(self.ask("status")["worker"]["pid"])

    def start(self) -> None:
        arguments = ["--home", str(self.home.folder), "up", *self.arguments]
        environment = {**os.environ, "SWARMD_THREADS": "1", "HF_HUB_OFFLINE": "1", **self.environment}
        with (self.home.folder / "daemon.log").open("ab") as log:
            if forks.IS_ON and not self.inside and self.program == COMMAND:
                environment = {VARIABLE: forks.server(*forks.WORKER), **environment}
                server = forks.server(*(forks.TRAINER if "--no-serve" in self.arguments else forks.DAEMON))
                self.process = ForkedProcess(
                    server, "swarmd_cli.main", arguments, [log.fileno()], environment, outputs=1
                )
                return
            command = [*self.inside, sys.executable, "-m", self.program, *arguments]
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=environment, start_new_session=True
            )

    def signal(self, number: int, what: str = "daemon") -> None:
        """Send a signal to the daemon, its worker, or both."""
        assert self.process is not None
        if what in ("worker", "both"):
            os.kill(self.worker_pid, number)
        if what in ("daemon", "both"):
            os.kill(self.process.pid, number)

    @property
    def is_listening(self) -> bool:
        """Does its control socket take connections? A moment before that it is there and does not."""
        with socket.socket(socket.AF_UNIX) as connection:
            return connection.connect_ex(str(self.home.socket)) == 0

    def ask(self, path: str, method: str = "GET", **query: str) -> dict[str, Any]:
        unencrypted = httpx.HTTPTransport(uds=str(self.home.socket), verify=False)  # else it reads certificates: 20 ms
        with httpx.Client(transport=unencrypted, timeout=20) as http:
            answer = http.request(method, f"http://swarmd/v1/{path}", params=query)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    def log(self) -> str:
        return (self.home.folder / "daemon.log").read_text()

    def stop(self) -> None:
        """End the daemon and, by its session, whatever it started."""
        if self.process is None:
            return
        for number in (signal.SIGCONT, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
        self.process.wait()
        self.process = None


@dataclass
class LocalSwarm:
    """A founder and volunteers on loopback."""

    folder: Path
    volunteers: list[Volunteer] = field(default_factory=list)

    def add(
        self,
        *arguments: str,
        models: dict[str, Path] | None = None,
        listen: str = "/ip4/127.0.0.1/tcp/0",
        inside: tuple[str, ...] = (),
        **environment: str,
    ) -> Volunteer:
        """Start a volunteer; the first one founds the swarm."""
        volunteer = self.prepare(*arguments, models=models, listen=listen, **environment)
        volunteer.inside = inside
        volunteer.start()
        self.wait(lambda: volunteer.is_listening, "its control socket", volunteer)
        return volunteer

    def prepare(
        self,
        *arguments: str,
        models: dict[str, Path] | None = None,
        listen: str = "/ip4/127.0.0.1/tcp/0",
        **environment: str,
    ) -> Volunteer:
        """Make a volunteer's home; it is not started."""
        home = Home(self.folder / f"peer{len(self.volunteers)}")
        if not self.volunteers:
            Founder(home).found("test")
        else:
            self.join(home)
        for name, model_folder in (models or {}).items():
            add_model(home, name, model_folder)
        volunteer = Volunteer(home, ("--listen", listen, *arguments), environment)
        self.volunteers.append(volunteer)
        return volunteer

    def join(self, home: Home) -> None:
        founder = self.volunteers[0]
        from swarmd.protocol.membership.identity import Identity

        ticket = Founder(founder.home).invite(self.addresses(), INVITED_FOR_S)
        MembershipFiles(home).enter(ticket, Identity.generate(), MembershipFiles(founder.home).catalog_raw())

    def invite(self) -> str:
        return invites.encode(Founder(self.volunteers[0].home).invite(self.addresses(), INVITED_FOR_S))

    def addresses(self) -> tuple[str, ...]:
        found = []
        for volunteer in self.volunteers:
            if volunteer.process is not None and volunteer.is_listening:
                found += volunteer.ask("status")["addresses"]
        return tuple(found)[:MAX_INVITED_BY]

    def serving(self, *spans: tuple[int, int], model: str = "demo", **more: Any) -> list[Volunteer]:
        """Start one volunteer for each span and wait until all see all online."""
        started = [self.add("--serve", model, "--blocks", f"{a}:{b}", **more) for a, b in spans]
        self.wait_online()
        return started

    def wait_online(self) -> None:
        """Wait until every worker is online and everybody's view says so, with addresses that are true."""
        live = [v for v in self.volunteers if v.process is not None]

        views: dict[PeerId, list[dict[str, Any]]] = {}

        def all_online() -> bool:
            own: dict[PeerId, dict[str, Any]] = {}
            try:
                for v in live:
                    own[v.peer] = v.ask("status")
                    if not _is_online(own[v.peer]):
                        return False
                for v in live:
                    views[v.peer] = v.ask("peers")["peers"]
                    if not _agrees(views[v.peer], own):
                        return False
            except httpx.TransportError:
                return False  # a control socket is not there yet
            return True

        try:
            self.wait(all_online, "all volunteers online in all views")
        except AssertionError as error:
            says = {v.peer: v.ask("status")["directory"] for v in live if v.is_listening}
            error.add_note(f"what each of them sees: {views}, and says of it: {says}")
            raise

    def wait(
        self, condition: Any, what: str, volunteer: Volunteer | None = None, within_s: float = READY_TIMEOUT_S
    ) -> None:
        deadline = time.monotonic() + within_s
        while not condition():
            for v in [volunteer] if volunteer else self.volunteers:
                if v.process is not None and v.process.poll() is not None:
                    raise AssertionError(f"a daemon ended while waiting for {what}:\n{v.log()[-2000:]}")
            assert time.monotonic() < deadline, f"no {what} within {within_s} s:\n" + self.logs()
            time.sleep(0.05)

    def logs(self) -> str:
        return "\n".join(f"--- {v.home.folder.name}\n{v.log()[-1500:]}" for v in self.volunteers)

    def hops(self, *parts: tuple[Volunteer, int, int]) -> tuple[Hop, ...]:
        return tuple(Hop(v.peer, Span(a, b)) for v, a, b in parts)

    def stop(self) -> None:
        for volunteer in self.volunteers:
            volunteer.stop()


def _is_online(status: dict[str, Any]) -> bool:
    """Is nothing on its way to be served, not even before there is a worker for it?"""
    return not {hosting["state"] for hosting in status["hosting"]} & {"choosing", "fetching", "loading", "failed"}


def _agrees(rows: list[dict[str, Any]], own: dict[PeerId, dict[str, Any]]) -> bool:
    """Does one view hold everybody's present addresses and states?"""
    seen = {row["peer"]: row for row in rows}
    for peer, status in own.items():
        row = seen.get(peer)
        if row is None or row["addresses"] != status["addresses"]:
            return False
        if status["worker"] is not None and [s["state"] for s in row["spans"]] != ["online"]:
            return False
    return True


@contextmanager
def local_swarm(folder: Path) -> Iterator[LocalSwarm]:
    swarm = LocalSwarm(folder)
    try:
        yield swarm
    finally:
        swarm.stop()


def add_model(home: Home, name: str, folder: Path) -> None:
    """What ``swarmd models add`` does, without a process; an adapter's base is the model "m", a draft's is "demo"."""
    import msgspec

    from swarmd.protocol.models import adapter, draft, manifest
    from swarmd.weights.library import Library

    catalog = MembershipFiles(home).catalog()
    kind, base = "models", ""
    if adapter.is_adapter(folder):
        kind, base = "adapters", catalog.models["m"][0]
        read = adapter.read_folder(folder, ModelId(base))
    elif draft.is_draft(folder):
        kind, base = "drafts", catalog.models["demo"][0]
        read = draft.read_folder(folder, ModelId(base))
    else:
        read = manifest.read_folder(folder)
    model = manifest.model_id(read)
    Library(home.weights, {}).keep_manifest(read, folder)
    ModelFolders(home).add(model, folder)
    if Founder(home).is_here:
        entry = (model, base or read.n_blocks)
        Founder(home).change_catalog(lambda c: msgspec.structs.replace(c, **{kind: {**getattr(c, kind), name: entry}}))
