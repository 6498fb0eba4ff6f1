"""A wrong name or option is refused before anything heavy is imported, and so is asking where nobody answers."""

from __future__ import annotations

import gzip
import socket
from pathlib import Path

import pytest
from swarmd_cli import preflight
from swarmd_cli.context import set_home
from swarmd_cli.preflight import require_answers
from swarmd_cli.verbs import chat

from swarmd.errors import ConfigError, DaemonNotRunning, SwarmUnavailable
from swarmd.home.founder import Founder
from swarmd.home.membership import MembershipFiles
from swarmd.home.models import bundled_folder
from swarmd.home.paths import Home
from swarmd.protocol.membership.identity import Identity
from swarmd.training_runs import require_data
from tests.cli.imported import imported_by
from tests.cli.played import PlayedGateway

HEAVY = {"torch", "transformers", "libp2p", "trio"}
WRONG = (
    (["run", "nosuch", "hi"], "the catalog has no model 'nosuch'; it has: demo"),
    (["run", "demo", "hi", "--draft", "nosuch"], "the catalog has no draft 'nosuch'; it has: demo"),
    (["run", "demo", "hi", "--adapter", "nosuch"], "no adapter 'nosuch'"),
    (["run", "demo"], "an empty prompt"),
    (["run", "demo", "hi"], "your daemon is down"),
    (["chat", "smole"], "no model 'smole'"),
    (["chat", "demo"], "your daemon is down"),
    (["tune", "nosuch", "--data", __file__], "no model 'nosuch'"),
    (["tune", "demo", "--data", "nowhere.jsonl"], "is no file"),
    (["tune", "demo", "--data", __file__, "--method", "magic"], "--method is one of"),
    (["tune", "demo", "--data", __file__, "--codec", "zip"], "--codec is one of"),
    (["gateway", "--listen", "42180"], "HOST:PORT"),
    (["gateway", "--listen", "0.0.0.0:0"], "there is no API key"),
    (["gateway"], "your daemon is down"),
    (["models", "add", str(bundled_folder()), "--name", "x", "--dtype", "int3"], "--dtype is one of"),
    (["models", "add", "org/adapter", "--name", "x", "--base", "nosuch"], "no model 'nosuch'"),
    (["models", "verify", "nosuch"], "no model 'nosuch'"),
    (["models", "rm", "nosuch"], "no model 'nosuch'"),
    (["demo", "--chat", "nowhere"], "no file or folder"),
)


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("founded")
    Founder(Home(folder)).found("ours")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(("words", "message"), WRONG)
def test_what_is_wrong_is_refused_before_torch_is_imported(founded: Path, words: list[str], message: str) -> None:
    imported, done = imported_by(founded, words, HEAVY)
    assert done.returncode == (3 if "daemon" in message else 2), done.stderr
    assert message in done.stderr
    assert not imported


def test_members_that_listen_are_asked_while_the_own_daemon_is_down(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their catalog may be newer than the one on this disk: an unknown name is theirs to refuse."""
    home = Home(tmp_path)
    Founder(home).found("ours")
    set_home(tmp_path)
    try:
        with socket.socket() as member:
            member.bind(("127.0.0.1", 0))
            member.listen()
            address = f"/ip4/127.0.0.1/tcp/{member.getsockname()[1]}"
            home.peers_file.write_text(f'{{"{Identity.generate().peer_id}": ["{address}"]}}')
            require_answers("new-there")
    finally:
        set_home(None)
    assert "your daemon is down (swarmd up): asking other members" in capsys.readouterr().err


def test_who_waits_for_a_founder_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(tmp_path)
    Founder(home).found("ours")
    (home.folder / "catalog.bin").unlink()  # as a join leaves it that has to be approved
    set_home(tmp_path)
    try:
        with pytest.raises(DaemonNotRunning, match="swarmd up; as far as is known here you wait for a founder"):
            require_answers("demo")
        monkeypatch.setattr(preflight, "is_running", lambda: True)
        with pytest.raises(SwarmUnavailable, match=f"members approve {MembershipFiles(home).identity().peer_id}"):
            require_answers("demo")
    finally:
        set_home(None)


CHATS: dict[str, bool | None] = {"demo": False, "smol": True}


def test_a_chat_without_a_name_is_with_the_model_that_can() -> None:
    assert chat.Conversation(PlayedGateway(CHATS), "", "", {})._choose_model() == "smol"


def test_a_chat_refuses_a_name_that_its_gateway_does_not_know() -> None:
    with pytest.raises(ConfigError, match="no model 'smole'; it has: demo, smol"):
        chat.Conversation(PlayedGateway(CHATS), "smole", "", {}).run()


def test_a_chat_stays_with_its_model_when_the_next_is_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    talk = chat.Conversation(PlayedGateway(CHATS), "smol", "", {})
    talk._command("model", "smole")
    assert talk.model == "smol"
    assert "no model 'smole'; it has: demo, smol" in capsys.readouterr().out


def test_training_data_that_is_not_there_is_refused_before_a_model_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no file, and no hash of data"):
        require_data("nowhere.txt", tmp_path)


ROW = b'{"text": "a"}\n'


@pytest.mark.parametrize(
    ("name", "raw", "words"),
    [
        ("x.jsonl", gzip.compress(ROW), r"it is compressed \(gzip\), expected UTF-8 text: unpack it first: gunzip"),
        ("x.parquet", b"PAR1\0", "it is a Parquet file, expected UTF-8 text: write it as lines of JSON first"),
        ("x.txt", "größer".encode("utf-16"), "it is UTF-16, expected UTF-8 text: convert it first"),
        ("x.csv", b"text\na\n", r"it is a table, expected lines of JSON .* or plain text"),
        ("x.jsonl.txt", ROW, "its first line is an object of JSON: name it .jsonl to have each line taken for a row"),
    ],
)
def test_training_data_of_another_kind_is_refused_before_a_model_is_made(
    tmp_path: Path, name: str, raw: bytes, words: str
) -> None:
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(ConfigError, match=rf"data: .*{name}: {words}"):
        require_data(name, tmp_path)


@pytest.mark.parametrize("name", ["x.jsonl", "x.JSONL", "x.ndjson", "x.json", "x.txt", "x.py", "x"])
def test_training_data_may_be_rows_or_any_plain_text(tmp_path: Path, name: str) -> None:
    raw = ROW if "j" in name.lower() else b"\xef\xbb\xbf{ Gallia } est\n"
    (tmp_path / name).write_bytes(raw)
    require_data(name, tmp_path)
