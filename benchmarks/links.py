"""Machines on links of their own, as homes have them, on one computer: what training over the internet is measured on.

    python -m benchmarks.links [--mbit 20 100] [--rtt-ms 50] [--seconds 16]

Each machine is a network namespace with a TUN device, and one process holds all of those: it lets every packet wait
for the sender's uplink, half of a round trip, and the receiver's downlink. A link is a rate and a queue of ``QUEUE_S``
that drops what does not fit, as a home router's does; no packet is lost otherwise, none is reordered, and nothing else
is on the line. The MTU is 1500, but the kernel hands over bursts as they leave a network card with segmentation
offload (a millisecond or so of a stream, headers of each segment counted), else Python could not keep up; such a burst
is queued, or dropped, whole. TCP is CUBIC, whatever the host's own is. Needs root, ``ip`` and /dev/net/tun.

As a program it measures itself, between machines that do nothing else: round trips, the share of a link that one TCP
stream has after its first four seconds, and that each of four has at once, each machine sending to the next.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import heapq
import json
import os
import select
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parent.parent
NET = "10.77.0"
MTU = 1500
QUEUE_S = 0.2  # of a link at its rate: between a home router's worst and what CUBIC needs at these round trips
LEAST_QUEUE_BYTES = 64 * 1024
AT_A_TIME = 64  # packets of one machine, before the others have their turn
MBIT = 125_000
TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0  # <linux/if_tun.h>
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
VNET = struct.Struct("=BBHHHH")  # flags, GSO type, header's length (a hint), segment's size, checksum's start, offset
PORT = 5201  # of the measurement
FIRST_S = 4.0  # of a stream, while it finds its rate
PING = """
import os, socket, struct, sys, time
s = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
s.settimeout(2)
for i in range(int(sys.argv[2])):
    head = struct.pack("!BBHHH", 8, 0, 0, os.getpid() & 0xFFFF, i)
    total = sum(struct.unpack("!4H", head))
    total = ~((total >> 16) + (total & 0xFFFF)) & 0xFFFF
    begun = time.perf_counter()
    s.sendto(head[:2] + struct.pack("!H", total) + head[4:], (sys.argv[1], 0))
    while (got := s.recv(2048))[20] != 0:
        pass
    print(time.perf_counter() - begun, flush=True)
    time.sleep(0.05)
"""
RECEIVE = """
import socket, sys, time
with socket.create_server(("0.0.0.0", int(sys.argv[1]))) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    begun, n, at = time.perf_counter(), 0, None
    while data := connection.recv(1 << 18):
        n += len(data)
        now = time.perf_counter()
        if at is None and now - begun > float(sys.argv[2]):
            at, before = now, n
    print((n - before) / (now - at), flush=True)
"""
SEND = """
import socket, sys, time
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as connection:
    end = time.perf_counter() + float(sys.argv[3])
    while time.perf_counter() < end:
        connection.sendall(bytes(1 << 16))
"""


@dataclass(frozen=True, slots=True)
class Line:
    """A home's link, in Mbit/s of IP packets."""

    up_mbit: float
    down_mbit: float


@dataclass(slots=True)
class Counted:
    """Bytes of IP packets that left a machine's uplink and came by its downlink, and what each queue dropped."""

    sent: int = 0
    received: int = 0
    dropped_up: int = 0
    dropped_down: int = 0

    @property
    def dropped(self) -> int:
        return self.dropped_up + self.dropped_down


@dataclass(slots=True)
class Pipe:
    """One direction of a link: when what is queued has left, at ``rate`` bytes/s."""

    rate: float
    free_at: float = 0.0

    def leaves_at(self, n_bytes: int, now: float) -> float | None:
        """When a packet that comes now has left; None: it does not fit in."""
        waiting_s = max(0.0, self.free_at - now)
        if waiting_s * self.rate + n_bytes > max(LEAST_QUEUE_BYTES, QUEUE_S * self.rate):
            return None
        self.free_at = now + waiting_s + n_bytes / self.rate
        return self.free_at


class Shaper:
    """Moves packets between TUN devices; machine i has the address ``NET``.(i + 1)."""

    def __init__(self, tuns: Sequence[int], lines: Sequence[Line], trip_s: float) -> None:
        self._tuns = tuns
        self._half_s = trip_s / 2
        self._up = [Pipe(line.up_mbit * MBIT) for line in lines]
        self._down = [Pipe(line.down_mbit * MBIT) for line in lines]
        self._counted = [Counted() for _ in lines]
        self._due: list[tuple[float, int, bool, int, int, bytes]] = []  # at, order, is it through, to, size, packet
        self._n = 0

    def run(self) -> None:
        """Until standard input ends; a line there asks for what was counted."""
        machine_of = {tun: i for i, tun in enumerate(self._tuns)}
        while True:
            wait_s = max(0.0, self._due[0][0] - time.monotonic()) if self._due else None
            ready, _, _ = select.select([0, *self._tuns], [], [], wait_s)
            for readable in ready:
                if readable in machine_of:
                    self._take(machine_of[readable])
                elif os.read(0, 4096):
                    print(json.dumps([asdict(counted) for counted in self._counted]), flush=True)
                else:
                    return
            self._move_on()

    def _take(self, machine: int) -> None:
        """Let what a machine sends wait for its uplink."""
        pipe, counted = self._up[machine], self._counted[machine]
        for _ in range(AT_A_TIME):
            try:
                packet = os.read(self._tuns[machine], 1 << 17)
            except BlockingIOError:
                return
            to = receiver_of(packet)
            if to is None or to >= len(self._tuns):
                continue  # it leads nowhere
            size = bytes_on_the_wire(packet)
            if (at := pipe.leaves_at(size, time.monotonic())) is None:
                counted.dropped_up += size
                continue
            counted.sent += size
            self._n += 1
            heapq.heappush(self._due, (at + self._half_s, self._n, False, to, size, packet))

    def _move_on(self) -> None:
        """Let what has crossed wait for a downlink; deliver what has come through that."""
        due = self._due
        while due and due[0][0] <= time.monotonic():
            now, order, is_through, to, size, packet = heapq.heappop(due)
            counted = self._counted[to]
            if is_through:
                counted.received += size
                with suppress(OSError):  # that machine's own buffers are full
                    os.write(self._tuns[to], packet)
            elif (at := self._down[to].leaves_at(size, now)) is not None:
                heapq.heappush(due, (at, order, True, to, size, packet))
            else:
                counted.dropped_down += size


def receiver_of(packet: bytes) -> int | None:
    """Which machine an IPv4 packet (behind its virtual header) is for; None: none of them."""
    net = bytes(int(part) for part in NET.split("."))
    if len(packet) < VNET.size + 20 or packet[VNET.size] >> 4 != 4 or packet[VNET.size + 16 : VNET.size + 19] != net:
        return None
    return packet[VNET.size + 19] - 1 if packet[VNET.size + 19] else None


def bytes_on_the_wire(packet: bytes) -> int:
    """What a burst comes to as packets of the MTU: each has IP's and TCP's headers."""
    _, kind, _, segment, start, _ = VNET.unpack_from(packet)
    n_bytes = len(packet) - VNET.size
    if not kind or not segment:
        return n_bytes
    header = start + (packet[VNET.size + start + 12] >> 4) * 4
    n_segments = -((header - n_bytes) // segment)
    return int(n_bytes + header * (n_segments - 1))


@dataclass
class Machine:
    """One namespace. ``inside`` goes before a command that is to run there."""

    name: str
    address: str

    @property
    def inside(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)


@dataclass
class Links:
    """Machines, and the process between them."""

    shaper: subprocess.Popen[bytes]
    machines: list[Machine] = field(default_factory=list)

    def counted(self) -> list[Counted]:
        """What each machine has sent and received so far."""
        assert self.shaper.stdin is not None
        assert self.shaper.stdout is not None
        self.shaper.stdin.write(b"\n")
        self.shaper.stdin.flush()
        return [Counted(**one) for one in json.loads(self.shaper.stdout.readline())]

    def cpu_s(self) -> float:
        """Seconds that the process between them has computed."""
        ticks = Path(f"/proc/{self.shaper.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


def missing() -> str:
    """Why machines cannot be made here; "" when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if not Path("/dev/net/tun").exists():
        return "there is no /dev/net/tun"
    return "" if shutil.which("ip") else "ip is not installed"


@contextmanager
def laid(lines: Sequence[Line], trip_ms: float) -> Iterator[Links]:
    """Machines, each with a link; they, and what runs in them, are gone afterwards."""
    machines: list[Machine] = []
    tuns: list[int] = []
    with _ended_by_signals():
        try:
            for i in range(len(lines)):
                machine = Machine(f"rig{os.getpid()}-{i}", f"{NET}.{i + 1}")
                machines.append(machine)
                tuns.append(_open(machine, f"rig{os.getpid()}t{i}"))
            told = json.dumps({"tuns": tuns, "lines": [asdict(line) for line in lines], "trip_s": trip_ms / 1000})
            command = [sys.executable, "-m", "benchmarks.links", "--shape", told]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            shaper = subprocess.Popen(command, cwd=ROOT, pass_fds=tuns, **pipes)  # type: ignore[call-overload]
            try:
                yield Links(shaper, machines)
            finally:
                shaper.kill()
                shaper.wait()
        finally:
            for tun in tuns:
                os.close(tun)
            for machine in machines:
                _remove(machine)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM ends this program as Ctrl-C does: what it made is removed."""

    def end(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _do(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr}")
    return done.stdout


def _open(machine: Machine, device: str) -> int:
    """Make a namespace with a TUN device; returns the file that its packets are read from and written to."""
    _do("ip", "netns", "add", machine.name)
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, TUNSETIFF, struct.pack("16sH22x", device.encode(), IFF_TUN | IFF_NO_PI | IFF_VNET_HDR))
    fcntl.ioctl(tun, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    _do("ip", "link", "set", device, "netns", machine.name)
    within = (
        "sysctl -qw net.ipv6.conf.all.disable_ipv6=1 && ip link set lo up && "
        f"ip link set {device} mtu {MTU} up && ip addr add {machine.address}/32 dev {device} && "
        f"ip route add {NET}.0/24 dev {device} src {machine.address} congctl cubic"
    )
    _do(*machine.inside, "sh", "-c", within)
    return tun


def _remove(machine: Machine) -> None:
    for pid in subprocess.run(["ip", "netns", "pids", machine.name], capture_output=True, text=True).stdout.split():
        with suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    subprocess.run(["ip", "netns", "del", machine.name], capture_output=True)


# --- the measurement of itself -----------------------------------------------------------------------------------


def pings(links: Links, n: int = 40) -> list[float]:
    """Round trips from the first machine to the second, in seconds."""
    command = (*links.machines[0].inside, sys.executable, "-c", PING, links.machines[1].address, str(n))
    return [float(line) for line in _do(*command).split()]


def streams(links: Links, ways: Sequence[tuple[int, int]], seconds: float) -> list[float]:
    """Bytes/s of TCP streams that run at the same time, each from one machine to another, but for their beginnings."""
    receivers: list[subprocess.Popen[str]] = []
    senders: list[subprocess.Popen[str]] = []
    try:
        for i, (_, to) in enumerate(ways):
            command = [*links.machines[to].inside, sys.executable, "-c", RECEIVE, str(PORT + i), str(FIRST_S)]
            receivers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        for receiver in receivers:
            assert receiver.stdout is not None
            receiver.stdout.readline()
        for i, (sender, to) in enumerate(ways):
            address, port = links.machines[to].address, str(PORT + i)
            command = [*links.machines[sender].inside, sys.executable, "-c", SEND, address, port, str(seconds)]
            senders.append(subprocess.Popen(command, text=True))
        return [float(receiver.communicate(timeout=seconds + 60)[0]) for receiver in receivers]
    finally:
        for process in [*receivers, *senders]:
            process.kill()
            process.wait()


def measure(mbit: float, rtt_ms: float, seconds: float) -> None:
    with laid([Line(mbit, mbit)] * 4, rtt_ms) as links:
        trips = [1000 * trip for trip in pings(links)]
        told = f"round trip median {statistics.median(trips):.1f} ms, most {max(trips):.1f}"
        print(f"{mbit:g} Mbit/s, {rtt_ms:g} ms: {told}")
        for ways in ([(0, 1)], [(i, (i + 1) % 4) for i in range(4)]):
            before, cpu_s, begun = links.counted(), links.cpu_s(), time.monotonic()
            shares = [rate / MBIT / mbit for rate in streams(links, ways, seconds)]
            took_s = time.monotonic() - begun
            after = links.counted()
            sent = sum(a.sent for a in after) - sum(b.sent for b in before)
            dropped = sum(a.dropped for a in after) - sum(b.dropped for b in before)
            told = " ".join(f"{share:.3f}" for share in shares)
            print(
                f"  {len(ways)} TCP streams at once: {told} of the link each; {sent / 1e6:.1f} MB sent, "
                f"{100 * dropped / (sent + dropped):.2f} % dropped by queues; "
                f"the shaper computed {100 * (links.cpu_s() - cpu_s) / took_s:.0f} % of the time",
                flush=True,
            )


def shape(told: str) -> None:
    """What the process between the machines does."""
    with suppress(PermissionError):
        os.nice(-10)
    gc.disable()  # nothing here refers to itself
    wanted = json.loads(told)
    Shaper(wanted["tuns"], [Line(**line) for line in wanted["lines"]], wanted["trip_s"]).run()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbit", type=float, nargs="+", default=[20.0, 100.0])
    parser.add_argument("--rtt-ms", type=float, default=50.0)
    parser.add_argument("--seconds", type=float, default=16.0)
    parser.add_argument("--shape", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.shape:
        shape(options.shape)
        return
    if why := missing():
        sys.exit(why)
    for mbit in options.mbit:
        measure(mbit, options.rtt_ms, options.seconds)


if __name__ == "__main__":
    main()
