"""What a worker computes next: every ready decode step together, and beside them as much prefill as they can bear.

Decoding goes before prefill. One chunk of one client's prefill rides along, cut so that the pass gets longer by half
at most; with nobody decoding, chunks are as long as a pass may be. Where one call computes steps, they get in between
the layers of a prompt's pass instead, and neither waits long for the other. Clients take turns by what they were
given so far, and so do sessions that cannot share a pass (exact grade, padded batches, families whose self-test
failed).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from swarmd.plan.chains.prefixes import BLOCK_TOKENS
from swarmd.values import Decision, count

MAX_GUESSED_TOKENS = 16  # verifying some guesses is decoding too
MAX_TOKENS_PER_PASS = 512  # fixed, so that the exact grade repeats a prefill as it was
MOST_TOKENS_OF_CARD = 2_048  # in a pass, where they take no longer than LONGEST_CHUNK_S: fewer, fuller passes
LONGEST_CHUNK_S = 0.05  # whoever comes meanwhile waits for it
MIN_CHUNK_TOKENS = 8  # less of a prefill is not worth a pass
MIN_TOKENS_BETWEEN = 64  # in a pass between those of who decodes: 32 cost four streams 7 % of their tokens
PREFILL_SHARE = 0.5  # of a decode pass, that prefill may add to it


@dataclass(frozen=True, slots=True)
class ReadyOp:
    """The next op of one session: rows ``b``, ``t`` tokens left of each, and when it came (a running number)."""

    key: tuple[bytes, int]
    client: bytes
    b: int
    t: int
    order: int
    can_share: bool
    group: object = None
    is_begun: bool = False

    @property
    def is_decode(self) -> bool:
        return not self.is_begun and (self.t == 1 or self.b * self.t <= MAX_GUESSED_TOKENS)


@dataclass(frozen=True, slots=True)
class Speed:
    """What passes were measured to take: seconds of a pass without prefill, seconds a token of prefill adds."""

    decode_pass_s: float
    prefill_token_s: float


@dataclass(frozen=True, slots=True)
class PassShare:
    """``t`` tokens of each row of one session's next op."""

    key: tuple[bytes, int]
    t: int


def choose_pass(
    ready: Sequence[ReadyOp],
    served: Mapping[bytes, float],
    speed: Speed,
    n_active: int = 0,
    admits_steps: bool = False,
    most_tokens: int = MAX_TOKENS_PER_PASS,
) -> Decision[tuple[PassShare, ...]]:
    """Choose what one pass computes.

    ``served`` is what each client was given so far, in tokens; ``n_active`` sessions decode, and come again soon. A
    pass may let steps in between its layers (``choose_steps``), so that prefill needs not make room for them. Of a
    prompt it takes ``most_tokens`` at most.
    """
    if not ready:
        return Decision((), "nothing is ready")
    # A turn goes to the client that was given least, and the pass is built round that op:
    #
    #     contenders:  decode steps, ops that share with none, and prefills of groups where nothing decodes
    #     turn:        the contender whose client was given least
    #     pass:        all decode steps of the turn's group, and one chunk of one prefill of it
    #
    # A prefill whose group decodes is no contender: it rides along with the decode steps, and never displaces them.
    decoding = [r for r in ready if r.is_decode]
    busy = {r.group for r in decoding}
    contenders = [r for r in ready if r.is_decode or not r.can_share or r.group not in busy]

    def rank(op: ReadyOp) -> tuple[float, int]:
        return served.get(op.client, 0.0), op.order

    turn = min(contenders, key=rank)
    if not turn.can_share:
        return Decision(
            (PassShare(turn.key, _longest_chunk(turn, speed, most_tokens)),),
            "a session that cannot share a pass, in its turn",
        )
    decode_steps = [r for r in decoding if r.can_share and r.group == turn.group]
    shares = [PassShare(r.key, r.t) for r in decode_steps]
    of_group = [r for r in ready if r.can_share and r.group == turn.group]
    prefills = [r for r in of_group if not r.is_decode]
    if not prefills:
        return Decision(tuple(shares), f"{len(shares)} decode steps together")
    prefill = min(prefills, key=rank)
    affordable_tokens = int(PREFILL_SHARE * speed.decode_pass_s / max(speed.prefill_token_s, 1e-9))
    if not decode_steps and not n_active:
        chunk = _longest_chunk(prefill, speed, most_tokens)
        return Decision((PassShare(prefill.key, chunk),), f"{chunk} tokens of prefill, nobody decodes")
    min_tokens = MIN_CHUNK_TOKENS if decode_steps and not admits_steps else MIN_TOKENS_BETWEEN
    chunk = min(_longest_chunk(prefill, speed, most_tokens), max(min_tokens, affordable_tokens) // prefill.b or 1)
    if admits_steps:
        return Decision((PassShare(prefill.key, chunk),), f"{chunk} tokens of prefill, which let decode steps in")
    shares.append(PassShare(prefill.key, chunk))
    return Decision(tuple(shares), f"{count(len(decode_steps), 'decode step')} and {chunk} tokens of prefill")


def can_admit_steps(step_s: float, pass_s: float) -> bool:
    """May steps get in between the layers of a prompt's pass? Beside them a third of the time is the prompt's."""
    return pass_s >= PREFILL_SHARE * step_s


def choose_steps(steps: Sequence[ReadyOp], n_tokens: int) -> tuple[PassShare, ...]:
    """The decode steps that a call for so many tokens computes in the midst of a pass, the oldest first."""
    shares = list[PassShare]()
    for step in sorted(steps, key=lambda r: r.order):
        if step.b * step.t <= n_tokens:
            n_tokens -= step.b * step.t
            shares.append(PassShare(step.key, step.t))
    return tuple(shares)


MAX_PATIENCE = 0.5  # of a decode pass: waiting longer for others costs more than it brings together
ACTIVE_PASSES = 20  # without a step: a session that is not decoding any more is not waited for
MIN_ACTIVE_S = 0.2  # passes of tiny models are so short that a client's round trip is many of them


def patience_s(n_ready: int, n_active: int, waited_s: float, speed: Speed) -> float:
    """How long an idle worker waits for more steps before it begins a pass.

    Weights are read once for a pass, whatever is in it, so a pass of one is dear while many decode. With half of the
    active sessions here the others keep another server of the chain busy: more would let one of the two idle. What
    is waited for never takes longer than half a pass.
    """
    if not n_ready or 2 * n_ready >= n_active:
        return 0.0
    return max(0.0, MAX_PATIENCE * speed.decode_pass_s - waited_s)


CHUNK_S = 0.05  # of the slowest hop: all hops of a chain compute at once, and none waits long for another
MIN_OP_TOKENS = 64  # of 32 a prompt is there no sooner: they waste the matrix units
MAX_OP_TOKENS = 2_048  # as much as a pass takes at once, four times


def tokens_of_op(b: int, t: int, prefill_tokens_per_s: Sequence[float], n_members: int = 1) -> int:
    """How many tokens of each row a client puts in one op, so that the hops of a chain work at the same time.

    An op should take the slowest hop about ``CHUNK_S``: long enough to be worth its way, short enough to fill a
    pipeline. One hop alone is given everything at once. Ops end where shared beginnings do. ``n_members``
    of a hop's team share an op: each should have enough of it.
    """
    if len(prefill_tokens_per_s) < 2:
        return t
    n_tokens = min(MAX_OP_TOKENS, max(n_members * MIN_OP_TOKENS, int(min(prefill_tokens_per_s) * CHUNK_S)))
    n_ops = max(1, round(b * t / n_tokens))
    n_even = -(-t // min(n_ops, t))
    return min(t, -(-n_even // BLOCK_TOKENS) * BLOCK_TOKENS)


def _longest_chunk(ready: ReadyOp, speed: Speed, most_tokens: int) -> int:
    """So many tokens of each row as a fast card computes in a moment; of what may be repeated always as many."""
    n_quick = min(most_tokens, int(LONGEST_CHUNK_S / max(speed.prefill_token_s, 1e-9)))
    n_tokens = max(MAX_TOKENS_PER_PASS, n_quick) if ready.can_share else MAX_TOKENS_PER_PASS
    return min(ready.t, max(1, n_tokens // ready.b))
