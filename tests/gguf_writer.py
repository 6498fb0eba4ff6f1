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


def write_all(writer: GGUFWriter) -> None:
    """Write the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
