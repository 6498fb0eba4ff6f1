"""Secrets that were planted everywhere are nowhere in a bug report; what helps is."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from pathlib import Path

from swarmd_cli.redact import make_redactor, read_secrets

from swarmd.home.founder import Founder
from swarmd.home.membership import MembershipFiles
from swarmd.home.paths import Home
from swarmd.protocol.membership import invite as invites

PROGRAM = [sys.executable, "-m", "swarmd_cli.main"]


def contents(path: Path) -> dict[str, str]:
    with tarfile.open(path) as tar:
        files = [(entry, tar.extractfile(entry)) for entry in tar]
        return {Path(entry.name).name: file.read().decode() for entry, file in files if file is not None}


def test_planted_secrets_are_taken_out(tmp_path: Path) -> None:
    state = Home(tmp_path / "home")
    Founder(state).found("ours")
    invite = invites.encode(Founder(state).invite(("/ip4/127.0.0.1/tcp/4117",), 600))
    keys = [(state.folder / name).read_text().strip() for name in ("node.key", "founder.key")]
    token = "t0ken-of-the-gateway-0123456789"
    key = "sk-swarmd-abcdefghijklmnop"
    (state.folder / "gateway.token").write_text(token)
    psk = MembershipFiles(state).swarm().keys.psk
    planted = [invite, *keys, token, key, "hunter2hunter2", psk.hex(), "93.184.216.34", "2606:2800:220:1::1"]
    lines = [f"2026-11-23 INFO it says {secret} and goes on" for secret in planted if secret != "hunter2hunter2"]
    (state.folder / "gateway.log").write_text("\n".join([*lines, "from 192.168.1.7 to 93.184.216.34"]))
    (state.folder / "config.toml").write_text('hub_token = "hunter2hunter2"\nup_limit_mbit = 7\n')
    out = tmp_path / "report.tar.gz"
    done = subprocess.run(
        [*PROGRAM, "--home", str(state.folder), "bugreport", "--out", str(out)],
        capture_output=True,
        text=True,
        env={**os.environ, "HOME": str(tmp_path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    texts = contents(out)
    all_text = "\n".join(texts.values())
    for secret in [*planted, *(s for s in read_secrets(state.folder)), str(tmp_path)]:
        assert secret not in all_text, secret
    assert "up_limit_mbit = 7" in texts["config.toml"]
    assert "from 192.168.1.7 to [address 1]" in texts["gateway.log"]
    assert "no daemon answers" in texts["status.json"]
    assert "600" in texts["home.txt"]
    assert "torch" in texts["about.txt"]


def test_it_overwrites_nothing(tmp_path: Path) -> None:
    out = tmp_path / "mine.txt"
    out.write_text("mine")
    command = [*PROGRAM, "--home", str(tmp_path / "none"), "bugreport", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"cannot write {out}: File exists" in done.stderr
    assert out.read_text() == "mine"


def test_the_same_address_has_the_same_number() -> None:
    redact = make_redactor([], {"ann": "[user]"})
    assert redact("8.8.8.8 1.1.1.1 /ip4/8.8.8.8/tcp/1") == "[address 1] [address 2] /ip4/[address 1]/tcp/1"
    assert redact("of ann, not of anna; 12:30:45 and 127.0.0.1") == "of [user], not of anna; 12:30:45 and 127.0.0.1"
