"""Tells holders of the same blocks of a hop that was found wrong, with what lets them see for themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from swarmd.client.links.link import HopLink, SessionOptions, SessionServices, suits
from swarmd.errors import PeerError
from swarmd.plan.trust.reputation import shared_blocks
from swarmd.protocol.accounts import evidence
from swarmd.protocol.accounts.evidence import MAX_EVIDENCE_BYTES, MAX_RECEIPTS, Evidence
from swarmd.protocol.membership.records import SpanRecord
from swarmd.protocol.wire.messages import Accuse, Believed
from swarmd.values import ModelId, PeerId
from swarmd.wire.tensors import pack

logger = logging.getLogger(__name__)

MOST_TOLD = 3  # holders, each of another voucher: they tell the others
ACCUSE_TIMEOUT_S = 60.0  # to receive and compute it: others' work comes first


def evidence_of(
    terms: SessionOptions,
    signed: tuple[tuple[bytes, bytes], ...],
    entered: tuple[torch.Tensor, torch.Tensor],
    left: tuple[torch.Tensor, torch.Tensor],
) -> bytes | None:
    """What shows it, as a payload; None where nobody else could compute or believe it.

    That is with own parameters, over coded links, where it is too much, and where a receipt is missing.
    """
    hidden, positions = entered
    is_plain = not terms.adapter and terms.own is None and 0 < len(signed) <= MAX_RECEIPTS
    if not is_plain or not torch.equal(positions, torch.arange(hidden.shape[1]).expand_as(positions).int()):
        return None
    payload = evidence.encode(Evidence(signed, pack(*entered, None), pack(*left, None)))
    return payload if len(payload) <= MAX_EVIDENCE_BYTES else None


async def accuse(
    swarm: SessionServices,
    voucher_of: Callable[[PeerId], bytes],
    terms: SessionOptions,
    link: HopLink,
    record: SpanRecord,
    payload: bytes,
) -> None:
    """Tell some who hold the blocks, and may read the text, and say what they found."""
    known = set[bytes]()
    for span in swarm.view().serving(ModelId(record.model)):
        peer, common = PeerId(span.peer), shared_blocks(record, span)
        is_able = common is not None and common.covers(link.hop.span) and suits(span, terms, "")
        if not is_able or voucher_of(peer) in known or len(known) >= MOST_TOLD:
            continue

        def request(call_id: int) -> Accuse:
            return Accuse(id=call_id, model=record.model, peer=record.peer, slot=record.slot)

        try:
            swarm.rpc.network.learn(peer, swarm.addresses_of(peer))
            reply, _ = await swarm.rpc.call(peer, request, payload, ACCUSE_TIMEOUT_S, "bulk")
        except PeerError as error:
            logger.info("%s was not told of %s: %s", peer[-8:], link.hop, error)
            continue
        if isinstance(reply, Believed):
            known.add(voucher_of(peer))
            logger.warning("%s computed it too: %s is %s", peer[-8:], link.hop, "wrong" if reply.is_wrong else "right")
