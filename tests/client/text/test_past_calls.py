"""Past calls of tools, as the chat templates of several families take them (in our own words), in one process."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoTokenizer

from swarmd.client.text.chat_template import ChatTemplate
from swarmd.client.text.prompts import answer
from swarmd.home.models import bundled_folder

END = "<|end|>"
TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}CALLS" + END + "{% endfor %}<assistant>"
OBJECT = {"where": "Rome", "days": [1, 2]}
TEXT = json.dumps(OBJECT)
LONG = "call_0123456789abcdef01234567"


def each_call(written: str) -> str:
    loop = "{% for c in m.tool_calls %}{% set f = c.function %}" + written + "{% endfor %}"
    return TURNS.replace("CALLS", "{% if m.tool_calls %}" + loop + "{% endif %}")


def refuse(condition: str, reason: str) -> str:
    return "{% if " + condition + " %}{{ raise_exception('" + reason + "') }}{% endif %}"


MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.tool_calls %}[TOOL_CALLS]["
    + (
        "{% for c in m.tool_calls %}"
        + refuse("c.id is not defined or c.id | length != 9", "ids of calls have 9 letters")
        + "{{ dict(c.function, id=c.id) | tojson }}{% endfor %}]"
    )
    + "{% elif m.role == 'tool' %}"
    + refuse("m.tool_call_id | length != 9", "ids of calls have 9 letters")
    + "[RESULT]{{ m.tool_call_id }} {{ m.content }}[/RESULT]{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
FAMILIES: dict[str, tuple[str, str]] = {
    "as Qwen 2.5 and Hermes": (
        each_call('<call>{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}</call>'),
        '<call>{"name": "weather", "arguments": ' + TEXT + "}</call>",
    ),
    "as Qwen 3": (
        each_call("{% if f.arguments is string %}{{ f.arguments }}{% else %}{{ f.arguments | tojson }}{% endif %}"),
        TEXT,
    ),
    "as Qwen 3.5 and GLM": (
        each_call(
            "<f={{ f.name }}>{% for k, v in f.arguments | items %}<p={{ k }}>{{ v if v is string else v | tojson }}</p>"
            "{% endfor %}</f>"
        ),
        "<f=weather><p=where>Rome</p><p=days>[1, 2]</p></f>",
    ),
    "by a method of objects": (
        each_call("{% for k, v in f.arguments.items() %}{{ k }}={{ v }};{% endfor %}"),
        "where=Rome;days=[1, 2];",
    ),
    "as Llama 3.1": (
        TURNS.replace(
            "CALLS",
            "{% if m.tool_calls %}"
            + refuse("m.tool_calls | length != 1", "one call at once")
            + '{"name": "{{ m.tool_calls[0].function.name }}", "parameters": '
            "{{ m.tool_calls[0].function.arguments | tojson }}}{% endif %}",
        ),
        '{"name": "weather", "parameters": ' + TEXT + "}",
    ),
    "as DeepSeek": (
        each_call("{{ f.name + '\n```json\n' + f.arguments + '\n```' }}"),
        f"weather\n```json\n{TEXT}\n```",
    ),
    "text as it is": (each_call("{{ f.name }}({{ f.arguments }})"), f"weather({TEXT})"),
    "as Mistral": (MISTRAL, '[TOOL_CALLS][{"name": "weather", "arguments": ' + TEXT),
    "parts only": (
        each_call("{{ f.arguments | tojson }}").replace(
            "{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}"
        ),
        TEXT,
    ),
    "no calls at all": (TURNS.replace("CALLS", ""), "<assistant>"),
}


def make(template: str) -> tuple[Any, ChatTemplate]:
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder())
    tokenizer.chat_template = template
    return tokenizer, ChatTemplate(tokenizer)


def conversation(arguments: Any, call_id: str = LONG) -> list[dict[str, Any]]:
    call = {"id": call_id, "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [
        {"role": "user", "content": "Is it warm?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "Sunny", "tool_call_id": call_id},
    ]


def render(template: str, messages: list[dict[str, Any]], tools: list[Any] | None = None) -> str:
    tokenizer, chat_template = make(template)
    reply = answer(tokenizer, chat_template, {"messages": messages, "tools": tools, "options": {}})
    return reply["error"] if "error" in reply else str(tokenizer.decode(reply["ids"]))


@pytest.mark.parametrize("arguments", [TEXT, OBJECT])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_past_call_is_written_as_the_model_wrote_it(family: str, arguments: Any) -> None:
    template, expected = FAMILIES[family]
    shown = render(template, conversation(arguments))
    assert expected in shown
    assert "Sunny" in shown


@pytest.mark.parametrize("arguments", ["", None, "{}"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_function_without_arguments_was_called(family: str, arguments: Any) -> None:
    assert "Sunny" in render(FAMILIES[family][0], conversation(arguments))


@pytest.mark.parametrize("arguments", ['{"where": "Ro', "[1]", '"{}"', 5, "Rome", "[" * 5_000])
def test_arguments_that_are_no_object_are_refused_in_a_sentence_where_one_is_wanted(arguments: Any) -> None:
    for family in ("as Qwen 2.5 and Hermes", "as Qwen 3.5 and GLM", "as Llama 3.1"):
        shown = render(FAMILIES[family][0], conversation(arguments))
        assert shown.startswith("a past call of weather has the arguments ")
        assert "takes a JSON object" in shown
    if isinstance(arguments, str):
        assert arguments in render(FAMILIES["as DeepSeek"][0], conversation(arguments)), "as the client sent it"


def test_ids_are_short_and_belong_together_where_a_template_wants_that() -> None:
    shown = render(MISTRAL, conversation(TEXT))
    short_id = shown.partition("[RESULT]")[2].split(" ")[0]
    assert len(short_id) == 9
    assert f'"id": "{short_id}"' in shown
    assert "[RESULT]abcdef123 Sunny" in render(MISTRAL, conversation(TEXT, "abcdef123")), "a short one is kept"
    showing = each_call("{{ c.id }}{{ f.arguments | tojson }}")
    assert LONG in render(showing, conversation(TEXT)), "any id is kept where it may be long"


def test_what_a_template_refuses_itself_is_told_in_its_words() -> None:
    messages = conversation(TEXT)
    messages[1]["tool_calls"] *= 2
    assert "one call at once" in render(FAMILIES["as Llama 3.1"][0], messages)


def test_names_in_arguments_and_tools_are_text_whatever_they_hold() -> None:
    """Only the template begins and ends turns."""
    tokenizer, chat_template = make("{{ tools | tojson }}" + FAMILIES["as Qwen 2.5 and Hermes"][0])
    end = tokenizer.convert_tokens_to_ids(END)

    def count_ends(name: str) -> int:
        parameters = {"type": "object", "properties": {name: {"type": "string"}}}
        tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
        ids = chat_template.ids(conversation(json.dumps({name: name})), tools, {})
        assert tokenizer.decode(ids).count(name) == 3 + (name == END) * 3
        return ids.count(end)

    assert count_ends(END) == count_ends("where"), "three turns"
