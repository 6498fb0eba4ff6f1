"""docs/limits.md is every bound of the program, from its own source: value, unit, reason, and who tests it.

python -m tests.test_limits writes it anew.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "limits.md"
BOUND = re.compile(
    r"^(MAX|MOST|LEAST|MIN|LONGEST|KEPT|N|FIRST)_|_(TIMEOUT|BUDGET|LIMIT|SHARE|INTERVAL|LIFETIME)|^MUCH_|_S$"
)
UNITS = {"_S": "s", "_BYTES": "B", "_TOKENS": "tokens", "_MS": "ms", "_MIB": "MiB", "_GIB": "GiB", "_HZ": "/s"}
HEAD = """# Limits

Every bound that the program has, made from its source by `python -m tests.test_limits`: what it is, why, and which test
files name it (a bound that none names is met by tests through what it stops). What can be set is in docs/operating.md.
"""


@dataclass(frozen=True)
class Limit:
    """One named number of a module."""

    module: str
    name: str
    value: str
    reason: str


def limits_of(path: Path) -> list[Limit]:
    source = path.read_text()
    lines = source.splitlines()
    limits = []
    for node in ast.parse(source).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if not (isinstance(target, ast.Name) and target.id.isupper() and BOUND.search(target.id)):
            continue
        value = getattr(node, "value", None)
        line = lines[node.lineno - 1]
        is_number = value is not None and any(
            isinstance(p, ast.Constant) and type(p.value) in (int, float) for p in ast.walk(value)
        )
        if is_number and "#" in line:
            written, _, reason = line.partition("#")
            module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            limits.append(Limit(module, target.id, written.partition("=")[2].strip(), reason.strip()))
    return limits


def unit_of(name: str) -> str:
    return next((unit for ending, unit in UNITS.items() if name.endswith(ending) or f"{ending}_" in name), "")


def page() -> str:
    """The whole of docs/limits.md."""
    tests = {
        p: set(re.findall(r"[A-Z][A-Z_0-9]{3,}", p.read_text())) for p in sorted((ROOT / "tests").rglob("test_*.py"))
    }
    lines = [HEAD]
    for package in sorted(p for p in (ROOT / "swarmd").iterdir() if p.is_dir()):
        limits = [limit for path in sorted(package.rglob("*.py")) for limit in limits_of(path)]
        if not limits:
            continue
        lines += [f"## {package.name}", "| where | what | value | why | named by |", "|---|---|---|---|---|"]
        for limit in limits:
            named = ", ".join(
                p.relative_to(ROOT / "tests").as_posix() for p, words in tests.items() if limit.name in words
            )
            value = f"{limit.value} {unit_of(limit.name)}".strip()
            where = limit.module.removeprefix("swarmd.").removeprefix(f"{package.name}.")
            lines.append(f"| {where} | {limit.name} | {value} | {limit.reason} | {named} |")
        lines.append("")
    return "\n".join(lines).rstrip() + "\n"


def test_the_page_of_limits_is_that_of_the_source() -> None:
    assert PAGE.read_text() == page(), "python -m tests.test_limits writes it anew"


if __name__ == "__main__":
    PAGE.write_text(page())
