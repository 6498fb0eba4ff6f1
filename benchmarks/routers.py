"""Seconds until a member at home is reachable again: its router forgets, grants little, or is the second in a row.

    python -m benchmarks.routers [--seconds 140]

Network namespaces (tests.real.netlab; needs root, ip, nft and miniupnpd). Each home has a bridge of containers and a
tunnel beside its LAN, as people's machines do. Every half second somebody outside makes a TCP connection to the port
that leads there. All routers restart at once and forget what they were asked for. Behind two routers no port helps:
there the member counts as reachable while relays hold a place for it. A last row: an address to listen on that the
machine gets later.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from swarmd.config import DEFAULT_LISTEN
from tests.real import netlab
from tests.real.harness import Volunteer, local_swarm
from tests.real.netlab import Lab, Place

LOOK_S = 0.5  # between two attempts to connect
START_WITHIN_S = 120.0  # to be reachable for the first time
LEASE_S = 121  # by PCP: as little as the router daemon grants
BRIDGE = "ip link add docker0 type bridge && ip addr add 172.17.0.1/16 dev docker0 && ip link set docker0 up"
TUNNEL = "ip tuntap add tun0 mode tun && ip addr add 10.8.0.2/24 dev tun0 && ip link set tun0 up"
VPN = "/ip4/10.8.1.2/tcp/4118"


@dataclass
class Case:
    """One home: what is done to its router, and how it is told whether somebody outside reaches the member."""

    name: str
    strike: Callable[[], object]
    is_reached: Callable[[], bool]
    away_s: list[float] = field(default_factory=list)
    back_s: float = 0.0

    def look(self, since_s: float) -> None:
        """Note one attempt, so many seconds after the blow."""
        if not self.is_reached():
            self.away_s.append(since_s)
            self.back_s = 0.0
        elif not self.back_s:
            self.back_s = since_s

    def row(self) -> str:
        """What was seen, as a line of a table."""
        if not self.away_s:
            return f"| {self.name} | 0: it was reachable all the time |"
        return f"| {self.name} | {f'{self.back_s:.0f}' if self.back_s else 'not within the time'} |"


def connects(place: Place, host: str, port: int) -> bool:
    """Does a new TCP connection from a place lead to somebody?"""
    command = ["timeout", "1", "bash", "-c", f"exec 3<>/dev/tcp/{host}/{port}"]
    return subprocess.run([*place.inside, *command], capture_output=True).returncode == 0


def home_of(router: Place, name: str) -> Place:
    """A machine at home that has more interfaces than its LAN's."""
    place = router.home(name)
    place.do(f"{BRIDGE} && {TUNNEL}")
    return place


def has_relays(member: Volunteer) -> bool:
    """Do relays hold a place for a member?"""
    return bool(member.ask("status")["reach"]["relays"])


def is_at(member: Volunteer, address: str) -> bool:
    """Does a member name an address?"""
    return any(named.startswith(address) for named in member.ask("status")["addresses"])


def wait_until(is_so: Callable[[], bool], within_s: float) -> float:
    """Wait until something is so; returns how long that took. Raises SystemExit."""
    begun = time.monotonic()
    while not is_so():
        if time.monotonic() - begun > within_s:
            sys.exit("a member was not reachable to begin with")
        time.sleep(LOOK_S)
    return time.monotonic() - begun


def measure(lab: Lab, folder: Path, seconds: float) -> list[str]:
    """Rows of the table."""
    with local_swarm(folder) as swarm:
        outside = lab.public("relay0")
        routers = {"UPnP": lab.router("asked"), "PCP": lab.router("scant")}
        routers["UPnP"].open_ports("UPnP")
        routers["PCP"].open_ports("PCP", granted_s=LEASE_S)
        second = lab.router("outer").router("inner", lan="10.9.9")
        second.open_ports("UPnP")
        places = {kind: home_of(router, kind) for kind, router in (*routers.items(), ("second", second))}

        def start(place: Place, listen: str = DEFAULT_LISTEN) -> Volunteer:
            return swarm.add("--no-serve", listen=listen, inside=place.inside)

        start(outside)
        start(lab.public("relay1"))
        members = {kind: start(place) for kind, place in places.items()}
        late = start(lab.public("late"), f"/ip4/0.0.0.0/tcp/4117,{VPN}")

        def is_open(kind: str) -> bool:
            return connects(outside, routers[kind].address, 4117)

        cases = [
            Case("restarts and forgets (UPnP, an hour granted)", routers["UPnP"].forget_ports, lambda: is_open("UPnP")),
            Case(
                "restarts and forgets (PCP, two minutes granted)", routers["PCP"].forget_ports, lambda: is_open("PCP")
            ),
            Case("the same, behind another router", second.forget_ports, lambda: has_relays(members["second"])),
        ]
        for case in cases:
            wait_until(case.is_reached, START_WITHIN_S)
        for kind, member in members.items():
            first = member.ask("status")["addresses"][0]
            assert f"/{places[kind].address}/" in first, f"{kind} announces {first} first, not its LAN's address"
        scant = Case("grants two minutes at a time (PCP)", lambda: None, cases[1].is_reached)
        watch([scant], LEASE_S + 10.0)
        for case in cases:
            case.strike()
        watch(cases, seconds)
        assert not is_at(late, VPN)
        lab.of("late").do("ip tuntap add vpn mode tun && ip addr add 10.8.1.2/24 dev vpn && ip link set vpn up")
        late_s = wait_until(lambda: is_at(late, VPN), START_WITHIN_S)
        arrived = f"| an address to listen on comes after the start | {late_s:.0f} |"
        return [*(case.row() for case in (scant, *cases)), arrived]


def watch(cases: list[Case], seconds: float) -> None:
    """Look again and again whether each is reached."""
    begun = time.monotonic()
    while time.monotonic() - begun < seconds:
        for case in cases:
            case.look(time.monotonic() - begun)
        time.sleep(LOOK_S)


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=140.0, help="how long to watch after the routers restarted")
    seconds = parser.parse_args().seconds
    if why := netlab.missing():
        sys.exit(why)
    with netlab.laid() as lab, tempfile.TemporaryDirectory() as folder:
        rows = measure(lab, Path(folder), seconds)
    print("\n".join(["| the router | seconds until it is reachable again |", "|---|---|", *rows]))


if __name__ == "__main__":
    main()
