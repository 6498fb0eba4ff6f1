"""Real workers that lie are found, real users are told, and what was given is in the books of both."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from tests.real.forks import Command
from tests.real.harness import LocalSwarm, Volunteer
from tools.prove.trust import add_liar, honest_swarm, prove

pytestmark = pytest.mark.slow
LIE = "right for what looks like a check"


@pytest.fixture(scope="module")
def around(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalSwarm, list[Volunteer], int]]:
    with honest_swarm(tmp_path_factory.mktemp("trust"), "bundled") as started:
        yield started


def swarmd(volunteer: Volunteer, *arguments: str) -> dict[str, object]:
    """What ``swarmd`` says on a volunteer's machine, as JSON."""
    done = Command("--home", str(volunteer.home.folder), *arguments, "--json").finish()
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def test_who_lies_only_to_users_is_found_by_one_and_believed_by_others(
    around: tuple[LocalSwarm, list[Volunteer], int],
) -> None:
    swarm, holders, n_blocks = around
    liar = add_liar(swarm, LIE, "bundled", n_blocks)
    outcome = prove(swarm, holders, liar, LIE, "demo", 3)
    assert outcome.is_found
    assert outcome.n_sessions == 1
    assert outcome.n_accused == 0
    assert outcome.n_believe >= 1
    liar.stop()


def test_what_was_computed_is_checked_and_in_the_books_of_both(
    around: tuple[LocalSwarm, list[Volunteer], int],
) -> None:
    _, holders, _ = around
    said = swarmd(holders[0], "run", "demo", "The function returns a list", "--max-tokens", "40", "--verify", "0.999")
    assert said["doubts"] == []
    assert {check["outcome"] for check in said["checks"]} == {"right"}  # type: ignore[attr-defined]
    credit = swarmd(holders[0], "credit", "--check")
    assert credit["bills_checked"]
    took = sum(row["took"] for row in credit["with"])  # type: ignore[attr-defined]
    assert took == credit["took"] > 0
    why = swarmd(holders[0], "why", "demo")
    assert why["chains"]["demo"]["readers"]  # type: ignore[index]


def test_a_member_that_is_revoked_is_gone_everywhere(around: tuple[LocalSwarm, list[Volunteer], int]) -> None:
    swarm, holders, _ = around
    founder, *_, last = holders
    rows = {row["peer"]: row for row in swarmd(founder, "members", "ls")["members"]}  # type: ignore[attr-defined]
    assert rows[founder.peer]["voucher"] == ""
    assert rows[last.peer]["voucher"]
    # what members found right is signed rarely
    swarm.wait(
        lambda: any(row["peer"] == last.peer and row["found_right"] for row in founder.ask("peers")["peers"]),
        "somebody to have found the last holder right",
    )
    assert rows[last.peer]["found_wrong"] == 0
    words = ("members", "revoke", last.peer[-8:])
    refused = Command("--home", str(holders[1].home.folder), *words).finish()
    assert refused.returncode == 2, "only the founder can"
    done = Command("--home", str(founder.home.folder), *words).finish()
    assert done.returncode == 0, done.stderr
    swarm.wait(
        lambda: all(last.peer not in [row["peer"] for row in v.ask("peers")["peers"]] for v in holders[:-1]),
        "all to have forgotten it",
    )
    assert Command("--home", str(founder.home.folder), "members", "revoke", "nobody").finish().returncode == 2
