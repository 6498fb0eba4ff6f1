"""A tokenizer of anybody's, tried on fixed texts by a process of its own, with limits, before it is used in this one.

A normalizer can make gigabytes of a word, a pattern can take for ever or end the process: all of that is data in
``tokenizer.json``, which no reader refuses.
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

from swarmd.errors import ConfigError, SwarmUnavailable

MOST_S = 45.0  # of the whole trial, on a busy machine; an honest one takes half a second
MOST_CPU_S = 15  # of computing: a pattern that never ends uses nothing else, and ends by this
MOST_BYTES = 4 * 2**30  # of address space: a vocabulary of 256,000 takes a third of one, with its merges
MOST_TOKENS_PER_BYTE = 8.0  # one for each byte is what byte-level ones need at most; some add marks
TEXTS = (
    "The quick brown fox jumps over the lazy dog, 1234567890 times; isn't it? (Yes!) [No] {Maybe} <b>&amp;</b>\n\t",
    "".join(map(chr, range(32, 127))) * 4,
    "a" * 20_000,
    "ab " * 5_000,
    " " * 5_000,
    "\n" * 2_000,
    "0" * 5_000,
    "aA1!é" * 3_000,
    "Größe, façade, Ελλάδα, Привет, שלום, مرحبا, नमस्ते, こんにちは, 你好, 안녕하세요 " * 50,
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 e\u0301 \u200d \ufeff" * 50,
    "def f(x):\n    return {k: v for k, v in x.items() if v != 'None'}  # noqa\n" * 100,
)


def try_out(folder: Path) -> None:
    """Raise ConfigError, with one sentence, for a tokenizer that cannot be used with reasonable means.

    Raises SwarmUnavailable where this machine is too busy to tell.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return
    command = [sys.executable, "-P", "-m", "swarmd.client.text.tokenizer_trial", str(path)]
    message = f"the tokenizer in {folder} cannot be used"
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=MOST_S,
        )
    except subprocess.TimeoutExpired:
        raise SwarmUnavailable(
            f"trying the tokenizer in {folder} took more than {MOST_S:g} s: this machine is busy; ask again"
        ) from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        last_line = lines[-1][:200] if lines else ""
        reason = last_line or f"it ends its process ({done.returncode})"
        raise ConfigError(f"{message}, as a trial with {MOST_BYTES >> 30} GiB and {MOST_CPU_S} s shows: {reason}")


def main(path: str) -> None:
    """The trial itself, in its own process."""
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(path)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        max_length = MOST_TOKENS_PER_BYTE * len(text.encode()) + 64
        if len(ids) > max_length:
            sys.exit(f"{len(ids)} tokens for a text of {len(text.encode())} B")
        decoded = tokenizer.decode(ids)
        if len(decoded) > max_length:
            sys.exit(f"{len(decoded)} characters for the tokens of a text of {len(text.encode())} B")


if __name__ == "__main__":
    main(sys.argv[1])
