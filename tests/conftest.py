"""Virtual time and one order of events: trio's MockClock with its scheduler seeded (shared facts, trio-simulation)."""

from __future__ import annotations

import os

import pytest
import trio._core._run as trio_run
import trio.testing

os.environ.setdefault("SWARMD_TEST_FORKS", "1")  # before tests.real.forks looks


@pytest.fixture
def deterministic_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    trio_run._r.seed(0)


@pytest.fixture
def virtual_time(deterministic_scheduling: None, autojump_clock: trio.testing.MockClock) -> trio.testing.MockClock:
    return autojump_clock
