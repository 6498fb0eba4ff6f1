"""A loss curve for people: in the terminal, and as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from swarmd.printable import clean_line

# Nine heights of one letter: a row of a terminal shows eight levels, and none.
EIGHTHS = " ▁▂▃▄▅▆▇█"


def terminal_curve(
    losses: Sequence[float],
    width: int = 60,
    height: int = 8,
) -> list[str]:
    """Draw losses as columns, each the mean of its steps, with the largest and smallest at the side."""
    # A column's level counts eighths of a row: level 19 is two full rows, and three eighths of the third.
    n = min(width, len(losses))
    cuts = [len(losses) * i // n for i in range(n + 1)]
    means = [sum(losses[start:end]) / (end - start) for start, end in pairwise(cuts)]
    lowest = min(means)
    highest = max(means)

    def level_of(mean: float) -> int:
        if highest == lowest:
            return 4 * height
        return round((8 * height - 1) * (mean - lowest) / (highest - lowest)) + 1

    levels = [level_of(mean) for mean in means]
    lines = []
    for row in reversed(range(height)):
        label = " " * 8
        if row == height - 1:
            label = f"{highest:8.3f}"
        elif row == 0:
            label = f"{lowest:8.3f}"
        eighths = [max(0, min(8, level - 8 * row)) for level in levels]
        lines.append(f"{label} │" + "".join(EIGHTHS[n_eighths] for n_eighths in eighths))
    n_steps = str(len(losses))
    gap = " " * max(1, n - 6 - len(n_steps))
    return [*lines, f"{' ' * 8} └{'─' * n}", f"{' ' * 10}step 1{gap}{n_steps}"]


def save_png(losses: Sequence[float], path: Path, title: str) -> None:
    """Draw losses, and their running mean, with matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="#9bb7d4", linewidth=1, label="each step")
    window = max(1, len(losses) // 20)
    means = []
    for end in steps:
        last_losses = losses[max(0, end - window) : end]
        means.append(sum(last_losses) / len(last_losses))
    axes.plot(steps, means, color="#1f4e79", linewidth=1.8, label=f"mean of {window}")
    axes.set(xlabel="step", ylabel="loss")
    axes.set_title(clean_line(title), parse_math=False)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
