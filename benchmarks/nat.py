"""Who reaches whom by which way, through real routers, how soon, how fast, and what a relay's death costs.

    python -m benchmarks.nat [--rounds 3] [--tokens 48]

Network namespaces with Linux' own NAT (tests.real.netlab; needs root, ip, nft and miniupnpd), links without delay.
Two public members relay; each server holds all of SmolLM2. Rows are where the server is, columns where the client is:
*forwarded* and *asked* are homes whose router forwards a port, set by hand or asked by UPnP; *neighbour* is a machine
in the home of the server behind a cone. For each: the way, seconds from opening a session to its first token, a
connection to be made included, and the tokens/s of one stream over those of the public client's with the public
server in the same round. At the end, server and client behind symmetric routers and nobody else: the relay that is in
use is killed in the middle of a text.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import msgspec

from tests.real import netlab
from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.netlab import Lab, Place
from tests.real.smollm2 import smollm2

LISTEN = "/ip4/0.0.0.0/tcp/4117"
SERVERS = ("public", "forwarded", "asked", "cone", "symmetric", "carrier")
CLIENTS = ("public", "cone", "symmetric", "carrier")
CLIENT = """
import sys, time, torch, swarmd, msgspec
from swarmd.plan.chains.routing import Hop
from swarmd.values import Span
torch.set_num_threads(1)
invite, n, *servers = sys.argv[1:]
ids = torch.arange(5, 37).unsqueeze(0)

class Times:
    def __init__(self):
        self.at = []
    def put(self, value):
        self.at.append(time.perf_counter())
        if len(self.at) == 18:
            print("going", flush=True)
    def end(self):
        pass

with swarmd.connect(invite) as swarm:
    for server in servers:
        model = swarm.model("smol", lookup=False, chain=(Hop(server, Span(0, 30)),), wait_s=60)
        begun = time.perf_counter()
        model.generate(ids, max_new_tokens=1, do_sample=False)
        first = time.perf_counter() - begun
        times = Times()
        text = model.generate(ids, max_new_tokens=int(n), min_new_tokens=int(n), do_sample=False, streamer=times)
        at = times.at[1:]  # the first is the prompt
        pauses = [b - a for a, b in zip(at, at[1:])]
        found = {"first": first, "rate": len(pauses) / (at[-1] - at[0]), "pause": max(pauses),
                 "way": swarm.within.way_to(server) or "gone", "text": text[0].tolist(),
                 "repairs": len(model.last_session.statistics.repairs)}
        print(msgspec.json.encode(found).decode(), flush=True)
"""


class Measured(msgspec.Struct):
    """Seconds to the first token, tokens/s, the longest pause between two, the way, the text, how often repaired."""

    first: float
    rate: float
    pause: float
    way: str
    text: list[int]
    repairs: int


class Homes:
    """All places, and the daemons in them."""

    def __init__(self, lab: Lab, swarm: LocalSwarm) -> None:
        self.swarm = swarm
        relays = [lab.public(f"relay{i}") for i in range(2)]
        folder = {"smol": smollm2()}
        self.relays = [self.start(place, "--no-serve", models=folder) for place in relays]
        at = {kind: _place(lab, kind, "server") for kind in SERVERS}
        self.servers = {kind: self.start(at[kind], "--serve", "smol", "--blocks", "0:30", models=folder) for kind in at}
        self.clients = {kind: _place(lab, kind, "client") for kind in CLIENTS}
        self.clients["neighbour"] = lab.of("cone-server-router").home("neighbour")

    def start(self, place: Place, *arguments: str, models: dict[str, Path]) -> Volunteer:
        return self.swarm.add(*arguments, models=models, listen=LISTEN, inside=place.inside, SWARMD_BALANCE="false")

    def settle(self) -> None:
        """Wait until everybody serves, and knows whether it can be dialled."""
        self.swarm.wait_online()
        for kind, server in self.servers.items():
            wanted = "open" if kind in ("public", "forwarded", "asked") else "closed"
            self.swarm.wait(lambda s=server, w=wanted: _is_settled(s, w), f"{kind} to be {wanted}")
        self.swarm.wait_online()

    def generate(
        self, client: str, servers: Sequence[Volunteer], n_tokens: int, kill: bool = False
    ) -> list[Measured | str]:
        """What a client measures with each server, one after the other; or its error."""
        peers = [str(server.peer) for server in servers]
        command = [*self.clients[client].inside, sys.executable, "-c", CLIENT, self.swarm.invite(), str(n_tokens)]
        process = subprocess.Popen([*command, *peers], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stderr is not None
        found: list[Measured | str] = []
        for line in process.stdout:
            if line.strip() == "going":
                if kill:
                    used = max(self.relays, key=lambda relay: relay.ask("status")["reach"]["relaying"])
                    used.stop()
            else:
                found.append(msgspec.json.decode(line, type=Measured))
        error = process.stderr.read().strip().splitlines()
        process.wait()
        return [*found, *(error[-1:] * (len(servers) - len(found)))]


def _place(lab: Lab, kind: str, who: str) -> Place:
    """A machine in a place of one kind."""
    if kind == "public":
        return lab.public(f"public-{who}")
    if kind == "carrier":
        return lab.router(f"carrier-{who}", lan="100.64.0").router(f"carrier-{who}-router").home(f"carrier-{who}-home")
    router = lab.router(f"{kind}-{who}-router", "symmetric" if kind == "symmetric" else "cone")
    home = router.home(f"{kind}-{who}")
    if kind == "forwarded":
        router.forward(4117, home)
    if kind == "asked":
        router.open_ports()
    return home


def _is_settled(server: Volunteer, wanted: str) -> bool:
    reach = server.ask("status")["reach"]
    return reach["state"] == wanted and (wanted == "open" or len(reach["relays"]) == 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=48)
    options = parser.parse_args()
    if why := netlab.missing():
        sys.exit(why)
    found: dict[tuple[str, str], list[Measured | str]] = defaultdict(list)
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as root, netlab.laid() as lab, local_swarm(Path(root)) as swarm:
        homes = Homes(lab, swarm)
        homes.settle()
        for _ in range(options.rounds):
            for client in homes.clients:
                kinds = ["cone"] if client == "neighbour" else list(SERVERS)
                measured = homes.generate(client, [homes.servers[kind] for kind in kinds], options.tokens)
                for kind, one in zip(kinds, measured, strict=True):
                    print(f"{kind} server, {client} client: {one if isinstance(one, str) else _told(one)}", flush=True)
                    found[kind, client].append(one)
                    reference = found["public", "public"][-1]
                    if isinstance(one, Measured) and isinstance(reference, Measured):
                        rates[kind, client].append(one.rate / reference.rate)
        _table(found, rates)
        for kind in SERVERS:
            if kind != "symmetric":  # with others left, the session would go on there
                homes.servers[kind].stop()
        (whole,) = homes.generate("symmetric", [homes.servers["symmetric"]], 64)
        (dead,) = homes.generate("symmetric", [homes.servers["symmetric"]], 64, kill=True)
        print(f"a relay killed in mid-sentence: {dead if isinstance(dead, str) else _told(dead)}")
        if isinstance(dead, Measured) and isinstance(whole, Measured):
            print(f"  the same text: {dead.text == whole.text}, longest pause {dead.pause:.2f} s")


def _told(one: Measured) -> str:
    return f"{one.way}, first {one.first:.2f} s, {one.rate:.1f} tokens/s, {one.repairs} repairs"


def _table(found: dict[tuple[str, str], list[Measured | str]], rates: dict[tuple[str, str], list[float]]) -> None:
    clients = [*CLIENTS, "neighbour"]
    print(f"\n| server / client | {' | '.join(clients)} |\n|{'---|' * (len(clients) + 1)}")
    for kind in SERVERS:
        cells = []
        for client in clients:
            good = [one for one in found[kind, client] if isinstance(one, Measured)]
            ways = "/".join(sorted({one.way for one in good}))
            lost = len(found[kind, client]) - len(good)
            first = statistics.median(one.first for one in good) if good else 0.0
            rate = statistics.median(rates[kind, client]) if rates[kind, client] else 0.0
            cells.append(f"{ways}, {first:.2f} s, {rate:.2f}{f', {lost} failed' if lost else ''}" if good else "")
        print(f"| {kind} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
