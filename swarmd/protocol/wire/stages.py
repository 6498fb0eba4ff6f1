"""Headers of runs in stages: micro-batches on their way through the holders of stages. docs/training.md.

A driver tells holders what to compute, one after the other; what they compute of, they fetch from one another.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from swarmd.protocol.fields import Count, Digest, Index, Message, Name, Part, Request, Stage
from swarmd.protocol.runs.commit import Finite

NumberOfDraws = Annotated[int, msgspec.Meta(ge=1, le=4_096)]
PassSignature = Annotated[bytes, msgspec.Meta(max_length=64)]
Direction = Literal["forward", "backward", "entered", "returned", "signed"]
RECEIPT = b"receipt"  # in a driver's signature under what it has had from the first stage of blocks
PASS_DOMAIN = b"swarmd stage pass 1\0"


class StagePass(Request, frozen=True):
    """Driver to holder: compute a pass of draws ``first`` to ``first + n`` of ``driver``, on the state of ``update``.

    ``run`` is the stage's ledger, which says which state that is. ``source`` has what goes forward, and has told the
    driver its SHA-256: what comes from there must be that. ``signature``: the driver's, where it is the source itself
    (``statement_of``).
    """

    run: Name = ""
    update: Count = 0
    driver: Name = ""
    first: Count = 0
    n: NumberOfDraws = 1
    source: Name = ""
    source_digest: Digest = b""
    signature: PassSignature = b""


def statement_of(message: StagePass, digest: bytes, loss: float = 0.0, of: bytes = b"") -> bytes:
    """What a driver signs under ``PASS_DOMAIN``, of a micro-batch: what it gives to a pass, or has had from one.

    ``digest`` is of that; of what the head gives, ``loss`` and ``of``, the hash of what the head had, are signed, too.
    """
    named = (message.run, message.update, message.driver, message.first, message.n)
    return msgspec.msgpack.encode((*named, digest, loss, of))


class StageForward(StagePass, tag="stage_forward", frozen=True):
    """Compute what leaves the stage, and keep it."""


class StageBackward(StagePass, tag="stage_backward", frozen=True):
    """Add the gradients of the stage's parameters, and keep that by what enters it.

    ``gradient_source`` has the gradient by what leaves the stage; ``loss`` is the summed loss that the head came to, of
    what has the hash ``left_digest``.
    """

    gradient_source: Name = ""
    gradient_digest: Digest = b""
    gradient_signature: PassSignature = b""
    loss: Finite = 0.0
    left_digest: Digest = b""


class StageWatch(Message, tag="stage_watch", frozen=True):
    """Tell me of each micro-batch that ``peer`` adds on the state of ``update``: I compute it again.

    A holder says it to drivers; a driver, of another one, to holders of the first and the last stage of blocks.
    ``run`` is the ledger of who is told; ``stage`` is that of both who watches and who is watched.
    """

    run: Name = ""
    stage: Stage = 0
    peer: Name = ""
    update: Count = 0


class StageCopy(StageBackward, tag="stage_copy", frozen=True):
    """To a holder that watches ``peer``: it has added this micro-batch. Answered by ``StageDone``.

    ``forward_digest`` and ``backward_digest`` are of what it says has come of it. Of a driver two holders say a half
    each: that of the first stage of blocks has what went in there, and the gradient that came back; that of the last
    stage has what went out there, and the gradient that came in. ``is_over``: the driver has said that it is.
    """

    peer: Name = ""
    forward_digest: Digest = b""
    backward_digest: Digest = b""
    receipt: PassSignature = b""
    is_over: bool = False


class SignedPass(msgspec.Struct, frozen=True, array_like=True):
    """What a driver has signed of what it gave to a holder: what entered its stage, and what was returned to it."""

    source_digest: Digest = b""
    signature: PassSignature = b""
    gradient_digest: Digest = b""
    gradient_signature: PassSignature = b""
    loss: Finite = 0.0
    left_digest: Digest = b""


class StageDone(Message, tag="stage_done", frozen=True):
    """Holder to driver: it is computed; or (not ``is_done``) the state here is that of another update by now.

    ``lacks``: which of the two could not be had from whom the driver named. ``digest``: SHA-256 of what came of it.
    """

    re: Count = 0
    is_done: bool = True
    update: Count = 0
    lacks: Literal["", "forward", "backward"] = ""
    digest: Digest = b""


class StageForget(Message, tag="stage_forget", frozen=True):
    """Driver to holder: a micro-batch is over, whatever has come of it; nobody asks for what is kept of it.

    ``receipt``: to the first stage of blocks, the driver's signature under the gradient that it has had from there.
    """

    run: Name = ""
    driver: Name = ""
    first: Count = 0
    receipt: PassSignature = b""


class WantActivations(Request, tag="want_activations", frozen=True):
    """Holder to holder: give me a part of what left your stage of a micro-batch, forward or back.

    Or of what has come there: what ``entered`` the stage, what was ``returned`` to it, and what its driver has
    ``signed`` of both (``SignedPass``).
    """

    run: Name = ""
    update: Count = 0
    driver: Name = ""
    first: Count = 0
    direction: Direction = "forward"
    part: Index = 0


class ActivationsAre(Message, tag="activations", frozen=True):
    """The payload is the part that was asked for (wire.activations says of what)."""

    re: Count = 0
    part: Part = (0, 1)
