"""What a model wrote for a call of a tool: a call where it is one, and otherwise the text itself, nothing lost."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.gateway.apis.parts import AnswerPart, MarkedParts, ToolCallParts, load_marks

TAIL = "<|im_start|>assistant\n"
GEMMA_TAIL = "<|turn>model\n"
PROPERTIES = {"text": {"type": "string"}, "n": {"type": "integer"}}
TOOLS = [{"type": "function", "function": {"name": "write", "parameters": {"properties": PROPERTIES}}}]
FAMILIES = {"qwen3": TAIL, "qwen3_5": TAIL, "gemma4": GEMMA_TAIL}


def read(text: str, family: str = "qwen3", tools: list[dict[str, Any]] = TOOLS, step: int = 7) -> list[AnswerPart]:
    """The parts of an answer that comes ``step`` characters at a time; text that follows text is one part."""
    marks = load_marks(family)
    assert marks
    reader = MarkedParts(marks, FAMILIES[family], tools)
    parts = [part for start in range(0, len(text), step) for part in reader.feed(text[start : start + step])]
    return join([*parts, *reader.end()])


def join(parts: list[AnswerPart]) -> list[AnswerPart]:
    joined: list[AnswerPart] = []
    for part in parts:
        if part.kind != "call" and joined and joined[-1].kind == part.kind:
            part = AnswerPart(part.kind, joined.pop().text + part.text)
        joined.append(part)
    return joined


def content(text: str) -> list[AnswerPart]:
    return [AnswerPart("content", text)]


def call(arguments: str, name: str = "write") -> AnswerPart:
    return AnswerPart("call", arguments, name)


def test_a_call_is_read() -> None:
    written = '\n<tool_call>\n{"name": "write", "arguments": {"text": "a"}}\n</tool_call>'
    assert read(f"I write.{written}{written}") == [*content("I write."), call('{"text": "a"}'), call('{"text": "a"}')]
    assert read('<tool_call>{"name": "now"}</tool_call>') == [call("{}", "now")]
    assert read('<tool_call>{"name": "now", "arguments": null}</tool_call>') == [call("{}", "now")]
    assert read('<tool_call>{"name": "write", "arguments": "{\\"n\\": 1}"}</tool_call>') == [call('{"n": 1}')]
    tags = "<tool_call>\n<function=write>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>"
    assert read(tags, "qwen3_5") == [call('{"n": 3}')]
    assert read('<|tool_call>call:write{text:<|"|>a<|"|>}<tool_call|>', "gemma4") == [call('{"text": "a"}')]


BROKEN = {
    "cut by its length": '<tool_call>\n{"name": "write", "arguments": {"text": "one line and another li',
    "cut in its mark": "<tool_ca",
    "a comma after the last": '<tool_call>\n{"name": "write", "arguments": {"text": "a",}}\n</tool_call>',
    "a line break in a string": '<tool_call>\n{"name": "write", "arguments": {"text": "a\nb"}}\n</tool_call>',
    "single quotes": "<tool_call>\n{'name': 'write', 'arguments': {'text': 'a'}}\n</tool_call>",
    "nothing": "<tool_call>\n</tool_call>",
    "only a text": '<tool_call>\n"write"\n</tool_call>',
    "no name": '<tool_call>\n{"arguments": {"text": "a"}}\n</tool_call>',
    "a name that is none": '<tool_call>\n{"name": 5, "arguments": {"text": "a"}}\n</tool_call>',
    "arguments in a list": '<tool_call>\n{"name": "write", "arguments": [1]}\n</tool_call>',
    "arguments that are text": '<tool_call>\n{"name": "write", "arguments": "a"}\n</tool_call>',
    "a number that JSON lacks": '<tool_call>\n{"name": "write", "arguments": {"n": NaN}}\n</tool_call>',
    "half a surrogate pair": '<tool_call>\n{"name": "write", "arguments": {"text": "\\ud83d"}}\n</tool_call>',
    "too deep": "<tool_call>\n" + "[" * 100_000 + "\n</tool_call>",
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_call_is_the_text_that_the_model_wrote(fault: str) -> None:
    step = 10_000 if fault == "too deep" else 7
    assert read(f"I write. {BROKEN[fault]}", step=step) == content(f"I write. {BROKEN[fault]}")


@pytest.mark.parametrize(
    "written",
    [
        "<tool_call>\n<function=write>\n<parameter=text>\none line and",
        "<tool_call>\n<function=write>\n<parameter=n>\n1\n</parameter>\n<parameter=text>\none line and",
        "<tool_call>\n<function=write>\n<parameter=n>\n1\n</parameter>\n",
        "<tool_call>\n<function=write>\n<parameter=text>\none line\n</function>\n</tool_call>",
        "<tool_call>\n<function=write>\n<parameter=text>\na</parameter>\nb</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=wri",
    ],
)
def test_tags_that_were_cut_off_are_no_call_with_fewer_arguments(written: str) -> None:
    assert read(f"I write. {written}", "qwen3_5") == content(f"I write. {written}")


@pytest.mark.parametrize("written", ['<|tool_call>call:write{text:<|"|>a', "<|tool_call>call:write{n:1,}<tool_call|>"])
def test_a_broken_call_of_another_dialect_is_text_too(written: str) -> None:
    assert read(written, "gemma4") == content(written)


def test_what_follows_a_broken_call_is_read_on() -> None:
    good = '<tool_call>\n{"name": "write", "arguments": {}}\n</tool_call>'
    assert read(f"<tool_call>{{</tool_call>{good}<think>hm</think>so<|im_end|>") == [
        *content("<tool_call>{</tool_call>"),
        call("{}"),
        AnswerPart("reasoning", "hm"),
        *content("so"),
    ]


def test_a_tool_whose_schema_is_none_breaks_no_answer() -> None:
    tools = [{"type": "function", "function": {"name": "write", "parameters": {"properties": {"n": {"anyOf": 5}}}}}]
    written = '<tool_call>{"name": "write", "arguments": {"n": 1}}</tool_call>'
    assert read(written, tools=tools) == content(written)


def test_a_prompt_that_opened_a_call_is_not_given_back() -> None:
    marks = load_marks("qwen3")
    assert marks
    reader = MarkedParts(marks, f'{TAIL}<tool_call>{{"name": "wr', TOOLS)
    assert join([*reader.feed('ite", "argum'), *reader.end()]) == content('ite", "argum')
    broken = MarkedParts(marks, "a user's <tool_call>{</tool_call> and no mark of a turn", TOOLS)
    assert join([*broken.feed("well"), *broken.end()]) == content("well")


PIECES = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "<|im_end|>", "\n", "word ", '{"name": "write"}'),
        *("<function=write>", "</function>", "<parameter=n>", "</parameter>", "{", "}", '"', "<|tool_call>call:f"),
        *("<tool_call|>", "<|channel>thought\n", "<channel|>", '<|"|>', "\x01"),
    ]
)


@given(st.lists(PIECES, max_size=12).map("".join), st.sampled_from(sorted(FAMILIES)), st.integers(1, 9))
def test_any_text_in_any_pieces_is_read_alike_and_keeps_its_words(text: str, family: str, step: int) -> None:
    parts = read(text, family, step=step)
    assert parts == read(text, family, step=1_000)
    assert sum(part.text.count("word") for part in parts) == text.count("word")


def test_a_forced_call_that_was_cut_off_is_text() -> None:
    for text in ('[{"name": "write", "argu', '[{"name": "write", "arguments": {"text": "\\ud83d"}}]', '"'):
        reader = ToolCallParts()
        assert [*reader.feed(text), *reader.end()] == content(text)
    reader = ToolCallParts()
    assert [*reader.feed('[{"name": "write", "arguments": {"n": 1}}]'), *reader.end()] == [call('{"n": 1}')]
