"""Ask the router of this home to forward a TCP port: by PCP or NAT-PMP, else by UPnP (Internet Gateway Device).

UPnP is the library miniupnpc's; its calls block, so they run in a thread. A mapping is leased, so that it ends by
itself when this machine is gone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Address
from typing import Any, Literal, TypeVar

import trio

from swarmd.errors import Unreachable
from swarmd.net import port_control
from swarmd.net.port_control import BehindAnotherError, NoRouterError, Spoken

LEASE_S = 3_600  # for a mapping; renewed at half of it
DISCOVERY_MS = 300  # that routers have to answer, for each way of asking
ROUTER_TIMEOUT_S = 10.0  # for all that is asked of one
N_PORTS = 8  # to try: another machine of the home may have the first ones
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Mapping:
    """A port of the router that leads to one of this machine, for ``lease_s`` from when it was granted.

    ``host`` is the address that the router thinks it has.
    """

    host: str
    port: int
    inside: int
    spoken: Spoken | Literal["UPnP"]
    lease_s: float = LEASE_S

    @property
    def endpoint(self) -> tuple[str, int, int]:
        """What leads here, and to which port, however long it was granted."""
        return self.host, self.port, self.inside

    @property
    def obstacle(self) -> BehindAnotherError | None:
        """Why nobody outside can use it though the router forwards it; None where nothing speaks against it."""
        try:
            host = IPv4Address(self.host)
        except ValueError:
            return None
        return BehindAnotherError(self.host) if port_control.is_behind_another(host) else None


async def map_port(port: int, nonce: bytes) -> Mapping:
    """Have ``port`` forwarded, by the same port of the router or another. Raises Unreachable, saying what routers said.

    The nonce, 12 bytes, is what this machine shows when it asks again or takes it back.
    """
    try:
        granted = await port_control.map_port(port, nonce, LEASE_S)
        return Mapping(granted.host, granted.port, port, granted.spoken, granted.lease_s)
    except Unreachable as error:
        control_error = error
    try:
        return await _run_in_thread(lambda: map_by_upnp(_find_router(), port))
    except Unreachable as upnp_error:
        raise join_refusals(control_error, upnp_error) from None


def join_refusals(*errors: Unreachable) -> Unreachable:
    """Say why no port is opened: what lies in between, else what routers refused, else that none answers."""
    refusals = [error for error in errors if not isinstance(error, NoRouterError)]
    for refusal in refusals:
        if isinstance(refusal, BehindAnotherError):
            return refusal
    if refusals:
        return Unreachable("; ".join(dict.fromkeys(map(str, refusals))))
    return NoRouterError(f"no router answers: {', '.join(map(str, errors))}")


async def unmap_port(mapping: Mapping, nonce: bytes) -> None:
    """Take a mapping back. Raises Unreachable."""
    if mapping.spoken == "UPnP":
        await _run_in_thread(partial(_unmap_by_upnp, mapping))
    else:
        await port_control.map_port(mapping.inside, nonce, lease_s=0)


async def _run_in_thread(function: Callable[[], T]) -> T:
    try:
        with trio.fail_after(ROUTER_TIMEOUT_S):
            return await trio.to_thread.run_sync(function, abandon_on_cancel=True)  # type: ignore[call-arg]
    except trio.TooSlowError:
        raise Unreachable(f"the router does not answer within {ROUTER_TIMEOUT_S:.0f} s") from None


def map_by_upnp(router: Any, port: int) -> Mapping:
    """Ask a router that miniupnpc has found. Raises Unreachable."""
    with _upnp_errors():
        host = router.externalipaddress()
    refusal: Unreachable | None = None
    for external_port in range(port, min(port + N_PORTS, 65_536)):
        for lease_s in (LEASE_S, 0):  # some routers know permanent ones only
            try:
                with _upnp_errors():
                    router.addportmapping(external_port, "TCP", router.lanaddr, port, "swarmd", "", lease_s)
            except Unreachable as error:
                refusal = refusal or error
            else:
                return Mapping(host, external_port, port, "UPnP", _granted_s(router, external_port))
    assert refusal is not None
    if not host:  # miniupnpd has no address to tell where its own is private, and fails for that reason (501)
        raise BehindAnotherError
    raise Mapping(host, port, port, "UPnP").obstacle or refusal


def _granted_s(router: Any, external_port: int) -> float:
    """How long a mapping is left, as the router says; what was asked for where it does not, or says for ever."""
    try:
        with _upnp_errors():
            _, _, _, _, left_s = router.getspecificportmapping(external_port, "TCP")
            return float(left_s) or LEASE_S
    except Unreachable:
        return LEASE_S


def _unmap_by_upnp(mapping: Mapping) -> None:
    router = _find_router()
    with _upnp_errors():
        router.deleteportmapping(mapping.port, "TCP")


def _find_router() -> Any:
    import miniupnpc  # late: only who is behind a router needs it

    router = miniupnpc.UPnP()
    router.discoverdelay = DISCOVERY_MS
    try:
        router.discover()
        router.selectigd()
    except Exception:  # noqa: BLE001 - the library raises Exception itself, "Success" where nobody answers
        raise NoRouterError("nothing by UPnP") from None
    return router


@contextmanager
def _upnp_errors() -> Iterator[None]:
    """Raise Unreachable for whatever goes wrong with UPnP."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - the library raises Exception itself, for a router's answers and its own
        raise Unreachable(f"the router opens no port by UPnP: {error}") from None
