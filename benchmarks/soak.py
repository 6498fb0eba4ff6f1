"""Draw what tests/real/test_soak.py wrote: memory and handles of everything that never dies, over half an hour.

SOAK_CSV=soak.csv pytest -m prove tests/real/test_soak.py && python -m benchmarks.soak soak.csv docs/images/soak.png
"""

from __future__ import annotations

import csv
import sys
from collections import defaultdict
from pathlib import Path

from matplotlib.figure import Figure

COLUMNS = (("resident_bytes", 2**20, "memory (MiB)"), ("handles", 1, "open handles"))


def draw(table: Path, picture: Path) -> None:
    """One panel for memory, one for handles; each curve is named at its end."""
    curves: dict[str, list[dict[str, str]]] = defaultdict(list)
    with table.open(newline="") as file:
        for row in csv.DictReader(file):
            curves[row["process"]].append(row)
    figure = Figure(figsize=(12, 5), layout="constrained")
    panels = figure.subplots(1, len(COLUMNS))
    for panel, (column, unit, label) in zip(panels, COLUMNS, strict=True):
        for name, rows in curves.items():
            minutes = [float(row["seconds"]) / 60 for row in rows]
            panel.plot(minutes, [float(row[column]) / unit for row in rows], label=name, linewidth=1.2)
        panel.set(xlabel="minutes", ylabel=label, ylim=(0, None))
        panel.grid(alpha=0.3)
        panel.spines[["top", "right"]].set_visible(False)
    panels[1].legend(fontsize=8, frameon=False, loc="upper right")
    figure.savefig(picture, dpi=110)


if __name__ == "__main__":
    draw(Path(sys.argv[1]), Path(sys.argv[2]))
