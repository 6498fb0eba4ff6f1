"""Proves that blocks and head compute what the whole file does, in a process of its own: the library may end it.

    python -m swarmd.compute.llama_cpp.proof FILE.gguf

puts the same tokens through the whole file and through the file of each block, a prompt and some steps: every hidden
state that leaves a block, and every logit, has to be the whole's, to the bit. One line on standard output says what
came of it. Of a file that does not fit into memory only its first blocks are compared.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from swarmd.compute.llama_cpp.blocks import LlamaBlocks, NewTokens
from swarmd.compute.llama_cpp.context import ContextSize, LlamaContext, LlamaModel, TokenPlace
from swarmd.compute.llama_cpp.cut_file import ReadTensor, describe_whole, read_from, temporary_cut
from swarmd.compute.llama_cpp.cut_rules import (
    EMBEDDING,
    UINT32,
    Cut,
    CutTensor,
    GgufSetting,
    WholeFile,
    block_of,
    plan_cut,
)
from swarmd.compute.llama_cpp.ends import LlamaHead, PackedEmbedding
from swarmd.compute.llama_cpp.gguf_header import GgufHeader, read_all_parts
from swarmd.compute.llama_cpp.packed import describe_packed
from swarmd.errors import ConfigError
from swarmd.resources import measure_memory
from swarmd.values import Span

N_PROMPT = 20  # tokens: more than a small window
N_STEPS = 3  # tokens behind it, one by one
SIZE = ContextSize(256, 1, n_new=32)
ROUNDING = 5e-4  # of a hidden state: the library rounds queries and keys to float16, and other numbers fall otherwise
CAP_ROUNDING = 1e-6  # of logits: a cap's hyperbolic tangent is computed by numpy here
LIMIT_S = 1_800.0  # for a whole file from a slow disk, some times
SHARE_OF_FREE = 0.8  # of the memory, up to which a whole file is mapped
N_COMPARED = 2  # blocks of a file that is larger
PROVED = "proved"


@dataclass(frozen=True, slots=True)
class WholePass:
    """What a whole file computed: what left some layers, by their number, [n, d]; and logits [n, vocabulary]."""

    embedded: np.ndarray
    outputs: dict[int, np.ndarray]
    logits: np.ndarray

    def entering(self, span: Span) -> np.ndarray:
        """What the first layer of a span is given."""
        return self.outputs[span.start - 1] if span.start else self.embedded


def prove_file(path: Path) -> None:
    """Prove all blocks and the head of a file. Raises ConfigError, which says what is wrong."""
    command = [sys.executable, "-P", "-m", __spec__.name, str(path)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"{path} was not proved within {LIMIT_S:.0f} s: copy it to a faster disk") from None
    said = done.stdout.strip().splitlines()
    verdict = said[-1] if said else f"llama.cpp's library ended its process ({done.returncode})"
    if verdict != PROVED:
        raise ConfigError(f"{path} cannot be served: {verdict}")


def main(arguments: list[str]) -> None:
    """Prove one file, and say what came of it."""
    try:
        header = read_all_parts(Path(arguments[0]))
        parts = describe_packed(header).parts
        n_bytes = sum(tensor.n_bytes for tensor in header.tensors.values())
        fits = n_bytes < SHARE_OF_FREE * measure_memory().free_bytes
        n_proved = len(parts) if fits else min(len(parts), N_COMPARED)
        proofs = prove_here(header, parts[:n_proved], parts[n_proved - 1].end)
        print(next((verdict for verdict, _ in proofs if verdict != PROVED), PROVED))
    except ConfigError as error:
        print(error)


def prove_here(header: GgufHeader, spans: Sequence[Span], n_layers: int) -> list[tuple[str, Cut]]:
    """Prove cuts of a file's first layers, and the head, in this process, which the library may end.

    Returns what came of each cut, the head's verdict with the first. Raises ConfigError.
    """
    whole = describe_whole(header)
    read = read_from(header)
    cuts = [plan_cut(whole, span) for span in spans]
    embedding = PackedEmbedding(whole, read)
    ids = [int(token) for token in np.random.default_rng(0).integers(0, embedding.n_words, N_PROMPT + N_STEPS)]
    expected = _run_whole(header, whole, n_layers, ids, embedding)
    verdicts = [_compare_cut(whole, cut, read, expected) for cut in cuts]
    verdicts[0] = _compare_head(whole, read, expected, n_layers, verdicts[0])
    return list(zip(verdicts, cuts, strict=True))


def _run_whole(
    header: GgufHeader, whole: WholeFile, n_layers: int, ids: Sequence[int], embedding: PackedEmbedding
) -> WholePass:
    """Put tokens through the first layers of a file, and through its head behind them."""
    layers = list(range(n_layers))
    with ExitStack() as stack:
        path = header.path
        if n_layers < whole.n_blocks:
            cut = _with_ends(whole, plan_cut(whole, Span(0, n_layers)))
            path = stack.enter_context(temporary_cut(whole.architecture, cut, read_from(header)))
        model = stack.enter_context(closing(LlamaModel(path, as_it_lies=True)))
        context = stack.enter_context(closing(LlamaContext(model, SIZE, layers)))
        parts = []
        logits = []
        for part in _parts():
            places = [TokenPlace(0, position) for position in range(part.start, part.stop)]
            parts.append(context.run_ids(ids[part], places))
            logits.append(context.read_logits(len(places)))
    outputs = {layer: np.concatenate([part[layer] for part in parts]) for layer in layers}
    return WholePass(embedding.rows(ids), outputs, np.concatenate(logits))


def _with_ends(whole: WholeFile, cut: Cut) -> Cut:
    """A cut of the first layers with the whole's embedding and head."""
    ends = {tensor.name: tensor for tensor in whole.tensors if block_of(tensor.name) is None}
    tensors = [
        CutTensor(tensor.name, ends[tensor.name].shape, ends[tensor.name].kind, tensor.name)
        if tensor.name in ends
        else tensor
        for tensor in cut.tensors
    ]
    n_words = GgufSetting((UINT32,), ends[EMBEDDING].shape[0])
    return replace(cut, tensors=tuple(tensors), settings={**cut.settings, "vocab_size": n_words})


def _compare_cut(whole: WholeFile, cut: Cut, read: ReadTensor, expected: WholePass) -> str:
    """Put what entered a span of the whole through its cut; returns PROVED, or how far apart the outputs are."""
    entering = expected.entering(cut.span)
    given = []
    with (
        temporary_cut(whole.architecture, cut, read) as path,
        closing(LlamaModel(path, as_it_lies=True)) as model,
        closing(LlamaBlocks(model, cut, SIZE)) as blocks,
    ):
        for part in _parts():
            (output,) = blocks.run([NewTokens(0, entering[part], part.start)])
            given.append(output)
    error = _relative_error(np.concatenate(given), expected.outputs[cut.span.end - 1])
    if error > (ROUNDING if cut.is_rounded else 0.0):
        return f"layers {cut.span} are {100 * error:.2g} % off those of the whole file"
    return PROVED


def _compare_head(whole: WholeFile, read: ReadTensor, expected: WholePass, n_layers: int, verdict: str) -> str:
    """The verdict on the first cut; if that is proved, whether the head's logits are the whole's."""
    if verdict != PROVED:
        return verdict
    with closing(LlamaHead(whole, read, SIZE.n_threads, as_it_lies=True)) as head:
        error = _relative_error(head.logits(expected.outputs[n_layers - 1]), expected.logits)
    return PROVED if error <= CAP_ROUNDING else f"its head's logits are {100 * error:.2g} % off those of the whole file"


def _relative_error(given: np.ndarray, expected: np.ndarray) -> float:
    """The norm of the difference by that of what was expected; infinite for what are no numbers."""
    error = float(np.linalg.norm(given - expected) / np.linalg.norm(expected))
    return error if np.isfinite(error) else np.inf


def _parts() -> list[slice]:
    steps = [slice(position, position + 1) for position in range(N_PROMPT, N_PROMPT + N_STEPS)]
    return [slice(0, N_PROMPT), *steps]


if __name__ == "__main__":
    main(sys.argv[1:])
