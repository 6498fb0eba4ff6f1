"""What is installed from this tree, built of the files that the Dockerfile copies and nothing else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent.parent


def test_a_wheel_holds_everything_that_runs(tmp_path: Path) -> None:
    copied = re.findall(r"^COPY ([^-].+) (\S+)$", (ROOT / "Dockerfile").read_text(), re.MULTILINE)
    source = tmp_path / "source"
    source.mkdir()
    for name in [name for names, _ in copied for name in names.split()]:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", str(source), "--wheel-dir", str(tmp_path)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = set(archive.namelist())
        assert b"[Service]" in archive.read("swarmd_cli/swarmd.service")
        assert b"DynamicUser=yes" in archive.read("swarmd_cli/scope-system.conf")
    needed = {"swarmd_cli/scope-user.conf", "swarmd/bundled/model.safetensors", "swarmd/gateway/page/api.js"}
    assert needed <= packed, needed - packed
    assert not [name for name in packed if name.startswith("tests/")]
