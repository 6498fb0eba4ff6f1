"""Greedy tokens of a whole GGUF file by llama.cpp's library.

    python -m tests.real.whole_file FILE.gguf N_TOKENS < IDS

reads token ids as JSON, and writes the next ones.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from swarmd.compute.llama_cpp.context import ContextSize, LlamaContext, LlamaModel, TokenPlace


def go_on(path: Path, ids: Sequence[int], n_tokens: int) -> list[int]:
    """The most likely next tokens, one by one."""
    size = ContextSize(len(ids) + n_tokens, 1)
    tokens: list[int] = []
    new = list(ids)
    with closing(LlamaModel(path)) as model, closing(LlamaContext(model, size)) as context:
        while len(tokens) < n_tokens:
            begin = len(ids) + len(tokens) - len(new)
            context.run_ids(new, [TokenPlace(0, begin + offset) for offset in range(len(new))])
            new = [int(context.read_logits(len(new))[-1].argmax())]
            tokens += new
    return tokens


if __name__ == "__main__":
    print(json.dumps(go_on(Path(sys.argv[1]), json.load(sys.stdin), int(sys.argv[2]))))
