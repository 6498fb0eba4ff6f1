"""Imports go down only. Each forbidden import comes with its reason, so that a failure explains itself."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (ROOT / "swarmd", ROOT / "cli" / "swarmd_cli")

LAYERS = {
    "swarmd.values": 0,
    "swarmd.errors": 0,
    "swarmd.config": 0,
    "swarmd.folders": 0,
    "swarmd.status": 0,
    "swarmd.protocol": 1,
    "swarmd.plan": 1,
    "swarmd.home": 2,
    "swarmd.compute": 2,
    "swarmd.net": 2,
    "swarmd.weights": 2,
    "swarmd.train": 3,
    "swarmd.node": 3,
    "swarmd.client": 3,
    "swarmd.daemon": 4,
    "swarmd": 4,
    "swarmd_cli": 5,
}

FORBIDDEN = [
    ("swarmd.protocol", "trio", "the protocol is sans-I/O: bytes in, values out"),
    ("swarmd.protocol", "torch", "the daemon parses messages without torch"),
    ("swarmd.protocol", "libp2p", "the protocol does not know what carries it"),
    ("swarmd.plan", "trio", "decisions are pure: time is an argument"),
    ("swarmd.plan", "torch", "decisions are made in the daemon, which has no torch"),
    ("swarmd.plan", "libp2p", "decisions do not know the network"),
    ("swarmd.plan", "time", "decisions read no clock"),
    ("swarmd.plan", "random", "decisions draw no random numbers of their own"),
    ("swarmd.compute", "trio", "the worker has no event loop"),
    ("swarmd.compute", "libp2p", "the worker has no network"),
    ("swarmd.compute", "swarmd.net", "the worker has no network"),
    ("swarmd.net", "torch", "the daemon stays small"),
    ("swarmd.net", "swarmd.compute", "network without torch"),
    ("swarmd.weights", "torch", "the daemon stays small; bytes are bytes"),
    ("swarmd.node", "torch", "the daemon stays small"),
    ("swarmd.node", "transformers", "the daemon stays small"),
    ("swarmd.node", "swarmd.compute", "a daemon reaches the worker through its socket only"),
    ("swarmd.node", "swarmd.client", "services never import each other's side"),
    ("swarmd.node", "swarmd.train", "training uses the node's worker link, never the other way round"),
    ("swarmd.train", "transformers", "the daemon stays small"),
    ("swarmd.client", "swarmd.node", "services never import each other's side"),
    ("swarmd", "pickle", "no pickle, ever"),
]
LIBP2P_HOME = "swarmd.net.libp2p"


def modules() -> dict[str, set[str]]:
    """Every module of the project with what it imports, type-checking imports included."""
    found = {}
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            parts = path.relative_to(package.parent).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            imported: set[str] = set()
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import):
                    imported |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module:
                    imported |= {node.module} | {f"{node.module}.{a.name}" for a in node.names}
            found[name] = imported
    return found


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def layer(module: str) -> int | None:
    matches = [p for p in LAYERS if is_in(module, p)]
    return LAYERS[max(matches, key=len)] if matches else None


def test_imports_go_down_only() -> None:
    wrong = []
    for module, imported in modules().items():
        mine = layer(module)
        for other in imported:
            theirs = layer(other)
            if theirs is not None and mine is not None and theirs > mine:
                wrong.append(f"{module} (layer {mine}) imports {other} (layer {theirs})")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("package", "target", "why"), FORBIDDEN)
def test_forbidden_import(package: str, target: str, why: str) -> None:
    offenders = [
        m for m, imported in modules().items() if is_in(m, package) and any(is_in(i, target) for i in imported)
    ]
    assert not offenders, f"{offenders} import {target}: {why}"


def test_only_one_folder_knows_libp2p() -> None:
    offenders = [
        m
        for m, imported in modules().items()
        if not is_in(m, LIBP2P_HOME) and any(is_in(i, "libp2p") for i in imported)
    ]
    assert not offenders, f"{offenders} import libp2p: only {LIBP2P_HOME} knows it"


def test_daemon_never_imports_torch() -> None:
    code = (
        "import sys, swarmd.daemon, swarmd.net.libp2p.kademlia, swarmd_cli.member; "
        "bad = {'torch', 'transformers'} & set(sys.modules); assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_files_and_functions_stay_small() -> None:
    too_long = []
    for package in PACKAGES:
        for path in package.rglob("*.py"):
            n_lines = len(path.read_text().splitlines())
            if n_lines > 620:
                too_long.append(f"{path.name}: {n_lines} lines")
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    length = (node.end_lineno or 0) - node.lineno + 1
                    if length > 72:
                        too_long.append(f"{path.name}:{node.name}: {length} lines")
    assert not too_long, "\n".join(too_long)
