"""What a holder keeps of micro-batches that are on their way: what entered its stage, and what left it both ways."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, field

import msgspec

from swarmd.errors import Code, Refused
from swarmd.protocol.wire.stages import Direction, SignedPass, StageBackward

MOST_BYTES = 512 * 2**20  # of all that is kept; drivers send no more micro-batches than a stage gets done


@dataclass(slots=True)
class KeptMicroBatch:
    """One micro-batch on the state of ``update``: what entered the stage, what left it, what goes back from it."""

    driver: str
    first: int
    n: int
    update: int
    entered: bytes = b""
    forward: bytes = b""
    backward: bytes = b""
    returned: bytes = b""  # the gradient that has come, where somebody watches the driver
    signed: SignedPass = field(default_factory=SignedPass)
    gradient_of: StageBackward | None = None  # the message whose gradient was added
    is_added: bool = False  # its gradients are in the sum, or were
    is_shown: bool = False  # it is kept until who watches the driver has fetched what that takes
    is_over: bool = False

    def note_gradient(self, message: StageBackward) -> None:
        """Note which driver's words the gradient that was added came with."""
        self.gradient_of = message
        self.signed = SignedPass(
            self.signed.source_digest,
            self.signed.signature,
            message.gradient_digest,
            message.gradient_signature,
            message.loss,
            message.left_digest,
        )

    @property
    def name(self) -> str:
        """What the worker calls it."""
        return f"{self.update}/{self.driver}/{self.first}"

    @property
    def n_bytes(self) -> int:
        """What it takes of memory."""
        return len(self.entered) + len(self.forward) + len(self.backward) + len(self.returned)

    def find(self, direction: Direction) -> bytes:
        """Find what left the stage, or has come to it; b"" while that has not happened."""
        kept = {
            "forward": self.forward,
            "backward": self.backward,
            "entered": self.entered,
            "returned": self.returned,
            "signed": msgspec.msgpack.encode(self.signed),
        }
        return kept[direction]

    def digest(self, direction: Direction) -> bytes:
        """The SHA-256 of what left the stage."""
        return hashlib.sha256(self.find(direction)).digest()

    @property
    def is_under_way(self) -> bool:
        """Has it gone forward, and not come back?"""
        return bool(self.forward) and not self.is_added


class KeptMicroBatches:
    """See the module. Those of an earlier update are forgotten with it: nobody computes on its state any more."""

    def __init__(self) -> None:
        self._kept: OrderedDict[tuple[str, int], KeptMicroBatch] = OrderedDict()

    def find(self, driver: str, first: int, update: int) -> KeptMicroBatch | None:
        """Find a micro-batch of an update."""
        batch = self._kept.get((driver, first))
        return batch if batch is not None and batch.update == update else None

    def open(self, driver: str, first: int, n: int, update: int) -> KeptMicroBatch:
        """Find a micro-batch, or begin to keep one. Raises Refused where there is no room for it."""
        batch = self.find(driver, first, update)
        if batch is not None:
            if batch.n != n:
                raise Refused(Code.MALFORMED, f"draws from {first} were {batch.n} before, and are {n} now")
            return batch
        n_bytes = sum(kept.n_bytes for kept in self._kept.values())
        if n_bytes > MOST_BYTES:
            raise Refused(Code.NO_CAPACITY, f"{n_bytes} B of micro-batches are kept here already", 1.0)
        batch = self._kept[driver, first] = KeptMicroBatch(driver, first, n, update)
        return batch

    def forget(self, driver: str, first: int) -> None:
        """Forget a micro-batch that is over, as soon as it is not shown to anybody."""
        batch = self._kept.get((driver, first))
        if batch is not None:
            batch.is_over = True
            if not batch.is_shown:
                del self._kept[driver, first]

    def forget_driver(self, driver: str) -> None:
        """Forget what is under way of a driver that is gone: it comes back no more."""
        for key in [key for key, batch in self._kept.items() if batch.driver == driver and not batch.is_added]:
            del self._kept[key]

    def forget_before(self, update: int, added_before: int) -> None:
        """Forget micro-batches on states before that of an update; those that were added, before another one's.

        Who computes them again may still fetch what has come of them: their drivers say when they are over.
        """
        for key, batch in list(self._kept.items()):
            if batch.update < (added_before if batch.is_added else update):
                del self._kept[key]

    @property
    def n_under_way(self) -> int:
        """How many have gone forward, and not come back."""
        return sum(batch.is_under_way for batch in self._kept.values())
