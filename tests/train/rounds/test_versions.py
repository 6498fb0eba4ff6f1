"""Who stays in a round's group and when it may be committed, decided without network or clock."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.plan.runs.ledger import Ledger
from swarmd.plan.runs.outcome import Timing
from swarmd.plan.runs.verdicts import MemberSeen
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.runs import backing
from swarmd.protocol.runs.backing import N_DIRECTIONS, ContributionShare
from swarmd.protocol.runs.commit import Commit
from swarmd.protocol.runs.recipe import Batch, Recipe, start_run
from swarmd.protocol.wire.rounds import Beat, Check, Group, GroupMember, JoinRound
from swarmd.train.rounds.assents import Backing, BringToAnchors, SendToMembers
from swarmd.train.rounds.versions import GroupVersions, RoundBasis
from swarmd.train.store.proposer import RoundFailed
from swarmd.values import PeerId

OWNER = Identity(b"o" * 32)
MEMBERS = [Identity(bytes([n]) * 32) for n in range(1, 6)]
PEERS = [member.peer_id for member in MEMBERS]
ME = PEERS[0]
STATE, AVERAGE, PARENT = b"s" * 32, b"a" * 32, b"p" * 32
SILENT_S = 5.0  # the limit while nothing was heard yet


def joining(n: int = 2, *, state: bytes = STATE, can_reduce: bool = True) -> JoinRound:
    return JoinRound(n=n, loss=1.0, state=state, n_elements=8, dtype="float32", receives=True, can_reduce=can_reduce)


def form(present: dict[PeerId, JoinRound]) -> GroupVersions:
    """A group formed at 100 s."""
    recipe = Recipe("r", "0" * 64, "1" * 64, batch=Batch(target=8, micro=2, tokens=8), anchors=(OWNER.peer_id,))
    ledger = Ledger(start_run(recipe, OWNER, 1))
    return GroupVersions(
        RoundBasis(ME, ledger.head, ledger, 0, Timing(), lambda average: 1.0, lambda: 8, lambda average: None),
        present,
        100.0,
    )


def beat(versions: GroupVersions, peer: PeerId, now: float) -> None:
    group = versions.group
    versions.take_beat(peer, Beat(round=group.round, version=group.version), now)


def counted(versions: GroupVersions) -> set[str]:
    return {m.peer for m in versions.group.members if m.is_counted}


def test_who_has_another_state_is_left_out_from_the_start() -> None:
    versions = form({ME: joining(), PEERS[1]: joining(state=b"x" * 32), PEERS[2]: joining()})
    assert set(versions.announcement.peers) == {ME, PEERS[2]}
    assert versions.suspicions.left_out == {PEERS[1]: "its state is another than the leader's"}


def test_a_round_to_which_nobody_gives_is_none() -> None:
    with pytest.raises(RoundFailed, match="nobody has samples"):
        form({ME: joining(0), PEERS[1]: joining(0)})


def test_a_silent_member_is_left_out_of_the_next_version_and_is_told_so() -> None:
    versions = form({peer: joining() for peer in PEERS[:3]})
    for peer in PEERS[:2]:
        beat(versions, peer, 101.0 + SILENT_S)
    (step,) = versions.advance(101.0 + SILENT_S)
    assert isinstance(step, SendToMembers)
    assert set(step.peers) == set(PEERS[:3])
    assert isinstance(step.message, Group)
    assert step.message.version == 1
    assert counted(versions) == set(PEERS[:2])
    assert versions.advance(101.1 + SILENT_S) == ()


def test_who_has_gone_is_waited_for_no_longer() -> None:
    versions = form({peer: joining() for peer in PEERS[:3]})
    versions.drop_member(PEERS[1])
    assert versions.advance(100.0)
    assert counted(versions) == {ME, PEERS[2]}


def test_a_round_that_nobody_is_left_to_reduce_is_given_up() -> None:
    versions = form({ME: joining(can_reduce=False), PEERS[1]: joining()})
    versions.drop_member(PEERS[1])
    with pytest.raises(RoundFailed, match="too few members are left: it has gone"):
        versions.advance(100.0)


def test_a_round_in_which_nothing_moves_by_nobodys_fault_is_given_up() -> None:
    versions = form({ME: joining()})

    def live_until(end: int) -> None:
        for now in range(100, end):
            beat(versions, ME, float(now))
            assert versions.advance(float(now)) == ()

    live_until(116)  # twice what results take at first
    with pytest.raises(RoundFailed, match="nobody to go on without"):
        live_until(120)


@given(st.lists(st.tuples(st.sampled_from(PEERS), st.sampled_from(["beat", "gone"])), max_size=30))
def test_versions_only_grow_and_who_is_left_out_never_counts_again(events: list[tuple[PeerId, str]]) -> None:
    versions = form({peer: joining() for peer in PEERS})
    now = 100.0
    left_out: set[str] = set()
    for peer, what in events:
        now += 0.5
        version = versions.group.version
        if what == "gone":
            versions.drop_member(peer)
        else:
            beat(versions, peer, now)
        try:
            steps = versions.advance(now)
        except RoundFailed:
            return
        assert not any(isinstance(step, BringToAnchors) for step in steps), "nobody has an average"
        assert versions.group.version >= version
        left_out |= versions.suspicions.left_out.keys()
        assert not left_out & counted(versions)
        reducers = {versions.group.members[part.reducer].peer for part in versions.group.parts}
        assert not left_out & reducers
        edges = [0, *(part.end for part in versions.group.parts)]
        assert [part.start for part in versions.group.parts] == edges[:-1], "the whole vector is divided"


# --- who stands for it ---------------------------------------------------------------------------------------------


def signed_share(member: Identity) -> ContributionShare:
    share = ContributionShare(first=0, n=2, loss=1.0, squares=1.0, sums=(0.0,) * N_DIRECTIONS, signature=b"")
    return backing.sign_share(share, PARENT, STATE, AVERAGE, member)


def open_backing() -> Backing:
    group = Group(parent=PARENT, members=tuple(GroupMember(peer, 0, 2, True) for peer in PEERS))

    def make_commit(shares: tuple[ContributionShare, ...], average: bytes) -> Commit:
        contributors = tuple(s.counted(peer) for s, peer in zip(shares, PEERS, strict=True))
        return Commit(
            run=b"r" * 32, epoch=1, parent=PARENT, generation=0, contributors=contributors, average=average,
            state=STATE, learning_rate=0.1,
        )  # fmt: skip

    return Backing(group, {peer: joining() for peer in PEERS}, STATE, AVERAGE, make=make_commit, limit_s=1.0)


def seen(assents: Sequence[bytes], n_shares: int = len(PEERS)) -> dict[PeerId, MemberSeen]:
    """Beats of members that have signed their shares, the first ``n_shares`` of them, and assent as is said."""
    beats = {}
    for place, (member, assent) in enumerate(zip(MEMBERS, assents, strict=True)):
        share = signed_share(member) if place < n_shares else None
        beats[member.peer_id] = MemberSeen(0.0, 0.0, Beat(share=share, assent=assent))
    return beats


NOBODY = [b""] * len(PEERS)


def test_no_commit_is_shown_before_all_have_said_what_they_gave() -> None:
    opened = open_backing()
    (asking,) = opened.advance(seen(NOBODY, n_shares=4), 0.0)
    assert isinstance(asking, SendToMembers)
    assert set(asking.peers) == set(PEERS)
    assert asking.payload == b""
    assert opened.advance(seen(NOBODY, n_shares=4), 99.0) == ()
    assert opened.lacking() == [PEERS[4]]
    (showing,) = opened.advance(seen(NOBODY), 99.0)
    assert isinstance(showing, SendToMembers)
    assert isinstance(showing.message, Check)
    assert backing.read_untrusted(showing.payload)[0].average == AVERAGE


@given(st.lists(st.sampled_from(["signs", "lies", "is silent"]), min_size=len(PEERS), max_size=len(PEERS)))
def test_only_what_most_contributors_stand_for_goes_to_the_anchors(answers: list[str]) -> None:
    opened = open_backing()
    opened.advance(seen(NOBODY), 0.0)
    assert opened._assents is not None
    body = opened._assents.body
    by_answer = {"lies": lambda member: b"x" * 64, "is silent": lambda member: b""}
    by_answer["signs"] = lambda member: backing.sign_assent(body, member)
    assents = [by_answer[answer](member) for answer, member in zip(answers, MEMBERS, strict=True)]
    at_once = opened.advance(seen(assents), 0.1)
    later = opened.advance(seen(assents), 1.2)
    n_signed = answers.count("signs")
    assert bool(at_once) == ("is silent" not in answers and 2 * n_signed > len(PEERS))
    assert bool(later) == (2 * n_signed > len(PEERS))
    for step in later:
        assert isinstance(step, BringToAnchors)
        _, backed = backing.read_untrusted(step.proposed)
        assert len(backed.assents) == n_signed
