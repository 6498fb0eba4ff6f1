"""Service managers: systemd, for one user or for the machine, and macOS's launchd. Texts are made, nothing is decided.

Sources: systemd.unit(5), systemd.exec(5), systemd.syntax(7), loginctl(1); launchd.plist(5), launchctl(1).
"""

from __future__ import annotations

import getpass
import os
import plistlib
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Protocol

from swarmd.errors import ConfigError

UNIT = "swarmd.service"
LABEL = "swarmd.daemon"
SYSTEM_HOME = Path("/var/lib/swarmd")  # what StateDirectory=swarmd makes
GPU_GROUPS = ("video", "render")  # own the devices of AMD's and Intel's GPUs
LOG_LINES = 12  # of the log, shown when a start failed
# What needs a namespace of users or mounts when an ordinary user's manager runs it; some machines allow none.
NEEDS_NAMESPACE = re.compile(
    r"^(PrivateUsers|PrivateTmp|ReadWritePaths|InaccessiblePaths|Protect\w+|CapabilityBoundingSet|AmbientCapabilities)=.*\n",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class ServiceState:
    """What the manager says: ``state`` as its own word, "not installed" without a unit; None is not known."""

    installed: bool
    state: str
    unit: str
    starts_by_itself: bool = False
    pid: int | None = None
    restarts: int | None = None
    detail: str = ""


class Manager(Protocol):
    """Keeps one daemon running."""

    @property
    def path(self) -> Path:
        """Of the file that tells the manager."""

    def require(self) -> None:
        """Raises ConfigError where this manager does not run."""

    def text(self, command: list[str], home: Path) -> str:
        """What the file says."""

    def start(self) -> None:
        """Start it, now and whenever the machine starts. Raises ConfigError with what the manager said."""

    def stop(self) -> None:
        """Stop it for good."""

    def reload(self) -> None:
        """Have the manager see that the file is gone."""

    def state(self) -> ServiceState:
        """What it does now."""

    def logs(self, lines: int, follow: bool) -> list[str]:
        """The command that shows the log."""

    def after_install(self) -> str:
        """What the owner should know once it runs."""

    def left_behind(self) -> str:
        """What uninstalling leaves beside the state folder; "" for nothing."""


@dataclass(frozen=True, slots=True)
class Systemd:
    """systemd: the user's own manager, or with ``is_system`` the machine's, as a user of the daemon's own."""

    is_system: bool

    @property
    def path(self) -> Path:
        if self.is_system:
            return Path("/etc/systemd/system") / UNIT
        configured = os.environ.get("XDG_CONFIG_HOME")
        settings = Path(configured) if configured else Path.home() / ".config"
        return settings / "systemd" / "user" / UNIT

    def require(self) -> None:
        result = _run(self._systemctl("show", "--property=Version"))
        if result.returncode:
            owner = "system" if self.is_system else "user"
            raise ConfigError(
                f"no systemd {owner} manager answers here ({_last_line(result.stderr)}), and nothing was written: "
                "run swarmd up under another supervisor, or in a container"
            )
        if self.is_system and os.geteuid():
            raise ConfigError("--system needs root, and nothing was written: sudo, with the same words")

    def text(self, command: list[str], home: Path) -> str:
        scope = _template(f"scope-{'system' if self.is_system else 'user'}.conf")
        groups = " ".join(group for group in GPU_GROUPS if _is_group(group))
        fill = {
            "@SCOPE@": scope.rstrip("\n"),
            "@GROUPS@": f"SupplementaryGroups={groups}" if groups else "# (no groups of video or render here)",
            "@COMMAND@": " ".join(quote_word(word, in_command=True) for word in command),
            "@TARGET@": "multi-user.target" if self.is_system else "default.target",
            "--home @HOME@": f"--home {quote_word(str(home), in_command=True)}",
            "@HOME@": quote_word(str(home)),
        }
        # In this order: "--home @HOME@" is a command's word, which needs other quotes than a path alone does.
        text = _template(UNIT)
        for mark, value in fill.items():
            text = text.replace(mark, value)
        return text if self.is_system or self._has_namespaces() else remove_namespaces(text)

    def start(self) -> None:
        # "restart", not "start": a unit that was installed before runs the old command until then.
        _check(self._systemctl("daemon-reload"))
        _check(self._systemctl("enable", UNIT))
        result = _run(self._systemctl("restart", UNIT))
        if result.returncode:
            log = _run(self.logs(LOG_LINES, follow=False)).stdout.rstrip()
            reason = result.stderr.strip().split("\n")[0]
            raise ConfigError(f"the service did not start, and was removed again. {reason}\n{log}")

    def stop(self) -> None:
        _run(self._systemctl("disable", "--now", UNIT))
        _run(self._systemctl("reset-failed", UNIT))

    def reload(self) -> None:
        _run(self._systemctl("daemon-reload"))

    def state(self) -> ServiceState:
        path = str(self.path)
        if not self.path.is_file():
            return ServiceState(False, "not installed", path)
        names = "ActiveState,SubState,MainPID,NRestarts,UnitFileState,StatusText,Result"
        shown = _run(self._systemctl("show", UNIT, f"--property={names}"))
        if shown.returncode:
            return ServiceState(True, "unknown", path, detail=_last_line(shown.stderr))
        lines = [line for line in shown.stdout.splitlines() if "=" in line]
        properties = dict(line.split("=", 1) for line in lines)
        detail = properties.get("StatusText", "")
        unit_result = properties.get("Result", "")
        if not detail and unit_result not in ("", "success"):
            detail = f"ended by: {unit_result}"
        return ServiceState(
            installed=True,
            state=properties.get("ActiveState", "unknown"),
            unit=path,
            starts_by_itself=properties.get("UnitFileState") == "enabled",
            pid=int(properties.get("MainPID", "0")) or None,
            restarts=int(properties.get("NRestarts", "0")),
            detail=detail,
        )

    def logs(self, lines: int, follow: bool) -> list[str]:
        unit_option = "--unit" if self.is_system else "--user-unit"
        ending = "--follow" if follow else "--no-pager"
        return ["journalctl", "--quiet", unit_option, UNIT, "--lines", str(lines), ending]

    def after_install(self) -> str:
        if self.is_system:
            return f"It runs as the user swarmd; its state is in {SYSTEM_HOME}."
        if _is_lingering():
            return "It goes on after you log out (lingering was on already)."
        # Without lingering the user's manager, and the daemon with it, ends with their last login.
        done = _run(["loginctl", "enable-linger"])
        if done.returncode:
            mend = f"sudo loginctl enable-linger {getpass.getuser()}"
            return f"It ends when you log out, for lingering is off ({_last_line(done.stderr)}): {mend}"
        return "It goes on after you log out: lingering was turned on (loginctl disable-linger turns it off)."

    def left_behind(self) -> str:
        if self.is_system or not _is_lingering():
            return ""
        return "lingering is still on; if nothing else of yours needs it: loginctl disable-linger"

    def _systemctl(self, *arguments: str) -> list[str]:
        return ["systemctl", *([] if self.is_system else ["--user"]), *arguments]

    def _has_namespaces(self) -> bool:
        """Can the user's manager make namespaces? One that runs is asked; where none runs, it is taken for granted."""
        probe = ["systemd-run", "--user", "--wait", "--collect", "--quiet", "-p", "PrivateUsers=yes"]
        result = _run([*probe, "-p", "ProtectSystem=strict", "true"])
        return result.returncode not in (217, 226)  # systemd's own exit codes for USER and NAMESPACE


@dataclass(frozen=True, slots=True)
class Launchd:
    """launchd on macOS: an agent of the user, which runs while they are logged in."""

    @property
    def path(self) -> Path:
        return Path.home() / "Library" / "LaunchAgents" / f"{LABEL}.plist"

    def require(self) -> None:
        if result := _run(["launchctl", "print", self._domain]).returncode:
            raise ConfigError(
                f"launchctl print {self._domain} failed ({result}): log in on the screen of this Mac first"
            )

    def text(self, command: list[str], home: Path) -> str:
        log = str(home / "daemon.log")
        job = {
            "Label": LABEL,
            "ProgramArguments": [*command, "--home", str(home), "up"],
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": 10,  # seconds, launchd's least
            "ExitTimeOut": 20,  # seconds for sessions to be taken over
            "ProcessType": "Background",
            "LowPriorityIO": True,
            "Nice": 10,
            "Umask": 0o077,
            "StandardOutPath": log,
            "StandardErrorPath": log,
        }
        return plistlib.dumps(job, sort_keys=False).decode()

    def start(self) -> None:
        _run(["launchctl", "bootout", f"{self._domain}/{LABEL}"])
        _check(["launchctl", "bootstrap", self._domain, str(self.path)])

    def stop(self) -> None:
        _run(["launchctl", "bootout", f"{self._domain}/{LABEL}"])

    def reload(self) -> None:
        """It has nothing to read again."""

    def state(self) -> ServiceState:
        if not self.path.is_file():
            return ServiceState(False, "not installed", str(self.path))
        result = _run(["launchctl", "print", f"{self._domain}/{LABEL}"])
        if result.returncode:
            return ServiceState(True, "inactive", str(self.path), detail=_last_line(result.stderr))
        state = re.search(r"^\s*state = (.+)$", result.stdout, re.M)
        pid = re.search(r"^\s*pid = (\d+)$", result.stdout, re.M)
        return ServiceState(
            installed=True,
            state=state[1] if state else "unknown",
            unit=str(self.path),
            starts_by_itself=True,
            pid=int(pid[1]) if pid else None,
        )

    def logs(self, lines: int, follow: bool) -> list[str]:
        if not self.path.is_file():
            raise ConfigError(f"{self.path} is not there: swarmd service install")
        log = plistlib.loads(self.path.read_bytes())["StandardErrorPath"]
        return ["tail", "-n", str(lines), *(["-f"] if follow else []), log]

    def after_install(self) -> str:
        return "It runs while you are logged in."

    def left_behind(self) -> str:
        return ""

    @property
    def _domain(self) -> str:
        return f"gui/{os.getuid()}"


def find_manager(is_system: bool) -> Manager:
    """Find the manager of this machine. Raises ConfigError where there is none that swarmd knows."""
    if sys.platform == "darwin":
        if is_system:
            raise ConfigError("--system is for systemd: on macOS the daemon runs as an agent of its user")
        return Launchd()
    if sys.platform != "linux":
        raise ConfigError(
            f"swarmd knows systemd and launchd, and this is {sys.platform}: see docs/operating.md, Service"
        )
    return Systemd(is_system)


def quote_word(word: str, in_command: bool = False) -> str:
    """Write a word so that systemd reads it as it is: spaces, %, quotes; in a command also $ (systemd.syntax(7))."""
    if any(ord(letter) < 32 for letter in word):
        raise ConfigError(f"a unit cannot name {word!r}: it has a control character")
    # The backslash first, or those of the other escapes would be escaped again. % begins a specifier everywhere, $ a
    # variable in commands only.
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    if in_command:
        escaped = escaped.replace("$", "$$")
    return f'"{escaped}"' if escaped != word or " " in word or "'" in word else word


def remove_namespaces(text: str) -> str:
    """Make a unit for a machine where users may make no namespaces: what stays still counts."""
    remark = "# This machine lets users make no namespaces: what needs them is left out.\n"
    return remark + NEEDS_NAMESPACE.sub("", text)


def _is_lingering() -> bool:
    """Does the user's manager run while they are logged out?"""
    result = _run(["loginctl", "show-user", getpass.getuser(), "--property=Linger"])
    return result.stdout.strip() == "Linger=yes"


def _template(name: str) -> str:
    return (resources.files("swarmd_cli") / name).read_text(encoding="utf-8")


def _is_group(name: str) -> bool:
    import grp

    try:
        grp.getgrnam(name)
    except KeyError:
        return False
    return True


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        return subprocess.CompletedProcess(command, 127, "", f"{command[0]}: {error.strerror}")


def _check(command: list[str]) -> None:
    result = _run(command)
    if result.returncode:
        raise ConfigError(f"{' '.join(command)}: {_last_line(result.stderr) or result.returncode}")


def _last_line(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else ""
