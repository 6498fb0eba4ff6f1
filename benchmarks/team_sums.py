"""What a sum over the members of a team costs, beside gloo's, which torch brings: microseconds.

    python -m benchmarks.team_sums

Members are processes of one thread: of one machine through shared memory, and as if of several over TLS, on loopback.
Numbers a sum are a token's hidden states in float32; a block has two sums.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import torch
from torch import distributed

from swarmd.compute.teams.link_sums import LinkSums
from swarmd.compute.teams.links import Seat, dial
from swarmd.compute.teams.shared_sums import SharedSums, make_shared
from swarmd.protocol.wire.teams import TeamSeat

MEMBERS, WIDTHS = (2, 3), (576, 4_096, 16_384)
HOST = "127.0.0.1"
N_WARM, N_SUMS, N_RUNS = 50, 200, 7
Add = Callable[[torch.Tensor], object]


def in_members(n_members: int, work: Callable[[int], None]) -> None:
    """Run this in so many processes, the first of which is this one."""
    children = []
    for member in range(1, n_members):
        child = os.fork()
        if not child:
            try:
                work(member)
            finally:
                os._exit(0)
        children.append(child)
    work(0)
    for child in children:
        os.waitpid(child, 0)


def measure(add: Add, member: int, title: str) -> None:
    for width in WIDTHS:
        part = torch.randn(1, 1, width)
        times = []
        for _ in range(N_WARM):
            add(part)
        for _ in range(N_RUNS):
            begun = time.perf_counter()
            for _ in range(N_SUMS):
                add(part)
            times.append((time.perf_counter() - begun) / N_SUMS)
        if not member:
            print(f"{title:<28} {width:>7} numbers {1e6 * median(times):>8.0f} us", flush=True)


def by_links(member: int, seats: Sequence[Seat]) -> None:
    """Each listens at a seat of its own, and dials those of the members before it."""
    n = len(seats)
    links = {other: dial(TeamSeat(HOST, seats[other].ticket), other, member) for other in range(member)}
    links |= seats[member].wait_for(range(member + 1, n))
    measure(LinkSums(links, member).add, member, f"TLS on loopback, {n} members")


def by_gloo(member: int, n_members: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    where = f"file://{folder / f'gloo-{n_members}'}"
    distributed.init_process_group("gloo", init_method=where, rank=member, world_size=n_members)
    measure(lambda part: distributed.all_reduce(part.clone()), member, f"gloo, {n_members} members")
    distributed.destroy_process_group()


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for n_members in MEMBERS:
            number = make_shared(n_members)

            def by_memory(member: int, n: int = n_members, number: int = number) -> None:
                measure(SharedSums(number, member, n, lambda: True).add, member, f"shared memory, {n} members")

            in_members(n_members, by_memory)
            seats = [Seat([HOST]) for _ in range(n_members)]
            in_members(n_members, lambda member, seats=seats: by_links(member, seats))  # type: ignore[misc]
            in_members(n_members, lambda member, n=n_members: by_gloo(member, n, Path(folder)))  # type: ignore[misc]


if __name__ == "__main__":
    main()
