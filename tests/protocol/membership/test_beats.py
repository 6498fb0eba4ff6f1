"""Beats prove that a peer is there, and nothing else proves it."""

from __future__ import annotations

import pytest

from swarmd.protocol.membership.beats import BEATS_KEPT, LEAST_KEPT, Life, SecretChain, name_of

SEED, PEER, BEGUN_AT, BEAT_S = b"s" * 16, "peer", 1_000, 20


@pytest.fixture
def chain() -> SecretChain:
    return SecretChain(PEER, SEED, BEGUN_AT, BEAT_S, 10)


@pytest.fixture
def life(chain: SecretChain) -> Life:
    return Life(PEER, chain.end, BEGUN_AT, BEAT_S, BEGUN_AT)


def test_a_beat_is_shown_when_it_is_due_and_counts_for_a_while(chain: SecretChain, life: Life) -> None:
    assert not chain.beats_at(BEGUN_AT + BEAT_S - 0.1)
    assert life.counts_until == BEGUN_AT + BEATS_KEPT * BEAT_S
    for number in (1, 2, 7):  # those between were lost
        (beat,) = chain.beats_at(BEGUN_AT + number * BEAT_S)
        assert (beat.chain, beat.number) == (life.chain, number)
        assert life.take_untrusted(beat.number, beat.value, BEGUN_AT + number * BEAT_S)
        assert life.counts_until == BEGUN_AT + (number + BEATS_KEPT) * BEAT_S
        assert life.take_untrusted(beat.number, beat.value, BEGUN_AT + 10**6) is False, "it is known"
    (last,) = chain.beats_at(BEGUN_AT + 10**6)
    assert life.take_untrusted(last.number, last.value, BEGUN_AT) is False, "it is shown long before its time"
    assert chain.beats_at(BEGUN_AT + 10**6) == chain.beats_at(BEGUN_AT + 10 * BEAT_S), "a chain ends"
    assert not chain.beats_at(BEGUN_AT - 10**6)


def test_who_does_not_know_the_chain_can_show_no_beat(chain: SecretChain, life: Life) -> None:
    (second,) = chain.beats_at(BEGUN_AT + 2 * BEAT_S)
    assert life.take_untrusted(3, second.value, BEGUN_AT) is None, "a beat has its number"
    assert life.take_untrusted(1, b"x" * 16, BEGUN_AT) is None
    assert life.number == 0


def test_a_chain_is_called_by_all_that_is_said_of_it(chain: SecretChain) -> None:
    """Else somebody could say that another one's chain began long ago."""
    said = (PEER, chain.end, BEGUN_AT, BEAT_S)
    assert name_of(*said) == chain.name
    others = {
        name_of("other", *said[1:]),
        name_of(PEER, b"e" * 16, BEGUN_AT, BEAT_S),
        name_of(PEER, chain.end, BEGUN_AT - 1, BEAT_S),
        name_of(PEER, chain.end, BEGUN_AT, BEAT_S + 1),
    }
    assert len({chain.name, *others}) == 5


@pytest.mark.parametrize("ahead_s", [-100, -60, -30, 30, 60, 3_600])
def test_where_clocks_differ_it_counts_from_when_it_came(chain: SecretChain, life: Life, ahead_s: int) -> None:
    (beat,) = chain.beats_at(BEGUN_AT + 5 * BEAT_S)
    came_at = BEGUN_AT + 5 * BEAT_S + ahead_s + 4  # by the clock of this machine
    assert life.take_untrusted(beat.number, beat.value, came_at)
    kept_s = life.counts_until - came_at
    assert LEAST_KEPT * BEAT_S <= kept_s <= BEATS_KEPT * BEAT_S
    assert kept_s > 2 * BEAT_S, "the next one may be lost"
