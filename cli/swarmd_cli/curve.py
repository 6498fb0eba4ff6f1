"""A loss curve for people: in the terminal, and as a PNG."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

EIGHTHS = " ▁▂▃▄▅▆▇█"


def terminal_curve(losses: Sequence[float], width: int = 60, height: int = 8) -> list[str]:
    """Draw losses as columns, each the mean of its steps, with the largest and smallest at the side."""
    n = min(width, len(losses))
    cuts = [len(losses) * i // n for i in range(n + 1)]
    means = [sum(losses[a:z]) / (z - a) for a, z in pairwise(cuts)]
    lowest, highest = min(means), max(means)
    levels = [
        round((8 * height - 1) * (mean - lowest) / (highest - lowest)) + 1 if highest > lowest else 4 * height
        for mean in means
    ]
    lines = []
    for row in reversed(range(height)):
        label = f"{highest:8.3f}" if row == height - 1 else f"{lowest:8.3f}" if row == 0 else " " * 8
        lines.append(f"{label} │" + "".join(EIGHTHS[max(0, min(8, level - 8 * row))] for level in levels))
    steps = f"step 1{' ' * max(1, n - 6 - len(str(len(losses))))}{len(losses)}"
    return [*lines, f"{' ' * 8} └{'─' * n}", f"{' ' * 10}{steps}"]


def save_png(losses: Sequence[float], path: Path, title: str) -> None:
    """Draw losses, and their running mean, with matplotlib."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color="#9bb7d4", linewidth=1, label="each step")
    window = max(1, len(losses) // 20)
    means = [sum(losses[max(0, i - window + 1) : i + 1]) / min(i + 1, window) for i in range(len(losses))]
    axes.plot(steps, means, color="#1f4e79", linewidth=1.8, label=f"mean of {window}")
    axes.set(xlabel="step", ylabel="loss", title=title)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
