"""Strangers without any key, against a real daemon: sockets that blast, and sockets that only stay open."""

from __future__ import annotations

import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from tests.real.harness import LocalSwarm, Volunteer, local_swarm

N_BLASTERS = 24
BLAST_S = 4.0
MOST_OVER_IDLE_MIB = 40
N_HANDLES = 64


@pytest.fixture
def volunteer(tmp_path: Path) -> Iterator[Volunteer]:
    with local_swarm(tmp_path) as swarm:
        yield alone(swarm)


def alone(swarm: LocalSwarm) -> Volunteer:
    started = swarm.add()
    swarm.wait(lambda: bool(started.ask("status")["addresses"]), "its address", started)
    return started


def ports(volunteer: Volunteer) -> list[int]:
    """Where it listens: libp2p and direct channels."""
    assert volunteer.process is not None
    return [
        c.laddr.port for c in psutil.Process(volunteer.process.pid).net_connections() if c.status == psutil.CONN_LISTEN
    ]


def pss_mib(volunteer: Volunteer) -> float:
    assert volunteer.process is not None
    return float(psutil.Process(volunteer.process.pid).memory_full_info().pss / 2**20)


def test_connections_that_blast_before_they_show_a_key_fill_nothing(volunteer: Volunteer) -> None:
    """Random bytes are lengths, too: of messages that would fill the machine."""
    stop, n_bytes = threading.Event(), [0]

    def blast(port: int) -> None:
        junk = os.urandom(1 << 18)
        while not stop.is_set():
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=3) as connection:
                    while not stop.is_set():
                        connection.sendall(junk)
                        n_bytes[0] += len(junk)
            except OSError:
                continue

    listening = ports(volunteer)
    assert len(listening) == 2
    idle = pss_mib(volunteer)
    blasters = [threading.Thread(target=blast, args=(listening[n % 2],), daemon=True) for n in range(2 * N_BLASTERS)]
    for blaster in blasters:
        blaster.start()
    peak, until = idle, time.monotonic() + BLAST_S
    while time.monotonic() < until:
        peak = max(peak, pss_mib(volunteer))
        time.sleep(0.05)
    assert volunteer.ask("status")["addresses"]
    stop.set()
    for blaster in blasters:
        blaster.join(5)
    assert n_bytes[0] > 10 * 2**20, "nothing was sent"
    assert peak - idle < MOST_OVER_IDLE_MIB


def test_the_last_file_handles_are_kept_for_what_is_needed(volunteer: Volunteer) -> None:
    assert volunteer.process is not None
    resource.prlimit(volunteer.process.pid, resource.RLIMIT_NOFILE, (N_HANDLES, N_HANDLES))
    with ExitStack() as stack:
        for port in ports(volunteer):
            for _ in range(N_HANDLES):
                stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=3))
                assert volunteer.ask("status")["addresses"]
    assert volunteer.ask("status")["addresses"]
