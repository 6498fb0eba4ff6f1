"""docs/performance.md from docs/performance.json, and new figures for it.

    python -m tools.performance            write the page
    python -m tools.performance --run      run the commands whose figure can be read from what they print, then write

A row is what was measured, its value, the command that measures it, on which machine, and what others reach. A table
with columns of its own names one command for all of its rows. ``pattern`` finds the figures in a command's output, and
``form`` says how they are written; a row without a pattern is filled in by hand, and says so in the page.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from tools.reading import reading_minutes

ROOT = Path(__file__).parent.parent
DATA, PAGE = ROOT / "docs" / "performance.json", ROOT / "docs" / "performance.md"
HEAD = """# Performance

{minutes} minutes to read. Each row names its command. `make bench` measures a row anew and writes it here, which takes
hours for all of them; rows *by hand* were copied from what their command prints: it needs another machine or program,
or prints more than figures. This page is made from docs/performance.json. Why things are as they are, with every
number that was weighed, is in docs/decisions/.

Figures are ratios within one run, or medians of several. The machines are virtual and shared: absolute numbers drift by
a third, ratios hold to about 0.05. *Xeon*: Intel, AVX-512. *Xeon, AMX*: since 2023, a matrix unit. *EPYC, AVX2*: AMD
without AVX-512, as most home computers. *EPYC, Zen 5*: AMD with AVX-512. Python 3.11, torch 2.13 for CPUs, two cores,
one thread a process.
"""


def table(columns: list[str], rows: list[list[str]]) -> list[str]:
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return lines + ["| " + " | ".join(row) + " |" for row in rows]


def section(data: dict[str, Any]) -> list[str]:
    """One heading with its table."""
    lines = [f"## {data['title']}"]
    if data.get("text"):
        lines += [data["text"]]
    if "command" in data:
        lines += [f"`{data['command']}`, by hand"]
    lines += [""]
    if "columns" in data:
        lines += table(data["columns"], data["rows"])
    else:
        rows = []
        for row in data["rows"]:
            command = f"`{row['command']}`" + ("" if row.get("pattern") else ", by hand")
            rows.append([row["what"], row["value"], row.get("beside", ""), row.get("machine", ""), command])
        lines += table(["what", "measured", "others", "machine", "command"], rows)
    if data.get("after"):
        lines += ["", data["after"]]
    return [*lines, ""]


def page(data: dict[str, Any]) -> str:
    """The whole of docs/performance.md."""
    body = "\n".join(line for part in data["sections"] for line in section(part)).rstrip() + "\n"
    return HEAD.format(minutes=reading_minutes(HEAD + body)) + "\n" + body


def read_value(row: dict[str, Any], output: str) -> str | None:
    """A row's figures as its command printed them; None where they are not there."""
    found = re.search(row["pattern"], output)
    if found is None:
        return None
    figures = found.groups()
    form: str = row.get("form", ", ".join(["{}"] * len(figures)))
    return form.format(*figures)


def measure(data: dict[str, Any]) -> None:
    """Run each command that has a pattern, and put its figure, this machine and today into its rows."""
    machine = f"{platform.processor() or platform.machine()} ({datetime.date.today()})"
    rows = [row for part in data["sections"] if "columns" not in part for row in part["rows"] if row.get("pattern")]
    outputs: dict[str, str] = {}
    for row in rows:
        command = row["command"]
        if command not in outputs:
            print(f"$ {command}", flush=True)
            arguments = shlex.split(command.replace("python", sys.executable, 1))
            done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
            outputs[command] = done.stdout
            print(done.stdout + done.stderr, flush=True)
        value = read_value(row, outputs[command])
        if value is None:
            print(f"{row['what']}: nothing in its output fits {row['pattern']!r}; the figure stays")
            continue
        row["value"] = value
        row["machine"] = machine


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", action="store_true", help="run the commands whose figure can be read")
    options = parser.parse_args()
    data = json.loads(DATA.read_text())
    if options.run:
        measure(data)
        DATA.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(page(data))


if __name__ == "__main__":
    main()
