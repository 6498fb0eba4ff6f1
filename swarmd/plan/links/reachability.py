"""Can others connect to this machine? Judged by what several members say who tried (as AutoNAT does), and who relays.

A member tries the address that it sees this peer come from, at the ports that this peer listens on: so it can be used
to knock at nobody else's door, and a port that a router forwards is found without being announced.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Literal

from swarmd.plan.links.dialing import is_private
from swarmd.values import Decision, PeerId, count

N_ASKED = 3  # members, over each version of IP: one may be behind a firewall of its own, or lie
VERSIONS = (4, 6)  # of IP
N_RELAYS = 2  # one may die: the other is there already

Reach = Literal["unknown", "open", "closed"]


@dataclass(frozen=True, slots=True)
class ReachabilityReport:
    """What one member found: the host that it sees this peer at, and which ports of it answered as this peer.

    ``is_neighbour``: it is on a network of this machine, so no router is between.
    """

    reporter: PeerId
    host: str
    open_ports: tuple[int, ...]
    is_neighbour: bool = False


def judge_reachability(answers: Collection[ReachabilityReport], own_hosts: Collection[str]) -> Decision[Reach]:
    """Open when at least half could connect: who shows this peer's key has been here, who could not may be to blame.

    Neighbours only count where nobody else was asked. IPv4 decides where somebody tried it: not all members have IPv6.
    """
    # An answer is a member's word, and one member may lie either way. So each has one vote, several are asked, and a
    # lie costs little: a machine that is wrongly "closed" takes a relay that it did not need.
    if not answers:
        return Decision("unknown", "no member has tried to connect yet")
    outside = _outside_answers(answers, own_hosts)
    counted = [a for a in outside if version_of(a.host) == 4] or outside or answers
    failed = [answer for answer in counted if not answer.open_ports]
    voters = f"{count(len(counted), 'member')}{'' if outside else ' of the same network'} that tried"
    if 2 * len(failed) <= len(counted):
        return Decision("open", f"{len(counted) - len(failed)} of {voters} could connect to it")
    hosts = ", ".join(sorted({answer.host for answer in failed}))
    return Decision("closed", f"{len(failed)} of {voters} could not connect to it at {hosts}")


def find_blocked_versions(answers: Collection[ReachabilityReport], own_hosts: Collection[str]) -> frozenset[int]:
    """The IP versions (4, 6) of which this machine's public addresses need not be announced: a firewall is before it.

    One that nobody from outside has tried may lead here only as long as the machine as a whole is not closed.
    """
    blocked_versions = set[int]()
    is_closed = judge_reachability(answers, own_hosts).action == "closed"
    outside = _outside_answers(answers, own_hosts)
    for version in VERSIONS:
        version_answers = [answer for answer in outside if version_of(answer.host) == version]
        is_version_closed = judge_reachability(version_answers, own_hosts).action == "closed"
        if is_version_closed or (is_closed and not version_answers):
            blocked_versions.add(version)
    return frozenset(blocked_versions)


def versions_to_try(answers: Iterable[ReachabilityReport], own_hosts: Collection[str]) -> tuple[int, ...]:
    """Over which IP versions to ask one more member to connect, until enough from outside have: most lacking first."""
    outside = _outside_answers(answers, own_hosts)
    hosts = [ip_address(host) for host in own_hosts]
    is_needed = {
        4: any(host.version == 4 for host in hosts),
        6: any(host.version == 6 and not is_private(host) for host in hosts),
    }
    if hosts and not any(is_needed.values()):
        is_needed[6] = True
    n_answers = Counter(version_of(answer.host) for answer in outside)
    lacking = [v for v in VERSIONS if is_needed[v] and n_answers[v] < N_ASKED]
    return tuple(sorted(lacking, key=lambda version: n_answers[version]))


def version_of(host: str) -> int:
    """4 or 6."""
    return 6 if ":" in host else 4


def _outside_answers(answers: Iterable[ReachabilityReport], own_hosts: Collection[str]) -> list[ReachabilityReport]:
    return [answer for answer in answers if not is_near(answer, own_hosts)]


def is_near(answer: ReachabilityReport, own_hosts: Collection[str]) -> bool:
    """Does it come from the same network, so that it says nothing of others?"""
    try:
        return answer.is_neighbour or (answer.host in own_hosts and is_private(ip_address(answer.host)))
    except ValueError:
        return False


def find_forwarded_ports(
    answers: Iterable[ReachabilityReport], own_hosts: Collection[str]
) -> tuple[tuple[str, int], ...]:
    """Hosts and ports of IPv4 that lead here although no interface has the address: a router forwards them.

    Public ones, that two members found, where two were asked: one could name somebody else's.
    """
    outside = _outside_answers(answers, own_hosts)
    elsewhere = [a for a in outside if version_of(a.host) == 4 and a.host not in own_hosts]
    n_reports = Counter((a.host, port) for a in elsewhere for port in a.open_ports)
    n_needed = min(2, len(outside))
    confirmed = [endpoint for endpoint, n in n_reports.items() if n >= n_needed]
    return tuple(sorted((host, port) for host, port in confirmed if not is_private(ip_address(host))))


def choose_relays(
    round_trips_s: Mapping[PeerId, float | None], current: Collection[PeerId], n: int = N_RELAYS
) -> tuple[PeerId, ...]:
    """Of the members that offer to relay: those that do so now, then the nearest; the unmeasured come last."""
    current_relays = [peer for peer in current if peer in round_trips_s]

    def distance(peer: PeerId) -> tuple[float, str]:
        trip = round_trips_s[peer]
        return (float("inf") if trip is None else trip), peer

    candidates = sorted((peer for peer in round_trips_s if peer not in current_relays), key=distance)
    return tuple([*current_relays, *candidates][:n])
