"""How blocks are cut out of a GGUF file so that llama.cpp computes them as in the whole: settings in, a plan out.

The library reads what a block is from the file's settings and from its number: which layers see a window, which have
experts, how embeddings are scaled. A cut renumbers its blocks, so many families would be computed wrongly, without a
word. Here is what each needs; what is not in the table is refused. That a cut is right is proved besides (``proof``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from swarmd.compute.llama_cpp.gguf_header import ARRAY, F32, NUMBERS, is_of_kind
from swarmd.errors import ConfigError
from swarmd.protocol.models.configuration import LIMITS
from swarmd.values import Span

VOCABULARY = 32  # tokens that a cut says it has: nobody asks it for any
UINT32 = 4  # ggml's number for the kind of a setting
FLOAT32 = 6  # ggml's number for the kind of a setting
BOOL = 7  # ggml's number for the kind of a setting
NO_LAYER_ARRAYS = ("rope.dimension_sections",)  # lists that have one entry for each of something else than blocks
MINICPM_SCALE = 12.0  # of embeddings, where a file says nothing
EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
BLOCK_NAME = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.")
SHARED_PREFIX = "rope_"
"""What the names of tensors begin with that belong to no block, and that each needs: factors of frequencies."""


class GgufSetting(NamedTuple):
    """A value, and ggml's numbers for its kind (a list's: its own, and that of its elements)."""

    kind: tuple[int, ...]
    value: Any


class TensorSource(NamedTuple):
    """A tensor of the whole file: ggml's number for its kind, and its shape as torch writes it."""

    name: str
    shape: tuple[int, ...]
    kind: int


class CutTensor(NamedTuple):
    """A tensor of a cut. ``source``: its name in the whole file; None: it is all zeros. Only float32 has a factor."""

    name: str
    shape: tuple[int, ...]
    kind: int
    source: str | None
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class WholeFile:
    """What is known of a whole file: its family, its settings without the family's prefix, its tensors."""

    architecture: str
    settings: Mapping[str, GgufSetting]
    tensors: Sequence[TensorSource]

    def number(self, name: str, default: int = 0) -> int:
        """Return a setting that is one number, without its fraction. Raises ConfigError for one that is none."""
        return int(self.real(name, default))

    def real(self, name: str, default: float) -> float:
        """Return a setting that is one number, as it is. Raises ConfigError for one that is none."""
        setting = self.settings.get(name)
        if setting is None:
            return default
        if not isinstance(setting.value, int | float) or isinstance(setting.value, bool):
            raise ConfigError(f"{self.architecture}.{name} is no number, and one is needed")
        return setting.value

    @property
    def n_blocks(self) -> int:
        """Blocks that make an answer; those behind them guess further tokens, and are left out."""
        return self.number("block_count") - self.number("nextn_predict_layers")

    @property
    def width(self) -> int:
        """Numbers of a hidden state."""
        return self.number("embedding_length")


@dataclass(frozen=True, slots=True)
class Cut:
    """The file to be written for ``span``.

    It holds the blocks of ``padded``. Those outside ``span`` have tensors of zeros, so each gives exactly what it is
    given. Hidden states are multiplied by ``input_scale`` before they enter. A token has ``n_positions`` of them.
    """

    span: Span
    padded: Span
    settings: Mapping[str, GgufSetting]
    tensors: tuple[CutTensor, ...]
    input_scale: float
    n_positions: int

    @property
    def sources(self) -> list[str]:
        """The tensors of the whole file that it needs."""
        return [tensor.source for tensor in self.tensors if tensor.source is not None]

    @property
    def is_rounded(self) -> bool:
        """Does something round that the whole does not: an input's scale, or a tensor's factor?"""
        return self.input_scale != 1.0 or any(tensor.factor != 1.0 for tensor in self.tensors)


def check_whole(whole: WholeFile) -> None:
    """Refuse a family that is not known, and what no file of one says. Raises ConfigError."""
    if whole.architecture not in FAMILIES:
        known = ", ".join(sorted(FAMILIES))
        raise ConfigError(f"blocks of {whole.architecture} cannot be cut out of GGUF; those of {known} can")
    for name, (kind, value) in whole.settings.items():
        if not is_of_kind(kind, value):
            raise ConfigError(f"{whole.architecture}.{name} is no value of kind {kind}: it is damaged, fetch it again")
    names = [*whole.settings, *(tensor.name for tensor in whole.tensors)]
    odd = next((name for name in names if not name.isascii() or not name.isprintable()), None)
    if odd is not None:
        raise ConfigError(f"{odd!a} is no name that a setting or a tensor has: it is damaged, fetch it again")
    for what, found, limit in (
        ("block_count", whole.number("block_count"), LIMITS["num_hidden_layers"]),
        ("block_count without those that guess", whole.n_blocks, LIMITS["num_hidden_layers"]),
        ("embedding_length", whole.width, LIMITS["hidden_size"]),
    ):
        if not 1 <= found <= limit:
            raise ConfigError(f"{whole.architecture}.{what} is {found}, expected 1 to {limit}")


def scale_embeddings(whole: WholeFile) -> float:
    """By what the rows of the embedding are multiplied in front of the first block."""
    if whole.architecture in ("gemma", "gemma2", "gemma3"):
        return math.sqrt(whole.width)
    return whole.real("embedding_scale", MINICPM_SCALE if whole.architecture == "minicpm" else 1.0)


@dataclass(frozen=True, slots=True)
class FamilyRules:
    """What a family's cuts need.

    ``period``: blocks are of kinds that come again after so many, so a cut begins at a multiple.
    ``kinds``: of which of two kinds each block is, where the library wants both in a file.
    ``n_positions``: of each token. ``scales_inputs``: hidden states, too, are multiplied by the root of their width.
    ``needs_output``: an output matrix has to be there. ``changes``: further settings of a cut.
    ``special_size``: with exactly so many blocks the library computes otherwise, so it has to be told another way:
    ``query_factor`` for the norm of queries; None: it cannot be told.
    ``has_states``: what is remembered of the past cannot be taken back token by token.
    """

    period: Callable[[WholeFile], int] = lambda whole: 1
    kinds: Callable[[WholeFile], list[bool]] = lambda whole: []
    n_positions: int = 1
    scales_inputs: bool = False
    needs_output: bool = False
    changes: Callable[[WholeFile, Span], Mapping[str, GgufSetting]] = lambda whole, span: {}
    special_size: int = 0
    query_factor: Callable[[WholeFile], float] | None = None
    has_states: bool = False


def _window_period(default: int) -> Callable[[WholeFile], int]:
    """Every so-and-so-manyth block sees all tokens, the others a window, where the file has one."""

    def period(whole: WholeFile) -> int:
        pattern = whole.settings.get("attention.sliding_window_pattern")
        if pattern is not None and pattern.kind[0] == ARRAY:
            return 1  # a list for all blocks: cut as such
        return whole.number("attention.sliding_window_pattern", default) if _has_window(whole) else 1

    return period


def _has_window(whole: WholeFile) -> bool:
    return whole.number("attention.sliding_window") > 0


def _llama4_period(whole: WholeFile) -> int:
    """Every fourth block knows no positions, and every so-and-so-manyth has experts."""
    return math.lcm(4, max(1, whole.number("interleave_moe_layer_step", 1)))


def _unscaled(whole: WholeFile, span: Span) -> Mapping[str, GgufSetting]:
    """The client scales what it embeds; a library that finds no such setting has a scale of its own."""
    return {"embedding_scale": GgufSetting((FLOAT32,), 1.0)}


def _dense_first(whole: WholeFile, span: Span) -> Mapping[str, GgufSetting]:
    """So many of the first blocks have no experts."""
    n_dense = whole.number("leading_dense_block_count")
    n_here = min(max(0, n_dense - span.start), span.end - span.start)
    return {"leading_dense_block_count": GgufSetting((UINT32,), n_here)}


def _glm4_moe(whole: WholeFile, span: Span) -> Mapping[str, GgufSetting]:
    """Given hidden states, the library turns them by four positions each, and needs to know which numbers by which."""
    half = whole.number("rope.dimension_count") // 4
    sections = GgufSetting((ARRAY, UINT32), [half, half, 0, 0])
    return {**_dense_first(whole, span), "rope.dimension_sections": sections}


def _fourth_blocks(whole: WholeFile) -> list[bool]:
    """Every fourth block knows no positions."""
    return [(index + 1) % 4 == 0 for index in range(whole.n_blocks)]


def _attention_by_heads(whole: WholeFile) -> list[bool]:
    """Blocks without attention have no heads of keys."""
    heads = whole.settings.get("attention.head_count_kv")
    if heads is None or heads.kind[0] != ARRAY or heads.kind[1] not in NUMBERS:
        return []
    return [n > 0 for n in heads.value][: whole.n_blocks]


def _attention_by_interval(whole: WholeFile) -> list[bool]:
    """Every so-and-so-manyth block has attention, the others remember in a state."""
    interval = max(1, whole.number("full_attention_interval", 4))
    return [(index + 1) % interval == 0 for index in range(whole.n_blocks)]


def _recurrent_layers(whole: WholeFile, span: Span) -> Mapping[str, GgufSetting]:
    """Which blocks are without attention: the library would count from the cut's first."""
    is_recurrent = [not has_attention for has_attention in _attention_by_interval(whole)]
    return {"attention.recurrent_layers": GgufSetting((ARRAY, BOOL), is_recurrent[span.start : span.end])}


def _gemma3_query_factor(whole: WholeFile) -> float:
    """The largest Gemma 3 divides by the root of its width for each head, where the others divide by a key's."""
    head_width = max(1, whole.width // max(1, whole.number("attention.head_count")))
    return math.sqrt(whole.number("attention.key_length", head_width) / head_width)


PLAIN = FamilyRules()
FAMILIES: Mapping[str, FamilyRules] = {
    **dict.fromkeys(("llama", "qwen2", "qwen3", "qwen3moe", "phi3", "mistral3"), PLAIN),
    **dict.fromkeys(("mamba2", "falcon-h1"), FamilyRules(has_states=True)),
    **dict.fromkeys(("minimax-m2", "hunyuan-dense", "seed_oss", "ernie4_5", "starcoder2", "command-r"), PLAIN),
    "stablelm": PLAIN,
    "exaone4": FamilyRules(special_size=64),
    "qwen3vl": FamilyRules(n_positions=4),
    "gemma": FamilyRules(scales_inputs=True),
    "gemma2": FamilyRules(period=_window_period(2), scales_inputs=True, special_size=46),
    "gemma3": FamilyRules(period=_window_period(6), special_size=62, query_factor=_gemma3_query_factor),
    "cohere2": FamilyRules(period=_window_period(4)),
    "gpt-oss": FamilyRules(period=_window_period(2), needs_output=True),
    "olmo2": FamilyRules(period=_window_period(4), needs_output=True),
    "smollm3": FamilyRules(period=lambda whole: 4),
    "llama4": FamilyRules(period=_llama4_period, kinds=_fourth_blocks),
    "granite": FamilyRules(changes=_unscaled),
    "granitemoe": FamilyRules(changes=_unscaled),
    "minicpm": FamilyRules(changes=_unscaled),
    "granitehybrid": FamilyRules(changes=_unscaled, kinds=_attention_by_heads, has_states=True),
    "lfm2": FamilyRules(kinds=_attention_by_heads, has_states=True),
    "deepseek2": FamilyRules(changes=_dense_first),
    "bailingmoe2": FamilyRules(changes=_dense_first),
    "glm4moe": FamilyRules(changes=_glm4_moe, n_positions=4),
    "qwen3next": FamilyRules(changes=_recurrent_layers, kinds=_attention_by_interval, has_states=True),
    "qwen35": FamilyRules(changes=_recurrent_layers, kinds=_attention_by_interval, n_positions=4, has_states=True),
}
"""Seen to be computed to the bit as in the whole, at every cut that was tried (tests/compute/llama_cpp)."""


def plan_cut(whole: WholeFile, span: Span) -> Cut:
    """Say what the file for some blocks holds. Raises ConfigError for a family that cannot be cut."""
    check_whole(whole)
    rules = FAMILIES[whole.architecture]
    if not 0 <= span.start < span.end <= whole.n_blocks:
        raise ConfigError(f"blocks {span} are not in this file, which has {whole.n_blocks}")
    period = max(1, rules.period(whole))
    padded = Span(span.start // period * period, span.end)
    padded = _widen_to_both_kinds(rules.kinds(whole), padded)
    query_factor = _find_query_factor(rules, whole, padded)
    settings = {
        **_settings_of(whole, padded),
        **rules.changes(whole, padded),
        "vocab_size": GgufSetting((UINT32,), VOCABULARY),
        "block_count": GgufSetting((UINT32,), padded.end - padded.start),
    }
    scale = 1 / math.sqrt(whole.width) if rules.scales_inputs else 1.0
    tensors = _tensors_of(whole, span, padded)
    if rules.needs_output and all(tensor.name != OUTPUT for tensor in tensors):
        tensors.append(CutTensor(OUTPUT, (VOCABULARY, whole.width), F32, None))
    if query_factor != 1.0:
        tensors = [_scale_query_norm(tensor, query_factor) for tensor in tensors]
    return Cut(span, padded, settings, tuple(tensors), scale, rules.n_positions)


def _settings_of(whole: WholeFile, padded: Span) -> dict[str, GgufSetting]:
    """The whole's settings, lists with an entry for each block cut to those that are in the file."""
    n_all = whole.number("block_count")
    kept = {}
    for name, setting in whole.settings.items():
        if name == "nextn_predict_layers":
            continue
        is_of_blocks = setting.kind[0] == ARRAY and len(setting.value) == n_all and name not in NO_LAYER_ARRAYS
        kept[name] = GgufSetting(setting.kind, setting.value[padded.start : padded.end]) if is_of_blocks else setting
    return kept


def _widen_to_both_kinds(kinds: Sequence[bool], padded: Span) -> Span:
    """Take in blocks behind, or else before, until there are both kinds; a whole of one kind is cut as it is."""
    start = padded.start
    end = padded.end
    while len(set(kinds)) == 2 and len(set(kinds[start:end])) < 2:
        if end < len(kinds):
            end += 1
        else:
            start -= 1
    return Span(start, end)


def _find_query_factor(rules: FamilyRules, whole: WholeFile, padded: Span) -> float:
    """By what the norm of queries is multiplied. Raises ConfigError where the library cannot be told otherwise."""
    n_all = whole.number("block_count")
    n_here = len(padded)
    special = rules.special_size
    if (n_all == special) == (n_here == special):
        return 1.0
    if rules.query_factor is None or n_here == special:
        raise ConfigError(
            f"blocks {padded} of this {whole.architecture} cannot be cut out of GGUF: llama.cpp's library computes a "
            f"file of {special} blocks otherwise than one of {n_here if n_all == special else n_all}"
        )
    return rules.query_factor(whole)


def _scale_query_norm(tensor: CutTensor, factor: float) -> CutTensor:
    is_norm = tensor.name.endswith(".attn_q_norm.weight") and tensor.source is not None
    return tensor._replace(factor=factor) if is_norm and tensor.kind == F32 else tensor


def _tensors_of(whole: WholeFile, span: Span, padded: Span) -> list[CutTensor]:
    cuts = (_cut_tensor(tensor, span, padded) for tensor in whole.tensors)
    return [cut for cut in cuts if cut is not None]


def _cut_tensor(tensor: TensorSource, span: Span, padded: Span) -> CutTensor | None:
    """What becomes of one tensor; None: it is not in the cut."""
    if tensor.name in (EMBEDDING, OUTPUT):
        return CutTensor(tensor.name, (VOCABULARY, *tensor.shape[1:]), F32, None)
    if tensor.name == "output.bias":
        return CutTensor(tensor.name, (VOCABULARY,), F32, None)
    block = block_of(tensor.name)
    if block is None:  # behind the last block, where nobody looks, or for all blocks
        is_shared = tensor.name.startswith(SHARED_PREFIX)
        return CutTensor(tensor.name, tensor.shape, tensor.kind, tensor.name if is_shared else None)
    if not padded.start <= block < padded.end:
        return None
    rest = tensor.name.split(".", 2)[2]
    source = tensor.name if span.start <= block < span.end else None
    return CutTensor(f"blk.{block - padded.start}.{rest}", tensor.shape, tensor.kind, source)


def block_of(name: str) -> int | None:
    """Which block a tensor belongs to, by its name; None: to none."""
    match = BLOCK_NAME.match(name)
    return int(match[1]) if match else None
