"""Which run a user means, and what is said of one that this machine has left."""

from __future__ import annotations

import pytest

from swarmd.errors import ConfigError
from swarmd.train.runs import choose_taken_run
from swarmd.values import RunId

CAESAR, CICERO = RunId("a" * 64), RunId("b" * 64)


@pytest.mark.parametrize("name", ["caesar", "aaaaaa", ""])
def test_a_run_that_was_left_is_joined_again_and_it_is_said_how(name: str) -> None:
    with pytest.raises(ConfigError, match="this machine has left 'caesar': swarmd train join caesar takes part again"):
        choose_taken_run(name, {}, {CAESAR: "caesar"})


def test_a_run_that_this_machine_takes_part_in_is_meant_though_another_was_left() -> None:
    assert choose_taken_run("", {CICERO: "cicero"}, {CAESAR: "caesar"}) == CICERO
    assert choose_taken_run("caesar", {CICERO: "caesar"}, {CAESAR: "caesar"}) == CICERO
    with pytest.raises(ConfigError, match="has left 'caesar'"):
        choose_taken_run("caesar", {CICERO: "cicero"}, {CAESAR: "caesar"})
    with pytest.raises(ConfigError, match="no run called 'brutus' here; there are: cicero"):
        choose_taken_run("brutus", {CICERO: "cicero"}, {CAESAR: "caesar"})
