"""The suites of others against a gateway over three real servers of a real model; they live in tests/clients.

``make clients`` gives them an environment of their own. What a suite expects to fail is there with its reason.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.real.gateways import RealGateway
from tests.real.harness import LocalSwarm, Volunteer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
ROOT = Path(__file__).parents[2]
PYTEST = ROOT / ".venv" / "clients" / "bin" / "pytest"
AT_MOST_S = 400


@pytest.mark.parametrize(
    ("suite", "which"),
    [
        ("litellm", ""),
        ("openapi", ""),
        ("langchain", "test_invoke or test_stream or test_tool_calling"),
        pytest.param("langchain", "", marks=pytest.mark.prove),  # all of it: a minute
    ],
)
def test_it_holds(smol: tuple[LocalSwarm, list[Volunteer], RealGateway], suite: str, which: str) -> None:
    gateway = smol[2]
    assert PYTEST.exists(), "make clients installs them"
    done = subprocess.run(
        [PYTEST, f"{suite}_suite.py", "-k", which],
        cwd=ROOT / "tests" / "clients",
        env={**os.environ, "SWARMD_GATEWAY": gateway.url},
        capture_output=True,
        text=True,
        timeout=AT_MOST_S,
        check=False,
    )
    print(done.stdout.splitlines()[-1])
    assert done.returncode == 0, done.stdout[-8_000:]
    assert "Traceback" not in gateway.log.read_text(), "it made no mistake of its own"
