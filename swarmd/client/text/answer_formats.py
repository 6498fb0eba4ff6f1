"""How families mark thoughts and calls of tools in their answers, and which format a chat template writes.

Sources: the chat templates that their authors publish, as of November 2026.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import regex


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch of an answer between two marks, both patterns. ``closes`` is None for one that ends with the answer.

    ``kind`` is "reasoning", "call", or "nothing" for marks that are left out, with nothing between them.
    """

    kind: str
    opens: regex.Pattern[str]
    closes: regex.Pattern[str] | None = None
    begins_answer: bool = False  # only where nothing but white space stands before it
    is_bare: bool = False  # there are no marks: only a tool's own name makes it a call


class ThoughtFormat(NamedTuple):
    """How thoughts are marked: by which text they begin, and behind which one the answer does.

    ``tokens`` are those that it is made of, which some vocabularies have as special ones.
    """

    regions: tuple[Region, ...]
    tokens: tuple[str, ...]
    opens: str
    answer_begins: str
    is_always_written: bool = False  # a prompt does not begin them: the model does


class CallFormat(NamedTuple):
    """How calls are marked, and the tokens as in ``ThoughtFormat``."""

    regions: tuple[Region, ...]
    tokens: tuple[str, ...]


class AnswerFormats(NamedTuple):
    """The formats of one model's answers, by their names in THOUGHTS and CALLS."""

    thoughts: str
    calls: str

    @property
    def regions(self) -> tuple[Region, ...]:
        """All that an answer may consist of, beside text. The usual calls are among it: models are told of them."""
        usual = () if self.calls == DEFAULT_FORMATS.calls else CALLS[DEFAULT_FORMATS.calls].regions
        return (*THOUGHTS[self.thoughts].regions, *CALLS[self.calls].regions, *usual)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens that both are made of."""
        return (*THOUGHTS[self.thoughts].tokens, *CALLS[self.calls].tokens)

    @property
    def forced_regions(self) -> tuple[Region, ...]:
        """What an answer consists of to which a grammar gives the form of calls."""
        return (*THOUGHTS[self.thoughts].regions, FORCED_CALL)

    def is_thinking(self, tail: str, continued: str | None = None) -> bool:
        """Does a prompt with this tail end within thoughts? ``continued``: the answer whose beginning it holds."""
        thoughts = THOUGHTS[self.thoughts]
        if continued is not None:
            return continued.rfind(thoughts.opens) > continued.rfind(thoughts.answer_begins)
        return tail.rstrip().endswith(thoughts.opens)

    def answer_mark(self, is_thinking: bool) -> str:
        """Return the text behind which the answer begins that a grammar holds; "" where it begins at once."""
        thoughts = THOUGHTS[self.thoughts]
        return thoughts.answer_begins if is_thinking or thoughts.is_always_written else ""


def _region(kind: str, opens: str, closes: str = "", begins_answer: bool = False, is_bare: bool = False) -> Region:
    closing = regex.compile(closes, regex.DOTALL) if closes else None
    return Region(kind, regex.compile(opens, regex.DOTALL), closing, begins_answer, is_bare)


def _thoughts(opens: str, closes: str, begins_answer: bool = True) -> ThoughtFormat:
    pattern = regex.escape(closes)
    region = _region("reasoning", regex.escape(opens) + r"\s*", rf"\s*{pattern}\s*", begins_answer)
    return ThoughtFormat((region,), (opens, closes), opens.strip(), closes)


def _calls(opens: str, closes: str, *tokens: str) -> CallFormat:
    """Calls between two marks, with white space around them."""
    pattern = rf"\s*{regex.escape(closes)}" if closes else ""
    return CallFormat((_region("call", rf"\s*{regex.escape(opens)}\s*", pattern),), (opens, closes, *tokens))


# A mark that is a token of its own is seen wherever it stands; one that people write, too, only where an answer begins.
THOUGHTS = {
    "think": _thoughts("<think>", "</think>"),
    "harmony": ThoughtFormat(  # gpt-oss
        (
            _region(
                "reasoning",
                r"(?:<\|start\|>assistant)?<\|channel\|>analysis\s*<\|message\|>",
                r"<\|end\|>|(?=<\|start\|>|<\|channel\|>|<\|return\|>|<\|call\|>)",
            ),
            _region(
                "nothing",
                r"(?:<\|start\|>assistant)?<\|channel\|>(?:final|commentary)\s*(?:<\|constrain\|>\w*)?<\|message\|>",
            ),
            _region("nothing", r"<\|end\|>|<\|return\|>"),
        ),
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|constrain|>"),
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>",
        is_always_written=True,
    ),
    "mistral": _thoughts("[THINK]", "[/THINK]"),
    "gemma": _thoughts("<|channel>thought\n", "<channel|>", begins_answer=False)._replace(
        tokens=("<|channel>", "<channel|>")
    ),
    "command": _thoughts("<|START_THINKING|>", "<|END_THINKING|>")._replace(
        regions=(
            _region("reasoning", r"<\|START_THINKING\|>\s*", r"\s*<\|END_THINKING\|>\s*"),
            _region("nothing", r"\s*<\|(?:START|END)_(?:RESPONSE|TEXT)\|>"),
        ),
        tokens=(
            *("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
            *("<|START_TEXT|>", "<|END_TEXT|>"),
        ),
    ),
    "seed": _thoughts("<seed:think>", "</seed:think>"),
    "kimi-k3": ThoughtFormat(
        (
            _region("reasoning", r"<\|open\|>think<\|sep\|>", r"<\|close\|>think<\|sep\|>"),
            _region("nothing", r"<\|(?:open|close)\|>(?:response|message)<\|sep\|>|<\|end_of_msg\|>"),
        ),
        ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        "<|open|>think<|sep|>",
        "<|close|>think<|sep|><|open|>response<|sep|>",
    ),
    "apertus": _thoughts("<|inner_prefix|>", "<|inner_suffix|>"),
}

CALLS = {
    # Hermes, Qwen 2 to 3.5, Qwen3-Coder, GLM 4.x, SmolLM3, Granite 4, Nemotron 3, MiMo
    "tool_call": _calls("<tool_call>", "</tool_call>"),
    "mistral": CallFormat(
        (_region("call", r"\s*\[TOOL_CALLS\]\s*", r"(?=\s*\[TOOL_CALLS\])"),),
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
    ),
    "harmony": CallFormat(
        (
            _region(
                "call",
                r"(?:<\|start\|>assistant)?\s*(?:<\|channel\|>(?:commentary|analysis))?\s*to=(?=functions\.)",
                r"<\|call\|>|(?=<\|start\|>|<\|end\|>)",
            ),
        ),
        ("<|channel|>", "<|call|>", "<|start|>", "<|message|>", "<|constrain|>", "<|end|>"),
    ),
    "deepseek": CallFormat(
        (_region("call", r"\s*(?:<｜tool▁calls▁begin｜>|(?=<｜tool▁call▁begin｜>))", r"<｜tool▁calls▁end｜>"),),
        (
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            "<｜tool▁sep｜>",
        ),
    ),
    "deepseek-tags": CallFormat(
        (
            _region(
                "call",
                r"\s*<｜DSML｜(?P<what>function_calls|tool_calls)>",
                r"\s*</｜DSML｜(?:function_calls|tool_calls)>",
            ),
        ),
        ("｜DSML｜",),
    ),
    "kimi": _calls(
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    "kimi-k3": _calls("<|open|>tools<|sep|>", "<|close|>tools<|sep|>", "<|open|>", "<|close|>", "<|sep|>"),
    "gemma": _calls("<|tool_call>", "<tool_call|>", '<|"|>'),
    "function-gemma": _calls("<start_function_call>", "<end_function_call>", "<escape>"),
    "granite": _calls("<|tool_call|>", "<|/tool_call|>"),  # and Phi-4
    "lfm": _calls("<|tool_call_start|>", "<|tool_call_end|>"),
    "minimax": _calls("<minimax:tool_call>", "</minimax:tool_call>"),
    "seed": _calls("<seed:tool_call>", "</seed:tool_call>"),
    "tool_calls": _calls("<tool_calls>", "</tool_calls>"),  # Hunyuan, Jamba, Apriel
    "nemotron": _calls("<TOOLCALL>", "</TOOLCALL>"),
    "olmo": _calls("<function_calls>", "</function_calls>"),
    "command": _calls("<|START_ACTION|>", "<|END_ACTION|>"),
    "apertus": _calls("<|tools_prefix|>", "<|tools_suffix|>"),
    # Llama 3 and 4, and whoever writes no mark at all: JSON, or a list of Python's calls, and nothing else
    "llama": CallFormat(
        (
            _region("call", r"\s*<\|python_tag\|>\s*", r"\s*(?:<\|eom_id\|>|<\|eot_id\|>)"),
            _region("call", r"\s*<\|python_start\|>\s*", r"\s*<\|python_end\|>"),
            _region("call", r"\s*(?=<function=)", r"(?<=</function>)"),
            _region("call", r'\s*(?=\[?\s*\{\s*"(?:name|type|function)"\s*:)', begins_answer=True, is_bare=True),
            _region("call", r"\s*(?=\[[A-Za-z_][\w.]*\()", begins_answer=True, is_bare=True),
        ),
        ("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
    ),
}
FORCED_CALL = _region("call", r"\s*(?=[\[{])", begins_answer=True)
DEFAULT_FORMATS = AnswerFormats("think", "tool_call")


def find_thoughts(written: str) -> str:
    """Name the format of thoughts whose marks stand in a template or are tokens; the usual one where none do."""
    return _find_marked(THOUGHTS, written, 2) or DEFAULT_FORMATS.thoughts


def find_calls(reads: Callable[[str], bool], written: str) -> str:
    """Name the first format by which the call can be read that a template wrote.

    Some templates write none, and only say how to: the marks that they name count then.
    """
    return next(filter(reads, CALLS), None) or _find_marked(CALLS, written, 1) or DEFAULT_FORMATS.calls


def _find_marked(formats: Mapping[str, ThoughtFormat | CallFormat], written: str, n_marks: int) -> str | None:
    """Name the first format whose first tokens are written, the usual ones last."""
    names = sorted(formats, key=lambda name: name in DEFAULT_FORMATS)
    return next((name for name in names if all(token in written for token in formats[name].tokens[:n_marks])), None)
