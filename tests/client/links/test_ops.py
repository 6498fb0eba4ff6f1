"""The codec of a session follows the links of its chain."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from swarmd.client.links.link import SessionOptions
from swarmd.client.links.ops import codec_for
from swarmd.values import ModelId, PeerId

TERMS = SessionOptions(ModelId("m" * 64), 4, 1, 100)


def swarm(
    *addresses: str,
    codecs: tuple[str, ...] = ("raw", "float16", "int8"),
) -> Any:
    """Every trip takes 50 ms and every link has 4 Mbit/s, as a busy machine measures them too."""
    peers = [PeerId(f"p{i}") for i in range(len(addresses))]
    record = SimpleNamespace(up_bytes_per_s=5e5, down_bytes_per_s=5e5, minor=0, codecs=codecs, needs=())
    view = SimpleNamespace(peers=dict.fromkeys(peers, record), serving=lambda model: [])
    trips = {(a, b): 0.05 for a in ("me", *peers) for b in ("me", *peers)}
    return SimpleNamespace(
        view=lambda: view,
        rpc=SimpleNamespace(network=SimpleNamespace(peer_id=PeerId("me"))),
        trips=lambda spans: trips,
        addresses_of=lambda peer: (addresses[peers.index(peer)],),
    )


@pytest.mark.parametrize(
    ("addresses", "codec"),
    [
        (("/ip4/127.0.0.1/tcp/1", "/ip6/::1/tcp/2"), "raw"),
        (("/ip4/192.168.0.7/tcp/1",), "int8"),
        (("/ip4/127.0.0.1/tcp/1", "/ip4/203.0.113.7/tcp/1"), "int8"),
    ],
)
def test_a_chain_on_one_machine_is_lossless_however_busy_it_is(addresses: tuple[str, ...], codec: str) -> None:
    chain = [PeerId(f"p{i}") for i in range(len(addresses))]
    assert codec_for(swarm(*addresses), TERMS, chain).action == codec


def test_a_chain_uses_what_all_its_hops_announce() -> None:
    away = "/ip4/203.0.113.7/tcp/1"
    chain = [PeerId("p0")]
    assert codec_for(swarm(away), TERMS, chain).action == "int8"
    assert codec_for(swarm(away, codecs=("raw", "float16")), TERMS, chain).action == "float16"
    assert codec_for(swarm(away, codecs=("raw", "later")), TERMS, chain).action == "raw"
