"""Every verb, while all text that a daemon or a file gives it is markup, escape codes and hidden letters.

The answers are made from their types: a field that is added is covered. They come as a daemon of an earlier version
would send them, not cleaned; what this version's control socket sends is looked at by itself.
"""

from __future__ import annotations

import io
import sys
import tarfile
import unicodedata
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from swarmd_cli import context, main

from swarmd.gateway.generation.row import RowReport
from swarmd.gateway.models import ListedModel
from swarmd.gateway.news import describe_flow, describe_swarm, send_changes
from swarmd.home.founder import Founder
from swarmd.home.paths import Home
from swarmd.node.machine import control
from swarmd.node.machine.control import VERBS
from swarmd.plan.chains.view import SwarmView
from swarmd.protocol.membership.catalog import Catalog
from swarmd.protocol.membership.records import PeerRecord, SpanRecord
from swarmd.status import DaemonStatus
from swarmd.values import ModelId, PeerId
from tests.cli.answers import filled_everywhere
from tests.cli.played import play_daemon

HOSTILE = "a[/x][red]b \x1b[2J\x1b]0;mine\x07\x9b\u202e\u200b\u2028\r\nadmitted"
UNSEEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}
READING = (
    ["status"],
    ["doctor"],
    ["peers"],
    ["ps"],
    ["why"],
    ["why", "a"],
    ["top", "--interval", "0.5"],
    ["update-check"],
    ["ping", "a"],
    ["models", "ls"],
    ["members", "ls"],
    ["members", "order"],
    ["train", "status"],
    ["train", "plan", "a"],
    ["credit"],
    ["policy", "show"],
    ["founders", "ls"],
    ["resume"],
    ["pause"],
)
OWN_WORDS = ("credit", "policy show", "founders ls", "members order", "resume")  # they print nothing that others wrote


def hostile_answer(path: str, truth: bool) -> Any:
    verb = next(verb for verb in VERBS if verb.path == path)
    answer = filled_everywhere(verb.answer, HOSTILE, truth)
    if isinstance(answer, DaemonStatus):  # update-check looks for a kind, which is the daemon's own word
        answer = replace(answer, health=(*answer.health, replace(answer.health[0], kind="version")))
    return msgspec.to_builtins(answer)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A member's home whose swarm and models are called like that."""
    state = Home(tmp_path_factory.mktemp("hostile"))
    founder = Founder(state)
    founder.found("team [red]alpha[/x]")
    names = {f"{n}{HOSTILE}"[:60]: ("0" * 63 + str(n), 4) for n in range(2)}
    founder.change_catalog(lambda catalog: replace(catalog, models=names))
    return state


def run_verb(monkeypatch: pytest.MonkeyPatch, home: Home, words: list[str]) -> tuple[str, int]:
    """What a verb prints on both streams, and its exit code."""
    screen = io.StringIO()
    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", screen)
        patch.setattr(sys, "stderr", screen)
        patch.setattr(sys, "argv", ["swarmd", "--home", str(home.folder), *words])
        patch.setenv("COLUMNS", "200")
        patch.setattr(context, "WAIT_S", 0.5)  # for what this daemon never comes to
        with pytest.raises(SystemExit) as ended:
            main.run()
    return screen.getvalue(), int(ended.value.code or 0)


def assert_harmless(text: str) -> None:
    assert not {unicodedata.category(char) for char in text} & (UNSEEN - {"Cc"})
    assert not {char for char in text if unicodedata.category(char) == "Cc"} - {"\n", "\t"}


@pytest.mark.parametrize("truth", [True, False])
@pytest.mark.parametrize("words", READING, ids=" ".join)
def test_no_verb_prints_more_than_can_be_seen(
    monkeypatch: pytest.MonkeyPatch, home: Home, words: list[str], truth: bool
) -> None:
    with play_daemon(home.socket, partial(hostile_answer, truth=truth)):
        text, code = run_verb(monkeypatch, home, words)
    assert code in (0, 1, 75), text
    assert "Traceback" not in text
    assert_harmless(text)
    if " ".join(words) not in OWN_WORDS:
        assert "[/x]" in text.replace("\n", "")


def test_models_and_swarms_are_shown_by_their_names_where_no_daemon_runs(
    monkeypatch: pytest.MonkeyPatch, home: Home
) -> None:
    for words in (["models", "ls"], ["doctor"], ["leave"]):
        text, _ = run_verb(monkeypatch, home, words)
        assert "[red]" in text
        assert_harmless(text)


def test_a_bug_report_is_harmless_to_read(monkeypatch: pytest.MonkeyPatch, home: Home, tmp_path: Path) -> None:
    (home.folder / "daemon.log").write_text(f"by an earlier version: {HOSTILE}\n")
    out = tmp_path / "report.tar.gz"
    with play_daemon(home.socket, partial(hostile_answer, truth=True)):
        text, code = run_verb(monkeypatch, home, ["bugreport", "--out", str(out)])
    assert code == 0
    assert_harmless(text)
    with tarfile.open(out) as tar:
        files = {entry.name: tar.extractfile(entry) for entry in tar}
        texts = {name: file.read().decode() for name, file in files.items() if file is not None}
    assert "by an earlier version: a[/x]" in texts["swarmd-bugreport/daemon.log"]
    for report in texts.values():
        assert_harmless(report)


@pytest.mark.parametrize("answer", {verb.answer for verb in VERBS}, ids=lambda answer: answer.__name__)
def test_what_the_control_socket_answers_can_be_printed(answer: Any) -> None:
    body = control._json(filled_everywhere(answer, HOSTILE), 200).body
    texts = list(find_texts(msgspec.json.decode(body)))
    for text in texts:
        assert_harmless(text)
        assert "\n" not in text, "a field is one line: it cannot feign another"


def find_texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from find_texts(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from find_texts(inner)


async def test_what_the_page_is_told_can_be_shown() -> None:
    peer = filled_everywhere(PeerRecord, HOSTILE)
    view = SwarmView(
        {PeerId(HOSTILE): peer},
        (filled_everywhere(SpanRecord, HOSTILE),),
        Catalog(models={HOSTILE: (HOSTILE, 4)}),
    )
    sent: dict[str, Any] = {}

    status = {"status": msgspec.to_builtins(filled_everywhere(DaemonStatus, HOSTILE))}
    machine: Any = SimpleNamespace(status=status, training=hostile_answer("train", truth=True))

    async def say(name: str, raw: bytes) -> None:
        sent[name] = msgspec.json.decode(raw)
        if len(sent) == 4:
            raise StopAsyncIteration

    models = [ListedModel(HOSTILE, ModelId(HOSTILE), 4, (), None, True)]
    flow = describe_flow(ModelId(HOSTILE), RowReport(1, chain=(HOSTILE,), repairs=[HOSTILE]))
    with pytest.raises(StopAsyncIteration):
        await send_changes(lambda: describe_swarm(view, "me", models), lambda: [flow], machine, say)
    assert sent.keys() == {"swarm", "flows", "machine", "training"}
    for text in find_texts(sent):
        assert_harmless(text)
