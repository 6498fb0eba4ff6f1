"""``swarmd up`` in a folder where somebody else may write: nothing that lies there is imported, by any process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import aclosing
from pathlib import Path

import pytest
import trio

import swarmd.compute.serving.worker  # noqa: F401 - so that its imports are known here
from swarmd.node.worker import worker_link
from swarmd.protocol.wire import messages
from swarmd.protocol.wire.frames import FrameDecoder
from swarmd.protocol.wire.worker import LoadSpan, Tick, WorkerFailed, decode

BUILT_IN = {*sys.builtin_module_names, "__main__"}


@pytest.fixture
def shared_folder(tmp_path: Path) -> Path:
    """A folder with a module of each name that is imported anywhere; each leaves a mark when it is run."""
    folder = tmp_path / "shared"
    for name in {module.split(".")[0] for module in sys.modules} | {"sitecustomize", "usercustomize"} - BUILT_IN:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"open({str(tmp_path / 'run')!r}, 'a').write(__name__ + ' ')")
    return folder


def run_here(tmp_path: Path) -> str:
    mark = tmp_path / "run"
    return mark.read_text() if mark.exists() else ""


@pytest.mark.slow
def test_a_worker_imports_nothing_from_where_it_was_started(
    tmp_path: Path, shared_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(shared_folder)
    monkeypatch.delenv(worker_link.VARIABLE, raising=False)

    async def ask() -> object:
        worker, decoder = worker_link.SubprocessWorker(), FrameDecoder()
        try:
            await worker.send(messages.encode_frame(LoadSpan(path=str(tmp_path), model="m", start=0, end=1)))
            async with aclosing(worker.received()) as received:  # type: ignore[type-var]
                async for data in received:
                    for frame in decoder.feed_untrusted(data):
                        if not isinstance(answer := decode(frame.header), Tick):
                            return answer
            return "it ended"
        finally:
            worker.kill()

    answer = trio.run(ask)
    assert isinstance(answer, WorkerFailed), answer
    assert "config.json is missing" in answer.message
    assert not run_here(tmp_path)


def test_a_command_imports_nothing_from_where_it_is_typed(tmp_path: Path, shared_folder: Path) -> None:
    program = shutil.which("swarmd", path=str(Path(sys.executable).parent))
    assert program is not None
    line = [program, "--home", str(tmp_path / "home"), "status"]
    done = subprocess.run(line, cwd=shared_folder, capture_output=True, text=True, timeout=60, check=False)
    assert "is no member of a swarm" in done.stderr
    assert not run_here(tmp_path)


def test_the_folder_would_be_imported_from_but_for_the_way_processes_are_started(
    tmp_path: Path, shared_folder: Path
) -> None:
    line = [sys.executable, "-c", "import msgspec"]
    subprocess.run(line, cwd=shared_folder, capture_output=True, timeout=60, check=False, env={**os.environ})
    assert "msgspec" in run_here(tmp_path)
