"""``swarmd chat``: a conversation in the terminal, through the gateway that runs, or through one of its own."""

from __future__ import annotations

import json
import sys
import time
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmd.values import count
from swarmd_cli.context import JsonObject, ask, format_number, home, membership
from swarmd_cli.gateway_client import (
    GatewayClient,
    ModelEntry,
    StreamEvent,
    describe_answer,
    open_gateway,
    require_listed,
)
from swarmd_cli.preflight import require_answers
from swarmd_cli.terminal import show_answer, show_dim

if TYPE_CHECKING:
    from swarmd.status import ChainRow

HELP = """\
/system TEXT   say how to answer; without TEXT, no longer
/retry         ask the last question again
/reset         begin a new conversation
/model NAME    ask another model
/save FILE     write the conversation as JSON
/why           which machines answered, and why these
/help, /quit   Ctrl-C stops an answer, Ctrl-D ends the chat"""


def chat(
    model: Annotated[str, typer.Argument(help="A name of the swarm's catalog; left out: the one that is whole.")] = "",
    temperature: Annotated[float | None, typer.Option(min=0.0, max=2.0, help="0 takes the likeliest token.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1, help="Of each answer, at most.")] = None,
    system: Annotated[str, typer.Option("--system", help="Say how to answer.")] = "",
) -> None:
    """Talk with a hosted model.

    Example: swarmd chat llama
    """
    from swarmd.gateway.address import read_url

    membership().swarm()
    if read_url(home().folder) is None:  # one that runs knows the names, and who is there
        require_answers(model)
    settings = {"temperature": temperature, "max_tokens": max_tokens}
    options = {name: value for name, value in settings.items() if value is not None}
    with open_gateway() as gateway:
        Conversation(gateway, model, system, options).run()


@dataclass
class Conversation:
    """A conversation and where it goes."""

    gateway: GatewayClient
    model: str
    system: str
    options: JsonObject
    turns: list[dict[str, str]] = field(default_factory=list)
    chain: list[str] = field(default_factory=list)

    def run(self) -> None:
        """Read questions and commands, and answer, until the end of the input. Raises SwarmError."""
        self.model = self._choose_model()
        if sys.stdin.isatty():
            with suppress(ImportError):
                import readline  # noqa: F401 - arrow keys and a history for input()
            print(f"{self.model}: ask away (/help for commands, Ctrl-D ends)")
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print("\n(Ctrl-D or /quit ends the chat)")
                continue
            if line in ("/quit", "/exit"):
                return
            if line.startswith("/"):
                self._command(*line[1:].partition(" ")[::2])
            elif line:
                self.turns.append({"role": "user", "content": line})
                self._answer()

    def _choose_model(self) -> str:
        """Choose the model that was named, else the one that is whole and can chat. Raises SwarmError."""
        listed = self.gateway.models()
        if not self.model:
            return self._only_complete(listed)
        require_listed(self.model, listed)
        return self.model

    def _only_complete(self, listed: list[ModelEntry]) -> str:
        from swarmd.errors import ConfigError, NoRoute

        complete = []
        for entry in listed:
            if not entry.swarmd.missing and entry.swarmd.chats is not False:
                complete.append(entry.id)
        if len(complete) == 1:
            return complete[0]
        if complete:
            raise ConfigError(f"say which model: {', '.join(complete)}")
        names = ", ".join(entry.id for entry in listed)
        raise NoRoute(
            f"no model that can chat is whole now (the swarm knows {names or 'none'}): swarmd models ls says what lacks"
        )

    # --- commands ----------------------------------------------------------------------------------------------

    def _command(self, name: str, rest: str) -> None:
        rest = rest.strip()
        if name == "system":
            self.system = rest
            print("(said)" if rest else "(no longer)")
        elif name == "reset":
            self.turns.clear()
            print("(a new conversation)")
        elif name == "retry":
            while self.turns and self.turns[-1]["role"] == "assistant":
                self.turns.pop()
            self._answer() if self.turns else print("(nothing was asked yet)")
        elif name == "model" and rest:
            self._change_model(rest)
        elif name == "save" and rest:
            self._save(Path(rest).expanduser())
        elif name == "why":
            self._print_why()
        elif name == "help":
            print(HELP)
        else:
            print(f"/{name} is no command, or lacks its word\n{HELP}")

    def _change_model(self, name: str) -> None:
        from swarmd.errors import ConfigError

        try:
            require_listed(name, self.gateway.models())
        except ConfigError as error:
            print(f"({error})")
            return
        self.model = name
        print(f"({name} answers from now on)")

    def _save(self, path: Path) -> None:
        try:
            conversation = {"model": self.model, "messages": self._messages()}
            path.write_text(json.dumps(conversation, indent=2) + "\n", encoding="utf-8")
            print(f"(written to {path})")
        except OSError as error:
            print(f"({path} cannot be written: {error.strerror})")

    def _print_why(self) -> None:
        from swarmd.errors import SwarmError
        from swarmd.status import WhyAnswer

        print("\n".join(self.chain) or "(nothing was answered yet)")
        with suppress(SwarmError):
            for chain in ask(WhyAnswer, "why", model=self.model).chains.values():
                print(chain.error or _describe_chain(chain))

    def _messages(self) -> list[dict[str, str]]:
        if not self.system:
            return list(self.turns)
        return [{"role": "system", "content": self.system}, *self.turns]

    # --- answers -----------------------------------------------------------------------------------------------

    def _answer(self) -> None:
        """Stream one answer; Ctrl-C stops it, and what came so far is part of the conversation."""
        from swarmd.errors import SwarmError

        # The gateway has no memory of conversations: each request carries all turns. What came before Ctrl-C is an
        # answer as far as it goes. One that failed is not kept, so that /retry asks the same question again.
        body = {"model": self.model, "messages": self._messages(), **self.options}
        text = ""
        began_at = time.monotonic()
        first_s = 0.0
        last_event: StreamEvent | None = None
        try:
            with closing(self.gateway.stream("/v1/chat/completions", body)) as events:
                for event in events:
                    last_event = event if event.usage else last_event
                    for choice in event.choices:
                        part = (choice.delta and choice.delta.content) or ""
                        first_s = first_s or (time.monotonic() - began_at if part else 0.0)
                        text += part
                        show_answer(part)
        except KeyboardInterrupt:
            print(" (stopped)", end="")
        except SwarmError as error:
            print(f"{text and chr(10)}({error}: /retry asks again)")
            return
        print()
        self.turns.append({"role": "assistant", "content": text})
        self._print_summary(last_event, first_s, time.monotonic() - began_at)

    def _print_summary(self, last_event: StreamEvent | None, first_s: float, seconds: float) -> None:
        """Print the numbers under an answer, dim where the terminal can."""
        if last_event is None or last_event.usage is None:
            return
        n_tokens = last_event.usage.completion_tokens
        self.chain = list(last_event.swarmd.chain)
        speed = ""
        if n_tokens > 1 and seconds > first_s:
            speed = f", {(n_tokens - 1) / (seconds - first_s):.1f} tokens/s"
        hops = count(len(self.chain), "hop")
        summary = f"{count(n_tokens, 'token')}{speed}, the first after {first_s:.2f} s, through {hops}"
        summary = "\n".join([summary, *describe_answer(last_event.swarmd)])
        show_dim(summary)


def _describe_chain(chain: ChainRow) -> str:
    return f"the cheapest chain now, {format_number(chain.cost_ms, ' ms')} a token: {', '.join(chain.hops)}"
