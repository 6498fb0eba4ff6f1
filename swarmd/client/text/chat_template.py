"""A model's chat templates as their authors wrote them: which one counts, what it takes, what it may be told.

Runs in the child that makes prompts (``prompts``): templates are programs of anybody's.
"""

from __future__ import annotations

import inspect
import json
import re
from functools import cached_property
from typing import Any

from jinja2 import meta

from swarmd.client.text.answer_formats import CALLS, DEFAULT_FORMATS, AnswerFormats, find_calls, find_thoughts
from swarmd.client.text.answer_reader import AnswerReader
from swarmd.client.text.past_calls import (
    LONG_PROBE_ID,
    PROBE_ID,
    PROBE_RESULT,
    probe_turns,
    rewrite_calls,
    wants_text,
    write_as_talk,
)
from swarmd.client.text.turn_order import TurnRules, order_turns

DEFAULT = "default"
WITH_TOOLS = "tool_use"
SPECIAL = (WITH_TOOLS, "rag")  # names that Hugging Face gives to templates for something else than plain conversations
OWN_ARGUMENTS = ("add_generation_prompt", "continue_final_message")  # what ``prompts`` says beside the messages
PROBE = "written by the user"  # a text that is looked for in what a template makes of it
PROBE_NOTE = "written by the system, later"
PROBE_ARGUMENTS = {"text": PROBE}
PROBE_PROPERTIES = {"text": {"type": "string", "description": ""}}  # some templates fail without any
PROBE_SCHEMA = {"type": "object", "properties": PROBE_PROPERTIES, "required": ["text"]}
PROBE_TOOL = {"type": "function", "function": {"name": "probe", "description": "", "parameters": PROBE_SCHEMA}}
HALF_MARK = re.compile(r"[<\[][^<>\[\]\s]*\Z")


# Templates are programs, and families differ in what they expect. Nothing declares it, so it is found out by trying:
# PROBE is put into a message, and looked for in the text that the template writes. A template that loses a plain string
# and shows a list of parts takes parts. What it writes right behind an assistant's turn ends that model's answers.
# Calls that were made before are tried alike, with arguments in both forms, and with a long id and a short one; so are
# a system's turns at the beginning and later, and two of a user's in a row. How the model will write a call is how its
# template writes one: the first format by which the call can be read again.
# Variables are read from the template's syntax tree: what it does not name is not passed, so that a user's option never
# reaches an argument of the library's by the same name.
class ChatTemplate:
    """The chat template of one tokenizer. ``source`` is "" where there is none; ``trouble`` says more, if there is."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.trouble = _name_default(tokenizer)
        self.source = tokenizer.get_chat_template() if tokenizer.chat_template and not self.trouble else ""

    def ids(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        options: dict[str, Any],
    ) -> list[int]:
        """A conversation as tokens. Raises ConfigError for a past call, and whatever the template raises."""
        accepted = {*OWN_ARGUMENTS, *self._template_variables}
        passed_options = {name: value for name, value in options.items() if name in accepted}
        has_calls = any("tool_calls" in message or message["role"] == "tool" for message in messages)
        if has_calls and not all(self._shows_calls):
            messages = write_as_talk(messages, *self._shows_calls, CALLS[self.formats.calls].marks)
        messages = order_turns(messages, self._turn_rules)
        if has_calls:
            messages = rewrite_calls(messages, self._takes_text_arguments, self._takes_short_ids)
        messages = self._in_form(messages)
        ids = self._tokenizer.apply_chat_template(
            self._mark_keys(messages),
            tools=self._mark_keys(tools),
            tokenize=True,
            return_dict=False,
            sanitize_control_tokens=True,
            **self._mark_keys(passed_options),
        )
        return [int(token) for token in ids]

    # Only the template begins and ends turns: whatever users send is text, the names in their objects, too.
    def _mark_keys(self, value: Any) -> Any:
        """Have names inside objects be text, too, whatever control tokens they hold."""
        if isinstance(value, dict):
            return {self._mark_text(key): self._mark_keys(item) for key, item in value.items()}
        return [self._mark_keys(item) for item in value] if isinstance(value, list) else value

    def _mark_text(self, name: str) -> str:
        from transformers.utils.chat_template_utils import mark_control_tokens

        if name.isidentifier():  # as templates' own words are: role, content
            return name
        return str(mark_control_tokens(name, self._control_tokens))

    @cached_property
    def _control_tokens(self) -> Any:
        """The pattern of what only a template may write."""
        from transformers.utils.chat_template_utils import _get_control_token_patterns as make_patterns

        chosen = self._tokenizer.chat_template
        sources = "".join(chosen.values()) if isinstance(chosen, dict) else chosen
        return make_patterns(self._tokenizer._get_control_tokens(sources))[0]

    @cached_property
    def _template_variables(self) -> set[str]:
        """The names that the templates use: nothing else is passed on, least of all what the library itself takes."""
        from transformers.utils.chat_template_utils import _compile_jinja_template as compiled

        chosen = self._tokenizer.chat_template
        sources = chosen.values() if isinstance(chosen, dict) else [chosen]
        used: set[str] = set()
        for source in sources:
            used |= meta.find_undeclared_variables(compiled(source).environment.parse(source))
        taken = set(inspect.signature(self._tokenizer.apply_chat_template).parameters)
        return used - (taken - {"documents"})

    @cached_property
    def ends(self) -> list[int]:
        """The token that it writes right after an assistant's turn: what a model that was trained by it ends with."""
        turns: list[dict[str, Any]] = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": PROBE},
        ]
        shown = self._render_turns(self._in_form(turns), False)
        tail = shown.rpartition(PROBE)[2].lstrip() if PROBE in shown else ""
        added = {str(token): number for number, token in self._tokenizer.added_tokens_decoder.items()}
        markers = [text for text in added if text and tail.startswith(text)]
        return [added[max(markers, key=len)]] if markers else []

    @cached_property
    def formats(self) -> AnswerFormats:
        """How its model marks thoughts and calls."""
        added = map(str, self._tokenizer.added_tokens_decoder.values())
        marks = "\n".join([self.source, *added])
        thoughts = find_thoughts(marks)
        if "tools" not in self.source and not self.writes_calls:  # whoever asks says how calls are marked
            return DEFAULT_FORMATS._replace(thoughts=thoughts)
        return AnswerFormats(thoughts, find_calls(self.reads_call, marks))

    @property
    def writes_calls(self) -> bool:
        """Does it write calls at all?"""
        return PROBE in self._written_call

    def reads_call(self, name: str) -> bool:
        """Can what it makes of a call be read again by a format, of this name?"""
        text = self._written_call
        for token in self._tokenizer.added_tokens_decoder.values():
            if token.special and str(token) not in CALLS[name].tokens:  # nobody sees it in an answer
                text = text.replace(str(token), "")
        reader = AnswerReader(CALLS[name].regions, [PROBE_TOOL])
        parts = [*reader.feed(text.strip()), *reader.end()]
        return any(part.name == "probe" and json.loads(part.text) == PROBE_ARGUMENTS for part in parts)

    @cached_property
    def _written_call(self) -> str:
        """What it makes of a call, without what a prompt ends with."""
        begun = self._render_turns(self._in_form(probe_turns({}, PROBE_ID)[:1]), True, [PROBE_TOOL])
        shown = self._render_turns(self._in_form(probe_turns(self._probe_arguments, PROBE_ID)[:2]), False, [PROBE_TOOL])
        pairs = zip(begun, shown, strict=False)
        n_alike = next((place for place, (one, other) in enumerate(pairs) if one != other), len(begun))
        half_mark = HALF_MARK.search(shown, 0, n_alike)  # another mark may begin with the same letters
        return shown[half_mark.start() if half_mark else n_alike :]

    @cached_property
    def _shows_calls(self) -> tuple[bool, bool]:
        """Does it write a past call, and what came of it?"""
        shown = self._render_call(self._probe_arguments, PROBE_ID)
        return PROBE in shown, PROBE_RESULT in shown

    @cached_property
    def _takes_parts(self) -> bool:
        """Does it read a message's content as a list of parts, and lose a plain text?"""
        plain = {"role": "user", "content": PROBE}
        shows_text = PROBE in self._render_turns([plain], True)
        return not shows_text and PROBE in self._render_turns([_in_parts(plain)], True)

    @cached_property
    def _turn_rules(self) -> TurnRules:
        """Which turns does it take: a system's, later ones, two of a user's in a row?"""
        probe = {"role": "system", "content": PROBE}
        user = {"role": "user", "content": "?"}
        reply = {"role": "assistant", "content": "!"}
        note = {**probe, "content": PROBE_NOTE}
        called = probe_turns(self._probe_arguments, PROBE_ID)
        return TurnRules(
            takes_system=self._shows_probe(probe, user),
            takes_notes=all(
                self._shows_probe(*turns, shown=PROBE_NOTE)
                for turns in ((probe, user, reply, user, note), (probe, user, reply, note, user), (user, reply, note))
            ),
            takes_runs=self._shows_probe(user, {**user, "content": PROBE}),
            takes_talk=not self._shows_probe(*called, shown=PROBE_RESULT)
            or self._shows_probe(*called, {**user, "content": PROBE_NOTE}, shown=PROBE_NOTE),
        )

    @cached_property
    def _takes_text_arguments(self) -> bool:
        """Does it want the arguments of past calls as text, and not as an object?"""
        with_object = self._render_call(PROBE_ARGUMENTS, PROBE_ID)
        with_text = self._render_call(json.dumps(PROBE_ARGUMENTS), PROBE_ID)
        return wants_text(PROBE_ARGUMENTS, with_object, with_text)

    @property
    def _probe_arguments(self) -> Any:
        """Arguments in the form that it takes."""
        return json.dumps(PROBE_ARGUMENTS) if self._takes_text_arguments else PROBE_ARGUMENTS

    @cached_property
    def _takes_short_ids(self) -> bool:
        """Does it refuse ids of calls but short ones?"""
        takes_long = self._render_call(self._probe_arguments, LONG_PROBE_ID)
        return not takes_long and bool(self._render_call(self._probe_arguments, PROBE_ID))

    def _render_call(self, arguments: Any, call_id: str) -> str:
        return self._render_turns(self._in_form(probe_turns(arguments, call_id)), True, [PROBE_TOOL])

    def _in_form(self, turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return turns with their contents as it takes them."""
        return [_in_parts(turn) for turn in turns] if self._takes_parts else turns

    def _shows_probe(self, *turns: dict[str, Any], shown: str = PROBE) -> bool:
        return shown in self._render_turns(self._in_form([*turns]), True)

    def _render_turns(
        self,
        messages: list[dict[str, Any]],
        begins_answer: bool,
        tools: list[Any] | None = None,
    ) -> str:
        """What it makes of some turns; "" where it refuses them."""
        try:
            shown = self._tokenizer.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=begins_answer
            )
        except MemoryError:
            raise
        except Exception:  # noqa: BLE001 - a template is anybody's program: it fails in any way
            return ""
        return str(shown)


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return {**message, "content": [{"type": "text", "text": content}]}


def _name_default(tokenizer: Any) -> str:
    """Have the only one for conversations be the default, where none is called so; returns why that cannot be."""
    named = tokenizer.chat_template
    if not isinstance(named, dict) or DEFAULT in named:
        return ""
    plain = [name for name in named if name not in SPECIAL] or list(named)
    if len(plain) != 1:
        return (
            f"this model has chat templates called {', '.join(sorted(named))}, and none called {DEFAULT}: whoever "
            "publishes it has to call one so, in tokenizer_config.json"
        )
    tokenizer.chat_template = {**named, DEFAULT: named[plain[0]]}
    return ""
