"""What several of the tests with real processes share."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from tests.real.gateways import RealGateway, smol_gateway
from tests.real.harness import LocalSwarm, Volunteer


@pytest.fixture(scope="session")
def smol(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LocalSwarm, list[Volunteer], RealGateway]]:
    """Three servers of SmolLM2 and a gateway; test_gateway.py, which comes last, kills one of them."""
    with smol_gateway(tmp_path_factory.mktemp("smol")) as started:
        yield started
    gc.collect()  # clients' connections, which would else be found open when pytest itself ends
