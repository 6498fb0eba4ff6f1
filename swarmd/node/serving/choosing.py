"""Which blocks a worker of this machine takes, beside the swarm's other servers and this daemon's other workers."""

from __future__ import annotations

import logging
import os
import random
import statistics
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

import trio

from swarmd.config import Config, Serve
from swarmd.errors import ConfigError
from swarmd.net.exchange import Exchange
from swarmd.net.rpc import Rpc
from swarmd.node.machine.presence import Presence
from swarmd.node.machine.store import Store
from swarmd.node.members.directory import Directory
from swarmd.node.members.order import Order
from swarmd.node.serving.balancer import Turnover
from swarmd.node.serving.trials import Trials, claimant_of
from swarmd.node.worker.worker_link import Starter
from swarmd.plan.chains.hosting import BlockLimit, HostingLifecycle, Placement
from swarmd.plan.chains.memory import blocks_that_fit, blocks_that_fit_card, family_of, group_bytes
from swarmd.plan.chains.placement import Holder, choose_model, choose_span, holders_of
from swarmd.plan.chains.routing import STAYS_S, stays_s
from swarmd.plan.layouts.nearness import choose_near_span
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.membership.records import SpanRecord
from swarmd.protocol.models.configuration import PACKED
from swarmd.protocol.models.manifest import Manifest
from swarmd.protocol.understanding import Understanding
from swarmd.resources import Card, can_use_cards, find_card, is_with_cards, list_cards, measure_memory
from swarmd.usage_ledger import UsageLedger
from swarmd.values import ModelId, PeerId, Span

LOOK_INTERVAL_S = 0.5  # a model that is added is served as soon as a person looks
FIRST_LOOK_S = 4.0  # to see who else is there before choosing

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class PlacementChoice:
    """What a hosting chose: others of the same daemon choose beside it, and leave it its memory."""

    model: ModelId
    span: Span
    n_bytes: int
    card: str = ""  # the uuid of the one whose memory they take; "" is the machine's
    is_loaded: bool = False
    promised_bytes: int = 0  # of that card, for caches


@dataclass(frozen=True, slots=True)
class HostingServices:
    """What all hostings of a daemon share. History that memory does not hold goes to ``spill_folder``.

    By ``steady_clock`` (clocks) is measured how long ago something was; by ``wall_clock`` others tell their times.
    """

    identity: Identity
    rpc: Rpc
    exchange: Exchange
    directory: Directory
    store: Store
    config: Config
    start_worker: Starter
    wall_clock: Callable[[], float]
    steady_clock: Callable[[], float]
    rng: random.Random
    turnover: Turnover
    understands: Understanding
    presence: Presence
    books: UsageLedger
    order: Order
    trials: Trials
    spill_folder: str = ""
    choices: dict[int, PlacementChoice] = field(default_factory=dict)

    @property
    def me(self) -> PeerId:
        """This daemon's peer id."""
        return self.rpc.network.peer_id


async def wait_for_model(services: HostingServices, settings: Serve, lifecycle: HostingLifecycle) -> ModelId:
    """Wait until the catalog lists the model asked for, or any; then the one that needs servers most."""
    while True:
        view = services.directory.view()
        stored_models = frozenset(services.store.library.folders)
        models = view.catalog.models
        choice = choose_model(view.spans, models, settings.model, stored_models, lifecycle.unfit)
        if choice.action is not None:
            model, n_blocks = choice.action
            if settings.span is not None and settings.span.end > n_blocks:
                raise ConfigError(f"--blocks {settings.blocks} exceeds the model's {n_blocks} blocks")
            return model
        if lifecycle.wait_for_model(choice.reason):
            logger.warning("%s", choice.reason)
        await trio.sleep(LOOK_INTERVAL_S)


def may_choose_another(services: HostingServices, settings: Serve, unfit: Collection[ModelId], model: ModelId) -> bool:
    """Is a worker that may choose its model free to take another one that was not tried here?"""
    listed = {ModelId(listed_model) for listed_model, _ in services.directory.view().catalog.models.values()}
    return not settings.model and bool(listed - {*unfit, model})


async def choose_blocks(
    services: HostingServices, settings: Serve, slot: int, limit: BlockLimit, model: ModelId
) -> Placement:
    """Choose the blocks of a model that a worker holds. Raises SwarmError."""
    if settings.span is not None:
        return Placement(model, settings.span, f"blocks {settings.span}, as --blocks says")
    with trio.move_on_after(FIRST_LOOK_S):  # see who else is there before choosing
        while len(services.directory.view().peers) < 2:
            await trio.sleep(0.2)
    manifest = await services.store.supply.manifest(model)
    n_blocks = manifest.n_blocks
    card = await _find_card(settings.device, manifest)
    shrinks_experts = settings.device == "cpu" or (not settings.device and not is_with_cards())
    block_bytes, head_bytes = group_bytes(manifest, settings.dtype, settings.quantize, shrinks_experts)
    free_bytes = max(0, _free_bytes(services, slot, card) - settings.head * head_bytes)
    if card is None:
        n_fit = blocks_that_fit(free_bytes, block_bytes)
    else:
        rounded_bytes = 0 if settings.quantize == "none" else max(group_bytes(manifest, settings.dtype)[0])
        n_fit = blocks_that_fit_card(free_bytes, block_bytes, rounded_bytes)
    n_fit = min(n_fit, settings.max_blocks or n_fit, limit.n_blocks or n_fit)
    believed = await _believed_spans(services, model, n_blocks)
    holders = holders_of(believed)
    speed = statistics.median([h.blocks_per_s for h in holders] or [1.0])  # its own is not measured yet
    for other_slot, choice in services.choices.items():
        if other_slot != slot and choice.model == model:
            holders.append(Holder(services.me, choice.span, speed))
    decision = choose_span(holders, n_blocks, n_fit, speed)
    if n_fit < n_blocks:
        around = services.directory.look_around(believed, n_blocks)
        decision = choose_near_span(around, holders, (services.me, slot), decision.action, speed) or decision
    span = decision.action
    n_bytes = sum(block_bytes[span.start : span.end])
    if settings.head and span.end == n_blocks:
        n_bytes += head_bytes
    services.choices[slot] = PlacementChoice(model, span, n_bytes, card.uuid if card else "")
    reason = f"{decision.reason}; {limit.reason}" if n_fit == limit.n_blocks else decision.reason
    return Placement(model, span, reason)


async def _find_card(device: str, manifest: Manifest) -> Card | None:
    """The card that a worker with this model takes, where its memory is known; GGUF is for the CPU if "" is said."""
    if family_of(manifest) == PACKED or not is_with_cards() or not can_use_cards():
        return None
    return find_card(device, await trio.to_thread.run_sync(list_cards, os.environ))


def _free_bytes(services: HostingServices, slot: int, card: Card | None) -> int:
    """How much memory a worker may take, of the machine or of a card; may be negative.

    That is what is free, without what siblings are about to load there, or have promised to caches. What the worker
    holds now is counted as free: it gives way to what is chosen.
    """
    free_bytes = measure_memory().free_bytes if card is None or card.free_bytes is None else card.free_bytes
    n_bytes = free_bytes - services.presence.kept_bytes
    for other_slot, choice in services.choices.items():
        if choice.card != (card.uuid if card else ""):
            continue
        if other_slot == slot and choice.is_loaded:
            n_bytes += choice.n_bytes
        elif other_slot != slot:
            n_bytes -= choice.promised_bytes if choice.is_loaded else choice.n_bytes
    return n_bytes


# A record that says "I hold blocks [0,8)" costs nothing, and a server that believed all of them would leave real gaps
# open. So other members' claims are counted only if the peer answers a ping now and, where it says that it is online,
# takes a trial session. Claims of this very daemon's older workers need no trial; those of its present workers are left
# out here, since ``choices`` says what they hold.
async def _believed_spans(services: HostingServices, model: ModelId, n_blocks: int) -> list[SpanRecord]:
    """Find the records of other workers that placement may count on."""
    me = services.me

    def is_own_worker(span: SpanRecord) -> bool:
        return span.peer == me and span.slot in services.choices

    spans = [s for s in services.directory.view().spans if s.model == model and s.end <= n_blocks]
    other_spans = [s for s in spans if s.state != "draining" and not is_own_worker(s)]
    answering = await services.directory.probes.find_answering({PeerId(s.peer) for s in other_spans})
    live_spans = [s for s in other_spans if s.peer in answering]
    claims = [s for s in live_spans if s.state == "online" and s.peer != me]
    serving = await services.trials.find_serving(claims)
    now = services.wall_clock()
    counted = [s for s in live_spans if s not in claims or claimant_of(s) in serving]
    return [s for s in counted if stays_s(s, now) > STAYS_S]


async def fetch_blocks(
    services: HostingServices, settings: Serve, model: ModelId, span: Span, slot: int | None = None
) -> Path:
    """Have blocks on the disk, and the head where it is served, kept for worker ``slot``. Raises SwarmError."""
    supply = services.store.supply
    groups = frozenset(span.blocks())
    if slot is not None:
        services.store.hold(slot, model, groups)
    n_blocks = (await supply.manifest(model)).n_blocks if settings.head else None
    if n_blocks is not None and span.end == n_blocks:
        groups |= {n_blocks}  # the group behind the last block holds norm and head
        if slot is not None:
            services.store.hold(slot, model, groups)
    return (await supply.ensure(model, groups)).folder
