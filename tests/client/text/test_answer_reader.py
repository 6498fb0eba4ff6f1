"""Answers of the families that people run: text, thoughts and calls as they are meant, however the text is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarmd.client.text.answer_formats import CALLS, DEFAULT_FORMATS, THOUGHTS, AnswerFormats
from swarmd.client.text.answer_reader import AnswerPart, AnswerReader
from tests.client.text.families import FAMILIES, STAND_ALONE, Asked, as_json

PROPERTIES = {
    "text": {"type": "string"},
    "n": {"type": "integer"},
    "share": {"type": ["number", "null"]},
    "flag": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    "items": {"type": "array"},
    "more": {"type": "object"},
}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"properties": PROPERTIES}}}
    for name in ("write", "now", "read_all")
]


def read(
    text: str, formats: AnswerFormats = DEFAULT_FORMATS, step: int = 7, was_cut: bool = False, **more: Any
) -> list[AnswerPart]:
    """The parts of an answer that comes ``step`` characters at a time; text that follows text is one part."""
    reader = AnswerReader(formats.regions, more.pop("tools", TOOLS), **more)
    parts = [part for start in range(0, len(text), step) for part in reader.feed(text[start : start + step])]
    return join([*parts, *reader.end(was_cut)])


def join(parts: list[AnswerPart]) -> list[AnswerPart]:
    joined: list[AnswerPart] = []
    for part in parts:
        if part.kind != "call" and joined and joined[-1].kind == part.kind:
            part = AnswerPart(part.kind, joined.pop().text + part.text)
        joined.append(part)
    return joined


def content(text: str) -> list[AnswerPart]:
    return [AnswerPart("content", text)]


def thoughts(text: str) -> list[AnswerPart]:
    return [AnswerPart("reasoning", text)]


def call(arguments: str, name: str = "write") -> AnswerPart:
    return AnswerPart("call", arguments, name)


MARKS = {
    "harmony": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "gemma": ("<|channel>thought\n", "<channel|>"),
    "command": ("<|START_THINKING|>", "<|END_THINKING|><|START_RESPONSE|>"),
    "seed": ("<seed:think>", "</seed:think>"),
    "kimi-k3": ("<|open|>think<|sep|>", "<|close|>think<|sep|><|open|>response<|sep|>"),
    "apertus": ("<|inner_prefix|>", "<|inner_suffix|>"),
}


# --- each family, as its models write ------------------------------------------------------------------------------

ARGUMENTS: list[dict[str, Any]] = [
    {"text": "a"},
    {"n": 3},
    {"text": "3", "n": -12, "flag": True},
    {"share": 0.5, "flag": None},
    {"text": "def f(x):\n    return {'a': [1, 2]}  # \"quoted\"\n\tend", "n": 0},
    {"text": "  é 😀 日本語 \u2028"},
    {"items": [1, "two", {"three": [3, None]}], "more": {"a": {"b": {}}}},
    {"text": "if a < b and c > d: print('</p> & }]')"},
    {"more": {"path": "C:\\new\\table", "n": 1000.5}},
]
OUTPUTS: list[list[Asked]] = [
    *([("write", arguments)] for arguments in ARGUMENTS),
    [("now", {})],
    [("now", {}), ("write", {"text": "a"})],
    [("write", {"text": "a"}), ("read_all", {"items": ["x"]}), ("write", {"n": 2})],
]


def expected(calls: list[Asked]) -> list[AnswerPart]:
    return [call(as_json(arguments), name) for name, arguments in calls]


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_read_as_each_family_writes_them(name: str) -> None:
    family = FAMILIES[name]
    for calls in OUTPUTS:
        written = family.write(calls)
        for step in (1, 3, 11, 100_000):
            assert read(written, family.formats, step) == expected(calls), written
            if name not in STAND_ALONE:
                assert read(f"So.{written}\n", family.formats, step) == [*content("So."), *expected(calls)]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_call_that_is_cut_anywhere_is_whole_or_text(name: str) -> None:
    family = FAMILIES[name]
    for calls in OUTPUTS:
        written = family.write(calls)
        for n_written in range(len(written)):
            parts = read(written[:n_written], family.formats, 100_000, was_cut=True)
            assert parts == read(written[:n_written], family.formats, 1, was_cut=True)
            called = [part for part in parts if part.kind == "call"]
            assert called == expected(calls)[: len(called)]
            if not called and "<|" not in written:  # special marks of parts are left out
                assert "".join(part.text for part in parts) == written[:n_written]


@pytest.mark.parametrize("name", FAMILIES)
def test_without_tools_what_looks_like_a_call_is_text(name: str) -> None:
    family = FAMILIES[name]
    written = family.write(OUTPUTS[0])
    parts = read(written, family.formats, tools=None)
    assert [part.kind for part in parts] == ["content"]


@pytest.mark.parametrize(("name", "marks"), [("think", ("<think>\n", "\n</think>\n\n")), *MARKS.items()])
def test_thoughts_are_read_as_each_family_writes_them(name: str, marks: tuple[str, str]) -> None:
    formats = AnswerFormats(name, "tool_call")
    opens, closes = marks
    for written in ("a word", "two\n\nlines", "<b> é 😀 < |", "1 < 2 </thin> <|x"):
        for step in (1, 4, 1_000):
            whole = f"{opens}{written}{closes}"
            assert read(f"{whole}So.", formats, step) == [*thoughts(written), *content("So.")]
            assert read(f"{whole}", formats, step) == thoughts(written)
            assert read(f"{written}{closes}So.", formats, step, is_thinking=True) == [
                *thoughts(written),
                *content("So."),
            ]
            assert read(f"{opens}{written}", formats, step) == thoughts(written), "no end of them"


def test_an_answer_of_gpt_oss_has_no_marks_left() -> None:
    formats = AnswerFormats("harmony", "harmony")
    first = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    called = '<|start|>assistant<|channel|>commentary to=functions.write <|constrain|>json<|message|>{"n": 1}'
    spoken = "<|channel|>final<|message|>Phi ends turns with <|end|>, see?<|end|>"
    assert read(spoken, formats, 5) == content("Phi ends turns with <|end|>, see?")
    preamble = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>final json<|message|>Done."
    assert read(preamble, formats, 5) == content("I look.\n\nDone.")
    assert read("redirect_to=functions.home leads home", formats, 5) == content("redirect_to=functions.home leads home")
    last = "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    assert read(first + called, formats, 5) == [*thoughts("hm"), *content("I look."), call('{"n": 1}')]
    assert read(last, formats, 5) == [*thoughts("so"), *content("Done.")]


def test_a_call_in_thoughts_that_never_end_is_made_and_one_that_is_only_thought_of_is_not() -> None:
    written = '<tool_call>\n{"name": "now"}\n</tool_call>'
    assert read(f"<think>I call. {written}") == [*thoughts(f"I call. {written}"), call("{}", "now")]
    assert read(f"<think>I call. {written}", was_cut=True) == thoughts(f"I call. {written}")
    assert read(f"<think>I call. {written}</think>No.") == [*thoughts(f"I call. {written}"), *content("No.")]


def test_who_explains_a_mark_of_thoughts_does_not_think() -> None:
    assert read("A model writes <think> first.") == content("A model writes <think> first.")


@pytest.mark.parametrize(
    "written", ['{"name": "Ann", "parameters": {}}', "[f(n=1)]", '{"name": "Ann"}', "[1, 2]", "{}"]
)
def test_an_answer_that_only_looks_like_a_call_is_none(written: str) -> None:
    assert read(written, AnswerFormats("think", "llama")) == content(written)


# --- what models get wrong -----------------------------------------------------------------------------------------

NEARLY = {
    "a comma after the last": '{"name": "write", "arguments": {"text": "a",}}',
    "a line break in a string": '{"name": "write", "arguments": {"text": "a"\n}}',
    "single quotes": "{'name': 'write', 'arguments': {'text': 'a'}}",
    "arguments as text": '{"name": "write", "arguments": "{\\"text\\": \\"a\\"}"}',
    "parameters": '{"name": "write", "parameters": {"text": "a"}}',
    "as OpenAI has it": '{"type": "function", "function": {"name": "write", "arguments": {"text": "a"}}}',
    "in a list": '[{"name": "write", "arguments": {"text": "a"}}]',
    "without its end": '{"name": "write", "arguments": {"text": "a"}}',
}


@pytest.mark.parametrize("fault", NEARLY)
def test_a_call_that_is_nearly_right_is_read(fault: str) -> None:
    end = "" if fault == "without its end" else "\n</tool_call>"
    assert read(f"<tool_call>\n{NEARLY[fault]}{end}") == [call('{"text": "a"}')]


def test_a_call_without_arguments_has_none() -> None:
    for arguments in ("", ', "arguments": null', ', "arguments": ""', ', "arguments": {}'):
        assert read(f'<tool_call>{{"name": "now"{arguments}}}</tool_call>') == [call("{}", "now")]


def test_a_line_break_within_a_text_stays() -> None:
    written = '<tool_call>{"name": "write", "arguments": {"text": "a\nb\tc"}}</tool_call>'
    assert read(written) == [call('{"text": "a\\nb\\tc"}')]


def test_texts_are_read_as_the_schema_has_them() -> None:
    def given_as(arguments: dict[str, Any]) -> str:
        return f'<tool_call>{{"name": "write", "arguments": {json.dumps(arguments)}}}</tool_call>'

    texts = {"n": "3", "share": "null", "flag": "True", "items": "[1, 'a']", "more": '{"a": 1}', "text": "3", "x": "3"}
    meant = {"n": 3, "share": None, "flag": True, "items": [1, "a"], "more": {"a": 1}, "text": "3", "x": "3"}
    assert read(given_as(texts)) == [call(as_json(meant))]
    assert read(given_as({"n": "3.0"})) == [call('{"n": 3}')]
    wrong = {"n": "many", "share": "half", "flag": "perhaps", "items": "1", "more": "[]"}
    assert read(given_as(wrong)) == [call(as_json(wrong))], "who called sees what it did wrong"


BROKEN = {
    "cut by its length": '<tool_call>\n{"name": "write", "arguments": {"text": "one line and another li',
    "cut in its mark": "<tool_ca",
    "nothing": "<tool_call>\n</tool_call>",
    "only a text": '<tool_call>\n"write"\n</tool_call>',
    "no name": '<tool_call>\n{"arguments": {"text": "a"}}\n</tool_call>',
    "a name that is none": '<tool_call>\n{"name": 5, "arguments": {"text": "a"}}\n</tool_call>',
    "arguments in a list": '<tool_call>\n{"name": "write", "arguments": [1]}\n</tool_call>',
    "arguments that are text": '<tool_call>\n{"name": "write", "arguments": "a"}\n</tool_call>',
    "a number that JSON lacks": '<tool_call>\n{"name": "write", "arguments": {"n": NaN}}\n</tool_call>',
    "half a surrogate pair": '<tool_call>\n{"name": "write", "arguments": {"text": "\\ud83d"}}\n</tool_call>',
    "too deep": "<tool_call>\n" + "[" * 100_000 + "\n</tool_call>",
    "too deep for Python": "<tool_call>\n{'name': 'write', 'arguments': {'n': " + "-" * 10_000 + "1}}\n</tool_call>",
    "a program": "<tool_call>[write(text=open('/etc/passwd').read())]</tool_call>",
    "words between tags": "<tool_call>\n<function=write>\nI write a\n</function>\n</tool_call>",
    "a tag within a value": (
        "<tool_call>\n<function=write>\n<parameter=text>\na</parameter>\nb</parameter>\n</function>\n</tool_call>"
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_a_broken_call_is_the_text_that_the_model_wrote(fault: str) -> None:
    step = 10_000 if fault.startswith("too deep") else 7
    assert read(f"I write. {BROKEN[fault]}", step=step) == content(f"I write. {BROKEN[fault]}")


def as_call(arguments: str) -> str:
    return f'<tool_call>{{"name": "write", "arguments": {arguments}}}</tool_call>'


def in_tags(body: str) -> str:
    return f"<tool_call><function=write>{body}</function></tool_call>"


@pytest.mark.parametrize(
    "written",
    [
        as_call('{"text": "open(p, "r")"}'),
        as_call('{"text": "say "u" x"}'),
        as_call('{"n": 1, "n": 2}'),
        '<tool_call>{"name": "write", "text": "important"}</tool_call>',
        '<tool_call>{"name": "write", "arguments": {}, "parameters": {"n": 1}}</tool_call>',
        in_tags("<parameter=n>1</parameter><parameter=n>2</parameter>"),
        "<tool_call>no_such_tool</tool_call>",
        "<tool_call>...</tool_call>",
        "<tool_call>[(lambda: 1)(n=1)]</tool_call>",
    ],
)
def test_what_could_mean_something_else_is_text(written: str) -> None:
    assert read(f"I write. {written}") == content(f"I write. {written}")


@pytest.mark.parametrize("written", ['{"name": "now", "age": 5}', '{"name": "write", "description": "it writes"}'])
def test_an_object_with_a_tools_name_is_no_call_without_arguments(written: str) -> None:
    assert read(written, AnswerFormats("think", "llama")) == content(written)


def test_a_mark_that_is_only_spoken_of_hides_no_call_and_holds_back_nothing() -> None:
    good = '<tool_call>{"name": "now"}</tool_call>'
    assert read(f"Use <tool_call> for it: {good}") == [*content("Use <tool_call> for it:"), call("{}", "now")]
    assert read(f"<tool_call>{{broken {good}") == [*content("<tool_call>{broken"), call("{}", "now")]
    reader = AnswerReader(DEFAULT_FORMATS.regions, TOOLS)
    spoken = "Models write <tool_call> before a call, and more."
    assert join(reader.feed(spoken)) == content(spoken)
    often = "<tool_call>[ " * 100
    assert read(f"{often}{good}", step=1_000) == content(f"{often}{good}"), "at some point nobody calls any more"


def test_a_closing_mark_within_a_text_closes_nothing() -> None:
    assert read(as_call('{"text": "x</tool_call>y"}')) == [call('{"text": "x</tool_call>y"}')]
    broken = '<tool_call>{"name": "write", "arguments": {"text": "x</tool_call> y'
    assert read(broken) == content(broken)


REALLY: list[tuple[str, str, dict[str, Any]]] = [
    ("LFM 2", "<|tool_call_start|>[write(text='a\nb', n=1)]<|tool_call_end|>", {"text": "a\nb", "n": 1}),
    ("LFM 2", "<|tool_call_start|>[write(from='en', text='a=b')]<|tool_call_end|>", {"from": "en", "text": "a=b"}),
    ("Gemma 4", "<|tool_call>call:write{more:{a:None,b:[True,1]}}<tool_call|>", {"more": {"a": None, "b": [True, 1]}}),
    ("Gemma 4", '<|tool_call>call:write{text:<|"|>a <escape><|"|>}<tool_call|>', {"text": "a <escape>"}),
    (
        "Seed-OSS",
        "<seed:tool_call><function=write><parameter=text>a\n</parameter></function></seed:tool_call>",
        {"text": "a\n"},
    ),
    ("Qwen3-Coder and 3.5", in_tags("<parameter=text><function=f></parameter>"), {"text": "<function=f>"}),
    ("gpt-oss", '<|channel|>commentary to=write <|constrain|>json<|message|>{"n": 1}<|call|>', {"n": 1}),
    ("gpt-oss", '<|channel|>commentary to=functions.write<|message|>{"text": "<|end|>"}<|call|>', {"text": "<|end|>"}),
    ("Nemotron Nano 2", '<TOOLCALL>[{"name": "write", "arguments": {"text": "a\\/b",}}]</TOOLCALL>', {"text": "a/b"}),
    ("Kimi K2", as_call('{"text": "\\ud83d\\ude00",}'), {"text": "😀"}),
]


@pytest.mark.parametrize(("family", "written", "arguments"), REALLY)
def test_what_models_really_write_is_read(family: str, written: str, arguments: dict[str, Any]) -> None:
    assert read(written, FAMILIES[family].formats) == [call(as_json(arguments))]


def test_a_text_that_json_has_as_a_text_stays_one_where_it_may() -> None:
    schema = {
        "$defs": {"Point": {"properties": {"x": {"type": "integer"}}}},
        "properties": {
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "share": {"type": "number"},
            "point": {"$ref": "#/$defs/Point"},
            "one_of": {"enum": [1, 2]},
            "both": {"allOf": [{"type": "integer"}]},
        },
    }
    tools = [{"name": "write", "parameters": schema}]
    typed = {"maybe": "None", "share": "NaN", "point": '{"x": 1}', "one_of": "2", "both": "0x10"}
    meant = {"maybe": "None", "share": "NaN", "point": {"x": 1}, "one_of": 2, "both": "0x10"}
    assert read(as_call(as_json(typed)), tools=tools) == [call(as_json(meant))]
    tags = in_tags("<parameter=maybe>null</parameter><parameter=both>1e3</parameter>")
    assert read(tags, tools=tools) == [call('{"maybe": null, "both": 1000}')]
    deep: Any = {"type": "integer"}
    for _ in range(2_000):
        deep = {"anyOf": [deep]}
    tools = [{"name": "write", "parameters": {"properties": {"n": deep}}}]
    assert read(as_call('{"n": "1"}'), tools=tools) == [call('{"n": "1"}')]


N = 100_000
PAIR = "<arg_key>n</arg_key><arg_value>1</arg_value>"
LONG = {
    "line breaks behind a name": "<tool_call>write" + "\n" * N + "x</tool_call>",
    "line breaks before pairs": "<tool_call>write" + "\n" * N + f"{PAIR}</tool_call>",
    "a long name": "<tool_call>{" + "a" * N,
    "a long word": "<tool_call>[" + "a" * N + "</tool_call>",
    "tags that open": "<tool_call>" + "<function=a>" * (N // 12) + "</tool_call>",
    "arguments that open": "<tool_call><function=a>" + "<parameter=b>" * (N // 13) + "</function></tool_call>",
    "pairs that open": "<tool_call>f" + "<arg_key>a</arg_key><arg_value>" * (N // 30) + "</tool_call>",
    "quotes": "<tool_call>{" + '"' * N + "</tool_call>",
    "commas": "<tool_call>[" + "," * N + "</tool_call>",
    "half marks": "<tool_call" * (N // 10),
    "marks": "<tool_call>[" * (N // 12),
    "blanks": "a" + " " * N + "b",
    "blanks in a channel": "<|channel|>final" + " " * N + "<|message|>",
    "thoughts": "<think>" + "line\n" * (N // 5),
}


@pytest.mark.parametrize("kind", LONG)
@pytest.mark.parametrize("calls", ["tool_call", "llama", "harmony"])
def test_an_answer_of_a_hundred_thousand_letters_is_read_whatever_is_in_it(kind: str, calls: str) -> None:
    thinks = "harmony" if calls == "harmony" else "think"
    assert read(LONG[kind], AnswerFormats(thinks, calls), step=200)


def test_what_follows_a_broken_call_is_read_on() -> None:
    good = '<tool_call>\n{"name": "write", "arguments": {}}\n</tool_call>'
    assert read(f"<tool_call>{{</tool_call>{good}so") == [
        *content("<tool_call>{</tool_call>"),
        call("{}"),
        *content("so"),
    ]


@pytest.mark.parametrize("schema", [{"properties": {"n": {"anyOf": 5}}}, {"properties": 5}, 5, None, {}])
def test_a_tool_whose_schema_is_none_breaks_no_answer(schema: Any) -> None:
    tools = [{"type": "function", "function": {"name": "write", "parameters": schema}}]
    written = '<tool_call>{"name": "write", "arguments": {"n": "1"}}</tool_call>'
    assert read(written, tools=tools) == [call('{"n": "1"}')]


PIECES = st.sampled_from(
    [
        *(token for name in THOUGHTS for token in THOUGHTS[name].tokens),
        *(token for name in CALLS for token in CALLS[name].tokens if token),
        *("\n", "word ", '{"name": "write"}', "<function=write>", "</function>", "<parameter=n>", "</parameter>"),
        *("{", "}", '"', "[", "call:f", " to=functions.f", "commentary", "write(n=1)", "\x01", "<", "|"),
    ]
)


@given(
    st.lists(PIECES, max_size=12).map("".join),
    st.sampled_from(sorted(THOUGHTS)),
    st.sampled_from(sorted(CALLS)),
    st.integers(1, 9),
    st.booleans(),
)
def test_any_text_in_any_pieces_is_read_alike_and_keeps_its_words(
    text: str, thinks: str, calls: str, step: int, is_thinking: bool
) -> None:
    formats = AnswerFormats(thinks, calls)
    parts = read(text, formats, step, is_thinking=is_thinking)
    assert parts == read(text, formats, 1_000, is_thinking=is_thinking)
    assert sum(part.text.count("word") for part in parts) == text.count("word")


def test_a_forced_call_comes_behind_thoughts_and_one_that_was_cut_off_is_text() -> None:
    def read_forced(text: str, is_thinking: bool = False) -> list[AnswerPart]:
        reader = AnswerReader(DEFAULT_FORMATS.forced_regions, TOOLS, is_thinking)
        return join([*reader.feed(text), *reader.end()])

    for text in ('[{"name": "write", "argu', '[{"name": "write", "arguments": {"text": "\\ud83d"}}]', '"'):
        assert read_forced(text) == content(text)
    written = '[{"name": "write", "arguments": {"n": 1}}]'
    assert read_forced(written) == [call('{"n": 1}')]
    assert read_forced(f"hm</think>{written}", is_thinking=True) == [*thoughts("hm"), call('{"n": 1}')]
