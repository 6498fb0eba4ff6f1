"""Which format a chat template writes, found by trying, and what becomes of calls that a template leaves out."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

import pytest
from transformers import AutoTokenizer

from swarmd.client.text.answer_formats import CALLS, DEFAULT_FORMATS, THOUGHTS, AnswerFormats
from swarmd.client.text.answer_reader import AnswerReader
from swarmd.client.text.chat_template import ChatTemplate
from swarmd.client.text.prompts import answer
from swarmd.home.models import bundled_folder
from tests.client.text.families import FAMILIES


class WritingTokenizer:
    """A tokenizer whose chat template writes calls as a family does."""

    def __init__(self, family: str) -> None:
        self.family = FAMILIES[family]
        self.chat_template = "{{ messages }}{{ tools }}" + THOUGHTS[self.family.thoughts].opens
        self.chat_template += "".join(THOUGHTS[self.family.thoughts].tokens)
        names = {"<|end|>", "<|head|>", *self.family.formats.tokens} - {""}
        self.added_tokens_decoder = {
            place: type("Token", (), {"special": True, "__str__": lambda _, name=name: name})()
            for place, name in enumerate(sorted(names))
        }

    def get_chat_template(self) -> str:
        return self.chat_template

    def apply_chat_template(self, turns: Sequence[dict[str, Any]], **options: Any) -> str:
        written = "".join(f"<|head|>{turn['role']}<|head|>{self._write(turn)}<|end|>" for turn in turns)
        return written + ("<|head|>assistant<|head|>" if options["add_generation_prompt"] else "")

    def _write(self, turn: dict[str, Any]) -> str:
        functions = [call["function"] for call in turn.get("tool_calls", ())]
        calls = [
            (function["name"], json.loads(arguments) if isinstance(arguments, str) else arguments)
            for function in functions
            for arguments in [function["arguments"]]
        ]
        return str(turn["content"]) + (self.family.write(calls) if calls else "")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_format_is_the_one_by_which_what_a_template_writes_can_be_read(family: str) -> None:
    assert ChatTemplate(WritingTokenizer(family)).formats == FAMILIES[family].formats


def make(template: str, tokens: Sequence[str] = ()) -> tuple[Any, ChatTemplate]:
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder())
    tokenizer.add_special_tokens({"additional_special_tokens": list(tokens)})
    tokenizer.chat_template = template
    return tokenizer, ChatTemplate(tokenizer)


TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if tools %}HOW{% endif %}<assistant>"


@pytest.mark.parametrize(
    ("template", "tokens", "expected"),
    [
        (TURNS, (), DEFAULT_FORMATS),
        (TURNS.replace("HOW", "write <|tool_call|> before it"), (), AnswerFormats("think", "granite")),
        (TURNS, ("<|tool_call_start|>",), AnswerFormats("think", "lfm")),
        (TURNS.replace("{% if tools %}HOW{% endif %}", ""), ("<|python_tag|>",), DEFAULT_FORMATS),
        ("", ("<seed:think>", "</seed:think>"), AnswerFormats("seed", "tool_call")),
    ],
    ids=["nothing said", "named by the template", "a token", "a token, but no tools", "no template"],
)
def test_a_template_that_writes_no_calls_names_their_marks_or_its_vocabulary_does(
    template: str, tokens: tuple[str, ...], expected: AnswerFormats
) -> None:
    assert make(template, tokens)[1].formats == expected


def conversation() -> list[dict[str, Any]]:
    function = {"name": "weather", "arguments": '{"where": "Rome"}'}
    return [
        {"role": "user", "content": "Is it warm?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [{"id": "c1", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny"},
        {"role": "tool", "tool_call_id": "c2", "content": "Dry"},
    ]


NO_TOOLS = (
    "{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('no ' + m.role) }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)
CALL = '<tool_call>\n{"name": "weather", "arguments": {"where": "Rome"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (
            NO_TOOLS,
            f"<assistant>I look.\n{CALL}<user><tool_response>\nSunny\n</tool_response><user><tool_response>\nDry\n",
        ),
        (TURNS, f"<assistant>I look.\n{CALL}<tool>Sunny<tool>Dry"),
        (
            TURNS.replace("HOW", "<|tool_call|>"),
            "I look.\n<|tool_call|>\n" + CALL[12:-13] + "\n<|/tool_call|><tool>Sunny",
        ),
    ],
    ids=["neither calls nor results", "no calls", "no calls of a family"],
)
def test_what_a_template_leaves_out_of_past_calls_is_said_as_talk(template: str, shown: str) -> None:
    tokenizer, made = make(template)
    reply = answer(tokenizer, made, {"messages": conversation(), "tools": None, "options": {}})
    assert "error" not in reply, reply
    assert shown in tokenizer.decode(reply["ids"])


def test_every_format_of_calls_has_a_family_here() -> None:
    assert {family.calls for family in FAMILIES.values()} == set(CALLS)


ENDS = {
    "think": "</think>",
    "harmony": "<|end|><|start|>assistant<|channel|>final <|constrain|>json<|message|>",
    "mistral": "[/THINK]",
    "gemma": "<channel|>",
    "command": "<|END_THINKING|>",
    "seed": "</seed:think>",
    "kimi-k3": "<|close|>think<|sep|><|open|>response<|sep|>",
    "apertus": "<|inner_suffix|>",
}


@pytest.mark.parametrize("name", THOUGHTS)
def test_a_prompt_that_begins_thoughts_is_known_by_its_end(name: str) -> None:
    formats = AnswerFormats(name, "tool_call")
    opens = THOUGHTS[name].opens
    assert formats.is_thinking(f"<assistant>{opens}\n")
    assert not formats.is_thinking(f"{opens} is what a user wrote<assistant>")
    assert formats.is_thinking("", continued=f"{opens}I am not d")
    assert not formats.is_thinking("", continued=f"{opens}Done.{ENDS[name]}So")
    assert not formats.is_thinking("", continued=f"A model writes {opens} first, and")
    assert re.search(formats.answer_mark(is_thinking=True, is_continued=False), ENDS[name])
    assert not formats.answer_mark(is_thinking=False, is_continued=True)


@pytest.mark.parametrize("name", CALLS)
def test_a_call_that_is_said_as_talk_can_be_read_again(name: str) -> None:
    before, behind = CALLS[name].marks
    reader = AnswerReader(AnswerFormats("think", name).regions, [{"name": "f"}])
    parts = [*reader.feed(f'{before}\n{{"name": "f", "arguments": {{"n": 1}}}}\n{behind}'), *reader.end()]
    assert [(part.name, part.text) for part in parts] == [("f", '{"n": 1}')]


def test_a_result_whose_call_is_gone_is_said_as_talk() -> None:
    tokenizer, made = make(NO_TOOLS)
    turns = [turn for turn in conversation() if turn["role"] != "assistant"]
    reply = answer(tokenizer, made, {"messages": turns, "tools": None, "options": {}})
    assert "<tool_response>\nSunny" in tokenizer.decode(reply["ids"])


def test_a_template_may_write_a_call_of_any_length() -> None:
    wide = "{% for c in messages[-1].tool_calls or [] %}<tool_call>{{ c.function }}{{ '\n' * 50000 }}x{% endfor %}"
    assert make(TURNS + wide)[1].formats == DEFAULT_FORMATS
