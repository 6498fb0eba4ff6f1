"""UPnP's answers as miniupnpc gives them, and what is said where no port is opened."""

from __future__ import annotations

from typing import Any

import pytest

from swarmd.errors import Unreachable
from swarmd.net.port_control import BehindAnotherError, NoRouterError
from swarmd.net.port_mapping import LEASE_S, Mapping, join_refusals, map_by_upnp

HOST = "5.0.1.2"


class PlayedRouter:
    """A router as miniupnpc shows one. ``left_s``: of a lease, None where the router does not tell."""

    lanaddr = "192.168.1.2"

    def __init__(self, host: str = HOST, taken: tuple[int, ...] = (), left_s: int | None = 3600) -> None:
        self.host = host
        self.taken = taken
        self.left_s = left_s

    def externalipaddress(self) -> str:
        return self.host

    def addportmapping(self, external_port: int, *arguments: Any) -> bool:
        if not self.host:
            raise Exception("Action Failed")
        if external_port in self.taken:
            raise Exception("ConflictInMappingEntry")
        return True

    def getspecificportmapping(self, external_port: int, protocol: str) -> tuple[str, int, str, bool, int] | None:
        return None if self.left_s is None else (self.lanaddr, 4117, "swarmd", True, self.left_s)


@pytest.mark.parametrize(("left_s", "lease_s"), [(120, 120), (0, LEASE_S), (None, LEASE_S)])
def test_the_lease_is_what_the_router_says(left_s: int | None, lease_s: float) -> None:
    """0 is for ever, and asked for again all the same."""
    assert map_by_upnp(PlayedRouter(left_s=left_s), 4117) == Mapping(HOST, 4117, 4117, "UPnP", lease_s)


def test_a_taken_port_is_passed_over_and_what_is_refused_says_why() -> None:
    assert map_by_upnp(PlayedRouter(taken=(4117, 4118)), 4117).port == 4119
    with pytest.raises(Unreachable, match="ConflictInMappingEntry"):
        map_by_upnp(PlayedRouter(taken=tuple(range(4117, 4130))), 4117)
    with pytest.raises(BehindAnotherError, match=r"^another router is in between$"):
        map_by_upnp(PlayedRouter(host=""), 4117)


def test_a_port_of_a_router_behind_another_leads_nowhere() -> None:
    assert "100.64.0.9" in str(map_by_upnp(PlayedRouter(host="100.64.0.9"), 4117).obstacle)
    assert not map_by_upnp(PlayedRouter(), 4117).obstacle


def test_refusals_are_told_and_silence_is_no_refusal() -> None:
    silent = NoRouterError("nothing by PCP or NAT-PMP (no answer)")
    also_silent = NoRouterError("nothing by UPnP")
    refused = Unreachable("the router opens no port: it may not")
    said = "no router answers: nothing by PCP or NAT-PMP (no answer), nothing by UPnP"
    assert str(join_refusals(silent, also_silent)) == said
    assert str(join_refusals(silent, refused)) == str(join_refusals(refused, refused)) == str(refused)
    between = BehindAnotherError("10.0.0.2")
    assert join_refusals(refused, between) is between
