"""The second half of docs/glossary.md: what follows from blame, and every public class with its first sentence.

A class is told by the first sentence of its docstring, or of its module's.

    python -m tools.glossary      writes it anew; tests/test_glossary.py holds the page to the source

A class name means one thing in the whole tree: a name that two modules define is an error.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from swarmd.plan.trust.blame import CONSEQUENCES

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "glossary.md"
PACKAGES = (ROOT / "swarmd", ROOT / "cli" / "swarmd_cli")
BEGIN = "<!-- made by python -m tools.glossary -->"


@dataclass(frozen=True, slots=True)
class Entry:
    """One public class: its name, its module as a path, and what it is."""

    name: str
    module: str
    meaning: str


@cache
def entries() -> list[Entry]:
    """All public classes of the program, by module and then in their order."""
    found = []
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            module = path.relative_to(package.parent).with_suffix("").as_posix().removeprefix("swarmd/")
            tree = ast.parse(path.read_text())
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    meaning = first_sentence(ast.get_docstring(node) or "")
                    if meaning.startswith("See the module"):
                        meaning = first_sentence(ast.get_docstring(tree) or "")
                    found.append(Entry(node.name, module, meaning))
    return found


def first_sentence(docstring: str) -> str:
    """The first sentence, as one line of a table."""
    text = " ".join(docstring.split("\n\n")[0].split())
    sentence = re.split(r"(?<=[.:])\s", text + " ")[0].rstrip(":")
    return sentence.replace("|", "\\|").replace("``", "`")


def doubled_names() -> dict[str, list[str]]:
    """Class names that stand for different things, with the modules that define them."""
    modules: dict[str, list[str]] = defaultdict(list)
    for entry in entries():
        modules[entry.name].append(entry.module)
    return {name: homes for name, homes in modules.items() if len(homes) > 1}


def blame_table() -> list[str]:
    """What follows from which blame: ``plan.trust.blame``."""
    lines = [
        "## Blame",
        'How much is held against a peer, from nothing to a ban. Its faults: docs/protocol.md, "Standing".',
        "",
        "| blame | for what | what follows |",
        "|---|---|---|",
    ]
    for blame, consequence in CONSEQUENCES.items():
        lines.append(f"| {blame} | {consequence.occasion} | {consequence.effect} |")
    return lines


def page() -> str:
    """The whole page: what people wrote, then the classes, wing by wing."""
    written = PAGE.read_text().partition(BEGIN)[0].rstrip()
    lines = [
        written,
        "",
        BEGIN,
        *blame_table(),
        "",
        "## Classes",
        "One name, one thing, in the words of its docstring.",
    ]
    wing = None
    for entry in entries():
        home = entry.module.rpartition("/")[0] or "top"
        if home != wing:
            wing = home
            lines += ["", f"### {wing}", "| class | module | meaning |", "|---|---|---|"]
        lines.append(f"| {entry.name} | {entry.module.rpartition('/')[2]} | {entry.meaning} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
