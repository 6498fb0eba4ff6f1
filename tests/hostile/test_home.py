"""A state folder that was damaged, or left halfway by a kill: one sentence, nothing lost, and trying again mends it."""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import itertools
import logging
import os
import random
import shutil
import socket
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from swarmd_cli.main import app, run

from swarmd import config
from swarmd.client.links.checks import Checks
from swarmd.errors import ConfigError, SwarmError
from swarmd.gateway.keys import Keys
from swarmd.home.founder import Founder
from swarmd.home.membership import MembershipFiles
from swarmd.home.models import ModelFolders
from swarmd.home.paths import Home
from swarmd.net.standing import Standing
from swarmd.net.traffic import Traffic
from swarmd.node.machine.presence import read_pause
from swarmd.node.members.address_memory import AddressMemory
from swarmd.plan.links.traffic import Limits
from swarmd.plan.trust.standing import Fault
from swarmd.protocol.membership.identity import Identity
from swarmd.protocol.runs.recipe import Batch, Recipe, read_toml, start_run
from swarmd.train.store.disk import RunFolder, known_runs
from swarmd.usage_ledger import UsageKind, UsageLedger
from swarmd.values import PeerId
from swarmd.weights.library import Library

FILES = ("swarm.json", "node.key", "founder.key", "catalog.bin", "models.json", "peers.json", "standing.json")
DAMAGES = {
    "empty": lambda raw: b"",
    "cut short": lambda raw: raw[: len(raw) // 2],
    "no UTF-8": lambda raw: b"\xff\xfe" + raw,
    "another type": lambda raw: b"[5]",
    "a number": lambda raw: b"5",
    "null": lambda raw: b"null",
    "too deep": lambda raw: b"[" * 100_000,
    "wrong values": lambda raw: b'{"a": 5, "b": [1]}',
}


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home") / "home"
    home = Home(folder)
    Founder(home).found("ours")
    ModelFolders(home).add(MembershipFiles(home).catalog().models["demo"][0], folder)
    for name in ("peers.json", "standing.json"):
        (folder / name).write_text("{}")
    return folder


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_one_sentence(
    founded: Path,
    tmp_path: Path,
    name: str,
    damage: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "home"
    shutil.copytree(founded, folder)
    (folder / name).write_bytes(DAMAGES[damage]((folder / name).read_bytes()))
    for command in ("doctor", "invite"):
        monkeypatch.setattr(sys, "argv", ["swarmd", "--home", str(folder), command])
        with pytest.raises(SystemExit) as ended:  # and nothing else
            run()
        said = capsys.readouterr().err
        assert "Traceback" not in said
        assert ended.value.code in (0, 1, 2, 3, 4), command
        assert len(said) < 1_000


# --- every file of the folder, as disks and people leave it ---------------------------------------------------------

BOM = b"\xef\xbb\xbf"
_CAPABILITIES = 0x20080522  # version 3 of Linux's capability sets (capabilities(7))
_OVER_MODES = (1 << 1) | (1 << 2)  # CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH


@contextlib.contextmanager
def as_plain_owner() -> Iterator[None]:
    """Obey the modes of files, which root passes over."""
    if os.geteuid() != 0 or sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(_CAPABILITIES, 0)  # of this thread
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable, each twice
    assert libc.capget(header, sets) == 0
    effective = sets[0]
    sets[0] = effective & ~_OVER_MODES
    assert libc.capset(header, sets) == 0
    try:
        yield
    finally:
        sets[0] = effective
        assert libc.capset(header, sets) == 0


def forbid(path: Path) -> None:
    path.chmod(0o000)


def make_read_only(path: Path) -> None:
    path.chmod(0o400)


def replace_by_link(path: Path) -> None:
    elsewhere = path.with_name(f"{path.name}.elsewhere")
    path.rename(elsewhere)
    path.symlink_to(elsewhere)


def replace_by_broken_link(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.with_name("gone"))


def add_bom(path: Path) -> None:
    path.write_bytes(BOM + path.read_bytes())


def cut_in_half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


MISHAPS = (
    *(forbid, make_read_only, Path.unlink, replace_by_link, replace_by_broken_link),
    *(add_bom, cut_in_half, replace_by_folder),
)
OF_MEMBERS = ("doctor", "invite", "members ls", "models ls", "credit")
OF_POLICIES = ("doctor", "policy show", "policy set hours 22:00-06:00")
VERBS = {  # that read or write a file; all others are the daemon's and the gateway's own
    **dict.fromkeys(("swarm.json", "node.key", "catalog.bin", "founder.key"), OF_MEMBERS),
    **dict.fromkeys(("config.toml", "pause.json", "traffic.json"), OF_POLICIES),
    "models.json": ("models ls", "models rm ours"),
    "books.db": ("credit",),
    "gateway-keys.json": ("gateway key ls", "gateway key add anne"),
    "catalog.lock": ("invite",),
}
OF_NONE = ("doctor",)
EVERY_VERB = sorted(
    {*OF_POLICIES, *itertools.chain.from_iterable(VERBS.values()), "bugreport", "status", "train status"}
)


@pytest.fixture(scope="module")
def lived_in(founded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which every file is that a daemon, its gateway and its owner's verbs write."""
    folder = tmp_path_factory.mktemp("lived") / "home"
    shutil.copytree(founded, folder, ignore=shutil.ignore_patterns("*.sock"))
    home = Home(folder)
    use_as_daemon(home)
    Keys(folder).add("bob")
    (folder / "config.toml").write_text('listen = "/ip4/127.0.0.1/tcp/0"\n')
    (folder / "gateway.token").write_text("token")
    (folder / "gateway.address").write_text("http://127.0.0.1:1")
    home.pause_file.write_text('{"until": null}')
    home.router_file.write_text('{"port": 1, "inside": 1, "by": "pcp"}')
    owner = Identity(b"r" * 32)
    recipe = Recipe("run", "0" * 64, "1" * 64, batch=Batch(target=8, micro=2, tokens=4), anchors=(owner.peer_id,))
    run = start_run(recipe, owner, 1)
    run_folder = RunFolder(home.runs / run.id)
    run_folder.folder.mkdir(parents=True)
    run_folder.keep_run(run, "train")
    run_folder.keep_order(b"order")
    named = {value for name, value in vars(Home).items() if name.endswith("_file")}
    assert all(value.fget(home).is_file() for value in named), "a file that the sweep does not know"
    return folder


def use_as_daemon(home: Home) -> None:
    """Read and write what a daemon, and a client beside it, read when they start and write until they end."""
    with home.lock_for_daemon(), home.lock_catalog():
        pass
    member = MembershipFiles(home)
    member.swarm()
    member.identity()
    member.bootstrap()
    catalog = member.catalog_raw()
    if catalog is not None:
        member.save_catalog(catalog)
    read_pause(home.pause_file)
    with contextlib.closing(Traffic(Limits(), home.traffic_file)) as traffic:
        traffic.connected()
    AddressMemory({}, home.peers_file, PeerId("me")).remember({PeerId("other"): ("/ip4/127.0.0.1/tcp/1",)})
    standing = Standing(lambda: 1e9, home.standing_file)
    standing.fault(PeerId("other"), Fault.SILENT, "a test")
    standing.save()
    checks = Checks(random.Random(1), home.checks_file)
    checks.note("other", is_right=True)
    checks.save()
    books = UsageLedger(home.books_file)
    books.count(UsageKind.SECONDS, 1)
    books.save()
    books.prune(0)
    Library(home.weights, ModelFolders(home).read())
    for run_folder in known_runs(home.runs).values():
        with contextlib.suppress(SwarmError):  # the daemon leaves such a run out, aloud
            if run_folder.role:
                run_folder.run()
                run_folder.order()
                list(run_folder.commits())


def trouble_of(use: Callable[[], object]) -> str:
    """What is no sentence of ours, if anything."""
    try:
        use()
    except SystemExit:
        return ""
    except SwarmError as error:
        return "" if 0 < len(str(error)) < 1_000 else f"an endless sentence: {error}"
    except BaseException as error:  # noqa: BLE001 - anything else is a traceback
        return repr(error)
    return ""


def run_verb(folder: Path, line: str) -> None:
    app(["--home", str(folder), *line.split()], standalone_mode=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def copy_home(lived_in: Path, folder: Path) -> Path:
    if folder.exists():
        subprocess.run(["chmod", "-R", "u+rwX", str(folder)], check=True)
        shutil.rmtree(folder)
    shutil.copytree(lived_in, folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("mishap", MISHAPS, ids=lambda mishap: mishap.__name__)
def test_every_file_of_the_folder_may_be_in_any_state_without_a_traceback_or_a_loss(
    lived_in: Path, tmp_path: Path, mishap: Callable[[Path], None]
) -> None:
    troubles = []
    names = sorted(contents(lived_in))
    assert set(VERBS) < set(names)
    for name in names:
        folder = copy_home(lived_in, tmp_path / "home")
        mishap(folder / name)
        before = contents(folder)
        verbs = {line: partial(run_verb, folder, line) for line in VERBS.get(name, OF_NONE)}
        with as_plain_owner():
            found = {"a daemon": trouble_of(partial(use_as_daemon, Home(folder)))}
            found |= {line: trouble_of(verb) for line, verb in verbs.items()}
        troubles += [f"{name}: {use}: {trouble}" for use, trouble in found.items() if trouble]
        after = contents(folder)
        for secret in ("node.key", "founder.key", "swarm.json"):
            if after.get(secret) != before.get(secret):
                troubles.append(f"{name}: {secret} was changed")
    assert not troubles, "\n".join(troubles)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "says"),
    [(0o500, "config.toml: Permission denied"), (0o300, "open it"), (0o000, "open it")],
    ids=["not written", "not listed", "closed"],
)
def test_a_folder_in_which_nothing_can_be_written_or_listed_is_one_sentence_for_every_verb(
    lived_in: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: int, says: str
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = copy_home(lived_in, tmp_path / "home")
    before = contents(folder)
    folder.chmod(mode)
    with as_plain_owner():
        uses = {line: partial(run_verb, folder, line) for line in EVERY_VERB}
        if mode != 0o300:  # a daemon's own files are found by their names, but no verb begins one there
            uses["a daemon"] = partial(use_as_daemon, Home(folder))
        troubles = {name: trouble_of(use) for name, use in uses.items()}
        with pytest.raises(ConfigError, match=says):
            run_verb(folder, "policy set hours 22:00-06:00")
        if mode != 0o300:
            with pytest.raises(ConfigError, match="nothing can be written in"), Home(folder).lock_for_daemon():
                pass
    folder.chmod(0o700)
    assert not {name: trouble for name, trouble in troubles.items() if trouble}
    assert contents(folder) == before


@given(st.binary(max_size=200) | st.text(max_size=200).map(str.encode))
@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_settings_or_one_sentence(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "config.toml"
    for written in (raw, b"cache_tokens = " + raw, b"[[serve]]\nmodel = " + raw, b"[" * 5_000 + raw):
        path.write_bytes(written)
        for read in (lambda: config.load(tmp_path, {}), lambda: read_toml(path)):
            with contextlib.suppress(ConfigError):
                read()


@pytest.mark.parametrize("nth", range(1, 5))
def test_founding_that_was_killed_is_mended_by_trying_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """Before each of the four files that it writes; an older founder's key and catalog lie there too."""
    old, home = Home(tmp_path / "old"), Home(tmp_path / "new")
    Founder(old).found("theirs")
    for name in ("founder.key", "catalog.bin"):
        (tmp_path / "new").mkdir(exist_ok=True)
        shutil.copy(tmp_path / "old" / name, tmp_path / "new" / name)
    written: list[str] = []
    write = Home.write

    def killed(self: Home, name: str, content: str | bytes, secret: bool = False) -> None:
        written.append(name)
        if len(written) == nth:
            raise KeyboardInterrupt
        write(self, name, content, secret)

    with monkeypatch.context() as patch:
        patch.setattr(Home, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            Founder(home).found("ours")
    assert not home.has_joined
    keys = Founder(home).found("ours")
    assert "demo" in MembershipFiles(home).catalog().models
    assert Founder(home).is_here
    assert Founder(home).key().public_key == keys.founder_key


def test_the_key_of_another_swarm_makes_nobody_its_founder(tmp_path: Path) -> None:
    old, home, mine = Home(tmp_path / "old"), Home(tmp_path / "new"), Home(tmp_path / "mine")
    Founder(old).found("theirs")
    Founder(mine).found("ours")
    shutil.copytree(tmp_path / "old", tmp_path / "new")
    (tmp_path / "new" / "swarm.json").unlink()  # left, and killed in the middle
    MembershipFiles(home).enter(Founder(mine).invite((), 60), Identity.generate(), None)
    assert not Founder(home).is_here
    assert not MembershipFiles(home).catalog().models
    with pytest.raises(SwarmError, match="only a founder of the swarm"):
        Founder(home).key()


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_folder_that_was_made_before_is_closed_to_other_users_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "home"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with caplog.at_level(logging.WARNING), Home(folder).lock_for_daemon():
        assert mode_of(folder) == 0o700
        assert mode_of(folder / "lock") == 0o600
    assert f"could open {folder} (mode 755): it is its owner's alone now" in caplog.text
    caplog.clear()
    with Home(folder).lock_for_daemon():
        assert not caplog.text, "said once"


def test_a_lock_that_another_user_holds_keeps_no_daemon_from_starting(tmp_path: Path) -> None:
    """Whoever could open it may hold it for ever."""
    for name in ("lock", "catalog.lock"):
        (tmp_path / name).touch()
        (tmp_path / name).chmod(0o644)
        with (tmp_path / name).open() as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            home = Home(tmp_path)
            with home.lock_for_daemon() if name == "lock" else home.lock_catalog():
                assert mode_of(tmp_path / name) == 0o600


def test_a_daemon_of_an_older_version_that_runs_keeps_its_lock(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.touch()
    lock.chmod(0o644)
    with lock.open() as held, socket.socket(socket.AF_UNIX) as control:
        fcntl.flock(held, fcntl.LOCK_EX)
        control.bind(str(Home(tmp_path).socket))
        control.listen()
        with pytest.raises(ConfigError, match="another daemon runs"), Home(tmp_path).lock_for_daemon():
            pass
    with (
        Home(tmp_path).lock_for_daemon(),
        pytest.raises(ConfigError, match="another daemon runs"),
        Home(tmp_path).lock_for_daemon(),
    ):
        pass
