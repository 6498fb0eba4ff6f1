"""The one way to a terminal: whatever is printed, nothing in it acts but what is written here.

Text of swarms, models, members, files and errors comes from others. Three doors lead out, and each cleans it:

    print, typer, tracebacks, libraries --> sys.stdout, sys.stderr   guard_streams: ? for what cannot be seen
    tables, live views                  --> make_console             the same, and no markup in strings
    what a model writes                 --> show_answer              exact, unless a terminal reads it

So a verb may print what it likes. Styles are given by ``styled``, never by markup in a string. Nothing else may import
rich's console (tests/cli/test_terminal.py).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

from swarmd.printable import clean_answer, clean_line, clean_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TextColumn
    from rich.segment import Segment
    from rich.table import Table
    from rich.text import Text

BEGIN_LINE = "\r\x1b[2K"  # back to the first column, and what was written there is gone
DIM = "\x1b[2m"
END_STYLE = "\x1b[0m"


class CleanStream:
    """A stream of text that writes ? for what cannot be seen. All else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        """Write text, cleaned."""
        self.stream.write(clean_text(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write several, each cleaned."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def guard_streams() -> None:
    """Have everything that this process prints be clean from now on."""
    sys.stdout = cast(TextIO, CleanStream(_find_raw(sys.stdout)))
    sys.stderr = cast(TextIO, CleanStream(_find_raw(sys.stderr)))


def _find_raw(stream: TextIO) -> TextIO:
    return stream.stream if isinstance(stream, CleanStream) else stream


@contextmanager
def drawing_by_library() -> Iterator[None]:
    """Let a library draw its own progress on standard error, with no text of others in it."""
    guarded = sys.stderr
    sys.stderr = _find_raw(guarded)
    try:
        yield
    finally:
        sys.stderr = guarded


def show_answer(text: str, end: str = "") -> None:
    """Print what a model wrote, at once: for a program as it is, for a terminal without what acts on it."""
    stream = _find_raw(sys.stdout)
    stream.write((clean_answer(text) if stream.isatty() else text) + end)
    stream.flush()


def show_dim(text: str) -> None:
    """Print on standard error, dim where both streams are terminals."""
    stream = _find_raw(sys.stderr)
    is_drawn = sys.stdout.isatty() and stream.isatty()
    shown = clean_text(text)
    stream.write(f"{DIM}{shown}{END_STYLE}\n" if is_drawn else f"{shown}\n")
    stream.flush()


def rewrite_line(text: str) -> None:
    """Write one line in the place of the last one, on a terminal at standard error."""
    stream = _find_raw(sys.stderr)
    stream.write(BEGIN_LINE + clean_line(text))
    stream.flush()


def make_console(to_errors: bool = False, highlight: bool = True) -> Console:
    """Make rich's console, in which no string is markup and no code is an emoji."""
    from rich import console

    # Strings are cleaned before they are measured, so that columns stay straight. What widgets draw of their own is
    # cleaned when it is drawn; segments with ``control`` are rich's moves of the cursor.
    class PlainConsole(console.Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(clean_text(text), **{**options, "markup": False, "emoji": False})

        def render(self, renderable: Any, options: Any = None) -> Iterable[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else segment._replace(text=clean_text(segment.text))

    stream = _find_raw(sys.stderr if to_errors else sys.stdout)
    return PlainConsole(file=stream, markup=False, emoji=False, highlight=highlight)


def styled(*parts: str | tuple[str, str]) -> Text:
    """Put text together of strings, and of strings with rich's name of a style."""
    from rich.text import Text

    # Cleaned here, too: Text drops some codes that are to be seen as "?".
    cleaned = [clean_text(part) if isinstance(part, str) else (clean_text(part[0]), part[1]) for part in parts]
    return Text.assemble(*cleaned)


@contextmanager
def show_waiting(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Turn a spinner beside a text; yields what changes the text."""
    with console.status(styled(text)) as status:
        yield lambda stage: status.update(styled(stage))


def text_column(template: str) -> TextColumn:
    """Make a column of a progress bar, in which no string is markup."""
    from rich.progress import TextColumn

    return TextColumn(template, markup=False)


def print_table(
    title: str,
    columns: list[str],
    rows: list[list[str]],
) -> None:
    """Print a table for people; says so when there is nothing in it."""
    console = make_console()
    if not rows:
        console.print(f"{title}: none", highlight=False)
        return
    console.print(make_table(columns, rows, title))


def make_table(
    columns: list[str],
    rows: list[list[str]],
    title: str | None = None,
) -> Table:
    """Make a table that looks like all of them."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    drawing = Table(title=title, box=SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        drawing.add_column(column, overflow="fold")
    for row in rows:
        drawing.add_row(*row)
    return drawing
