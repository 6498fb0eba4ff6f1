"""Which row of the data a peer's k-th draw is: the same for everybody who asks, without any coordination.

Each peer goes through all rows once before it sees one again, in an order of its own: shards in a seeded order, and
the rows of a shard in a seeded order, so that who lacks disk needs one shard at a time. A draw (peer, k) is what the
ledger counts, each at most once.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache


def row_of(
    seed: int,
    peer: str,
    draw: int,
    shard_rows: tuple[int, ...],
) -> int:
    """Return the row that a draw takes; ``shard_rows`` counts the rows of each shard."""
    n_rows = sum(shard_rows)
    shard, place = _locate_draw(seed, peer, draw // n_rows, shard_rows, draw % n_rows)
    inside = permute_index(f"{seed}/{peer}/{draw // n_rows}/{shard}", place, shard_rows[shard])
    return sum(shard_rows[:shard]) + inside


def shard_of(row: int, shard_rows: tuple[int, ...]) -> tuple[int, int]:
    """Return the shard of a row, and its place in there."""
    for shard, n in enumerate(shard_rows):
        if row < n:
            return shard, row
        row -= n
    raise ValueError("no such row")


def seed_of(seed: int, peer: str, draw: int) -> int:
    """Return the seed of all that is random in computing a draw (dropout), below 2**53."""
    digest = hashlib.sha256(f"{seed}/{peer}/{draw}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 11


def permute_index(key: str, index: int, n: int) -> int:
    """Permute ``index`` within range(n) by a key: a Feistel network with cycle walking.

    Black & Rogaway 2002, "Ciphers with Arbitrary Finite Domains", sections 4 and 5.
    """
    # A Feistel network permutes all numbers of 2 * half bits; walking on from what lies outside range(n) until one
    # lies inside makes it a permutation of range(n). It ends: the walk is a cycle that holds ``index``. At most four
    # times as many numbers lie in the network's domain, so that a few turns do on average.
    half = max(1, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        high = index >> half
        low = index & mask
        for turn in range(4):
            digest = hashlib.blake2b(f"{key}/{turn}/{low}".encode(), digest_size=8).digest()
            mixed = high ^ (int.from_bytes(digest, "big") & mask)
            high = low
            low = mixed
        index = high << half | low
        if index < n:
            return index


def _locate_draw(
    seed: int,
    peer: str,
    turn: int,
    shard_rows: tuple[int, ...],
    place: int,
) -> tuple[int, int]:
    for shard in _shard_order(f"{seed}/{peer}/{turn}", len(shard_rows)):
        if place < shard_rows[shard]:
            return shard, place
        place -= shard_rows[shard]
    raise ValueError("no such draw")


@lru_cache(maxsize=256)
def _shard_order(key: str, n: int) -> tuple[int, ...]:
    return tuple(permute_index(key, i, n) for i in range(n))
