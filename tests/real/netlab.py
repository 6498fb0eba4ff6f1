"""Homes behind routers, in network namespaces that this process makes and removes: needs root, ``ip`` and ``nft``.

The middle is one namespace that forwards between public hosts, each on a link of its own, and no route leads out of
it. Every home has the same private addresses, as homes do. A router is Linux' own masquerade, which lets in only what
was asked for (a port-restricted NAT): ``cone`` keeps ports, so that others can meet them, ``symmetric`` takes a new one
for each connection; a router behind a router is a carrier's NAT. ``forward`` opens a port by hand. ``six`` gives a
public place IPv6, those behind it addresses of its network: ``shut`` lets in what was asked for, as most routers do.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Nat = Literal["cone", "symmetric"]
Six = Literal["none", "open", "shut"]
MASQUERADE = {"cone": "masquerade", "symmetric": "masquerade fully-random"}
UPNP_CHAINS = """table inet upnp {
    chain forward { type filter hook forward priority -10; jump miniupnpd; }
    chain miniupnpd { }
    chain prerouting { type nat hook prerouting priority -100; jump prerouting_miniupnpd; }
    chain prerouting_miniupnpd { }
    chain postrouting { type nat hook postrouting priority 99; jump postrouting_miniupnpd; }
    chain postrouting_miniupnpd { }
}"""
UPNP = """ext_ifname={outside}
listening_ip=lan
enable_upnp={upnp}
enable_natpmp={pcp}
secure_mode=yes
uuid=00000000-0000-0000-0000-000000000001
upnp_table_name=upnp
upnp_nat_table_name=upnp
upnp_forward_chain=miniupnpd
upnp_nat_chain=prerouting_miniupnpd
upnp_nat_postrouting_chain=postrouting_miniupnpd
min_lifetime=120
max_lifetime={granted_s}
allow 1024-65535 {lan}.0/24 1024-65535
"""
FILTER = "ct state established,related accept"
GUARD_6 = f"""table ip6 guard {{
    chain forward {{ type filter hook forward priority 0; policy drop; {FILTER}; iifname lan accept; }}
}}"""


def missing() -> str:
    """Why namespaces cannot be made here; "" when they can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    absent = [tool for tool in ("ip", "nft") if shutil.which(tool) is None]
    return f"{' and '.join(absent)} is not installed" if absent else ""


def run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout


@dataclass
class Place:
    """One namespace. ``inside`` goes before a command that is to run there."""

    lab: Lab
    name: str
    address: str = ""
    n_within: int = 0
    lan: str = ""
    lan_6: str = ""
    port_daemon: subprocess.Popen[bytes] | None = None

    @property
    def inside(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name)

    def do(self, command: str) -> str:
        return run(*self.inside, "sh", "-c", command)

    def home(self, name: str) -> Place:
        """A machine in this router's home network."""
        self.n_within += 1
        place = self.lab.place(name)
        place.address = f"{self.lan}.{self.n_within + 1}"
        link = self.lab.link(self, place)
        self.do(f"ip link set {link}a master lan && ip link set {link}a up")
        place.do(f"ip addr add {place.address}/24 dev {link}b && ip link set {link}b up")
        place.do(f"ip route add default via {self.lan}.1")
        if self.lan_6:
            place.do(f"ip addr add {self.lan_6}::{self.n_within + 1}/64 dev {link}b nodad")
            place.do(f"ip route add default via {self.lan_6}::1")
        return place

    def router(self, name: str, nat: Nat = "cone", lan: str = "192.168.1") -> Place:
        """A router in this one's network."""
        return self.lab.route(self.home(name), nat, lan)

    def forward(self, port: int, to: Place) -> None:
        """What people set by hand: connections to a port of the router go to a machine at home."""
        self.do(
            "nft add chain ip nat in '{ type nat hook prerouting priority -100; }' && "
            f"nft add rule ip nat in ip daddr {self.address} tcp dport {port} dnat to {to.address}:{port} && "
            f"nft insert rule ip nat forward tcp dport {port} accept"
        )

    def open_ports(self, speaks: Literal["UPnP", "PCP"] = "UPnP", granted_s: int = 86_400) -> None:
        """Let machines of this router's home open ports, by the daemon that many routers have.

        ``granted_s``: at most for so long at a time by PCP, 121 at least.
        """
        outside = self.do("ip -o route show default").split("dev ")[1].split()[0]
        self.do(f"nft '{UPNP_CHAINS}' && nft insert rule ip nat forward ct status dnat accept")
        self.do("ip route add 239.0.0.0/8 dev lan")
        settings = self.lab.folder / f"{self.name}.conf"
        asked = {"upnp": "yes", "pcp": "no"} if speaks == "UPnP" else {"upnp": "no", "pcp": "yes"}
        settings.write_text(UPNP.format(outside=outside, lan=self.lan, granted_s=granted_s, **asked))
        self._start_port_daemon()

    def _start_port_daemon(self) -> None:
        settings, pid_file = (self.lab.folder / f"{self.name}.{kind}" for kind in ("conf", "pid"))
        command = [*self.inside, "miniupnpd", "-d", "-f", str(settings), "-P", str(pid_file)]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.lab.started.append(process)
        self.port_daemon = process

    def opened_ports(self) -> set[int]:
        """Ports that this router forwards because it was asked to."""
        rules = self.do("nft list chain inet upnp prerouting_miniupnpd")
        return {int(port) for port in re.findall(r"dport (\d+)", rules)}

    def forget_ports(self) -> None:
        """Restart as routers do: all that they were asked for is gone."""
        assert self.port_daemon is not None
        self.port_daemon.terminate()
        self.port_daemon.wait()
        self.do("nft flush chain inet upnp prerouting_miniupnpd && nft flush chain inet upnp miniupnpd")
        self._start_port_daemon()


@dataclass
class Lab:
    """All places of one test."""

    prefix: str
    folder: Path
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    middle: Place = field(init=False)
    _links: Iterator[int] = field(default_factory=itertools.count)
    n_public: int = 0

    def place(self, name: str) -> Place:
        place = Place(self, f"{self.prefix}-{name}")
        run("ip", "netns", "add", place.name)
        self.places.append(place)
        place.do("ip link set lo up && sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")
        return place

    def of(self, name: str) -> Place:
        """A place by the name that it was made with."""
        return next(place for place in self.places if place.name == f"{self.prefix}-{name}")

    def link(self, a: Place, b: Place) -> str:
        """A cable between two places; its ends are NAMEa and NAMEb."""
        name = f"l{next(self._links)}"
        run("ip", "link", "add", f"{name}a", "netns", a.name, "type", "veth", "peer", f"{name}b", "netns", b.name)
        return name

    def public(self, name: str, six: Six = "none") -> Place:
        """A machine with a public address of its own."""
        self.n_public += 1
        place = self.place(name)
        link, net = self.link(self.middle, place), f"5.0.{self.n_public}"
        place.address = f"{net}.2"
        self.middle.do(f"ip addr add {net}.1/30 dev {link}a && ip link set {link}a up")
        place.do(f"ip addr add {net}.2/30 dev {link}b && ip link set {link}b up && ip route add default via {net}.1")
        if six != "none":
            net_6 = f"2600:{self.n_public}"
            self.middle.do(f"ip addr add {net_6}::1/64 dev {link}a nodad && ip route add {net_6}:1::/64 via {net_6}::2")
            place.do(f"ip addr add {net_6}::2/64 dev {link}b nodad && ip route add default via {net_6}::1")
        return place

    def narrow(self, place: Place, mtu: int) -> None:
        """Let the way to a public place take smaller packets than its ends send, and lose what would tell them."""
        link = self.middle.do(f"ip -o route get {place.address}").split("dev ")[1].split()[0]
        self.middle.do(
            f"ip link set {link} mtu {mtu} && nft add table ip silent && "
            "nft add chain ip silent out '{ type filter hook output priority 0; }' && "
            "nft add rule ip silent out icmp type destination-unreachable drop"
        )
        place.do(f"ip link set {link[:-1]}b gso_max_segs 1")  # else a cable of Linux hands over many packets as one

    def router(self, name: str, nat: Nat = "cone", lan: str = "192.168.1", six: Six = "none") -> Place:
        """A home's router, with a public address."""
        place = self.public(name, six)
        place.lan_6 = "" if six == "none" else f"2600:{self.n_public}:1"
        if six == "shut":
            place.do(f"nft '{GUARD_6}'")
        return self.route(place, nat, lan)

    def route(self, place: Place, nat: Nat, lan: str) -> Place:
        """Make a place a router of a network behind it."""
        place.lan = lan
        place.do(f"ip link add lan type bridge && ip addr add {lan}.1/24 dev lan && ip link set lan up")
        if place.lan_6:
            place.do(f"ip addr add {place.lan_6}::1/64 dev lan nodad")
        place.do(
            "nft add table ip nat && "
            "nft add chain ip nat out '{ type nat hook postrouting priority 100; }' && "
            f"nft add rule ip nat out oifname != lan {MASQUERADE[nat]} && "
            "nft add chain ip nat forward '{ type filter hook forward priority 0; policy drop; }' && "
            f"nft add rule ip nat forward {FILTER} && nft add rule ip nat forward iifname lan accept && "
            "nft add chain ip nat in_itself '{ type filter hook input priority 0; }' && "
            "nft add rule ip nat in_itself iifname != lan ct state new drop"
        )
        return place


@contextmanager
def laid() -> Iterator[Lab]:
    """A laboratory; everything of it is gone afterwards."""
    folder = tempfile.TemporaryDirectory()
    lab = Lab(f"swarmd{os.getpid()}", Path(folder.name))
    try:
        lab.middle = lab.place("middle")
        for version in (4, 6):
            lab.middle.do(f"ip -{version} route add blackhole default")  # what leads nowhere gets no answer
        yield lab
    finally:
        for process in lab.started:
            process.kill()
            process.wait()
        folder.cleanup()
        for place in lab.places:
            for pid in run("ip", "netns", "pids", place.name).split():
                with_pid = ("kill", "-KILL", pid)
                subprocess.run(with_pid, capture_output=True)
            run("ip", "netns", "del", place.name)
