"""For all tests: virtual time with one order of events; no error is only logged."""

from __future__ import annotations

import gc
import logging
import os
import shutil
from collections.abc import Iterator
from importlib.metadata import version

import hypothesis
import pytest
import trio._core._run as trio_run
import trio.testing

os.environ.setdefault("SWARMD_TEST_FORKS", "1")  # before tests.real.forks looks
os.environ.setdefault("OMP_NUM_THREADS", "1")  # before numpy and torch look: several parts run on two cores
if shutil.which("nvidia-smi") is None or "+cpu" in version("torch"):  # before anything imports Triton
    os.environ.setdefault("TRITON_INTERPRET", "1")
hypothesis.settings.register_profile("swarmd", deadline=None)  # how fast a machine is, no test asserts
hypothesis.settings.load_profile("swarmd")


def pytest_configure(config: pytest.Config) -> None:
    gc.disable()  # what importing makes stays: looking for cycles in it takes a tenth of the time of all tests


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture
def deterministic_scheduling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trio_run, "_ALLOW_DETERMINISTIC_SCHEDULING", True)
    trio_run._r.seed(0)


@pytest.fixture
def virtual_time(deterministic_scheduling: None, autojump_clock: trio.testing.MockClock) -> trio.testing.MockClock:
    return autojump_clock


class _Caught(logging.Handler):
    """Keeps the errors that a guard kept from ending the program."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info:
            self.records.append(record)


@pytest.fixture(autouse=True)
def nothing_breaks_behind_a_guard() -> Iterator[list[logging.LogRecord]]:
    """An error that would have ended a daemon, but for a guard, is an error; who means it takes it out of the list."""
    caught, logger = _Caught(), logging.getLogger("swarmd")
    logger.addHandler(caught)
    yield caught.records
    logger.removeHandler(caught)
    assert not [(record.getMessage(), record.exc_info) for record in caught.records]
