"""Threads that wait for work burn no more than they have to, unless the user says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SHOW = "import os, swarmd; print(os.environ.get('GOMP_SPINCOUNT'))"


@pytest.mark.parametrize(
    ("given", "expected"),
    [({}, "50000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "None")],
)
def test_threads_that_wait_sleep_soon_unless_the_user_says_otherwise(given: dict[str, str], expected: str) -> None:
    names = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(
        [sys.executable, "-c", SHOW], env={**environment, **given}, stdout=subprocess.PIPE, text=True, check=True
    )
    assert done.stdout.strip() == expected
