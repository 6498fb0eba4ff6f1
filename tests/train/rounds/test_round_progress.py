"""What a member has of an average: whatever comes, and however often, each number is taken once and in order."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.errors import OutOfStep
from swarmd.protocol.wire.rounds import Group, GroupMember, GroupPart, Reduced
from swarmd.train.rounds.round_progress import RoundProgress, begin_version
from swarmd.train.vectors.scratch import new_in_memory
from swarmd.values import PeerId

ME, REDUCER, OTHER = PeerId("me"), PeerId("reducer"), PeerId("other")
N, CHUNK = 8, 3
CHUNKS = ((0, 3), (3, 3), (6, 2))


def begin(version: int = 1) -> RoundProgress:
    """A version in which another member reduces everything, and this one gets it."""
    members = tuple(GroupMember(peer, 0, 2, True) for peer in (ME, REDUCER, OTHER))
    group = Group(version=version, n_elements=N, members=members, parts=(GroupPart(1, 0, N),))
    return begin_version(group, ME, CHUNK, {}, new_in_memory)


def bring(progress: RoundProgress, start: int, n: int, *, peer: PeerId = REDUCER, version: int = 1) -> bool:
    """Bring results, which are the numbers of their elements; were they taken?"""
    message = Reduced(version=version, start=start, n_elements=n)
    part = progress.find_wanted_part(peer, message)
    if part is None:
        return False
    return progress.keep_results(part, start, np.arange(start, start + n, dtype=np.float32), b"")


def test_results_that_come_in_order_make_the_average_whole() -> None:
    progress = begin()
    assert not progress.is_whole
    assert all(bring(progress, *chunk) for chunk in CHUNKS)
    assert progress.is_whole
    assert progress.average is not None
    assert list(progress.average) == list(range(N))
    assert progress.results_here == {0: N}


def test_what_is_of_another_version_changes_nothing() -> None:
    progress = begin()
    assert not bring(progress, 0, 3, version=0)
    assert progress.results_here == {}


@pytest.mark.parametrize(("start", "n", "peer"), [(3, 3, REDUCER), (0, 2, REDUCER), (0, 3, OTHER), (9, 3, REDUCER)])
def test_results_out_of_step_are_refused(start: int, n: int, peer: PeerId) -> None:
    with pytest.raises(OutOfStep):
        bring(begin(), start, n, peer=peer)


def test_results_that_cannot_be_are_a_fault_of_their_reducer() -> None:
    progress = begin()
    part = progress.find_wanted_part(REDUCER, Reduced(version=1, start=0, n_elements=3))
    assert part is not None
    assert not progress.keep_results(part, 0, np.array([1.0, np.nan, 2.0], np.float32), b"")
    assert "not finite" in progress.faults[1]
    assert progress.results_here == {}
    assert progress.make_beat().reductions[0].fault


@given(st.lists(st.tuples(st.integers(0, N), st.integers(1, N), st.sampled_from([ME, REDUCER, OTHER])), max_size=30))
def test_each_number_is_taken_once_whatever_members_send(sent: list[tuple[int, int, PeerId]]) -> None:
    progress = begin()
    n_taken = 0
    for start, n, peer in sent:
        try:
            taken = bring(progress, start, n, peer=peer)
        except OutOfStep:
            taken = False
        n_taken += n * taken
        upto = progress.results_here.get(0, 0)
        assert upto == n_taken
        assert progress.average is not None
        assert list(progress.average[:upto]) == list(range(upto))
    for chunk in CHUNKS:
        if chunk[0] >= n_taken:
            assert bring(progress, *chunk)
    assert progress.is_whole
