"""Which formats of thoughts and calls are found in chat templates: ``python -m tools.chat_templates FILE.jinja ...``.

Many of them come with packages: the sdists of llama-cpp-python (``vendor/llama.cpp/models/templates``) and of trl
(``trl/chat_templates``).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from transformers import PreTrainedTokenizerFast

from swarmd.client.text.chat_template import ChatTemplate
from swarmd.home.models import bundled_folder

# A template's tokens are special ones of its own tokenizer, which does not come with it.
MARK = re.compile(r"<\|[\w ]{1,40}\|>|<｜[^｜<>]{1,30}｜>|\[/?[A-Z_]{3,20}\]|<\w+\|>|<\|\w+>|</?s>")
ROW = "{:50} {:10} {:15} {}"


def describe(path: Path) -> str:
    """Return a row about one template."""
    source = path.read_text()
    tokenizer = Tokenizer.from_file(str(bundled_folder() / "tokenizer.json"))
    marks = sorted(set(MARK.findall(source)))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    wrapped.chat_template = source
    template = ChatTemplate(wrapped)
    thoughts, calls = template.formats
    if not template.writes_calls:
        return ROW.format(path.stem[:50], thoughts, calls, "writes no calls")
    return ROW.format(path.stem[:50], thoughts, calls, "" if template.reads_call(calls) else "not read")


def main(paths: list[str]) -> None:
    """Print a row for each template."""
    print(ROW.format("template", "thoughts", "calls", ""))
    for path in sorted(map(Path, paths)):
        print(describe(path))


if __name__ == "__main__":
    main(sys.argv[1:])
