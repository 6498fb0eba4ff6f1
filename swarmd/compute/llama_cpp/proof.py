"""Proves that a cut computes what the whole file does, in a process of its own: the library ends it on some files.

    python -m swarmd.compute.llama_cpp.proof WHOLE START END CUT

writes the cut, and puts the same tokens through the whole and through the cut, a prompt and some steps: every hidden
state that leaves the cut has to be the whole's, to the bit. One line on standard output says what came of it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np

from swarmd.compute.checkpoints.gguf_header import GgufHeader, read_header
from swarmd.compute.llama_cpp.blocks import LlamaBlocks, NewTokens
from swarmd.compute.llama_cpp.context import ContextSize, LlamaContext, TokenPlace
from swarmd.compute.llama_cpp.cut_file import describe_whole, read_from, write_cut
from swarmd.compute.llama_cpp.cut_rules import EMBEDDING, Cut, WholeFile, plan_cut, scale_embeddings
from swarmd.errors import ConfigError
from swarmd.values import Span

N_PROMPT = 20  # tokens: more than a small window
N_STEPS = 3  # tokens behind it, one by one
ROUNDING = 5e-4  # of a hidden state: the library rounds queries and keys to float16, and other numbers fall otherwise
LIMIT_S = 600.0  # for a whole file from a slow disk
PROVED = "proved"


def prove_cut(whole: Path, span: Span, target: Path) -> None:
    """Write the file for some blocks to ``target``, and prove it. Raises ConfigError, which says what is wrong."""
    command = [sys.executable, "-P", "-m", __spec__.name, str(whole), str(span.start), str(span.end), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    said = done.stdout.strip().splitlines()
    verdict = said[-1] if said else f"the library ended its process ({done.returncode})"
    if verdict != PROVED:
        target.unlink(missing_ok=True)
        raise ConfigError(f"blocks {span} of {whole.name} cannot be served: {verdict}")


def main(arguments: list[str]) -> None:
    """Prove one cut, and say what came of it."""
    span = Span(int(arguments[1]), int(arguments[2]))
    try:
        verdict, _ = prove_here(Path(arguments[0]), span, Path(arguments[3]))
    except ConfigError as error:
        verdict = str(error)
    print(verdict)


def prove_here(path: Path, span: Span, target: Path) -> tuple[str, Cut]:
    """Write a cut and prove it in this process, which the library may end; returns what came of it, and the cut.

    Raises ConfigError.
    """
    header = read_header(path)
    whole = describe_whole(header)
    cut = plan_cut(whole, span)
    with path.open("rb") as file:
        write_cut(header.architecture, cut, read_from(header, file), target)
    return _compare(header, whole, cut, target), cut


def _compare(header: GgufHeader, whole: WholeFile, cut: Cut, target: Path) -> str:
    """Put the same tokens through both; returns PROVED, or how far apart they are."""
    rng = np.random.default_rng(0)
    embedding = header.tensors[EMBEDDING]
    ids = rng.integers(0, embedding.shape[0], N_PROMPT + N_STEPS)
    inputs, expected = _run_whole(header, whole, cut.span, ids)
    given = []
    with LlamaBlocks(target, cut, ContextSize(256, 1)) as blocks:
        for part in _parts():
            (output,) = blocks.run([NewTokens(0, inputs[part], part.start)])
            given.append(output)
    error = np.linalg.norm(np.concatenate(given) - expected) / np.linalg.norm(expected)
    if error > (ROUNDING if cut.is_rounded else 0.0) or not np.isfinite(error):
        return f"they are {100 * error:.2g} % off those of the whole file"
    return PROVED


def _run_whole(header: GgufHeader, whole: WholeFile, span: Span, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What enters the first block of a span and what leaves its last, [n, d] each, as the whole file computes them."""
    wanted = [block for block in (span.start - 1, span.end - 1) if block >= 0]
    inputs = []
    outputs = []
    with LlamaContext(header.path, ContextSize(256, 1), wanted) as context:
        for part in _parts():
            places = [TokenPlace(0, position) for position in range(part.start, part.stop)]
            given = context.run_ids([int(token) for token in ids[part]], places)
            outputs.append(given[span.end - 1])
            if span.start:
                inputs.append(given[span.start - 1])
    entering = np.concatenate(inputs) if span.start else embed(header, ids) * np.float32(scale_embeddings(whole))
    return entering, np.concatenate(outputs)


def _parts() -> list[slice]:
    steps = [slice(position, position + 1) for position in range(N_PROMPT, N_PROMPT + N_STEPS)]
    return [slice(0, N_PROMPT), *steps]


def embed(header: GgufHeader, ids: np.ndarray) -> np.ndarray:
    """Read the rows of some tokens, [n, d] of float32, out of a whole file."""
    from gguf import GGMLQuantizationType, dequantize  # late: an extra, which GGUF alone needs

    tensor = header.tensors[EMBEDDING]
    row_bytes = tensor.n_bytes // tensor.shape[0]
    rows = []
    with header.path.open("rb") as file:
        for token in ids:
            file.seek(tensor.start + int(token) * row_bytes)
            packed = np.frombuffer(file.read(row_bytes), np.uint8)
            rows.append(dequantize(packed, GGMLQuantizationType(tensor.kind)).reshape(-1))
    return np.stack(rows).astype(np.float32)


if __name__ == "__main__":
    main(sys.argv[1:])
