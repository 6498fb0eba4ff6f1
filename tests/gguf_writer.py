"""What tests do with gguf's writer, whichever files they make; imports nothing heavy."""

from __future__ import annotations

from typing import Any

from gguf import GGUFWriter


def add_setting(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add a setting of the kind that its value has in Python; None adds nothing."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def add_words(writer: GGUFWriter, n_words: int) -> None:
    """Add a tokenizer: one that cuts as GPT-2's does, into letters, with many words that no text has."""
    letters = [chr(number) for number in range(33, 127)] + ["\u0120", "\u010a"]  # as it writes a space, a line's end
    tokens = ["<|end|>", *letters, "wo", *(f"word{number}" for number in range(n_words))][:n_words]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, *[1] * (n_words - 1)])
    writer.add_token_merges(["w o"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)


def write_all(writer: GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
