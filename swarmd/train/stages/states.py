"""The states of stages that are held elsewhere, fetched for who wants the whole model: one stage after the other."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path

import trio

from swarmd.errors import SwarmUnavailable
from swarmd.net.pace import Pace
from swarmd.net.rpc import Rpc
from swarmd.plan.chains.view import SwarmView
from swarmd.plan.runs.recovery import DonorOffer
from swarmd.protocol.runs.recipe import Run
from swarmd.train.store import recovery
from swarmd.values import ModelId, PeerId
from swarmd.weights.fetch import fetch_manifest


async def fetch_state(rpc: Rpc, view: SwarmView, part: Run, folder: Path) -> tuple[Path, int]:
    """Fetch the newest state of a stage into a folder; returns its file, and of which update it is.

    Raises SwarmUnavailable.
    """
    holders = [PeerId(r.peer) for r in view.in_ledger(part.id) if r.state_epoch is not None]
    for peer in holders:
        record = view.peers.get(peer)
        rpc.network.learn(peer, record.addresses if record is not None else ())
    offers = await recovery.ask_states(rpc, holders, part.id)
    newest = max(offers.values(), key=lambda offer: offer.epoch, default=None)
    if newest is None:
        raise SwarmUnavailable(f"nobody who answers holds stage {part.stage} of {part.recipe.name!r}: try again later")
    donors = [peer for peer, offer in offers.items() if _is_same(offer, newest)]
    manifest = await fetch_manifest(rpc, ModelId(newest.state.hex()), donors)
    await trio.to_thread.run_sync(partial(shutil.rmtree, folder, ignore_errors=True))
    path = await recovery.fetch_file(rpc, folder, manifest, donors, Pace(lambda: None), "snapshot")
    return path, newest.epoch


def _is_same(offer: DonorOffer, other: DonorOffer) -> bool:
    return (offer.epoch, offer.state) == (other.epoch, other.state)
