"""The hub as a donor, played by a web server on loopback that knows ranges: same chunks, same checks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from swarmd.errors import ConfigError, SwarmUnavailable, Unreachable
from swarmd.net.pace import Pace
from swarmd.net.standing import Standing
from swarmd.weights import fetch
from swarmd.weights import folder as files
from swarmd.weights.fetch import Fetch
from swarmd.weights.folder import ModelFolder
from swarmd.weights.hub import HUB, Hub, open_client
from tests import played_hub
from tests.played_hub import HubHandler
from tests.weights.conftest import N_BLOCKS

SOURCE = "org/name@c0ffee"
ALL = frozenset(range(N_BLOCKS + 1))


@pytest.fixture
def served(full_model: ModelFolder, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Serves the checkpoint as the hub does; yields how many bytes each answer had."""
    sent: list[int] = []

    class Handler(HubHandler):
        def do_GET(self) -> None:
            path = full_model.folder / Path(self.path.removeprefix("/org/name/resolve/c0ffee/")).name
            if not self.path.startswith("/org/name/resolve/c0ffee/") or not path.is_file():
                self.send_error(404)
                return
            data = self.begin_range(path)
            self.wfile.write(data)
            sent.append(len(data))

    with played_hub.served(Handler, monkeypatch):
        yield sent


def fetch_of(target: ModelFolder, groups: frozenset[int], source: str = SOURCE) -> Fetch:
    rpc: Any = SimpleNamespace(standing=Standing())
    hub = Hub(source, target.manifest)
    return Fetch(rpc, target, groups, lambda: {HUB: ALL}, Pace(lambda: None), hub=hub)


async def test_a_span_comes_from_the_hub_and_nothing_else_of_it(
    full_model: ModelFolder, tmp_path: Path, served: list[int]
) -> None:
    target = files.create(tmp_path / "store", full_model.manifest)
    await fetch_of(target, frozenset({1, N_BLOCKS})).run()
    assert target.held == {1, N_BLOCKS}
    assert not target.damaged()
    assert sum(served) < full_model.n_bytes({1, N_BLOCKS}) + 100_000, "the ranges that it needs, and a header"


async def test_a_hub_that_lacks_the_model_is_unreachable_not_a_crash(
    full_model: ModelFolder, tmp_path: Path, served: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Unreachable, match="404"):
        Hub("org/other@1", full_model.manifest).read_piece(((0, 0),))
    monkeypatch.setattr(fetch, "PATIENCE_S", 0.3)
    target = files.create(tmp_path / "store", full_model.manifest)
    with pytest.raises(SwarmUnavailable, match="try again"):
        await fetch_of(target, ALL, "org/other@1").run()


@pytest.mark.parametrize(
    ("name", "value"),
    [("SSL_CERT_FILE", "/gone.pem"), ("NO_PROXY", "[::1]"), ("ALL_PROXY", "socks9://127.0.0.1:1")],
)
def test_settings_of_the_environment_that_cannot_be_used_are_named(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match="look at HTTPS_PROXY, ALL_PROXY, NO_PROXY and SSL_CERT_FILE"):
        open_client()
