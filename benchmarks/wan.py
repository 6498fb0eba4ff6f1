"""A wide-area network on one machine: proxies that delay and throttle each peer and direction. No root needed.

    python benchmarks/wan.py [--mbit 100] [--one-way-ms 50] [--seconds 20]

Every peer announces the address of its proxy. A proxy looks up which process opened a connection, so that what a
peer sends is charged to its own uplink and to the receiver's downlink, over all connections together. Delay is one
way and stated. First use: how much of the link one bulk stream of swarmd's libp2p reaches.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import psutil
import trio

from swarmd.net.api import TaskStatus
from swarmd.net.libp2p.host import HostOptions, Libp2pNetwork
from swarmd.protocol.membership.identity import Identity

CHUNK_BYTES = 16 * 1024
QUEUE_S = 0.05
PSK = b"w" * 32


@dataclass
class Pipe:
    """One direction of one peer's link: bytes leave one after the other, over all connections."""

    bytes_per_s: float
    free_at: float = 0.0

    def pass_through(self, n_bytes: int, earliest: float) -> float:
        """Return when the last of ``n_bytes`` is through, if they may start at ``earliest``."""
        self.free_at = max(self.free_at, earliest) + n_bytes / self.bytes_per_s
        return self.free_at


@dataclass
class Peer:
    """A peer's uplink and downlink, and the delay from it to the middle of the network."""

    name: str
    up: Pipe
    down: Pipe


@dataclass
class Wan:
    """The network. ``who`` tells whose process a local TCP port belongs to."""

    one_way_s: float
    who: Callable[[int], str]
    peers: dict[str, Peer] = field(default_factory=dict)

    def add(self, name: str, up_bytes_per_s: float, down_bytes_per_s: float) -> None:
        self.peers[name] = Peer(name, Pipe(up_bytes_per_s), Pipe(down_bytes_per_s))

    async def serve(self, name: str, target_port: int, task_status: TaskStatus[int]) -> None:
        """Proxy for one peer: whoever connects here reaches ``target_port`` as over the network."""

        async def handle(near: trio.SocketStream) -> None:
            try:
                far = await trio.open_tcp_stream("127.0.0.1", target_port)
            except OSError:  # the peer is not up
                await near.aclose()
                return
            caller = self.who(near.socket.getpeername()[1])
            async with far, near, trio.open_nursery() as nursery:
                nursery.start_soon(self._carry, near, far, self.peers[caller], self.peers[name], nursery)
                nursery.start_soon(self._carry, far, near, self.peers[name], self.peers[caller], nursery)

        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        task_status.started(listeners[0].socket.getsockname()[1])
        await trio.serve_listeners(handle, listeners)

    async def _carry(
        self, source: trio.SocketStream, sink: trio.SocketStream, sender: Peer, receiver: Peer, nursery: trio.Nursery
    ) -> None:
        waiting: deque[tuple[float, bytes]] = deque()
        changed = trio.Event()

        async def deliver() -> None:
            nonlocal changed
            while True:
                while waiting:
                    at, data = waiting[0]
                    await trio.sleep_until(at)
                    await sink.send_all(data)
                    waiting.popleft()
                changed = trio.Event()
                await changed.wait()

        nursery.start_soon(_quietly, deliver)
        try:
            while data := await source.receive_some(CHUNK_BYTES):
                now = trio.current_time()
                left = sender.up.pass_through(len(data), now)
                arrives = receiver.down.pass_through(len(data), left + self.one_way_s)
                waiting.append((arrives, data))
                changed.set()
                queued_s = max(left, arrives - self.one_way_s) - now  # routers do not hold more than so much
                if queued_s > QUEUE_S:
                    await trio.sleep(queued_s - QUEUE_S)
            while waiting:
                await trio.sleep(self.one_way_s / 4)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            pass
        nursery.cancel_scope.cancel()


async def _quietly(function: Callable[[], object]) -> None:
    try:
        await function()  # type: ignore[misc]
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        return


def owner_of_port(pids: dict[int, str], default: str) -> Callable[[int], str]:
    """Name the peer whose process (or a child of it) holds a local TCP port."""

    def who(port: int) -> str:
        for connection in psutil.net_connections("tcp"):
            if connection.laddr and connection.laddr.port == port and connection.pid in pids:
                return pids[connection.pid]
        return default

    return who


async def receive(task_status: TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    """The far side: print the address, then count what arrives on a bulk stream until its end."""
    network = Libp2pNetwork(Identity(b"r" * 32), PSK, HostOptions(("/ip4/127.0.0.1/tcp/0",)))
    done = trio.Event()

    async def count(stream: object) -> None:
        n_bytes, begun = 0, 0.0
        while data := await stream.receive():  # type: ignore[attr-defined]
            begun = begun or time.perf_counter()
            n_bytes += len(data)
        print(n_bytes, time.perf_counter() - begun, flush=True)
        done.set()

    network.set_handler("bulk", count)
    async with network.running():
        print(network.addresses()[0], flush=True)
        await done.wait()


async def measure(mbit: float, one_way_s: float, seconds: float) -> float:
    """Send on one bulk stream for ``seconds``; returns the share of the link that was reached."""
    process = subprocess.Popen([sys.executable, __file__, "--receive"], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = process.stdout.readline().strip()
        peer = address.rpartition("/")[2]
        wan = Wan(one_way_s, owner_of_port({process.pid: "receiver"}, "sender"))
        for name in ("sender", "receiver"):
            wan.add(name, mbit * 125_000, mbit * 125_000)
        network = Libp2pNetwork(Identity.generate(), PSK)
        async with network.running(), trio.open_nursery() as nursery:
            port = await nursery.start(partial(wan.serve, "receiver", int(address.split("/")[4])))
            network.learn(peer, (f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}",))  # type: ignore[arg-type]
            stream = await network.open_stream(peer, "bulk")  # type: ignore[arg-type]
            until, block = trio.current_time() + seconds, bytes(1 << 20)
            while trio.current_time() < until:
                await stream.send(block)
            await stream.aclose()
            line = await trio.to_thread.run_sync(process.stdout.readline)
            nursery.cancel_scope.cancel()
    finally:
        process.kill()
        process.wait()
    n_bytes, taken = line.split()
    return 8 * int(n_bytes) / float(taken) / 1e6 / mbit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--one-way-ms", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--receive", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.receive:
        trio.run(receive)
        return
    shares = sorted(trio.run(measure, options.mbit, options.one_way_ms / 1000, options.seconds) for _ in range(3))
    print(f"one bulk stream over {options.mbit:.0f} Mbit/s, {options.one_way_ms:.0f} ms one way:")
    print(f"  share of the link, start-up included, three runs: {', '.join(f'{s:.2f}' for s in shares)}")
    print(f"  median {shares[1]:.2f}")


if __name__ == "__main__":
    main()
