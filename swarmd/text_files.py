"""Text files as people's programs write them: read as UTF-8, with a mark or without, or refused with what to do.

Windows' editors begin UTF-8 with a byte order mark, PowerShell's ``>`` writes UTF-16, data comes compressed.
"""

from __future__ import annotations

import codecs
from pathlib import Path

from swarmd.errors import ConfigError

# How a file begins that is no UTF-8, what it is then, and what makes it text. UTF-32's mark begins as UTF-16's does.
FORMATS = (
    (codecs.BOM_UTF32_LE, "UTF-32", "convert it first: iconv -f utf-32 -t utf-8"),
    (codecs.BOM_UTF16_LE, "UTF-16", "convert it first: iconv -f utf-16 -t utf-8"),
    (codecs.BOM_UTF16_BE, "UTF-16", "convert it first: iconv -f utf-16 -t utf-8"),
    (b"\x1f\x8b", "compressed (gzip)", "unpack it first: gunzip --keep"),
    (b"\x28\xb5\x2f\xfd", "compressed (Zstandard)", "unpack it first: unzstd"),
    (b"\xfd7zXZ\0", "compressed (xz)", "unpack it first: unxz --keep"),
    (b"BZh", "compressed (bzip2)", "unpack it first: bunzip2 --keep"),
    (b"PK\x03\x04", "a ZIP archive", "unpack it first: unzip"),
    (b"PAR1", "a Parquet file", "write it as lines of JSON first: pandas' to_json(..., orient='records', lines=True)"),
    (b"ARROW1", "an Arrow file", "write it as lines of JSON first: datasets' to_json(...)"),
)


def find_other_format(raw: bytes) -> str:
    """Say what a file is that is no UTF-8 text, and what makes it that; "" where it may be."""
    for mark, name, remedy in FORMATS:
        if raw.startswith(mark):
            return f"it is {name}, expected UTF-8 text: {remedy}"
    nul = raw.find(b"\0")
    if nul >= 0:
        return f"byte {nul + 1} is NUL: it is UTF-16 (iconv -f utf-16le -t utf-8 converts it), or no text"
    return ""


def decode_text(raw: bytes, source: str) -> str:
    """Decode UTF-8 without its mark. Raises ConfigError that says what came, where in ``source``, and what to do."""
    other = find_other_format(raw)
    if other:
        raise ConfigError(f"{source}: {other}")
    text = raw.removeprefix(codecs.BOM_UTF8)
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        line = text.count(b"\n", 0, error.start) + 1
        raise ConfigError(
            f"{source} is not UTF-8: line {line} has the byte 0x{text[error.start]:02x}; "
            "convert it first, for example with iconv -f latin1 -t utf-8"
        ) from None


def read_bytes(path: Path, at_most: int = -1) -> bytes:
    """Read a user's file, or its beginning. Raises ConfigError."""
    try:
        with path.open("rb") as file:
            return file.read(at_most)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None


def read_text(path: Path) -> str:
    """Read a user's text, line ends as they are written. Raises ConfigError."""
    return decode_text(read_bytes(path), str(path))
