"""Random partitions, crashes and returns among leaders, anchors and members, then peace: what must hold after all.

One chain of commits that everybody shares, no sample twice, the same bits for the same commit, and progress once the
network is whole again and a majority of anchors lives.
"""

from __future__ import annotations

import random

import trio

from swarmd.protocol.runs.recipe import Batch
from tests.train.world import Member, TrainingWorld, check_ledger

N_TRAINERS = 4
N_BLOWS = 8
PEACE_S = 480


async def one_world(seed: int) -> str:
    """Live through one seed; says what came of it. Raises AssertionError, or TooSlowError where it stands still."""
    rng = random.Random(seed)
    async with trio.open_nursery() as nursery:
        world = TrainingWorld(nursery, seed, n_anchors=3, batch=Batch(target=32, micro=2, tokens=8))
        # anchors that train as well, or only sign
        anchors = [world.add(rng.choice(["train", "anchor"]), identity=identity) for identity in world.anchors]
        for _ in range(N_TRAINERS - 1):
            world.add(sample_s=rng.choice([0.05, 0.05, 0.2]))
        blows = []
        for _ in range(N_BLOWS):
            await trio.sleep(rng.expovariate(1 / 4))
            blows.append(_blow(world, anchors, rng))
        world.heal()
        before = world.epoch
        with trio.fail_after(PEACE_S):
            while min(m.trainer.ledger.epoch for m in world.members.values()) < before + 2:
                await trio.sleep(0.5)
        check_ledger(world)
        nursery.cancel_scope.cancel()
    return f"{before} commits under {', '.join(blows)}"


def _blow(world: TrainingWorld, anchors: list[Member], rng: random.Random) -> str:
    """Cut the network anywhere, heal it, or take somebody's power; a majority of anchors lives, and two trainers."""
    kind = rng.choice(["cut", "cut", "one way off", "heal", "crash", "join"])
    peers = sorted(world.members)
    if kind == "cut":
        ours = set(rng.sample(peers, rng.randrange(1, len(peers))))
        world.cut(ours, set(peers) - ours)
    elif kind == "one way off":
        world.cut({rng.choice(peers)}, set(rng.sample(peers, rng.randrange(1, len(peers)))))
    elif kind == "heal":
        world.heal()
    elif kind == "join":
        world.add(sample_s=0.05)
    else:
        n_anchors = sum(a.peer in world.members for a in anchors)
        able = [m for m in world.members.values() if m not in anchors or n_anchors > 2]
        able = [m for m in able if m.source is None or len(world.trainers()) > 2]
        if able:
            world.crash(rng.choice(sorted(able, key=lambda m: m.peer)))
    return kind
