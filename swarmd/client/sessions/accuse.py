"""Tells holders of the same blocks of a hop that was found wrong, with what lets them see for themselves."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch

from swarmd.client.links.link import HopLink, SessionOptions, SessionServices, is_suitable
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
    receipts: tuple[tuple[bytes, bytes], ...],
    inputs: tuple[torch.Tensor, torch.Tensor],
    outputs: tuple[torch.Tensor, torch.Tensor],
) -> bytes | None:
    """Encode what shows that a hop is wrong; None where nobody else could compute or believe it.

    That is so with the client's own parameters, where the evidence is too large, and where a receipt is missing.
    ``inputs`` and ``outputs`` are hidden states [b, t, d] and positions [b, t]; the outputs of the wrong token only.
    """
    hidden, positions = inputs
    has_own_weights = bool(terms.adapter) or terms.tuned is not None
    if has_own_weights or not 0 < len(receipts) <= MAX_RECEIPTS:
        return None
    plain_positions = torch.arange(hidden.shape[1]).expand_as(positions).int()
    if not torch.equal(positions, plain_positions):
        return None
    packed_inputs = pack(*inputs, None)
    packed_outputs = pack(*outputs, None)
    payload = evidence.encode(Evidence(receipts, packed_inputs, packed_outputs))
    return payload if len(payload) <= MAX_EVIDENCE_BYTES else None


async def accuse(
    swarm: SessionServices,
    voucher_of: Callable[[PeerId], bytes],
    terms: SessionOptions,
    link: HopLink,
    record: SpanRecord,
    payload: bytes,
) -> None:
    """Tell some peers that hold the blocks and may read the text; log what they found."""
    notified = set[bytes]()  # vouchers of peers that believed it: one key's many peers count once
    for span in swarm.view().serving(ModelId(record.model)):
        peer = PeerId(span.peer)
        common = shared_blocks(record, span)
        holds_blocks = common is not None and common.covers(link.hop.span)
        if not holds_blocks or not is_suitable(span, terms, ""):
            continue
        if voucher_of(peer) in notified or len(notified) >= MOST_TOLD:
            continue
        request = Accuse(model=record.model, peer=record.peer, slot=record.slot)
        try:
            swarm.rpc.network.learn(peer, swarm.addresses_of(peer))
            reply, _ = await swarm.rpc.call(peer, request, payload, ACCUSE_TIMEOUT_S, "bulk")
        except PeerError as error:
            logger.info("%s was not told of %s: %s", peer[-8:], link.hop, error)
            continue
        if isinstance(reply, Believed):
            notified.add(voucher_of(peer))
            verdict = "wrong" if reply.is_wrong else "right"
            logger.warning("%s computed it too: %s is %s", peer[-8:], link.hop, verdict)
