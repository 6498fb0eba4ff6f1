"""What a peer's faults are worth: weights, decay, when it is left out, and when and for how long it is banned.

Pure rules over one record a peer; ``net.standing`` keeps them. What honest peers do under load, what they relay and
what tells their version from another one is no fault: there is no kind for it. docs/protocol.md, "Standing".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from swarmd.plan.trust.blame import Blame
from swarmd.values import Decision

HALF_LIFE_S = 600.0  # of a fault's weight
LEFT_OUT_ABOVE = 1.0  # one accident of weight 1 is not enough, two within a half-life are
BANNED_ABOVE = 2.0  # the sum of what bans; docs/protocol.md has the weight of each fault
FIRST_BAN_S = 60.0  # doubles with each ban
LONGEST_BAN_S = 86_400.0  # longer than an attack lasts, and still it ends
BANS_FORGOTTEN_S = 86_400.0  # without another one
SECOND_CHANCE_S = 1.0  # for who alone holds what is needed
MAX_WITNESSES = 64  # against one peer: more change nothing


class Fault(StrEnum):
    """What a peer can do wrong."""

    MALFORMED = "malformed"
    FORGED = "forged"
    BAD_CHUNK = "bad_chunk"
    FAULTY_NUMBERS = "faulty_numbers"
    SILENT = "silent"
    WRONG_RESULTS = "wrong_results"
    UNACCOUNTED = "unaccounted"
    FALSE_ACCUSATION = "false_accusation"


@dataclass(frozen=True, slots=True)
class Rule:
    """``weight`` of one fault of a kind, and how much is held against its peer; a ban is of ``ban_s`` at first."""

    weight: float
    blame: Blame
    meaning: str
    ban_s: float = FIRST_BAN_S

    @property
    def bans(self) -> bool:
        """Does it count towards a ban?"""
        return self.blame is Blame.OFFENCE


RULES: Mapping[Fault, Rule] = {
    Fault.MALFORMED: Rule(0.5, Blame.OFFENCE, "bytes that no honest peer sends"),
    Fault.FORGED: Rule(1.0, Blame.OFFENCE, "a signature, certificate or commit that does not verify"),
    Fault.BAD_CHUNK: Rule(2.0, Blame.OFFENCE, "weights or state that are not what their hash says"),
    Fault.FAULTY_NUMBERS: Rule(1.0, Blame.FAULT, "hidden states, gradients or averages that cannot be right"),
    Fault.WRONG_RESULTS: Rule(
        3.0, Blame.OFFENCE, "others, or this machine, compute something else from its input", 3_600.0
    ),
    Fault.UNACCOUNTED: Rule(1.0, Blame.FAULT, "no receipt for what it computed, or other numbers than it signed"),
    Fault.FALSE_ACCUSATION: Rule(1.0, Blame.OFFENCE, "evidence against another that computes rightly"),
    Fault.SILENT: Rule(
        0.0, Blame.SILENT, "no sign of life while something was outstanding: left out for a while, no more"
    ),
}


@dataclass(slots=True)
class FaultHistory:
    """What was seen of one peer: faults by kind as (count, weight as of ``at``), and what follows from them.

    It is left out until ``out_until``, or as a last resort until ``last_resort_at``, though nothing is held against it;
    ``strikes`` counts how often that was, since it last did something right.
    """

    faults: dict[Fault, tuple[int, float]] = field(default_factory=dict)
    at: float = 0.0
    why: str = ""
    strikes: int = 0
    last_resort_at: float = 0.0
    out_until: float = 0.0
    banned_until: float = 0.0
    n_bans: int = 0
    witnesses: dict[str, float] = field(default_factory=dict)

    def weight(self, kind: Fault, now: float) -> float:
        """What the faults of a kind weigh by now."""
        decay: float = 0.5 ** (max(0.0, now - self.at) / HALF_LIFE_S)
        return self.faults.get(kind, (0, 0.0))[1] * decay

    def score(self, now: float) -> float:
        """What all faults together weigh by now."""
        return sum(self.weight(kind, now) for kind in self.faults)


def record_fault(
    history: FaultHistory,
    kind: Fault,
    why: str,
    now: float,
    witness: str = "",
) -> Decision[bool]:
    """Count one fault; tells whether the peer is banned from now on. Of a witness each kind counts once."""
    # A witness is a member that says what a third one did. One that repeats itself adds nothing, and there is an end
    # to how many are remembered, so that nobody fills memory or a history with words.
    if witness:
        witnesses = {w: seen_at for w, seen_at in history.witnesses.items() if now - seen_at < HALF_LIFE_S}
        history.witnesses = witnesses
        if f"{kind}/{witness}" in witnesses or len(witnesses) >= MAX_WITNESSES:
            return Decision(False, f"{witness[-8:]} has said so before")
        witnesses[f"{kind}/{witness}"] = now
    # All weights are brought to the present first: one time (``at``) stands for all of them, and they decay alike.
    weights = {k: (count, history.weight(k, now)) for k, (count, _) in history.faults.items()}
    count, weight = weights.get(kind, (0, 0.0))
    weights[kind] = (count + 1, weight + RULES[kind].weight)
    history.faults = weights
    history.at = now
    history.why = f"{kind}: {why}"[:300]
    counted = sum(w for k, (_, w) in weights.items() if RULES[k].bans)
    if counted <= BANNED_ABOVE or is_banned(history, now):
        return Decision(False, history.why)
    if now - history.banned_until > BANS_FORGOTTEN_S:
        history.n_bans = 0
    ban_s = min(LONGEST_BAN_S, RULES[kind].ban_s * 2**history.n_bans)
    history.n_bans += 1
    history.banned_until = now + ban_s
    # What led to this ban is paid for by it: afterwards only new faults count towards the next, longer one.
    for other_kind, (n, old_weight) in weights.items():
        weights[other_kind] = (n, 0.0 if RULES[other_kind].bans else old_weight)
    return Decision(True, f"banned for {ban_s:.0f} s, for the {history.n_bans}. time: {history.why}")


def leave_out(
    history: FaultHistory,
    now: float,
    for_s: float,
    longest_s: float,
    is_relayed: bool = False,
) -> float:
    """Do without a peer for a while, twice as long each time until it does something right; returns until when.

    ``is_relayed``: the relay may be what is silent, so it is a last resort at once, unless it was left out before.
    """
    grown_s = min(longest_s, for_s * 2**history.strikes)
    is_last_resort_now = is_relayed and not history.strikes
    history.last_resort_at = now if is_last_resort_now else now + SECOND_CHANCE_S
    if longest_s > for_s:  # else it is only asked again and again whether it is there
        history.strikes = min(history.strikes + 1, 32)
    history.out_until = now + grown_s
    return history.out_until


def is_banned(history: FaultHistory, now: float) -> bool:
    """Is a ban of this peer under way?"""
    return now < history.banned_until


def is_shunned(history: FaultHistory, now: float) -> bool:
    """Has this peer lost its standing by what it did?"""
    return is_banned(history, now) or history.score(now) > LEFT_OUT_ABOVE


def is_allowed(history: FaultHistory, now: float, is_last_resort: bool = False) -> bool:
    """May this peer be used? As a last resort one is that is left out, soon after it was, but none that is banned."""
    if is_banned(history, now):
        return False
    if is_last_resort:
        return now >= min(history.out_until, history.last_resort_at)
    return now >= history.out_until and not is_shunned(history, now)
