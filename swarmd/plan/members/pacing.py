"""How often members show that they are there and exchange what they know, by how many they are.

Everything that is known of a member travels to every other, so what each spends grows with their number. Up to
FEW members the pace is the same; beyond it beats come more rarely, as the root of the number, so that a member's share
grows more slowly than the swarm.
"""

from __future__ import annotations

import math

from swarmd.plan.members.partners import N_NEIGHBOURS
from swarmd.protocol.membership.records import MAX_BEAT_S

BEAT_S = 20  # between two beats: a member that is gone is believed in for three of them
FEW = 400  # members, of whom all can show so often that they are there: beyond it a line with a cap would feel it
SPREAD = 0.75  # beats: within these all have heard of one, in as many rounds of exchanges as it takes
GROWTH = 4.0  # times as many know of something after each round, in which each member calls one and is called by one
ROUNDS_OF_NEIGHBOURS = 1.25  # who is not heard of is asked itself (plan.members.partners)
NEWS_S = 2.0  # between two exchanges while there is news, which crosses a swarm in a few of these
RARELY_S = 0.75  # for each member, between two signatures for what one measures now and then; a beat at least


def beat_s(n_members: int) -> int:
    """Seconds between two beats of each of so many members."""
    return min(MAX_BEAT_S, round(BEAT_S * _stretch(n_members)))


def exchange_s(n_members: int) -> float:
    """Seconds between two exchanges of each of so many members, while there is no news but beats."""
    rounds = ROUNDS_OF_NEIGHBOURS if n_members <= N_NEIGHBOURS else math.log(n_members, GROWTH)
    return SPREAD * beat_s(n_members) / rounds


def news_s(n_members: int) -> float:
    """Seconds between two exchanges while there is news: among thousands there always is."""
    return min(exchange_s(n_members), NEWS_S * _stretch(n_members))


def _stretch(n_members: int) -> float:
    return max(1.0, math.sqrt(n_members / FEW))


def next_exchange_s(n_members: int, last_s: float, is_quiet: bool) -> float:
    """Seconds until the next exchange, where the last one came after ``last_s``: more while it brings no news."""
    least_s = news_s(n_members)
    return min(exchange_s(n_members), max(least_s, 2 * last_s)) if is_quiet else least_s


def rarely_s(n_members: int) -> float:
    """Seconds between two signatures of a member for what differs little."""
    return max(BEAT_S, RARELY_S * n_members)
