"""What the documents say is there: every setting, flag, exit code and refusal that exists is written down."""

from __future__ import annotations

import ast
import dataclasses
import io
import json
import re
import tokenize
from pathlib import Path
from typing import Any

import pytest
import typer
from swarmd_cli.main import INTERRUPTED, app

from swarmd import errors
from swarmd.config import TABLES, Config, PolicyConfig
from tools import performance
from tools.reading import reading_minutes

ROOT = Path(__file__).parent.parent
OPERATING = (ROOT / "docs" / "operating.md").read_text()
README = (ROOT / "README.md").read_text()


def test_every_setting_is_documented() -> None:
    for field in dataclasses.fields(Config):
        if field.name in TABLES:
            assert ("[[serve]]" if field.name == "hosted" else f"[{field.name}]") in OPERATING
            continue
        assert f"| {field.name} | SWARMD_{field.name.upper()} |" in OPERATING, field.name
    for field in dataclasses.fields(PolicyConfig):
        assert f"\n{field.name} = " in OPERATING, field.name


def flags_of(command: Any) -> set[str]:
    flags = {option for parameter in command.params for option in parameter.opts if option.startswith("--")}
    return flags.union(*(flags_of(sub) for sub in getattr(command, "commands", {}).values()))


def test_every_flag_is_documented() -> None:
    flags = flags_of(typer.main.get_command(app)) - {"--help"}
    assert {"--json", "--blocks", "--max-tokens"} <= flags
    assert not [flag for flag in sorted(flags) if flag not in OPERATING]


def test_every_exit_code_is_documented() -> None:
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.SwarmError)]
    line = next(text for text in OPERATING.splitlines() if text.startswith("0 ok"))
    assert {str(k.exit_code) for k in kinds} <= set(re.findall(r"\d+", line))


def test_what_is_documented_exists() -> None:
    settings = {field.name for field in dataclasses.fields(Config)}
    rows = re.findall(r"^\| (\w+) \| (SWARMD_\w+) \|", OPERATING, re.MULTILINE)
    assert rows
    assert not [name for name, variable in rows if name not in settings or variable != f"SWARMD_{name.upper()}"]
    flags = flags_of(typer.main.get_command(app))
    commands = OPERATING.split("\n## Commands\n")[1].split("\n## ")[0]
    assert not set(re.findall(r"--[a-z][a-z-]*", commands)) - flags
    in_table = set(re.findall(r"^\| \w+ \| SWARMD_\w+ \| (--[a-z-]+)", OPERATING, re.MULTILINE))
    assert "--listen" in in_table
    assert not in_table - flags
    kinds = [k for k in vars(errors).values() if isinstance(k, type) and issubclass(k, errors.SwarmError)]
    line = next(text for text in OPERATING.splitlines() if text.startswith("0 ok"))
    assert set(re.findall(r"\d+", line)) == {str(k.exit_code) for k in kinds} | {"0", str(INTERRUPTED)}


PATH = re.compile(r"(?<![\w/.:<>{}*-])((?:\.\./)*[\w-]+(?:/[\w.-]+)+\.(?:py|md|sh|json|toml|yaml|html|js))\b")
PLACES = (ROOT, ROOT / "swarmd", ROOT / "cli" / "swarmd_cli")  # that a path may begin in
RECORDS = ROOT / "docs" / "decisions"  # name what there was when they were taken
TREES = ("swarmd", "cli", "tests", "tools", "benchmarks", "examples", "docs", "findings")


def prose_of(path: Path) -> str:
    """What a file says to its readers: a page's text, a module's comments and docstrings."""
    text = path.read_text()
    if path.suffix == ".md":
        return text
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    tree = ast.parse(text)
    parts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    statements = [node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)]
    parts += [str(value.value) for value in statements if isinstance(value, ast.Constant)]
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return "\n".join([*parts, *(token.string for token in tokens if token.type == tokenize.COMMENT)])


def test_paths_that_pages_docstrings_and_comments_name_exist() -> None:
    paths = [path for tree in TREES for path in (ROOT / tree).rglob("*") if path.suffix in (".py", ".md")]
    prose = {path: prose_of(path) for path in (*ROOT.glob("*.md"), *paths) if RECORDS not in path.parents}
    named = {path: set(PATH.findall(text)) for path, text in prose.items()}
    assert sum(map(len, named.values())) > 300, "they are found"
    missing = [
        f"{path.relative_to(ROOT)} names {name}"
        for path, names in named.items()
        for name in sorted(names)
        if name.startswith("..") or not any((place / name).exists() for place in (*PLACES, path.parent))
    ]
    assert not missing
    assert not [path for path, text in prose.items() if path != Path(__file__) and "shared facts" in text]


def test_readme_begins_with_the_two_commands() -> None:
    first_block = README.split("```")[1]
    assert "make demo" in first_block
    assert "make test" in first_block
    assert "can read the activations" in README, "privacy is said plainly"


def test_nothing_is_installed_by_a_name_that_no_index_has() -> None:
    """The project is in no package index: extras come from the repository's folder."""
    pages = {path.name: path.read_text() for path in (*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"))}
    assert not [name for name, text in pages.items() if re.search(r"pip install[^`]*\bswarmd\[", text)]
    assert "<this repository>" not in README, "commands are there to be typed"


def test_the_page_of_figures_is_that_of_the_measurements() -> None:
    assert performance.PAGE.read_text() == performance.page(json.loads(performance.DATA.read_text())), (
        "python -m tools.performance writes it anew"
    )


def test_figures_are_read_from_what_a_command_prints() -> None:
    row = {"pattern": r"a: ([\d.]+)[\s\S]*b: ([\d.]+)", "form": "{} s, at most {}"}
    assert performance.read_value(row, "a: 1.5 s\nb: 2.0 s") == "1.5 s, at most 2.0"
    assert performance.read_value({"pattern": row["pattern"]}, "a: 1.5\nb: 2.0") == "1.5, 2.0"
    assert performance.read_value(row, "a: 1.5") is None


def test_each_row_of_figures_has_a_pattern_for_its_form_or_says_that_it_is_by_hand() -> None:
    parts = json.loads(performance.DATA.read_text())["sections"]
    rows = [row for part in parts if "columns" not in part for row in part["rows"]]
    for row in rows:
        if "pattern" in row:
            n_figures = re.compile(row["pattern"]).groups
            assert row.get("form", "{}" * n_figures).count("{}") == n_figures >= 1, row["what"]
        else:
            assert f"`{row['command']}`, by hand |" in performance.PAGE.read_text(), row["what"]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").rglob("*.md")), ids=lambda page: page.name)
def test_modules_that_a_page_names_exist(page: Path) -> None:
    rooms = "client|compute|gateway|net|node|plan|protocol|train|weights|wire"
    named = set(re.findall(rf"`((?:{rooms})/[\w/]+\.py)`", page.read_text()))
    assert not [module for module in sorted(named) if not (ROOT / "swarmd" / module).exists()]


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda page: page.stem)
def test_each_page_says_how_long_it_takes_to_read(page: Path) -> None:
    text = page.read_text().split("<!-- made by python -m tools.glossary")[0]  # classes are looked up, not read
    said = re.search(r"(\d+) minutes? to read", text)
    assert said, "say so in its first sentence"
    minutes = reading_minutes(text)
    assert abs(int(said[1]) - minutes) <= max(1, minutes // 5), f"{minutes} by now"


def test_sections_that_are_named_are_there() -> None:
    headings = {}
    for page in (ROOT / "docs").rglob("*.md"):
        titles = re.findall(r"^(?:#+ |\*\*)(.*?)\.?(?:\*\*.*)?$", page.read_text(), re.MULTILINE)
        headings[page.relative_to(ROOT).as_posix()] = titles
    missing = []
    sources = [path for folder in ("swarmd", "cli", "tests", "docs") for path in (ROOT / folder).rglob("*.*")]
    for path in (ROOT / "README.md", *sources):
        if path.suffix not in (".py", ".md"):
            continue
        text = re.sub(r"\s*\n\s*#?\s*", " ", path.read_text())
        named = re.findall(r'(docs/[\w/-]+\.md), "([^"]+)"', text)
        missing += [
            f"{path.relative_to(ROOT)}: {page}, {title}" for page, title in named if title not in headings[page]
        ]
    assert not missing
