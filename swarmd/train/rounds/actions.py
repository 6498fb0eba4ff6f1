"""What the cores of a round want done: callers send, wait, begin and go to the anchors; cores only decide."""

from __future__ import annotations

from dataclasses import dataclass

from swarmd.protocol.fields import Message
from swarmd.values import PeerId


@dataclass(frozen=True, slots=True)
class SendToMembers:
    """Bring a message, with a payload, to members of a round; one of them may be this peer."""

    peers: tuple[PeerId, ...]
    message: Message
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class BringToAnchors:
    """Have the anchors sign this commit, for which most contributors stand."""

    proposed: bytes


@dataclass(frozen=True, slots=True)
class WaitForMembers:
    """Look again when there is news, or a moment later: some may still join."""


@dataclass(frozen=True, slots=True)
class BeginRound:
    """Form the round's group of those who have joined."""


@dataclass(frozen=True, slots=True)
class PostponeRound:
    """Begin no round yet: all compute on."""

    reason: str


GatheringStep = WaitForMembers | BeginRound | PostponeRound
GroupStep = SendToMembers | BringToAnchors
