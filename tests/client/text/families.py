"""How families write calls of tools, as their authors' chat templates do: what readers have to read again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from swarmd.client.text.answer_formats import AnswerFormats

Asked = tuple[str, dict[str, Any]]
"""A function's name and its arguments."""
Writer = Callable[[list[Asked]], str]


class Family(NamedTuple):
    """The names of its formats, and how it writes calls."""

    thoughts: str
    calls: str
    write: Writer

    @property
    def formats(self) -> AnswerFormats:
        return AnswerFormats(self.thoughts, self.calls)


def as_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def listed(calls: list[Asked], name: str = "name", arguments: str = "arguments") -> str:
    return as_json([{name: function, arguments: values} for function, values in calls])


def each(form: str, write: Callable[[dict[str, Any]], str] = as_json, between: str = "") -> Writer:
    """Write calls one after the other: NAME, ARGUMENTS and PLACE stand for what they say."""

    def write_all(calls: list[Asked]) -> str:
        written = (
            form.replace("PLACE", str(place)).replace("NAME", name).replace("ARGUMENTS", write(arguments))
            for place, (name, arguments) in enumerate(calls)
        )
        return between.join(written)

    return write_all


def within(before: str, write: Writer, behind: str) -> Writer:
    return lambda calls: f"{before}{write(calls)}{behind}"


KINDS = {str: "string", bool: "boolean", int: "number", float: "number", dict: "object", list: "array"}


def tags(form: str) -> Callable[[dict[str, Any]], str]:
    """Write arguments between tags, texts as they are: KEY, VALUE, IS_TEXT and KIND stand for what they say."""

    def write(arguments: dict[str, Any]) -> str:
        return "".join(
            form.replace("KEY", key)
            .replace("IS_TEXT", as_json(isinstance(value, str)))
            .replace("KIND", KINDS.get(type(value), "null"))
            .replace("VALUE", value if isinstance(value, str) else as_json(value))
            for key, value in arguments.items()
        )

    return write


def braces(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{braces(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(braces, value)) + "]"
    return as_json(value)


def escaped_braces(value: Any) -> str:
    return braces(value).replace('<|"|>', "<escape>")


def named(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{key}={value!r}" for key, value in arguments.items())


SECTION = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"
DEEPSEEK = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
LLAMA = each('{"name": "NAME", "parameters": ARGUMENTS}', between="; ")
FAMILIES = {
    "Hermes, Qwen 2.5 and 3, SmolLM3, Granite 4": Family(
        "think", "tool_call", each('<tool_call>\n{"name": "NAME", "arguments": ARGUMENTS}\n</tool_call>', between="\n")
    ),
    "Qwen3-Coder and 3.5": Family(
        "think",
        "tool_call",
        each(
            "\n<tool_call>\n<function=NAME>\nARGUMENTS</function>\n</tool_call>",
            tags("<parameter=KEY>\nVALUE\n</parameter>\n"),
        ),
    ),
    "GLM 4.6": Family(
        "think",
        "tool_call",
        each(
            "\n<tool_call>NAME\nARGUMENTS</tool_call>",
            tags("<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"),
        ),
    ),
    "Mistral 7B v0.3": Family("mistral", "mistral", within("[TOOL_CALLS] ", listed, "")),
    "Mistral Small 3.2": Family("mistral", "mistral", each("[TOOL_CALLS]NAME[CALL_ID]abcPLACE[ARGS]ARGUMENTS")),
    "Devstral": Family("mistral", "mistral", each("[TOOL_CALLS]NAMEARGUMENTS")),
    "gpt-oss": Family(
        "harmony",
        "harmony",
        each("<|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>ARGUMENTS<|call|>"),
    ),
    "gpt-oss, the recipient first": Family(
        "harmony",
        "harmony",
        each("<|start|>assistant to=functions.NAME<|channel|>commentary json<|message|>ARGUMENTS<|call|>"),
    ),
    "DeepSeek V3 and R1": Family(
        "think",
        "deepseek",
        within(
            DEEPSEEK[0],
            each(
                "<｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\nARGUMENTS\n```<｜tool▁call▁end｜>",
                between="\n",
            ),
            DEEPSEEK[1],
        ),
    ),
    "DeepSeek V3.1": Family(
        "think",
        "deepseek",
        within(DEEPSEEK[0], each("<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>ARGUMENTS<｜tool▁call▁end｜>"), DEEPSEEK[1]),
    ),
    "DeepSeek V3.2": Family(
        "think",
        "deepseek-tags",
        within(
            "\n\n<｜DSML｜function_calls>\n",
            each(
                '<｜DSML｜invoke name="NAME">\nARGUMENTS</｜DSML｜invoke>\n',
                tags('<｜DSML｜parameter name="KEY" string="IS_TEXT">VALUE</｜DSML｜parameter>\n'),
            ),
            "</｜DSML｜function_calls>",
        ),
    ),
    "Kimi K2": Family(
        "think",
        "kimi",
        within(
            SECTION[0],
            each("<|tool_call_begin|>functions.NAME:PLACE<|tool_call_argument_begin|>ARGUMENTS<|tool_call_end|>"),
            SECTION[1],
        ),
    ),
    "Kimi K3": Family(
        "kimi-k3",
        "kimi-k3",
        within(
            "<|open|>tools<|sep|>",
            each(
                '<|open|>call tool="NAME" index="PLACE"<|sep|>ARGUMENTS<|close|>call<|sep|>',
                tags('<|open|>argument key="KEY" type="KIND"<|sep|>VALUE<|close|>argument<|sep|>'),
            ),
            "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>",
        ),
    ),
    "Gemma 4": Family("gemma", "gemma", each("<|tool_call>call:NAMEARGUMENTS<tool_call|>", braces)),
    "FunctionGemma": Family(
        "think",
        "function-gemma",
        each("<start_function_call>call:NAMEARGUMENTS<end_function_call>", escaped_braces),
    ),
    "Granite 3": Family("think", "granite", within("<|tool_call|>", listed, "")),
    "Phi-4 mini": Family("think", "granite", within("<|tool_call|>", listed, "<|/tool_call|>")),
    "LFM 2": Family(
        "think", "lfm", within("<|tool_call_start|>[", each("NAME(ARGUMENTS)", named, ", "), "]<|tool_call_end|>")
    ),
    "MiniMax M2": Family(
        "think",
        "minimax",
        within(
            "\n<minimax:tool_call>\n",
            each('<invoke name="NAME">\nARGUMENTS</invoke>\n', tags('<parameter name="KEY">VALUE</parameter>\n')),
            "</minimax:tool_call>",
        ),
    ),
    "Seed-OSS": Family(
        "seed",
        "seed",
        each(
            "<seed:tool_call>\n<function=NAME>\nARGUMENTS</function>\n</seed:tool_call>",
            tags("<parameter=KEY>VALUE</parameter>\n"),
        ),
    ),
    "Nemotron Nano 2": Family("think", "nemotron", within("<TOOLCALL>", listed, "</TOOLCALL>")),
    "Hunyuan, Apriel": Family("think", "tool_calls", within("<tool_calls>", listed, "</tool_calls>")),
    "Olmo 3": Family(
        "think", "olmo", within("<function_calls>", each("NAME(ARGUMENTS)", named, "\n"), "</function_calls>")
    ),
    "Command A": Family(
        "command",
        "command",
        within("<|START_ACTION|>", lambda calls: listed(calls, "tool_name", "parameters"), "<|END_ACTION|>"),
    ),
    "Apertus": Family(
        "apertus",
        "apertus",
        within(
            "<|tools_prefix|>", lambda calls: as_json([{name: values} for name, values in calls]), "<|tools_suffix|>"
        ),
    ),
    "Llama 3.1, with its tag": Family("think", "llama", within("<|python_tag|>", LLAMA, "")),
    "Llama 3.1, between functions": Family("think", "llama", each("<function=NAME>ARGUMENTS</function>")),
    "Llama 3.1": Family("think", "llama", LLAMA),
    "Llama 4": Family("think", "llama", within("[", each("NAME(ARGUMENTS)", named, ", "), "]")),
}
STAND_ALONE = ("Llama 3.1", "Llama 4")
"""Those that write no mark: text before makes it text."""
