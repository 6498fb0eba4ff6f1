"""Who is in a team, and what each is worth in it: by measured speeds and sums, before any slice is loaded.

A member needs so long for one token in one block: a part that does not shrink with its slice (Python, what is computed
whole), and a part that does. All wait for the slowest, and then for the sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarmd.plan.teams.slices import slices
from swarmd.values import Decision

WORTH = 0.97  # of the time of the leader alone that a team has to take at most
FULL = 0.9  # of a member's memory that its slices may take: sessions need some
LEAST_SHARE = 0.01  # of a block: a member of less would only be waited for
BISECTIONS = 50  # of the time in which all end: to a billionth of it
TOLD_S = 40e-6  # to write and read the part of each further member (docs/performance.md, "Teams")


@dataclass(frozen=True, slots=True)
class MemberSpeed:
    """Seconds of one token in one block: ``fixed_s``, and ``block_s`` times the share of the block that is its slice.

    ``sum_s``: of a sum with the leader alone; 0 for the leader. ``free_bytes`` of its memory; members of one machine
    have the leader's, and say None.
    """

    fixed_s: float
    block_s: float
    sum_s: float = 0.0
    free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class BlockShape:
    """Of one block: its sections, as (units, numbers), each with a sum; and of all blocks, how many bytes they take."""

    sections: tuple[tuple[int, int], ...]
    n_blocks: int
    n_bytes: int


@dataclass(frozen=True, slots=True)
class TeamChoice:
    """What each member is worth, the leader first; 0: it is left out. None of them: the leader computes alone.

    ``token_s``: what one token takes, as predicted.
    """

    weights: tuple[float, ...]
    token_s: float


def predict_token_s(members: Sequence[MemberSpeed], weights: Sequence[float], shape: BlockShape) -> float:
    """What one token takes in a team of these members: of each section the slowest slice, then the sum."""
    n_numbers = sum(numbers for _, numbers in shape.sections)
    sum_s = max(member.sum_s for member in members) + TOLD_S * (len(members) - 2)
    section_s = 0.0
    for n_units, numbers in shape.sections:
        shares = [len(units) / n_units for units in slices(n_units, weights)]
        slowest_s = max(member.block_s * share for member, share in zip(members, shares, strict=True))
        section_s += slowest_s * numbers / n_numbers + sum_s
    return shape.n_blocks * (section_s + max(member.fixed_s for member in members))


def whole_block_s(member: MemberSpeed, shape: BlockShape) -> float:
    """What a member would take for a whole block with its sums."""
    return member.fixed_s + member.block_s + len(shape.sections) * member.sum_s


def balance(members: Sequence[MemberSpeed], n_bytes: int) -> list[float] | None:
    """The share of each, so that all take as long as memory allows; None where it does not fit them all together.

    A share may come to nothing: that member would be the last even so.
    """
    most = [1.0 if m.free_bytes is None else min(1.0, FULL * m.free_bytes / max(1, n_bytes)) for m in members]
    if sum(most) < 1:
        return None

    def shares_within(time_s: float) -> list[float]:
        wanted = [(time_s - member.fixed_s) / member.block_s for member in members]
        return [min(bound, max(0.0, share)) for share, bound in zip(wanted, most, strict=True)]

    least_s, most_s = 0.0, max(member.fixed_s + member.block_s for member in members)
    for _ in range(BISECTIONS):
        middle_s = (least_s + most_s) / 2
        least_s, most_s = (least_s, middle_s) if sum(shares_within(middle_s)) >= 1 else (middle_s, most_s)
    return shares_within(most_s)


def choose_team(
    members: Sequence[MemberSpeed], shape: BlockShape, alone_s: float | None, alone_bytes: int | None
) -> Decision[TeamChoice]:
    """Choose the team of the leader (the first) and the fastest of the others that is quickest, if it is worth it.

    ``alone_s``: what a token takes the leader alone, measured; None where its memory (``alone_bytes``) is too small.
    """
    order = sorted(range(1, len(members)), key=lambda i: whole_block_s(members[i], shape))
    best: TeamChoice | None = None
    for n_others in range(1, len(members)):
        chosen, shares = _worth_waiting_for(members, [0, *order[:n_others]], shape.n_bytes)
        if len(chosen) < 2 or min(n for n, _ in shape.sections) < len(chosen):
            continue
        token_s = predict_token_s([members[i] for i in chosen], shares, shape)
        if best is None or token_s < best.token_s:
            weights = [0.0] * len(members)
            for i, share in zip(chosen, shares, strict=True):
                weights[i] = round(share, 3)
            best = TeamChoice(tuple(weights), token_s)
    return _decide(best, alone_s, alone_bytes, shape, len(members))


def _worth_waiting_for(
    members: Sequence[MemberSpeed], chosen: list[int], n_bytes: int
) -> tuple[list[int], list[float]]:
    """Those of the chosen ones who get a share that is worth it, and their shares; none where the leader gets none."""
    while True:
        shares = balance([members[i] for i in chosen], n_bytes)
        if shares is None or shares[0] < LEAST_SHARE:
            return [], []
        if min(shares) >= LEAST_SHARE:
            return chosen, shares
        chosen = [i for i, share in zip(chosen, shares, strict=True) if share >= LEAST_SHARE]


def _decide(
    best: TeamChoice | None, alone_s: float | None, alone_bytes: int | None, shape: BlockShape, n_members: int
) -> Decision[TeamChoice]:
    alone = TeamChoice((), alone_s or 0.0)
    if alone_s is None:
        needs = f"these blocks take {shape.n_bytes / 2**30:.1f} GiB, of {(alone_bytes or 0) / 2**30:.1f} that are here"
        if best is None:
            return Decision(alone, f"{needs}, and the others have no room for the rest")
        return Decision(best, f"{needs}; a token is to take {1000 * best.token_s:.1f} ms")
    if best is None:
        return Decision(
            alone, f"a token takes {1000 * alone_s:.1f} ms alone, and every other member would be waited for"
        )
    times = f"a token takes {1000 * alone_s:.1f} ms alone, and would take {1000 * best.token_s:.1f} in the best team"
    if best.token_s > WORTH * alone_s:
        return Decision(alone, times)
    left_out = n_members - sum(weight > 0 for weight in best.weights)
    without = f", without {left_out} that would slow it down" if left_out else ""
    return Decision(best, f"{times}{without}")
