"""Chat templates and tokenizers of anybody's, run by a process of their own with limits of time and memory.

A template can loop for ever or make gigabytes, a normalizer can make much of little: all that happens to a child, which
is ended and replaced. Control tokens in what users wrote are text: only the template itself can begin a turn.

``python -m swarmd.client.text.prompts FOLDER`` is the child: JSON lines in, JSON lines out.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import trio

from swarmd.client.text.answer_formats import AnswerFormats
from swarmd.client.text.child import Child, ChildFailed, limit
from swarmd.errors import ConfigError, SwarmError, SwarmUnavailable
from swarmd.importing import importing
from swarmd.protocol.models.manifest import read_json

STARTED_WITHIN_S = 60.0  # transformers is imported, a vocabulary is read, on a busy machine
MOST_S = 5.0  # of one prompt: a megabyte takes a second
MOST_MEMORY_BYTES = 2**30  # beyond what an idle child has
MOST_TOKENS = 4_000_000  # of one prompt; no context is as long
NO_TEMPLATE = "this model has no chat template: it is not made for conversations; ask for completions"


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a model is given: token ids; where they came from a template, their end as text, and what an answer is like.

    ``ends`` are the tokens that end one.
    """

    ids: tuple[int, ...]
    tail: str = ""
    ends: frozenset[int] = frozenset()
    formats: AnswerFormats | None = None


class Prompts:
    """Makes prompts for one model; one at a time, in the order in which they are asked for.

    A context manager: the child starts on the way in and ends on the way out. Entering it raises ConfigError for a
    tokenizer that cannot be used, and SwarmUnavailable where this machine is too busy to read it now.
    """

    def __init__(self, folder: Path, most_s: float = MOST_S) -> None:
        self.folder = folder
        self._most_s = most_s
        self._child = Child("swarmd.client.text.prompts", str(folder))
        self._turn = trio.Lock()
        self.has_template = False
        self._no_template = NO_TEMPLATE
        self.shows_tools = False

    async def __aenter__(self) -> Self:
        try:
            async with self._turn:
                await self._start_child()
        except trio.Cancelled:
            await self._child.end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._child.end()

    async def chat(
        self,
        messages: list[dict[str, Any]],
        tools: list[Any] | None,
        options: dict[str, Any],
    ) -> Prompt:
        """Write a conversation as the model was trained to read it.

        Raises ConfigError with the template's reason, SwarmUnavailable where this machine is too busy now.
        """
        if not self.has_template:
            raise ConfigError(self._no_template)
        return await self._ask_child({"messages": messages, "tools": tools, "options": options})

    async def text(self, text: str, special: bool = True) -> Prompt:
        """Plain text as tokens, with the model's own mark of a beginning if ``special``. Raises as ``chat`` does."""
        return await self._ask_child({"text": text, "special": special})

    async def _ask_child(self, question: dict[str, Any]) -> Prompt:
        async with self._turn:
            if not self._child.is_running:  # the last question was too much for it
                await self._start_child()
            try:
                with trio.CancelScope(shield=True):  # a cancelled caller must not cost the next one the child
                    answer = await self._child.ask(question, self._most_s)
            except ChildFailed as failure:
                if failure.is_late:
                    raise ConfigError(
                        f"making the prompt took more than {self._most_s:g} s, and was given up"
                    ) from None
                raise ConfigError(
                    "making the prompt ended the process that did it, most likely out of memory"
                ) from None
        if "error" in answer:
            raise ConfigError(str(answer["error"]))
        return read_answer(answer)

    async def _start_child(self) -> None:
        """Start the child and wait until it has read the tokenizer; a child that is late has proved nothing."""
        try:
            hello = await self._child.start(STARTED_WITHIN_S)
        except ChildFailed as failure:
            if failure.is_late:
                raise SwarmUnavailable(
                    f"reading the tokenizer in {self.folder} took more than {STARTED_WITHIN_S:g} s: this machine is "
                    "busy; ask again"
                ) from None
            raise ConfigError(f"the tokenizer in {self.folder} ends the process that reads it") from None
        if "error" in hello:
            await self._child.end()
            text = str(hello["error"])
            raise SwarmUnavailable(text) if hello["is_passing"] else ConfigError(text)
        self._no_template = hello["no_template"] or NO_TEMPLATE
        self.has_template = hello["has_template"]
        self.shows_tools = hello["shows_tools"]


def read_answer(answer: dict[str, Any]) -> Prompt:
    """Return what the child made."""
    return Prompt(
        ids=tuple(answer["ids"]),
        tail=answer.get("tail", ""),
        ends=frozenset(answer.get("ends", ())),
        formats=AnswerFormats(*answer["formats"]) if "formats" in answer else None,
    )


def has_template(folder: Path) -> bool:
    """Say whether a model's files bring a chat template; whether it works is seen when it is used."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        settings = read_json(folder / "tokenizer_config.json")
    except (OSError, ConfigError):
        return False
    return isinstance(settings, dict) and bool(settings.get("chat_template"))


async def one_turn(folder: Path, text: str) -> Prompt:
    """What a user says, alone, to a model whose files are in ``folder``. Raises as ``Prompts`` does."""
    async with Prompts(folder) as prompts:
        turn = {"role": "user", "content": text}
        return await prompts.chat([turn], None, {"add_generation_prompt": True})


# --- the child -----------------------------------------------------------------------------------------------------


def main(folder: Path) -> None:
    """Answer one question a line until the questions end."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # anything else that is printed is no answer
    try:
        with importing():
            from swarmd.client.text.chat_template import ChatTemplate
            from swarmd.client.text.tokenizer import load_tokenizer

            tokenizer = load_tokenizer(folder)  # which imports what its kind needs
        template = ChatTemplate(tokenizer)
        hello: dict[str, Any] = {
            "no_template": template.trouble,
            "has_template": bool(template.source),
            "shows_tools": "tools" in template.source,
        }
    except SwarmError as error:
        hello = {"error": str(error), "is_passing": isinstance(error, SwarmUnavailable)}
    limit(MOST_MEMORY_BYTES)  # tokenizer and template are anybody's programs: from here on they get no more
    print(json.dumps(hello), file=answers, flush=True)
    for line in sys.stdin:
        reply = answer(tokenizer, template, json.loads(line))
        print(json.dumps(reply), file=answers, flush=True)


def answer(
    tokenizer: Any,
    template: Any,
    question: dict[str, Any],
) -> dict[str, Any]:
    """Answer one question: ids, or an error for the user."""
    if "text" in question:
        ids = tokenizer(question["text"], add_special_tokens=question["special"]).input_ids
        return _check_length(ids)
    try:
        ids = template.ids(question["messages"], question["tools"], question["options"])
    except MemoryError:
        raise
    except ConfigError as error:
        return {"error": str(error)}
    except Exception as error:  # noqa: BLE001 - a template is anybody's program: it fails in any way
        return {"error": f"the model's chat template refuses this: {' '.join(str(error).split())[:300]}"}
    tail = tokenizer.decode(ids[-64:])
    return {**_check_length(ids), "tail": tail, "ends": template.ends, "formats": template.formats}


def _check_length(ids: list[int]) -> dict[str, Any]:
    if len(ids) > MOST_TOKENS:
        return {"error": f"the prompt has {len(ids)} tokens, at most {MOST_TOKENS} are taken"}
    return {"ids": [int(i) for i in ids]}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
