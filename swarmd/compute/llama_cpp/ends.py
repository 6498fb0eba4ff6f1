"""What is around a model's blocks, by llama.cpp's library: tokens to hidden states, and these to logits.

Rows of the embedding are unpacked here. Norm and head are computed by the library, which rounds hidden states as it
does in a whole file: in other numbers the largest logit is now and then another token's. It computes no file without
blocks. So they lie behind one small block of zeros, which gives what it is given, in a file of a plain family.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from swarmd.compute.llama_cpp.context import ContextSize, LlamaContext, LlamaModel, TokenPlace
from swarmd.compute.llama_cpp.cut_file import ReadTensor, count_bytes, temporary_cut
from swarmd.compute.llama_cpp.cut_rules import (
    EMBEDDING,
    FLOAT32,
    OUTPUT,
    UINT32,
    Cut,
    CutTensor,
    GgufSetting,
    TensorSource,
    WholeFile,
    scale_embeddings,
)
from swarmd.compute.llama_cpp.gguf_header import F32
from swarmd.errors import ConfigError
from swarmd.values import Span

HEAD_WIDTH = 32  # of the block of zeros
NORMS = ("output_norm.weight", "token_embd_norm.weight")  # the second is LFM2's name for the first
NORM_BIAS = "output_norm.bias"
OUTPUT_BIAS = "output.bias"
BY_MEAN = ("starcoder2", "command-r", "stablelm", "cohere2")
"""Families whose norm takes the mean away; the others' divides by the root of the mean square."""
DIVIDES = ("granite", "granitemoe", "granitehybrid", "minicpm")
"""Families that divide logits by their scale; others multiply."""
MINICPM_WIDTH = 256  # of hidden states, for which its logits are not divided
Q4_0 = 2  # ggml's number for the kind: zeros in few bytes
MOST_ROWS = 64  # tokens in one pass through the head: its logits are some 60 MB with a vocabulary of 256,000


@dataclass(frozen=True, slots=True)
class EndsFile:
    """The file with norm and head, of a plain family, and what its logits go through: factor, then softcap (0: none).

    ``bias``: the name of a tensor that is added first; "": there is none.
    """

    architecture: str
    cut: Cut
    bias: str
    factor: float
    softcap: float

    def list_sources(self) -> list[str]:
        """The names of all tensors of the whole that lie around its blocks and are read."""
        return [EMBEDDING, *self.cut.sources, *([self.bias] if self.bias else [])]


def plan_ends(whole: WholeFile) -> EndsFile:
    """Say what the file for norm and head holds. Raises ConfigError where the model has no such."""
    tensors = {tensor.name: tensor for tensor in whole.tensors}
    norm = next((tensors[name] for name in NORMS if name in tensors), None)
    embedding = tensors.get(EMBEDDING)
    if norm is None or embedding is None:
        raise ConfigError(f"there is no {NORMS[0]}, or no {EMBEDDING}: whole models have both")
    head = tensors.get(OUTPUT, embedding)
    for tensor in (embedding, head):
        if tensor.shape[1:] != (whole.width,):
            raise ConfigError(f"{tensor.name} is of shape {tensor.shape}, and hidden states have {whole.width} numbers")
    is_by_mean = whole.architecture in BY_MEAN
    around = [
        CutTensor(NORMS[0], norm.shape, norm.kind, norm.name),
        CutTensor(EMBEDDING, head.shape, head.kind, head.name),  # a file without a head uses that
    ]
    if is_by_mean:
        around.append(CutTensor(NORM_BIAS, norm.shape, F32, NORM_BIAS if NORM_BIAS in tensors else None))
    block = _zero_block(whole.width, is_by_mean)
    settings = _ends_settings(whole, head, "layer_norm_epsilon" if is_by_mean else "layer_norm_rms_epsilon")
    cut = Cut(Span(0, 1), Span(0, 1), settings, (*block, *around), 1.0, 1)
    return EndsFile(
        architecture="starcoder2" if is_by_mean else "llama",
        cut=cut,
        bias=OUTPUT_BIAS if OUTPUT_BIAS in tensors else "",
        factor=_logit_factor(whole),
        softcap=whole.real("final_logit_softcapping", 0.0),
    )


def _ends_settings(whole: WholeFile, head: TensorSource, epsilon_name: str) -> dict[str, GgufSetting]:
    numbers = {
        "block_count": 1,
        "context_length": MOST_ROWS,
        "embedding_length": whole.width,
        "feed_forward_length": HEAD_WIDTH,
        "attention.head_count": whole.width // _head_width(whole.width),
        "attention.head_count_kv": 1,
        "rope.dimension_count": _head_width(whole.width),
        "vocab_size": head.shape[0],
    }
    epsilon = whole.settings.get(f"attention.{epsilon_name}", GgufSetting((FLOAT32,), 1e-5))
    integers = {name: GgufSetting((UINT32,), number) for name, number in numbers.items()}
    return {**integers, f"attention.{epsilon_name}": epsilon}


def _zero_block(width: int, is_by_mean: bool) -> list[CutTensor]:
    """The tensors of a small block of zeros. Both plain families call them the same."""
    head_width = _head_width(width)
    matrices = {
        "attn_q": (width, width),
        "attn_k": (head_width, width),
        "attn_v": (head_width, width),
        "attn_output": (width, width),
        "ffn_up": (HEAD_WIDTH, width),
        "ffn_down": (width, HEAD_WIDTH),
    }
    vectors = {"attn_norm.weight": width, "ffn_norm.weight": width}
    if is_by_mean:
        of_width = ("attn_norm.bias", "attn_output.bias", "ffn_norm.bias", "ffn_down.bias")
        vectors |= {**dict.fromkeys(of_width, width), "ffn_up.bias": HEAD_WIDTH}
    else:
        matrices["ffn_gate"] = (HEAD_WIDTH, width)
    kind = F32 if width % HEAD_WIDTH else Q4_0
    zeros = [CutTensor(f"blk.0.{name}.weight", shape, kind, None) for name, shape in matrices.items()]
    return [*zeros, *(CutTensor(f"blk.0.{name}", (length,), F32, None) for name, length in vectors.items())]


def _head_width(width: int) -> int:
    return width if width % HEAD_WIDTH else HEAD_WIDTH


def _logit_factor(whole: WholeFile) -> float:
    """By what logits are multiplied."""
    default = whole.width / MINICPM_WIDTH if whole.architecture == "minicpm" else 1.0
    scale = whole.real("logit_scale", default) or 1.0
    return 1.0 / scale if whole.architecture in DIVIDES else scale


def _read_bias(whole: WholeFile, read: ReadTensor, name: str) -> np.ndarray:
    """Read a vector in float32. Raises ConfigError for another kind."""
    tensor = next(tensor for tensor in whole.tensors if tensor.name == name)
    if tensor.kind != F32:
        raise ConfigError(f"{name} is no F32, and has to be read as numbers")
    return np.frombuffer(read(name, 0, count_bytes(F32, tensor.shape)), "<f4")


class PackedEmbedding:
    """Rows of the embedding, read and unpacked when they are asked for."""

    def __init__(self, whole: WholeFile, read: ReadTensor) -> None:
        self._tensor = next(tensor for tensor in whole.tensors if tensor.name == EMBEDDING)
        self._row_bytes = count_bytes(self._tensor.kind, self._tensor.shape) // self._tensor.shape[0]
        self._scale = np.float32(scale_embeddings(whole))
        self._read = read
        self.n_words = self._tensor.shape[0]

    def rows(self, ids: Sequence[int]) -> np.ndarray:
        """Hidden states [n, d] of some tokens in front of the first block. Raises ConfigError for no token."""
        from gguf import GGMLQuantizationType, dequantize  # late: an extra, which GGUF alone needs

        if not all(0 <= token < self.n_words for token in ids):
            wrong = next(token for token in ids if not 0 <= token < self.n_words)
            raise ConfigError(f"token {wrong} is asked for, and this model has {self.n_words}")
        if not ids:
            return np.empty((0, self._tensor.shape[1]), np.float32)
        raw = b"".join(self._read(EMBEDDING, token * self._row_bytes, self._row_bytes) for token in ids)
        packed = np.frombuffer(raw, np.uint8).reshape(len(ids), self._row_bytes)
        return dequantize(packed, GGMLQuantizationType(self._tensor.kind)).astype(np.float32) * self._scale


class LlamaHead:
    """Norm and head, loaded. For one thread at a time. Raises ConfigError for what the library cannot compute."""

    def __init__(self, whole: WholeFile, read: ReadTensor, n_threads: int, as_it_lies: bool = False) -> None:
        ends = plan_ends(whole)
        self._factor = np.float32(ends.factor)
        self._softcap = np.float32(ends.softcap)
        self._bias = _read_bias(whole, read, ends.bias) if ends.bias else None
        size = ContextSize(MOST_ROWS, 1, n_new=MOST_ROWS, n_threads=n_threads)
        with temporary_cut(ends.architecture, ends.cut, read) as path:
            self._model = LlamaModel(path, as_it_lies)
            self._context = LlamaContext(self._model, size)
        self.n_words = self._model.n_words

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        """What the last block gave, [n, d], to logits [n, vocabulary]."""
        if not len(hidden):
            return np.empty((0, self.n_words), np.float32)
        parts = [hidden[offset : offset + MOST_ROWS] for offset in range(0, len(hidden), MOST_ROWS)]
        return np.concatenate([self._logits_of_few(part) for part in parts])

    def close(self) -> None:
        """Free what the library holds."""
        self._context.close()
        self._model.close()

    def _logits_of_few(self, hidden: np.ndarray) -> np.ndarray:
        self._context.memory.crop(0, 0)
        self._context.run_rows(hidden, [TokenPlace(0, position) for position in range(len(hidden))])
        logits = self._context.read_logits(len(hidden))
        if self._bias is not None:
            logits += self._bias
        if self._factor != 1.0:
            logits *= self._factor
        if self._softcap:
            logits = np.tanh(logits * (np.float32(1.0) / self._softcap)) * self._softcap
        return logits
