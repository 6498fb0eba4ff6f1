"""How families mark thoughts and calls of tools in their answers, and which format a chat template writes.

Sources: the chat templates that their authors publish, as of November 2026.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import regex


@dataclass(frozen=True, slots=True)
class Region:
    """A stretch of an answer between two marks, both patterns. ``closes`` is None for one that ends with the answer.

    ``kind`` is "reasoning", "call", or "nothing" for a mark that is left out, with nothing between. A call's name may
    stand in its first mark, as a group. White space around marks is not part of them: the reader takes care of it.
    """

    kind: str
    opens: regex.Pattern[str]
    closes: regex.Pattern[str] | None = None
    begins_answer: bool = False  # only where nothing but white space stands before it
    is_bare: bool = False  # there are no marks: only a tool's own name makes it a call
    body: regex.Pattern[str] | None = None  # what a call's body begins with: where it cannot, the mark is text


class ThoughtFormat(NamedTuple):
    """How thoughts are marked: by which text they begin, and by which pattern the answer does that follows them.

    ``tokens`` are those that it is made of, which some vocabularies have as special ones; ``seen_by`` are those by
    which a template or a vocabulary is known to have it.
    """

    regions: tuple[Region, ...]
    tokens: tuple[str, ...]
    seen_by: tuple[str, ...]
    opens: str
    answer_begins: str
    is_always_written: bool = False  # a prompt does not begin them: the model does


class CallFormat(NamedTuple):
    """How calls are marked, with tokens as in ``ThoughtFormat``.

    ``marks`` stand before and behind a past call where a template writes none.
    """

    regions: tuple[Region, ...]
    tokens: tuple[str, ...]
    seen_by: tuple[str, ...]
    marks: tuple[str, str] = ("<tool_call>", "</tool_call>")


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
    def forced_regions(self) -> tuple[Region, ...]:
        """What an answer consists of to which a grammar gives the form of calls, if the model gets so far."""
        return (*self.regions, FORCED_CALL)

    @property
    def tokens(self) -> tuple[str, ...]:
        """The tokens that both are made of."""
        return (*THOUGHTS[self.thoughts].tokens, *CALLS[self.calls].tokens)

    def is_thinking(self, tail: str, continued: str | None = None) -> bool:
        """Does a prompt with this tail end within thoughts? ``continued``: the answer whose beginning it holds."""
        thoughts = THOUGHTS[self.thoughts]
        if continued is None:
            return tail.rstrip().endswith(thoughts.opens)
        is_begun = continued.lstrip().startswith(thoughts.opens)
        return is_begun and not regex.search(thoughts.answer_begins, continued)

    def answer_mark(self, is_thinking: bool, is_continued: bool) -> str:
        """Return the pattern behind which the answer begins that a grammar holds; "" where it begins at once."""
        thoughts = THOUGHTS[self.thoughts]
        return thoughts.answer_begins if is_thinking or (thoughts.is_always_written and not is_continued) else ""


def _region(kind: str, opens: str, closes: str = "", **more: Any) -> Region:
    closing = regex.compile(closes, regex.DOTALL) if closes else None
    return Region(kind, regex.compile(opens, regex.DOTALL), closing, **more)


def _thoughts(
    opens: str, closes: str, begins_answer: bool = True, nothing: tuple[str, ...] = (), line: str = ""
) -> ThoughtFormat:
    """Thoughts between two marks, and marks that mean ``nothing``. ``line``: what else stands in the first one's."""
    region = _region("reasoning", regex.escape(opens + line), regex.escape(closes), begins_answer=begins_answer)
    left_out = (_region("nothing", regex.escape(mark)) for mark in nothing)
    marks = (opens, closes)
    return ThoughtFormat((region, *left_out), (*marks, *nothing), marks, (opens + line).strip(), regex.escape(closes))


def _calls(opens: str, closes: str, *tokens: str, **more: Any) -> CallFormat:
    """Calls between two marks."""
    region = _region("call", regex.escape(opens), regex.escape(closes), **more)
    return CallFormat((region,), (opens, closes, *tokens), (opens,), (opens, closes))


# A mark that is a token of its own is seen wherever it stands; one that people write, too, only where an answer begins.
# Patterns have no repetition without a limit: what a model wrote can be anything.
MESSAGE = r" ?(?:<\|constrain\|>)? ?\w{0,16}<\|message\|>"  # the end of a header of gpt-oss
STARTED = r"(?:<\|start\|>assistant)?"
RECIPIENT = r"to=(?:functions\.)?(?P<{}>[\w.-]{{1,128}})"
THOUGHTS = {
    "think": _thoughts("<think>", "</think>"),
    "harmony": ThoughtFormat(  # gpt-oss
        (
            _region(
                "reasoning",
                rf"{STARTED}<\|channel\|>analysis{MESSAGE}",
                r"<\|end\|>(?=<\|start\|>|\Z)|(?=<\|start\|>|<\|channel\|>)",
            ),
            _region("nothing", rf"{STARTED}<\|channel\|>(?:final|commentary){MESSAGE}|<\|start\|>assistant{MESSAGE}"),
            _region("nothing", r"<\|end\|>(?=<\|start\|>|\Z)|<\|return\|>"),
        ),
        ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>", "<|constrain|>"),
        ("<|channel|>", "<|message|>"),
        "<|channel|>analysis<|message|>",
        rf"<\|channel\|>final{MESSAGE}",
        is_always_written=True,
    ),
    "mistral": _thoughts("[THINK]", "[/THINK]"),
    "gemma": _thoughts("<|channel>", "<channel|>", False, line="thought\n"),
    "command": _thoughts(
        *("<|START_THINKING|>", "<|END_THINKING|>", False),
        nothing=("<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"),
    ),
    "seed": _thoughts("<seed:think>", "</seed:think>"),
    "kimi-k3": ThoughtFormat(
        (
            _region("reasoning", r"<\|open\|>think<\|sep\|>", r"<\|close\|>think<\|sep\|>"),
            _region("nothing", r"<\|(?:open|close)\|>(?:response|message)<\|sep\|>|<\|end_of_msg\|>"),
        ),
        ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"),
        ("<|open|>", "<|close|>"),
        "<|open|>think<|sep|>",
        r"<\|open\|>response<\|sep\|>",
    ),
    "apertus": _thoughts("<|inner_prefix|>", "<|inner_suffix|>", False),
}

CALLS = {
    # Hermes, Qwen 2 to 3.5, Qwen3-Coder, GLM 4.x, SmolLM3, Granite 4, Nemotron 3, MiMo
    "tool_call": _calls(
        *("<tool_call>", "</tool_call>"),
        body=regex.compile(r"\s{0,16}(?:[\[{<]|[\w.-]{1,128}\s{0,8}<(?:arg_key|/tool_call)>)"),
    ),
    "mistral": CallFormat(
        (_region("call", r"\[TOOL_CALLS\]", r"(?=\[TOOL_CALLS\])"),),
        ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"),
        ("[TOOL_CALLS]",),
    ),
    "harmony": CallFormat(
        (
            _region(
                "call",
                rf"{STARTED} ?(?:{RECIPIENT.format('name')} ?<\|channel\|>\w{{1,16}}"
                rf"|<\|channel\|>\w{{1,16}} ?{RECIPIENT.format('other')}){MESSAGE}",
                r"<\|call\|>|(?=<\|start\|>)",
            ),
        ),
        ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|call|>", "<|end|>"),
        ("<|channel|>", "<|call|>"),
    ),
    "deepseek": CallFormat(
        (_region("call", r"<｜tool▁calls▁begin｜>|(?=<｜tool▁call▁begin｜>)", r"<｜tool▁calls▁end｜>"),),
        (
            *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
            "<｜tool▁sep｜>",
        ),
        ("<｜tool▁calls▁begin｜>",),
    ),
    "deepseek-tags": CallFormat(
        (_region("call", r"<｜DSML｜(?:function|tool)_calls>", r"</｜DSML｜(?:function|tool)_calls>"),),
        ("｜DSML｜",),
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
            _region("call", r"<\|python_tag\|>", r"<\|eom_id\|>|<\|eot_id\|>"),
            _region("call", r"<\|python_start\|>", r"<\|python_end\|>"),
            _region("call", r"(?=<function=)", r"(?<=</function>)"),
            _region(
                "call",
                r'(?=\[?\s{0,8}\{\s{0,8}"(?:name|type|function)"\s{0,8}:)',
                begins_answer=True,
                is_bare=True,
            ),
            _region("call", r"(?=\[[A-Za-z_][\w.]{0,127}\()", begins_answer=True, is_bare=True),
        ),
        ("<|python_tag|>", "<|python_start|>", "<|python_end|>"),
        ("<|python_tag|>",),
    ),
}
FORCED_CALL = _region("call", r"(?=[\[{])", begins_answer=True)
DEFAULT_FORMATS = AnswerFormats("think", "tool_call")


def find_thoughts(written: str) -> str:
    """Name the format of thoughts whose marks stand in a template or are tokens; the usual one where none do."""
    return _find_marked(THOUGHTS, written) or DEFAULT_FORMATS.thoughts


def find_calls(reads: Callable[[str], bool], written: str) -> str:
    """Name the first format by which the call can be read that a template wrote.

    Some templates write none, and only say how to: the marks that they name count then.
    """
    return next(filter(reads, CALLS), None) or _find_marked(CALLS, written) or DEFAULT_FORMATS.calls


def _find_marked(formats: Mapping[str, ThoughtFormat | CallFormat], written: str) -> str | None:
    """Name the first format whose marks are written, the usual ones last."""
    names = sorted(formats, key=lambda name: name in DEFAULT_FORMATS)
    return next((name for name in names if all(token in written for token in formats[name].seen_by)), None)
