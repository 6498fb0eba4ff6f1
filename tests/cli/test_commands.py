"""Every command typed wrongly once: one sentence that says what to do, and the exit code of docs/operating.md."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from swarmd_cli.main import app
from typer.testing import CliRunner

from swarmd.errors import ConfigError
from swarmd.home.founder import Founder
from swarmd.home.membership import MembershipFiles
from swarmd.home.models import bundled_folder
from swarmd.home.paths import Home
from swarmd.protocol.membership import invite as invites
from swarmd.protocol.membership.catalog import AdmittedMember
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.membership.invite import Invite, SwarmKeys, create
from tests.cli.imported import imported_by
from tests.real import forks
from tests.real.harness import LocalSwarm, local_swarm

pytestmark = pytest.mark.slow
NOBODY = "/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"


def swarmd(*arguments: str, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = forks.Command("--home", str(home), *arguments, environment={**os.environ, **environment})
    return command.finish()


def fails(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def some_invite(address: str, expires_in_s: int = 600, psk: bytes = b"k" * 32) -> Invite:
    founder = Identity.generate()
    keys = SwarmKeys("elsewhere", founder.public_key, psk)
    return create(keys, founder, (address,), int(time.time()) + expires_in_s)


def test_help_has_an_example_for_every_verb() -> None:
    def shown(*words: str) -> str:
        done = CliRunner().invoke(app, [*words, "--help"])
        assert done.exit_code == 0, words
        return done.output

    def all_verbs(*group: str) -> list[tuple[str, ...]]:
        """Those of a group and of the groups within it."""
        text = shown(*group)
        if "Commands:" not in text:
            return [group]
        named = re.findall(r"^  (\w+) ", text.split("Commands:")[1], re.MULTILINE)
        return [words for name in named for words in all_verbs(*group, name)]

    verbs = all_verbs()
    assert {"demo", "init", "join", "up", "status", "peers", "run", "why"} <= {words[0] for words in verbs}
    assert {("models", "add"), ("service", "logs"), ("policy", "explain"), ("train", "export")} <= set(verbs)
    for words in verbs:
        assert "Example: swarmd" in shown(*words), words


HEAVY = {"torch", "transformers", "libp2p", "trio", "httpx", "hypercorn", "starlette", "scipy", "numpy", "cryptography"}
READING = (
    ["status"],
    ["peers"],
    ["ps"],
    ["why"],
    ["ping", "x"],
    ["train", "status"],
    ["train", "plan"],
    ["drain"],
    ["pause"],
)


@pytest.mark.parametrize("words", [["--help"], *READING], ids=" ".join)
def test_what_only_asks_the_daemon_imports_nothing_heavy(tmp_path: Path, words: list[str]) -> None:
    """Half of what a reading verb took was imports; who has no daemon to ask learns why at the same price."""
    with answering(tmp_path) as answered:
        imported, done = imported_by(tmp_path, words, HEAVY)
        assert not imported, done.stderr
        assert words == ["--help"] or answered, "it came as far as asking"


@contextmanager
def answering(home: Path) -> Iterator[list[bytes]]:
    """A control socket that refuses everything."""
    answered: list[bytes] = []
    body = b'{"schema": 1, "error": "not now", "exit_code": 75}'
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(home / "control.sock"))
        listener.listen()

        def answer() -> None:
            with suppress(OSError):
                while True:
                    connection, _ = listener.accept()
                    answered.append(connection.recv(65_536))
                    head = b"HTTP/1.1 409 Conflict\r\nContent-Length: %d\r\nConnection: close\r\n\r\n" % len(body)
                    connection.sendall(head + body)
                    connection.close()

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield answered
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(timeout=5)


def test_before_anything(tmp_path: Path) -> None:
    checked = json.loads(swarmd("doctor", "--json", home=tmp_path / "none").stdout)["checks"]
    assert [c["ok"] for c in checked if c["check"] in ("state folder", "member of a swarm")] == [False, False]
    assert "is not there yet" in checked[0]["detail"]
    assert all(way in checked[1]["detail"] for way in ("swarmd init --name NAME", "swarmd join INVITE"))
    fails(swarmd("status", home=tmp_path), 4, "swarmd init --name NAME, or swarmd join INVITE")
    fails(swarmd("up", home=tmp_path), 4, "is no member of a swarm")
    fails(swarmd("run", "demo", "hello", home=tmp_path), 4)
    fails(swarmd("nonsense", home=tmp_path), 2)


def test_founding_and_a_daemon_that_is_not_running(tmp_path: Path) -> None:
    done = swarmd("init", "--name", "ours", home=tmp_path)
    assert done.returncode == 0
    assert done.stdout.startswith("swarmd1-")
    assert oct((tmp_path / "founder.key").stat().st_mode)[-3:] == "600"
    fails(swarmd("init", "--name", "again", home=tmp_path), 2, "swarmd leave first")
    fails(swarmd("status", home=tmp_path), 3, "start it with swarmd up")
    fails(swarmd("down", home=tmp_path), 3)
    fails(swarmd("up", "--blocks", "4:2", home=tmp_path), 2, "START:END with START < END")
    fails(swarmd("up", "--listen", "nowhere", home=tmp_path), 2, "expected a listen address such as")
    (tmp_path / "config.toml").write_text("lisen = 3")
    fails(swarmd("up", home=tmp_path), 2, "unknown setting 'lisen'")
    (tmp_path / "config.toml").unlink()
    latin = subprocess.run(
        [sys.executable, "-m", "swarmd_cli.main", "--home", str(tmp_path), "run", "demo"],
        input="größer".encode("latin-1"),
        capture_output=True,
        check=False,
    )
    assert latin.returncode == 2
    assert b"is not UTF-8: line 1 has the byte 0xf6" in latin.stderr
    assert b"Traceback" not in latin.stderr
    listed = json.loads(swarmd("models", "ls", "--json", home=tmp_path).stdout)
    assert listed["schema"] == 1
    assert [m["name"] for m in listed["models"]] == ["demo"]
    fails(swarmd("models", "add", str(tmp_path), "--name", "x", home=tmp_path), 2, "config.json is missing")
    added = swarmd("models", "add", str(bundled_folder()), "--name", "twin", home=tmp_path)
    assert added.returncode == 0, added.stderr
    assert "6 blocks" in added.stdout
    fails(swarmd("leave", home=tmp_path), 2, "nobody can invite", "to keep a copy: cp", "swarmd leave --yes")
    assert (tmp_path / "founder.key").is_file()
    assert swarmd("leave", "--yes", home=tmp_path).returncode == 0
    fails(swarmd("status", home=tmp_path), 4)


def test_a_member_that_is_away_is_found_by_the_end_of_its_id(tmp_path: Path) -> None:
    home = Home(tmp_path)
    away = Identity.generate()
    Founder(home).found("ours")
    Founder(home).admit({away.public_key: AdmittedMember(int(time.time()) + 600, b"", ("use",))})
    done = swarmd("members", "favour", away.peer_id[-8:], "4", home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert list(MembershipFiles(home).catalog().favours) == [away.public_key]
    fails(swarmd("members", "favour", "nobody", "4", home=tmp_path), 2, "0 members, or who wait", "swarmd members ls")


def test_invites_that_cannot_work(tmp_path: Path) -> None:
    address = NOBODY.format(port=free_port(), peer=Identity.generate().peer_id)
    good = invites.encode(some_invite(address))
    fails(swarmd("join", good[:-5], home=tmp_path), 2, "cut short or mistyped")
    fails(swarmd("join", good.replace("swarmd1", "swarmd9"), home=tmp_path), 2, "version '9'")
    fails(swarmd("join", invites.encode(some_invite(address, -60)), home=tmp_path), 2, "expired")
    fails(swarmd("join", good, home=tmp_path), 75, "no member answers", address.split("/p2p/")[0], "connection refused")
    assert not (tmp_path / "swarm.json").exists()


@pytest.mark.parametrize("words", [["join"], ["join", "-"]], ids=" ".join)
def test_an_invite_that_is_piped_in_stands_in_no_process_list(tmp_path: Path, words: list[str]) -> None:
    address = NOBODY.format(port=free_port(), peer=Identity.generate().peer_id)
    good = invites.encode(some_invite(address))
    broken = f"Join us!\n> {good[:60]}\n> {good[60:]}\nUntil then"
    for piped, prompt in [
        ("", "got nothing: paste the line"),
        (good[:-5], "cut short or mistyped"),
        (good, None),
        (broken, None),
    ]:
        done = CliRunner().invoke(app, ["--home", str(tmp_path), *words], input=f"{piped}\n")
        if prompt is None:
            assert "no member answers" in str(done.exception), "it was read whole"
        else:
            assert prompt in str(done.exception)


def test_wrong_key_and_revoked_invite(tmp_path: Path) -> None:
    with local_swarm(tmp_path / "swarm") as swarm:
        founder = swarm.add("--no-serve")
        address = swarm.addresses()[0]
        wrong = invites.encode(some_invite(address, psk=b"z" * 32))
        fails(
            swarmd("join", wrong, home=tmp_path / "a"),
            2,
            "the swarm key does not match",
            "or something else listens at",
        )
        invite = swarm.invite()
        assert swarmd("join", invite, home=tmp_path / "b").returncode == 0
        assert swarmd("invite", "--revoke", invite, home=founder.home.folder).returncode == 0
        fails(swarmd("join", invite, home=tmp_path / "c"), 2, "revoked by the founder")
        fails(swarmd("invite", home=tmp_path / "b"), 2, "only a founder")
        check_running(swarm, tmp_path)


def check_running(swarm: LocalSwarm, tmp_path: Path) -> None:
    founder = swarm.volunteers[0]
    home = founder.home.folder
    for words in (["status"], ["peers"], ["ps"], ["why"], ["models", "ls"]):
        assert json.loads(swarmd(*words, "--json", home=home).stdout)["schema"] == 1
    assert "unknown" in swarmd("peers", home=home).stdout, "what was not measured is shown as unknown"
    fails(swarmd("run", "demo", "hello", home=home), 5, "no live server holds blocks [0,6)")
    fails(swarmd("run", "nope", "hello", home=home), 2, "it has: demo")
    fails(swarmd("ping", "zzz", home=home), 2, "see swarmd peers")
    fails(swarmd("drain", home=home), 2, "serves no blocks")
    fails(swarmd("resume", home=home), 2, "--no-serve")
    assert "nothing: started with --no-serve" in swarmd("status", home=home).stdout
    fails(swarmd("leave", home=home), 2, "swarmd down first")
    moved = NOBODY.format(port=free_port(), peer=Identity.generate().peer_id)
    assert "takes 1 way to others. Nobody answers there yet" in swarmd("join", moved, home=home).stdout
    assert moved in str(founder.ask("addresses")), "it goes on trying"
    fails(swarmd("up", home=home), 2, "another daemon runs on")
    port = founder.ask("status")["addresses"][0].split("/")[4]
    other_home = Home(tmp_path / "other")
    Founder(other_home).found("other")
    fails(
        swarmd("up", "--listen", f"/ip4/127.0.0.1/tcp/{port}", home=other_home.folder), 2, "in use by another program"
    )
    assert oct(founder.home.socket.stat().st_mode)[-3:] == "600", "only its owner can open the control socket"
    assert swarmd("down", home=home).returncode == 0
    fails(swarmd("status", home=home), 3)


def interrupted(process: subprocess.Popen[str]) -> tuple[str, str]:
    """Send Ctrl-C, and return what it printed until its end; one that stays is killed, and fails the test."""
    process.send_signal(signal.SIGINT)
    try:
        return process.communicate(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()
        raise


def test_ctrl_c_while_the_daemon_starts_or_runs_is_no_traceback(tmp_path: Path) -> None:
    swarmd("init", "--name", "ours", home=tmp_path)
    command = [sys.executable, "-m", "swarmd_cli.main", "--home", str(tmp_path), "up", "--no-serve"]
    command += ["--listen", "/ip4/127.0.0.1/tcp/0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as early:
        while not (tmp_path / "lock").exists():  # from here on it is importing and starting for a second or so
            time.sleep(0.01)
        _, output = interrupted(early)
        assert "Traceback" not in output, output
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as late:
        assert late.stdout is not None
        assert "is up as" in late.stdout.readline()
        _, output = interrupted(late)
        assert "Traceback" not in output, output
        assert late.returncode == 0


def test_state_folder_that_cannot_be_written(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    fails(swarmd("init", "--name", "x", home=blocked / "home"), 2, "cannot use", "choose another --home")


def test_full_disk_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ConfigError, match=r"cannot write .*No space left on device"):
        Founder(Home(tmp_path / "home")).found("x")
    assert not list((tmp_path / "home").glob(".*.new")), "nothing half-written stays behind"
