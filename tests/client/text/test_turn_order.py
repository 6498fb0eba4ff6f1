"""The order of turns, as chat templates of several kinds take them (in our own words)."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from swarmd.client.text.chat_template import ChatTemplate
from swarmd.client.text.turn_order import TurnRules, order_turns
from swarmd.home.models import bundled_folder

WRITTEN = "<{{ m.role }}>{{ m.content }}"
ANY = "{% for m in messages %}" + WRITTEN + "{% endfor %}"
FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('system comes first') }}"
    "{% endif %}" + WRITTEN + "{% endfor %}"
)
LOST_LATER = "{% for m in messages %}{% if m.role != 'system' or loop.first %}" + WRITTEN + "{% endif %}{% endfor %}"
ALTERNATING = (
    "{% for m in messages %}{% if m.role == 'system' or (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant take turns') }}{% endif %}" + WRITTEN + "{% endfor %}"
)
GEMMA = (  # a note passes where it stands for an answer
    "{% set first = 1 if messages[0].role == 'system' else 0 %}{% for m in messages %}"
    "{% if loop.index0 >= first and (m.role == 'user') != ((loop.index0 - first) % 2 == 0) %}"
    "{{ raise_exception('roles alternate') }}{% endif %}" + WRITTEN + "{% endfor %}"
)
MISTRAL = (  # no user's turn right behind a result, and users and assistants in turns
    "{% set ns = namespace(before='') %}{% for m in messages %}{% if m.role == 'user' and ns.before in ('user', 'tool')"
    " or m.role == 'assistant' and ns.before == 'assistant' %}{{ raise_exception('roles alternate') }}{% endif %}"
    + WRITTEN
    + "{{ (m.tool_calls | tojson) if m.tool_calls else '' }}{% set ns.before = m.role %}{% endfor %}"
)
IN_PARTS = ANY.replace("m.content", "m.content[0].text")
RULES = {
    ANY: TurnRules(),
    FIRST_ONLY: TurnRules(takes_notes=False),
    LOST_LATER: TurnRules(takes_notes=False),
    ALTERNATING: TurnRules(False, False, False),
    IN_PARTS: TurnRules(),
    GEMMA: TurnRules(takes_notes=False, takes_runs=False),
    MISTRAL: TurnRules(takes_runs=False, takes_talk=False),
}


def talk(text: str) -> list[dict[str, Any]]:
    """Turns from ``s:be brief u:hi a:hello``."""
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": names[turn[0]], "content": turn[2:]} for turn in text.split()]


def shown(turns: list[dict[str, Any]]) -> str:
    return " ".join(f"{turn['role'][0]}:{turn['content']}" for turn in turns).replace("\n\n", "+")


@pytest.mark.parametrize("template", RULES)
def test_a_template_is_tried_for_what_it_takes(template: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder())
    tokenizer.chat_template = template
    assert ChatTemplate(tokenizer)._turn_rules == RULES[template]


@pytest.mark.parametrize("template", RULES)
def test_no_word_of_a_conversation_is_lost_whatever_the_template_takes(template: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder())
    tokenizer.chat_template = template
    turns = talk("s:one s:two u:three u:four a:five s:six u:seven s:eight")
    prompt = tokenizer.decode(ChatTemplate(tokenizer).ids(turns, None, {"add_generation_prompt": False}))
    positions = [prompt.index(turn["content"]) for turn in turns]
    assert positions == sorted(positions)


@pytest.mark.parametrize(
    ("rules", "given", "expected"),
    [
        (TurnRules(), "s:a s:b u:c", "s:a+b u:c"),
        (TurnRules(), "u:a u:b s:c s:d", "u:a u:b s:c s:d"),
        (TurnRules(takes_notes=False), "u:a s:b a:c s:d", "u:a+b a:c u:d"),
        (TurnRules(takes_notes=False), "s:a u:b t:c s:d u:e", "s:a u:b t:c u:d u:e"),
        (TurnRules(takes_system=False), "s:a s:b u:c a:d", "u:a+b+c a:d"),
        (TurnRules(takes_system=False), "s:a a:b", "u:a a:b"),
        (TurnRules(takes_runs=False), "u:a u:b a:c a:d u:e", "u:a+b a:c+d u:e"),
        (TurnRules(takes_talk=False), "u:a a:b t:c u:d a:e", "u:a a:b t:c+d a:e"),
        (TurnRules(takes_talk=False, takes_notes=False), "u:a a:b t:c s:d", "u:a a:b t:c+d"),
    ],
)
def test_turns_that_a_template_refuses_are_joined_to_others(rules: TurnRules, given: str, expected: str) -> None:
    turns = talk(given)
    assert shown(order_turns(turns, rules)) == expected
    assert turns == talk(given), "what was given is left alone"


def test_content_that_is_no_text_stays() -> None:
    turns = [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "b"}]}]
    assert order_turns(turns, TurnRules(False, False, False))[1] == turns[1]
