"""The words of a GGUF file: whether its tokenizer can be read, and the parts of it that transformers reads otherwise.

llama.cpp cuts a text by patterns that a file names by a word (``tokenizer.ggml.pre``) before pairs are merged. For a
word that it does not know transformers cuts as GPT-2 does and says nothing: digits, for one, then stay together. And it
gives a tokenizer GPT-2's own special token, for which the model may have no vector.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from swarmd.compute.llama_cpp.gguf_header import GgufHeader
from swarmd.compute.model.plain_config import building
from swarmd.errors import ConfigError

AS_GPT2 = ("gpt-2", "phi-2", "olmo")
DIGIT_BY_DIGIT = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""llama.cpp cuts digits apart first, then as GPT-2 does."""
IDS = ("bos", "eos", "unknown", "padding", "eot", "eom")
TEMPLATE = "tokenizer.chat_template"


def check_words(header: GgufHeader, say: Callable[[str], None]) -> None:
    """Refuse a tokenizer that is missing or would cut texts otherwise than it was made to. Raises ConfigError."""
    path = header.path
    settings = header.settings
    words = settings.get("tokenizer.ggml.tokens")
    kind = settings.get("tokenizer.ggml.model")
    if not isinstance(words, list) or not words:
        raise ConfigError(f"{path} holds no tokenizer (tokenizer.ggml.tokens): nobody could ask the model anything")
    for name in IDS:
        number = settings.get(f"tokenizer.ggml.{name}_token_id")
        if number is not None and not (isinstance(number, int) and 0 <= number < len(words)):
            raise ConfigError(f"{path}: tokenizer.ggml.{name}_token_id is {number}, and there are {len(words)} tokens")
    embedding = header.tensors.get("token_embd.weight")
    if embedding is not None and len(words) > embedding.shape[0]:
        raise ConfigError(f"{path}: {len(words)} tokens, and vectors for {embedding.shape[0]} of them")
    splitter = settings.get("tokenizer.ggml.pre")
    if kind == "gpt2" and splitter not in (*GGUF_PRE_TOKENIZER_SPLITS, *AS_GPT2, *DIGIT_BY_DIGIT):
        raise ConfigError(
            f"{path}: how its tokenizer cuts texts (tokenizer.ggml.pre) is {splitter!r}, which is not known here: "
            "take the model as safetensors, or convert it anew"
        )
    extra_templates = [key.removeprefix(f"{TEMPLATE}.") for key in settings if key.startswith(f"{TEMPLATE}.")]
    if extra_templates:
        listed = ", ".join(extra_templates)
        say(f"it has {len(extra_templates) + 1} chat templates: the plain one is taken, {listed} is left out")


def write_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Write a file's tokenizer, with its chat template, to ``folder``, whatever the family. Raises ConfigError."""
    with building(f"the tokenizer of {header.path} cannot be used"):
        architecture, vocabulary, settings = get_gguf_tokenizer(str(header.path))
        backend, _ = convert_gguf_tokenizer(architecture, vocabulary)
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, **settings)
        mend(tokenizer, header)
    tokenizer.save_pretrained(folder)


def mend(tokenizer: Any, header: GgufHeader) -> None:
    """Have transformers' tokenizer cut texts as the file says, and know the file's tokens only."""
    _take_back(tokenizer, len(header.settings["tokenizer.ggml.tokens"]))
    is_cut = header.settings.get("tokenizer.ggml.model") == "gpt2"
    if is_cut and header.settings.get("tokenizer.ggml.pre") in DIGIT_BY_DIGIT:
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )


def _take_back(tokenizer: Any, n_tokens: int) -> None:
    """Forget what was added beyond the file's tokens."""
    written = json.loads(tokenizer.backend_tokenizer.to_str())
    if all(token["id"] < n_tokens for token in written["added_tokens"]):
        return
    for name, token in list(tokenizer.special_tokens_map.items()):
        if isinstance(token, str) and tokenizer.convert_tokens_to_ids(token) >= n_tokens:
            setattr(tokenizer, name, None)
    written["added_tokens"] = [token for token in written["added_tokens"] if token["id"] < n_tokens]
    tokenizer._tokenizer = Tokenizer.from_str(json.dumps(written))
