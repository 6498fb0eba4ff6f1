"""Who is wrong where an answer is computed again and something else comes of it: two of three decide.

Audits of sessions and of fine-tuning, accusations and contributions to training runs are judged here, by the same
rules. No I/O: whoever audits asks peers and compares numbers (``plan.trust.equality``), tells the judge what came of
it, and does what the judge says. How much is found so, and how soon: docs/trust.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from swarmd.plan.trust.blame import Blame
from swarmd.plan.trust.standing import RULES, Fault
from swarmd.values import Decision, PeerId


class AuditVerdict(StrEnum):
    """What the answers to one question say of the examined one."""

    RIGHT = "right"
    WRONG = "wrong"
    REFERENCE_WRONG = "reference wrong"
    UNDECIDED = "undecided"
    INCONCLUSIVE = "inconclusive"  # there was nothing to compare: no case


@dataclass(frozen=True, slots=True)
class Party:
    """Who gave one answer together: the server of a hop, or those of a whole chain; and who vouches for them."""

    peers: frozenset[PeerId]
    sponsors: frozenset[bytes]


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be done next: others compute the same, but none of ``peers``, and no guest of ``sponsors``."""

    peers: frozenset[PeerId]
    sponsors: frozenset[bytes] = frozenset()


@dataclass(frozen=True, slots=True)
class Charge:
    """What is held against one peer; without a ``fault`` its standing stays as it is."""

    peer: PeerId
    blame: Blame
    fault: Fault | None = None


@dataclass(frozen=True, slots=True)
class Ruling:
    """How a case ends, and why; ``charges`` say who is held to account for it."""

    verdict: AuditVerdict
    reason: str
    charges: tuple[Charge, ...] = ()

    @property
    def is_cleared(self) -> bool:
        """Was the examined answer right, whoever else was wrong?"""
        return self.verdict in (AuditVerdict.RIGHT, AuditVerdict.REFERENCE_WRONG)

    @property
    def faults(self) -> dict[PeerId, Fault]:
        """What enters the standing of peers."""
        return {charge.peer: charge.fault for charge in self.charges if charge.fault is not None}


@dataclass(frozen=True, slots=True)
class JudgeRules:
    """Where those who audit truly differ: SESSION_RULES, LANE_RULES and LANE_HOP_RULES say why.

    ``needs_other_sponsor``: must the first reference have another sponsor than the examined? The third always must.
    ``fault_of_many``: what each peer of a wrong answer is charged with, where several gave it together.
    """

    needs_other_sponsor: bool = False
    fault_of_many: Fault | None = None


# A session audits each of its hops by itself, so the examined is one server. A reference that is a chain of several and
# wrong as a whole charges none of them: one lies, and each is audited in its own sessions.
SESSION_RULES = JudgeRules()
# A lane of fine-tuning is examined as a whole only after none of its hops was found wrong alone. So its liar lies only
# in company, and would never be named: all of the lane are charged, with a fault that does not ban; one such fault does
# not leave out either, but the pipeline backs off from all of them.
LANE_RULES = JudgeRules(fault_of_many=Fault.FAULTY_NUMBERS)
# A hop of a lane is asked alone because two chains differed already. The answer of an accomplice would clear it.
LANE_HOP_RULES = JudgeRules(needs_other_sponsor=True)


# One case. The examined E has answered. Each method takes what came of a question and returns what is to be done next:
#
#     first_question: a reference R, not E
#        |
#     hear_reference -- R == E ------------------------------------------------> RIGHT
#        | R != E: a third T, of another sponsor than E and R
#        |
#     hear_third ------ T == R, T != E ----------------------------------------> WRONG
#        |       \----- T == E, T != R ----------------------------------------> REFERENCE_WRONG
#        |        \---- all three differ, or T is near both -------------------> UNDECIDED
#     rule_without_third: nobody is there, or nobody answers ------------------> UNDECIDED
#
# Without any reference there is no case: nothing was found out. What holds whatever peers answer:
#
#   - Nobody judges itself. One sponsor is one voice, because keys cost nothing: T has another than E and R.
#     So where all liars have one sponsor, nobody honest is charged with an OFFENCE.
#   - UNDECIDED puts nothing on record. The session moves away from E, and from the hops behind it, whose caches come of
#     what E gave; but once only: R may be the liar, and would else drive it from server to server.
#   - A reference that two others contradict is charged like any liar, if it is one server.
#   - An heir computes with caches that another server gave it, which may have changed them: it is left, not charged.
class Judge:
    """The case of one answer, ``examined``. ``may_move``: may its session still move away from who gave it?"""

    def __init__(
        self,
        examined: Party,
        rules: JudgeRules = SESSION_RULES,
        *,
        is_heir: bool = False,
        may_move: bool = True,
    ) -> None:
        self._examined = examined
        self._rules = rules
        self._is_heir = is_heir
        self._may_move = may_move
        self._reference: Party | None = None
        self._difference = ""  # between the reference and the examined, in words

    @property
    def first_question(self) -> Question:
        """Whom to ask for a reference."""
        sponsors = self._examined.sponsors if self._rules.needs_other_sponsor else frozenset[bytes]()
        return Question(self._examined.peers, sponsors)

    def hear_reference(self, reference: Party, equals_examined: Decision[bool]) -> Question | Ruling:
        """Take a first reference, and whether the examined answer is the same."""
        if equals_examined.action:
            return Ruling(AuditVerdict.RIGHT, equals_examined.reason)
        self._reference = reference
        self._difference = equals_examined.reason
        peers = self._examined.peers | reference.peers
        return Question(peers, self._examined.sponsors | reference.sponsors)

    def hear_third(
        self,
        third: Party,
        equals_examined: Decision[bool],
        equals_reference: Decision[bool],
    ) -> Ruling:
        """Take a third answer, and whether each of the first two is the same."""
        assert self._reference is not None
        before = (self._examined, self._reference)
        if any(third.peers & party.peers or third.sponsors & party.sponsors for party in before):
            return self.rule_without_third("who answered has the sponsor of one of the two")
        verdict = two_of_three(False, equals_examined.action, equals_reference.action)
        names = ", ".join(sorted(peer[-8:] for peer in third.peers))
        reason = f"{self._difference}; {names} is asked too: {verdict} ({equals_examined.reason})"
        return Ruling(verdict, reason, self._charges(verdict))

    def rule_without_third(self, reason: str) -> Ruling:
        """Conclude that two differ, and nobody says which one is wrong."""
        verdict = AuditVerdict.UNDECIDED
        return Ruling(verdict, f"{self._difference}; {reason}", self._charges(verdict))

    def _charges(self, verdict: AuditVerdict) -> tuple[Charge, ...]:
        assert self._reference is not None
        if verdict is AuditVerdict.REFERENCE_WRONG:
            return self._charge_party(self._reference)
        if verdict is AuditVerdict.WRONG and not self._is_heir:
            return self._charge_party(self._examined)
        if verdict is AuditVerdict.WRONG or self._may_move:
            return tuple(Charge(peer, Blame.AMBIGUOUS) for peer in sorted(self._examined.peers))
        return ()

    def _charge_party(self, party: Party) -> tuple[Charge, ...]:
        is_alone = len(party.peers) == 1
        fault = Fault.WRONG_RESULTS if is_alone else self._rules.fault_of_many
        return () if fault is None else _charge(fault, *party.peers)


def _charge(fault: Fault, *peers: PeerId) -> tuple[Charge, ...]:
    return tuple(Charge(peer, RULES[fault].blame, fault) for peer in sorted(peers))


def two_of_three(with_first: bool, with_second: bool | None, among_them: bool | None) -> AuditVerdict:
    """Whether an answer equals a first and a second reference (None: there is none), and these each other."""
    if with_first:
        return AuditVerdict.RIGHT
    if with_second is None or among_them is None:
        return AuditVerdict.UNDECIDED
    if with_second and not among_them:
        return AuditVerdict.REFERENCE_WRONG
    if among_them and not with_second:
        return AuditVerdict.WRONG
    return AuditVerdict.UNDECIDED


# What this machine has computed itself, from input that the examined has signed, needs no third: it believes itself,
# and nobody else. Whoever accuses another makes all who hear it compute, so a false accusation is held against it. That
# is so for evidence against a server and for contributions to a training run. A probe is no such case: its numbers are
# signed by nobody, so it charges nobody, and ``plan.trust.reputation`` counts what several sponsors found.
def judge_by_own_result(
    examined: PeerId,
    accuser: PeerId | None,
    equals_own: Decision[bool] | Decision[bool | None],
    *,
    is_clear: bool = True,
    fault: Fault = Fault.WRONG_RESULTS,
) -> Ruling:
    """Judge an answer by what this machine computes itself; ``fault`` is held against who is wrong.

    ``equals_own``: None where what comes of it here says nothing. ``accuser``: who says that it is wrong, if anybody;
    it is blamed only where the opposite is clear (``is_clear``), for near a bound honest machines differ.
    """
    if equals_own.action is None:
        return Ruling(AuditVerdict.UNDECIDED, equals_own.reason)
    if not equals_own.action:
        return Ruling(AuditVerdict.WRONG, equals_own.reason, _charge(fault, examined))
    charges: tuple[Charge, ...] = ()
    if accuser is not None and is_clear:
        charges = _charge(Fault.FALSE_ACCUSATION, accuser)
    return Ruling(AuditVerdict.RIGHT, equals_own.reason, charges)
