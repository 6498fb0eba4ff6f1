"""What a service manager hears: real datagrams, virtual time."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import MockClock

from swarmd.node.machine.service_manager import ServiceManager


@pytest.fixture(params=["path", "abstract"])
def manager_socket(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[str, socket.socket]]:
    """A manager's address as the environment names it, and its socket."""
    name = str(tmp_path / "notify") if request.param == "path" else f"@swarmd-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as listener:
        listener.bind("\0" + name[1:] if name[0] == "@" else name)
        yield name, listener


async def test_it_hears_of_the_start_the_loop_and_the_end(
    manager_socket: tuple[str, socket.socket], virtual_time: MockClock
) -> None:
    name, listener = manager_socket
    environment = {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "60000000", "WATCHDOG_PID": str(os.getpid()), "HOME": "/"}
    manager = ServiceManager(environment)
    assert environment == {"HOME": "/"}, "no child speaks for the daemon"
    manager.ready("a member of ours")
    assert listener.recv(999) == b"READY=1\nSTATUS=a member of ours"
    with trio.move_on_after(100):
        await manager.run()
    for _ in range(4):  # at 0, 30, 60 and 90 s
        assert listener.recv(999) == b"WATCHDOG=1"
    manager.stopping()
    assert listener.recv(999).startswith(b"STOPPING=1")
    with pytest.raises(BlockingIOError):
        listener.recv(999)


@pytest.mark.parametrize(
    "environment",
    [{}, {"WATCHDOG_USEC": "60000000", "WATCHDOG_PID": "1"}, {"WATCHDOG_USEC": "soon"}, {"NOTIFY_SOCKET": "/nowhere"}],
    ids=["none", "of another process", "no number", "nobody listens"],
)
async def test_without_one_it_is_silent_and_ends(environment: dict[str, str], virtual_time: MockClock) -> None:
    manager = ServiceManager(environment)
    manager.ready("up")
    await manager.run()
    manager.stopping()


def test_the_name_of_a_swarm_gives_the_manager_no_orders(manager_socket: tuple[str, socket.socket]) -> None:
    address, listener = manager_socket
    ServiceManager({"NOTIFY_SOCKET": address}).ready("a member of ours\nMAINPID=1")
    assert listener.recv(999) == b"READY=1\nSTATUS=a member of ours MAINPID=1"
