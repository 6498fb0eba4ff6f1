"""What reaches a terminal: text of others as it can be seen, and nothing of it that acts there."""

from __future__ import annotations

import ast
import io
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import swarmd_cli
from rich.console import Group
from swarmd_cli.terminal import (
    CleanStream,
    guard_streams,
    make_console,
    make_table,
    print_table,
    rewrite_line,
    show_answer,
    show_dim,
    show_waiting,
    styled,
    text_column,
)

HOSTILE = "a[/x][red]b[/red] :smile:\x1b[2J\x1b]0;mine\x07\u202ec"
SHOWN = "a[/x][red]b[/red] :smile:?[2J?]0;mine??c"
FOLDER = Path(swarmd_cli.__file__).parent
OURS = FOLDER / "terminal.py"


class Screen(io.StringIO):
    """A terminal, as far as programs ask."""

    def isatty(self) -> bool:
        return True


def open_screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    """Both streams of the process, guarded. Called in the test itself: pytest sets its own streams after fixtures."""
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "dumb")
    guard_streams()
    return screen


def test_what_is_printed_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = open_screen(monkeypatch)
    print(HOSTILE, "and\n\ttabs")
    print(HOSTILE, file=sys.stderr)
    sys.stdout.writelines([HOSTILE])
    assert screen.getvalue() == f"{SHOWN} and\n\ttabs\n{SHOWN}\n{SHOWN}"


def test_guarding_twice_is_guarding_once(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = open_screen(monkeypatch)
    guard_streams()
    assert isinstance(sys.stdout, CleanStream)
    assert sys.stdout.stream is screen


def test_a_traceback_is_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = open_screen(monkeypatch)
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
    assert f"ValueError: {SHOWN}\n" in screen.getvalue()


def test_a_table_shows_brackets_and_codes_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = open_screen(monkeypatch)
    print_table(f"T {HOSTILE}", [f"c {HOSTILE}"], [[HOSTILE]])
    print_table(f"N {HOSTILE}", ["c"], [])
    text = screen.getvalue()
    assert f"T {SHOWN}" in text
    assert f"c {SHOWN}" in text
    assert f"\n {SHOWN}" in text
    assert f"N {SHOWN}: none\n" in text
    assert "\x1b" not in text


def test_live_views_and_bars_are_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = open_screen(monkeypatch)
    from rich.live import Live
    from rich.progress import Progress

    console = make_console()
    with show_waiting(console, HOSTILE) as change_text:
        change_text(f"then {HOSTILE}")
    picture = Group(HOSTILE, styled(("b " + HOSTILE, "bold")), make_table(["x"], [[HOSTILE]]))
    with Live(picture, console=console, auto_refresh=False):
        pass
    bar = Progress(text_column("{task.description}"), console=console)
    bar.add_task(f"d {HOSTILE}")
    with bar:
        pass
    text = screen.getvalue()
    assert f"b {SHOWN}" in text
    assert "d a[/x][red]b[/red] :smile:?[2J?]0;min" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_styles_of_our_own_reach_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    make_console().print(styled((HOSTILE, "bold"), " plain"))
    assert screen.getvalue() == f"\x1b[1m{SHOWN}\x1b[0m plain\n"


def test_an_answer_is_exact_for_a_program_and_harmless_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = open_screen(monkeypatch)
    show_answer("a\r\n\x1b[2Jb\u200d")
    assert screen.getvalue() == "a\n?[2Jb\u200d"
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stdout", pipe)
    guard_streams()
    show_answer("a\r\n\x1b[2Jb", "\n")
    assert pipe.getvalue() == "a\r\n\x1b[2Jb\n"


def test_lines_that_are_rewritten_or_dim_are_clean(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = open_screen(monkeypatch)
    rewrite_line(f"{HOSTILE}\n")
    show_dim(HOSTILE)
    assert screen.getvalue() == f"\r\x1b[2K{SHOWN} \x1b[2m{SHOWN}\x1b[0m\n"


# --- nothing goes round the module -----------------------------------------------------------------------------------

MARKUP = re.compile(r"\x1b|\[/\w*\]|\[(?:bold|italic|dim|red|green|yellow)\b")
HARMLESS = ("rich.console.Group", "rich.live.Live", "rich.progress")  # they draw what they are given, by the console
WAYS_ROUND = ("from_markup", "TextColumn", "__stdout__", "__stderr__", "Spinner")


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def is_harmless(imported: str) -> bool:
    return imported.startswith(HARMLESS) and not imported.endswith(WAYS_ROUND)


def find_ways_round(path: Path) -> Iterator[str]:
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not is_for_types(node)]
    for node in ast.walk(tree):
        imported = []
        if isinstance(node, ast.ImportFrom):
            imported = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            imported = [alias.name for alias in node.names]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and MARKUP.search(node.value):
            yield f"{path.name}:{node.lineno} writes codes or markup, which styled and rewrite_line are for"
        elif isinstance(node, ast.Attribute) and node.attr in WAYS_ROUND:
            yield f"{path.name}:{node.lineno} goes round it by {node.attr}"
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("console.status"):
            yield f"{path.name}:{node.lineno} has rich read markup: show_waiting does not"
        for name in imported:
            if re.match(r"rich\b", name) and not is_harmless(name):
                yield f"{path.name}:{node.lineno} imports {name}: swarmd_cli.terminal has what draws"


def test_nothing_else_builds_a_console_or_writes_markup() -> None:
    modules = [path for path in sorted(FOLDER.rglob("*.py")) if path != OURS]
    assert not [way for path in modules for way in find_ways_round(path)]


@pytest.mark.parametrize(
    "line",
    [
        "from rich.console import Console",
        "import rich",
        "from rich.progress import TextColumn",
        "text = f'[bold]{name}[/bold] {name}'",
        "text = f'{name}[/]'",
        "print('\\x1b[2m' + name)",
        "with console.status(name): pass",
        "Text.from_markup(name)",
        "sys.__stdout__.write(name)",
    ],
)
def test_a_way_round_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "verb.py").write_text(line)
    assert list(find_ways_round(tmp_path / "verb.py"))
