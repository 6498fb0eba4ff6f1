"""Proves for each family that blocks cut out of a GGUF file compute as in the whole; prints the table of models.md.

    python -m tools.gguf_cuts [FAMILY ...]

Small models of random weights are made, and cut at numbers that are multiples of nothing. Each family has a process
of its own, as the library may end it. Fails where a family that is claimed (``cut_rules.FAMILIES``) is not proved.
"""

from __future__ import annotations

import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path

from swarmd.compute.llama_cpp.cut_rules import FAMILIES, Cut
from swarmd.compute.llama_cpp.gguf_header import read_header
from swarmd.compute.llama_cpp.proof import PROVED, prove_here
from swarmd.values import Span
from tests.compute.llama_cpp.random_gguf import make_random_gguf


def spans_of(n_blocks: int) -> list[Span]:
    """The cuts that are tried: the first blocks, the last, one alone, and the middle."""
    return [
        Span(0, 2),
        Span(2, 3),
        Span(1, n_blocks - 1),
        Span(3, n_blocks),
        Span(n_blocks - 1, n_blocks),
    ]


def prove_family(family: str) -> tuple[list[str], list[Cut]]:
    """Make a small model and cut it; returns what was said of each cut, and the cuts."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "whole.gguf"
        make_random_gguf(family, whole)
        header = read_header(whole)
        n_blocks = int(header.arch_settings()["block_count"])
        proofs = prove_here(header, spans_of(n_blocks), n_blocks)
    return [verdict for verdict, _ in proofs], [cut for _, cut in proofs]


def describe(family: str, verdicts: list[str], cuts: list[Cut]) -> str:
    """One row of the table."""
    wrong = [f"{cut.span}: {verdict}" for verdict, cut in zip(verdicts, cuts, strict=True) if verdict != PROVED]
    equality = "to float16's rounding" if any(cut.is_rounded for cut in cuts) else "to the bit"
    n_padding = max(len(cut.padded) - len(cut.span) for cut in cuts)
    padding = f"up to {n_padding}" if n_padding else "none"
    return f"| {family} | {'; '.join(wrong) or equality} | {padding} |"


def main() -> None:
    """Prove the families that are named, or all."""
    failed = False
    print("| architecture | blocks cut out compute as in the whole | blocks of zeros beside them |\n|---|---|---|")
    for family in sys.argv[1:] or sorted(FAMILIES):
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            try:
                verdicts, cuts = pool.submit(prove_family, family).result()
            except BrokenProcessPool:
                print(f"| {family} | the library ended its process | |")
                failed = True
                continue
        print(describe(family, verdicts, cuts), flush=True)
        failed = failed or any(verdict != PROVED for verdict in verdicts)
    sys.exit(failed)


if __name__ == "__main__":
    main()
