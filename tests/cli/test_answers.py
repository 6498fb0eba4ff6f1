"""What the command line makes of a daemon's answer, of its own version or another."""

from __future__ import annotations

import pytest
from msgspec import structs, to_builtins
from swarmd_cli.context import read_answer

from swarmd.errors import SwarmError
from swarmd.status import DaemonStatus, DrainAnswer
from tests.cli.answers import filled


def test_what_a_newer_daemon_says_beside_is_passed_over() -> None:
    status = filled(DaemonStatus, swarm="ours", addresses=("/ip4/192.0.2.7/tcp/4117",))
    body = {"schema": 1, **to_builtins(status), "mood": "fine"}
    assert read_answer(DaemonStatus, body) == status


def test_what_a_daemon_of_an_older_version_does_not_say_yet_is_as_by_default() -> None:
    body = {"schema": 1, **to_builtins(filled(DaemonStatus))}
    optional = [spec.name for spec in structs.fields(DaemonStatus) if not spec.required]
    assert optional
    for name in optional:
        del body[name]
    assert read_answer(DaemonStatus, body).policy is None


def test_a_daemon_that_lacks_a_field_is_told_of_in_a_sentence() -> None:
    with pytest.raises(SwarmError, match=r"another version .* missing required field `sessions`: start it anew"):
        read_answer(DrainAnswer, {"schema": 1, "draining": True})
