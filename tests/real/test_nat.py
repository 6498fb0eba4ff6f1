"""Members behind real routers, in namespaces of the test's own (benchmarks/nat.py has all kinds against all).

Part of ``make prove``: they need root, ``ip``, ``nft`` and miniupnpd, which few machines have. What needs no router is
in tests/net/test_circuits.py and tests/node/members/test_reachability.py.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from swarmd.config import DEFAULT_LISTEN
from tests.checkpoints import make
from tests.real import netlab
from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.netlab import Lab, Place

pytestmark = [pytest.mark.prove, pytest.mark.slow, pytest.mark.skipif(bool(netlab.missing()), reason=netlab.missing())]

LISTEN = DEFAULT_LISTEN
N_TOKENS, KILLED_AT = 120, 30
CLIENT = """
import sys, time, torch, swarmd, msgspec
torch.set_num_threads(1)

class Paced:
    def __init__(self): self.n, self.pause, self.at = 0, 0.0, time.perf_counter()
    def put(self, value):
        self.n += 1
        self.pause, self.at = max(self.pause, time.perf_counter() - self.at), time.perf_counter()
        time.sleep(0.01)
        if self.n == int(sys.argv[3]):
            print("going", flush=True)
    def end(self): pass

with swarmd.connect(sys.argv[1]) as swarm:
    model = swarm.model("m", lookup=False, wait_s=8)
    paced = Paced()
    text = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=int(sys.argv[2]),
                          min_new_tokens=int(sys.argv[2]), do_sample=False, streamer=paced)
    ways = [swarm.within.way_to(span.peer) for span in swarm.view().spans]
    print(msgspec.json.encode({"text": text[0].tolist(), "ways": ways, "pause": paced.pause}).decode())
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("llama", tmp_path_factory.mktemp("nat") / "model")


@pytest.fixture
def lab() -> Iterator[Lab]:
    with netlab.laid() as made:
        yield made


@pytest.fixture
def swarm(lab: Lab, tmp_path: Path) -> Iterator[LocalSwarm]:  # after the laboratory, so that it ends before it
    with local_swarm(tmp_path) as made:
        yield made


def start(swarm: LocalSwarm, place: Place, checkpoint: Path, *arguments: str) -> Volunteer:
    served = arguments or ("--no-serve",)
    return swarm.add(*served, models={"m": checkpoint}, listen=LISTEN, inside=place.inside)


def wait_for(swarm: LocalSwarm, volunteer: Volunteer, state: str, n_relays: int = 0) -> None:
    def is_so() -> bool:
        reach = volunteer.ask("status")["reach"]
        return reach["state"] == state and len(reach["relays"]) == n_relays

    swarm.wait(is_so, f"{state} through {n_relays} relays")


def generate(swarm: LocalSwarm, place: Place, kill: Any = None) -> dict[str, Any]:
    command = [*place.inside, sys.executable, "-c", CLIENT, swarm.invite(), str(N_TOKENS), str(KILLED_AT)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "going\n", process.stderr and process.stderr.read()
        if kill is not None:
            kill()
        out, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        return msgspec.json.decode(out.splitlines()[-1], type=dict[str, Any])
    finally:
        process.kill()
        process.wait()


def test_a_chain_through_two_homes_and_a_forwarded_port(lab: Lab, swarm: LocalSwarm, checkpoint: Path) -> None:
    """A relay, a home whose port is forwarded, one whose is not; a client in a third, with the same addresses."""
    relay = start(swarm, lab.public("relay"), checkpoint)
    first, second = lab.router("first"), lab.router("second")
    open_home = first.home("open")
    first.forward(4117, open_home)
    forwarded = start(swarm, open_home, checkpoint, "--serve", "m", "--blocks", "0:3")
    closed = start(swarm, second.home("closed"), checkpoint, "--serve", "m", "--blocks", "3:6")
    wait_for(swarm, relay, "open")
    wait_for(swarm, forwarded, "open")
    wait_for(swarm, closed, "closed", n_relays=2)
    swarm.wait_online()
    found = f"/ip4/{first.address}/tcp/4117/p2p/{forwarded.peer}"
    assert found in forwarded.ask("status")["addresses"], "nobody announced the forwarded port"
    away = generate(swarm, lab.router("third").home("client"))
    assert away["ways"] == ["direct", "punched"]
    neighbour = generate(swarm, second.home("neighbour"))
    assert neighbour["ways"][1] == "direct"
    assert neighbour["text"] == away["text"]
    rows = {row["peer"]: row for row in forwarded.ask("peers")["peers"]}
    assert rows[closed.peer]["reach"] == "closed"
    assert rows[closed.peer]["way"] in ("reversed", "direct"), "who can be dialled needs no relay"


def test_who_has_ipv6_is_reached_over_it_and_others_by_a_relay(lab: Lab, swarm: LocalSwarm, checkpoint: Path) -> None:
    """IPv4 through routers that cannot be punched; one lets IPv6 in, one does not."""
    relay = start(swarm, lab.public("relay", six="open"), checkpoint)
    opened = start(
        swarm, lab.router("opened", "symmetric", six="open").home("a"), checkpoint, "--serve", "m", "--blocks", "0:3"
    )
    shut = start(
        swarm, lab.router("shut", "symmetric", six="shut").home("b"), checkpoint, "--serve", "m", "--blocks", "3:6"
    )
    wait_for(swarm, relay, "open")

    def announced(volunteer: Volunteer) -> list[str]:
        found = [a for a in volunteer.ask("status")["addresses"] if "/p2p-circuit/" not in a]
        return sorted(a.split("/")[2] for a in found)

    for volunteer, hosts in ((opened, ["192.168.1.2", "2600:2:1::2"]), (shut, ["192.168.1.2"])):
        wait_for(swarm, volunteer, "closed", n_relays=1)
        swarm.wait(lambda v=volunteer, h=hosts: announced(v) == h, "the addresses that lead there")  # type: ignore[misc]
    swarm.wait_online()
    with_six = generate(swarm, lab.router("six", "symmetric", six="shut").home("c"))
    assert with_six["ways"] == ["direct", "relayed"]
    without = generate(swarm, lab.router("four", "symmetric").home("d"))
    assert without == {**with_six, "ways": ["relayed", "relayed"], "pause": without["pause"]}
    rows = {row["peer"]: row["way"] for row in shut.ask("peers")["peers"]}
    assert rows[opened.peer] == "direct"


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_relay_lost_in_mid_sentence_costs_a_pause(
    lab: Lab, swarm: LocalSwarm, checkpoint: Path, blow: signal.Signals
) -> None:
    """Both ends behind routers that give each connection another port: nothing but a relay connects them."""
    relays = [start(swarm, lab.public(f"relay{i}"), checkpoint) for i in range(2)]
    server = start(
        swarm, lab.router("server", "symmetric").home("at_server"), checkpoint, "--serve", "m", "--blocks", "0:6"
    )
    wait_for(swarm, server, "closed", n_relays=2)
    swarm.wait_online()
    home = lab.router("client", "symmetric").home("at_client")
    whole = generate(swarm, home)
    assert whole["ways"] == ["relayed"]

    def strike_the_one_in_use() -> None:
        struck = max(relays, key=lambda relay: relay.ask("status")["reach"]["relaying"])
        for pid in netlab.run("ip", "netns", "pids", struck.inside[-1]).split():
            os.kill(int(pid), blow)

    struck = generate(swarm, home, strike_the_one_in_use)
    assert (struck["text"], struck["ways"]) == (whole["text"], whole["ways"])
    wait_for(swarm, server, "closed", n_relays=1)


def test_without_a_relay_the_message_is_true_and_comes_soon(lab: Lab, swarm: LocalSwarm, checkpoint: Path) -> None:
    founder = swarm.add(
        "--no-serve", models={"m": checkpoint}, listen=LISTEN, inside=lab.public("f").inside, SWARMD_RELAY="false"
    )
    server = start(swarm, lab.router("home").home("server"), checkpoint, "--serve", "m", "--blocks", "0:6")
    wait_for(swarm, server, "closed")
    swarm.wait_online()
    why = server.ask("status")["reach"]["why"]
    assert why.endswith("could not connect to it at 5.0.2.2; no member relays for it yet")
    answer = founder.ask("ping", "POST", peer=str(server.peer))
    assert answer["error"] is None, "it connected here itself"
    command = [*lab.public("client").inside, sys.executable, "-c", CLIENT, swarm.invite(), "3", "9"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[-1] == (
        "swarmd.errors.NoRoute: no live server holds blocks [0,6) of 6; 1 server behind a router cannot be reached"
    )


@pytest.mark.skipif(shutil.which("miniupnpd") is None, reason="miniupnpd is not installed")
@pytest.mark.parametrize("speaks", ["UPnP", "PCP"])
def test_a_router_that_can_be_asked_opens_a_port_for_each(
    lab: Lab, swarm: LocalSwarm, checkpoint: Path, speaks: Literal["UPnP", "PCP"]
) -> None:
    """Two machines of one home want the same port; the one that ends gives its port back."""
    start(swarm, lab.public("relay"), checkpoint)
    router = lab.router("asked")
    router.open_ports(speaks)
    first = start(swarm, router.home("first"), checkpoint, "--serve", "m", "--blocks", "0:3")
    second = start(swarm, router.home("second"), checkpoint, "--serve", "m", "--blocks", "3:6")

    def mapped() -> set[str | None]:
        return {volunteer.ask("status")["reach"]["mapped"] for volunteer in (first, second)}

    wanted = {f"{router.address}:4117", f"{router.address}:4118"}
    swarm.wait(lambda: mapped() == wanted, "a port of the router for each")
    for volunteer in (first, second):
        wait_for(swarm, volunteer, "open")
    swarm.wait_online()
    assert generate(swarm, lab.router("away", "symmetric").home("client"))["ways"] == ["direct", "direct"]
    port = first.ask("status")["reach"]["mapped"].partition(":")[2]
    first.ask("down", "POST")
    assert first.process is not None
    first.process.wait()
    assert int(port) not in router.opened_ports()
    assert len(router.opened_ports()) == 1, "the other's is there"


@pytest.mark.skipif(shutil.which("miniupnpd") is None, reason="miniupnpd is not installed")
def test_a_port_comes_back_when_the_router_forgets_and_when_the_daemon_was_killed(
    lab: Lab, swarm: LocalSwarm, checkpoint: Path
) -> None:
    """The router grants two minutes by PCP (an hour is asked for)."""
    start(swarm, lab.public("relay"), checkpoint)
    router = lab.router("forgetful")
    router.open_ports("PCP", granted_s=121)
    volunteer = start(swarm, router.home("home"), checkpoint)
    wait_for(swarm, volunteer, "open")
    (port,) = router.opened_ports()
    router.forget_ports()
    assert not router.opened_ports()
    swarm.wait(lambda: router.opened_ports() == {port}, "the port again, at half of the lease", within_s=120)
    volunteer.signal(signal.SIGKILL)
    assert volunteer.process is not None
    volunteer.process.wait()
    volunteer.start()
    swarm.wait(lambda: volunteer.is_listening, "its control socket", volunteer)
    swarm.wait(lambda: volunteer.ask("status")["reach"]["mapped"] is not None, "what it had opened before")
    volunteer.ask("down", "POST")
    volunteer.process.wait()
    assert not router.opened_ports()


@pytest.mark.skipif(shutil.which("miniupnpd") is None, reason="miniupnpd is not installed")
@pytest.mark.parametrize("speaks", ["UPnP", "PCP"])
def test_another_router_in_between_is_named(
    lab: Lab, swarm: LocalSwarm, checkpoint: Path, speaks: Literal["UPnP", "PCP"]
) -> None:
    start(swarm, lab.public("relay"), checkpoint)
    inner = lab.router("outer").router("inner", lan="10.9.9")
    inner.open_ports(speaks)
    volunteer = start(swarm, inner.home("home"), checkpoint)
    swarm.wait(lambda: volunteer.ask("status")["reach"]["is_behind_another"], "why no port of the router helps")
    assert "another router is in between" in volunteer.ask("status")["reach"]["why"]


@pytest.mark.parametrize(("mtu", "is_told"), [(1_300, False), (1_100, True)])
def test_a_link_that_loses_large_packets_without_a_word_is_passed_or_named(
    lab: Lab, swarm: LocalSwarm, checkpoint: Path, tmp_path: Path, mtu: int, is_told: bool
) -> None:
    """Connections ask for packets of 1,280 bytes, which every link has to take; some take less."""
    member, newcomer = lab.public("member"), lab.public("newcomer")
    start(swarm, member, checkpoint)
    lab.narrow(newcomer, mtu)
    command = [*newcomer.inside, sys.executable, "-m", "swarmd_cli.main", "--home", str(tmp_path / "home")]
    joined = subprocess.run([*command, "join", swarm.invite()], capture_output=True, text=True, timeout=90)
    assert ("small messages pass, large ones do not: MTU?" in joined.stderr) is is_told, joined.stderr
    assert joined.returncode == (75 if is_told else 0)
