"""Members' names stand behind the ends of their ids wherever members are shown."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from swarmd_cli.main import app
from swarmd_cli.verbs.credit import _format_sponsor
from typer.testing import CliRunner

from swarmd.gateway.news import describe_swarm
from swarmd.home.founder import Founder
from swarmd.home.paths import Home
from swarmd.member_status import PeerRow, PeersAnswer
from swarmd.plan.chains.view import SwarmView
from swarmd.protocol.membership.catalog import Catalog
from swarmd.protocol.membership.records import PeerRecord
from swarmd.run_status import RunPeerRow, RunRow, RunsAnswer
from swarmd.status import (
    ChainRow,
    DaemonStatus,
    DirectoryStatus,
    HealthRow,
    ProbeRow,
    SessionRow,
    SessionsAnswer,
    StandingRow,
    WhyAnswer,
)
from swarmd.values import PeerId
from tests.cli.answers import filled
from tests.cli.played import play_daemon
from tests.cli.typed import swarmd

ANNA = "12D3KooWPjceQrSwdWXPyLLeABRXmuqt69Rg3sBYbU1Nft9HyQ6X"
BERT = "12D3KooWDpJ7As7BWAwRMfu1VU2WCqNjvq387JEYKDBj4kx6nXTN"
ANNA_SHOWN = f"{ANNA[-8:]} (laptop)"
BERT_SHOWN = f"{BERT[-8:]} (laptop)"
ANSWERS: dict[str, Any] = {
    "peers": PeersAnswer(
        peers=(
            filled(PeerRow, peer=ANNA, name="laptop", is_self=True),
            filled(PeerRow, peer=BERT, name="laptop", may=("use",)),
        )
    ),
    "status": filled(
        DaemonStatus,
        peer=ANNA,
        name="laptop",
        directory=filled(DirectoryStatus, reason=f"exchanged with {BERT[-8:]}"),
        health=(HealthRow(kind="version", is_fine=False, text=f"{BERT[-8:]} has a newer one"),),
    ),
    "sessions": SessionsAnswer(sessions=(filled(SessionRow, session="s", client=BERT),)),
    "why": filled(
        WhyAnswer,
        standing={BERT: filled(StandingRow)},
        probes=(filled(ProbeRow, peer=BERT),),
        chains={"demo": ChainRow(cost_ms=1.0, hops=(f"[0,2) on {BERT[-8:]}: trip 1 ms",), readers=(BERT,))},
    ),
    "train": RunsAnswer(
        runs=(filled(RunRow, name="r", run="r", shunned=(BERT,), peers=(filled(RunPeerRow, peer=BERT),)),),
        others=(),
        training="asked",
    ),
}


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Home]:
    state = Home(tmp_path / "home")
    Founder(state).found("ours")
    with play_daemon(state.socket, lambda path: msgspec.to_builtins(ANSWERS[path])):
        yield state


@pytest.mark.parametrize(
    ("words", "n_times"),
    [
        ("status", 2),
        ("doctor", 1),
        ("ps", 1),
        ("why", 4),
        ("top --interval 0.5", 1),
        ("members ls", 1),
        ("train status", 2),
    ],
)
def test_names_are_shown_behind_the_ends_of_ids(
    home: Home, monkeypatch: pytest.MonkeyPatch, words: str, n_times: int
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    text = CliRunner().invoke(app, ["--home", str(home.folder), *words.split()]).stdout  # doctor ends with 1
    assert text.count(BERT_SHOWN) == n_times, text


def test_two_of_one_name_are_told_apart(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = swarmd(home, "members", "ls")
    assert f"{ANNA_SHOWN}, this one" in shown
    assert BERT_SHOWN in shown
    assert f"{BERT} (laptop)  (unknown away" in swarmd(home, "peers")
    assert f"{ANNA} (laptop)" in swarmd(home, "status")
    listed = json.loads(swarmd(home, "members", "ls", "--json"))["members"]
    assert [member["name"] for member in listed] == ["laptop", "laptop"]


def test_a_bug_report_tells_no_names(home: Home, tmp_path: Path) -> None:
    (home.folder / "config.toml").write_text('name = "annas-own"\nup_limit_mbit = 7\n')
    out = tmp_path / "report.tar.gz"
    swarmd(home, "bugreport", "--out", str(out))
    with tarfile.open(out) as tar:
        texts = [file.read().decode() for file in map(tar.extractfile, tar) if file is not None]
    assert BERT in "".join(texts)
    assert "laptop" not in "".join(texts)
    assert "annas-own" not in "".join(texts)


def test_the_page_is_told_labels() -> None:
    peers = {PeerId(peer): PeerRecord(peer, 1, 2, 3, (), name="laptop") for peer in (ANNA, BERT)}
    told = describe_swarm(SwarmView(peers, (), Catalog()), ANNA, ())
    assert {peer["label"] for peer in told["peers"]} == {ANNA_SHOWN, BERT_SHOWN}


def test_credit_names_the_guests_of_an_invite() -> None:
    assert (
        _format_sponsor(b"\x01" * 32, [BERT, ANNA], {BERT: "laptop"}) == f"invite 01010101: {BERT_SHOWN}, {ANNA[-8:]}"
    )
