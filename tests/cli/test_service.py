"""The service's files and what is said where no manager runs (tests/real/test_service.py has systemd itself)."""

from __future__ import annotations

import plistlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from swarmd_cli.managers import Launchd, Systemd, quote_word, remove_namespaces

from swarmd.errors import ConfigError

PROGRAM = [sys.executable, "-m", "swarmd_cli.main"]
# A manager of which one word fails: what was asked of it is in the file beside it.
FAKE = """#!/bin/sh
echo "$@" >> {folder}/asked
case "$*" in *{failing}*) echo "Job failed because of a reason." >&2; exit 1;; esac
"""


def service(*words: str, home: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    places = {"PATH": path, "HOME": str(home), "XDG_CONFIG_HOME": str(home / "config")}
    return subprocess.run([*PROGRAM, "service", *words], capture_output=True, text=True, env=places, check=False)


def fake_manager(folder: Path, failing: str) -> str:
    for name in ("systemctl", "journalctl", "loginctl", "systemd-run"):
        (folder / name).write_text(FAKE.format(folder=folder, failing=failing))
        (folder / name).chmod(0o755)
    return str(folder)


@pytest.mark.parametrize("is_system", [False, True])
def test_a_unit_names_everything_as_systemd_reads_it(is_system: bool) -> None:
    text = Systemd(is_system).text(["/opt/my programs/swarmd"], Path('/home/me/50% "of" it'))
    assert 'ExecStart="/opt/my programs/swarmd" --home "/home/me/50%% \\"of\\" it" up' in text
    assert "@" not in text.replace("@system-service", "").replace("@privileged", "")
    for line in text.splitlines():
        assert not line or line[0] in "#[" or "=" in line, line
    assert ("DynamicUser=yes" in text) == is_system
    assert text.count("\nProtectHome=") == 1


def test_words_that_systemd_would_change() -> None:
    assert quote_word("/plain/path-1.2") == "/plain/path-1.2"
    assert quote_word("/a $HOME", in_command=True) == '"/a $$HOME"'
    assert quote_word("back\\slash") == '"back\\\\slash"'
    with pytest.raises(ConfigError, match="control character"):
        quote_word("two\nlines")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("is_system", [False, True])
def test_systemd_finds_nothing_to_say(is_system: bool, tmp_path: Path) -> None:
    unit = tmp_path / "swarmd.service"
    unit.write_text(Systemd(is_system).text([shutil.which("true") or "/bin/true"], tmp_path))
    command = ["systemd-analyze", "security", "--offline=true", "--threshold=40", "--no-pager", str(unit)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    verified = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    assert not verified.stderr, verified.stderr


def test_where_users_make_no_namespaces_the_rest_still_counts() -> None:
    text = remove_namespaces(Systemd(False).text(["/bin/swarmd"], Path("/home/me/.swarmd")))
    assert "PrivateUsers" not in text
    assert "ReadWritePaths" not in text
    assert "\nNoNewPrivileges=yes" in text
    assert "\nSystemCallFilter=@system-service" in text


def test_a_launchd_agent_is_a_property_list() -> None:
    job = plistlib.loads(Launchd().text(["/opt/my <programs>/swarmd"], Path("/Users/me/a & b")).encode())
    assert job["ProgramArguments"] == ["/opt/my <programs>/swarmd", "--home", "/Users/me/a & b", "up"]
    assert job["KeepAlive"] == {"SuccessfulExit": False}


def test_without_a_manager_nothing_is_written(tmp_path: Path) -> None:
    done = service("install", home=tmp_path)
    assert done.returncode == 2
    assert "no systemd user manager answers here (systemctl: No such file or directory)" in done.stderr
    assert "nothing was written" in done.stderr
    assert not list(tmp_path.iterdir())
    assert service("status", home=tmp_path).stdout.strip() == "not installed"
    assert "not installed" in service("uninstall", home=tmp_path).stdout
    assert "no journalctl" in service("logs", home=tmp_path).stderr
    dry = service("install", "--dry-run", home=tmp_path).stdout
    assert dry.startswith(f"# {tmp_path}/config/systemd/user/swarmd.service\n")
    assert not list(tmp_path.iterdir())


def test_a_service_that_does_not_start_is_removed_again(tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    home = tmp_path / "home"
    tools.mkdir()
    home.mkdir()
    path = fake_manager(tools, failing="restart")
    subprocess.run([*PROGRAM, "init", "--name", "ours"], env={"HOME": str(home)}, check=True, capture_output=True)
    done = service("install", home=home, path=path)
    assert done.returncode == 2
    assert "did not start, and was removed again. Job failed because of a reason." in done.stderr
    assert not (home / "config/systemd/user/swarmd.service").exists()
    assert (tools / "asked").read_text().splitlines()[-1] == "--user daemon-reload"


def test_the_machines_service_has_its_own_folder(tmp_path: Path) -> None:
    done = subprocess.run(
        [*PROGRAM, "--home", str(tmp_path), "service", "install", "--system"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"keeps its state in /var/lib/swarmd, not {tmp_path}: leave --home out" in done.stderr
