"""Verbs that make text: run a hosted model, and the demo."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from swarmd.importing import importing
from swarmd.values import count
from swarmd_cli.context import home, membership, print_json
from swarmd_cli.gateway_client import (
    GatewayClient,
    StreamEvent,
    TextDelta,
    describe_answer,
    describe_doubt,
    find_gateway,
    require_listed,
)
from swarmd_cli.preflight import require_answers
from swarmd_cli.terminal import show_answer

T = TypeVar("T")

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
WAIT_S = 5.0  # between looks whether what a model lacks is served


@dataclass(frozen=True, slots=True)
class _Task:
    """What the user wants: a text to answer or continue, and how tokens are chosen."""

    model: str
    text: str
    max_tokens: int
    temperature: float
    seed: int
    is_raw: bool


def run(
    model: Annotated[str, typer.Argument(help="A name of the swarm's catalog.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue; read from standard input if left out.")] = "",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="How many tokens to add at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    adapter: Annotated[str, typer.Option("--adapter", help="A LoRA adapter of the catalog.")] = "",
    draft: Annotated[
        str, typer.Option("--draft", help="What guesses ahead, here: a draft or a small model of the catalog, or none.")
    ] = "auto",
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="PEER", help="Let only this peer (how its id ends) read it.")
    ] = None,
    verify: Annotated[
        float, typer.Option(min=0.0, max=1.0, help="Check at least this share of what servers compute; 1: every token.")
    ] = 0.0,
    wait: Annotated[bool, typer.Option("--wait", help="Wait while blocks are missing, and say so.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text, also with a model made for chat.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help='Print JSON with "schema": 1.')] = False,
) -> None:
    """Have a hosted model answer (one made for chat), or continue a text (any other, or --raw).

    The gateway that runs here is asked, if one does. A client of its own takes some seconds to start, and is what
    --json, --adapter, --draft, --only and --verify need.

    Example: swarmd run demo "The function returns" --max-tokens 60
    """
    membership().swarm()  # not joined is said before anything is read
    text = prompt or _read_stdin()
    if not text.strip():
        raise typer.BadParameter("an empty prompt: give a text to continue")
    # A gateway that runs has torch and the model's files in memory already, and answers at once. Where none runs, or
    # for what it does not do, a client of our own is started.
    needs_own_client = as_json or adapter or draft != "auto" or only or verify
    gateway = None if needs_own_client else find_gateway()
    path = None if gateway is None else _choose_path(gateway, model, raw)
    if gateway is not None and path is not None:
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        _retry_until_whole(partial(_ask_gateway, gateway, path, model, text, sampling), wait)
        return
    require_answers(model, adapter=adapter, draft="" if draft in ("auto", "none") else draft)
    print(f"{model}: loading what is computed here ...", file=sys.stderr, flush=True)
    with importing():
        import swarmd.client.blocking

    with swarmd.connect(home=home().folder) as swarm:
        options: dict[str, Any] = {
            "adapter": adapter,
            "draft": "" if draft == "none" else draft,
            "only": only or (),
            "verify": verify,
        }
        load = partial(swarm.model, model, **options, wait_s=WAIT_S)
        loaded = _retry_until_whole(load, wait)
        task = _Task(model, text, max_tokens, temperature, seed, is_raw=raw)
        _generate_here(swarm, loaded, task, as_json)


def _retry_until_whole(ask: Callable[[], T], waits: bool) -> T:
    """Return what ``ask`` gives; try again while blocks are missing, if it ``waits``. Raises SwarmError."""
    from swarmd.errors import NoRoute

    # The pause counts from the beginning of an attempt: one that took long is followed by the next at once.
    while True:
        began_at = time.monotonic()
        try:
            return ask()
        except NoRoute as error:
            if not waits:
                raise
            print(f"waiting: {error}", file=sys.stderr)
        time.sleep(max(0.0, WAIT_S - (time.monotonic() - began_at)))


def _choose_path(gateway: GatewayClient, name: str, raw: bool) -> str | None:
    """Choose where a gateway answers for this model; None where only its files tell. Raises ConfigError."""
    listed = gateway.models()
    require_listed(name, listed)
    by_name = {entry.id: entry.swarmd for entry in listed}
    if name not in by_name:  # by its hash
        return None
    chats = by_name[name].chats
    if raw or chats is False:
        return COMPLETIONS
    return None if chats is None else CHAT


def _ask_gateway(
    gateway: GatewayClient,
    path: str,
    name: str,
    text: str,
    sampling: dict[str, Any],
) -> None:
    """Print what comes, and afterwards what it took. Raises NoRoute as long as nothing came, and SwarmError."""
    from swarmd.errors import NoRoute, SwarmError, SwarmUnavailable

    began_at = time.monotonic()
    last_event: StreamEvent | None = None
    has_begun = False
    prompt: dict[str, Any] = {"prompt": text, "echo": True}
    if path == CHAT:
        prompt = {"messages": [{"role": "user", "content": text}]}
    try:
        for event in gateway.stream(path, {"model": name, **prompt, **sampling}):
            last_event = event if event.usage else last_event
            for choice in event.choices:
                delta = choice.delta or TextDelta(choice.text)
                part = delta.content or delta.reasoning_content or ""
                show_answer(part)
                has_begun = has_begun or bool(part)
    except SwarmError as error:
        if has_begun:
            print()
        if has_begun and isinstance(error, NoRoute):  # to wait and ask again would say the beginning twice
            raise SwarmUnavailable(str(error)) from None
        raise
    print()
    if last_event is None or last_event.usage is None:
        return
    _print_summary(last_event.usage.completion_tokens, time.monotonic() - began_at, last_event.swarmd.chain)
    for line in describe_answer(last_event.swarmd):
        print(line, file=sys.stderr)


def _print_summary(n_tokens: int, seconds: float, chain: Iterable[str]) -> None:
    summary = f"{count(n_tokens, 'token')}, {n_tokens / seconds:.1f} tokens/s through {' -> '.join(chain)}"
    print(summary, file=sys.stderr)


def _read_stdin() -> str:
    """Read the prompt from standard input. Raises ConfigError for what is no UTF-8."""
    from swarmd.text_files import decode_text

    return decode_text(sys.stdin.buffer.read(), "the prompt on standard input")


def _generate_here(swarm: Any, model: Any, task: _Task, as_json: bool) -> None:
    """Generate with a client of our own, and print what came of it."""
    from dataclasses import asdict

    import torch
    from transformers import TextStreamer

    tokenizer = swarm.tokenizer(task.model)
    is_chat = bool(tokenizer.chat_template) and not task.is_raw
    if is_chat:
        inputs, ends = _encode_turn(swarm, task.model, task.text)
    else:
        inputs = tokenizer(task.text, return_tensors="pt")
        ends = frozenset()
    n_prompt = inputs["input_ids"].shape[1]
    torch.manual_seed(task.seed)
    sampling: dict[str, Any] = {"do_sample": False}
    if task.temperature > 0:
        sampling = {"do_sample": True, "temperature": task.temperature}

    class AnswerStreamer(TextStreamer):  # type: ignore[misc]
        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            show_answer(text, "\n" if stream_end else "")

    streamer = None if as_json else AnswerStreamer(tokenizer, skip_prompt=is_chat, skip_special_tokens=True)
    began_at = time.perf_counter()
    ending = end_options(model.generation_config.eos_token_id, tokenizer.eos_token_id, ends)
    ids = model.generate(**inputs, max_new_tokens=task.max_tokens, streamer=streamer, **ending, **sampling)
    seconds = time.perf_counter() - began_at
    n_new = ids.shape[1] - n_prompt
    session = model.last_session
    session.wait_closed()
    statistics = session.statistics
    doubts = sorted({(doubt.first_token, doubt.hop, doubt.reason) for doubt in statistics.doubts})
    checks = swarm.within.checks
    speculation = model.last_speculation
    if as_json:
        answer_ids = ids[0, -n_new:] if is_chat else ids[0]
        print_json(
            {
                "text": tokenizer.decode(answer_ids, skip_special_tokens=True),
                "new_tokens": n_new,
                "seconds": round(seconds, 3),
                "tokens_per_s": round(n_new / seconds, 2),
                "chain": list(session.chain),
                "repairs": len(statistics.repairs),
                "doubts": [{"token": token, "hop": hop, "reason": reason} for token, hop, reason in doubts],
                "checks": [asdict(finding) for finding in checks.findings],
                "tried_ahead": speculation.n_sent,
                "taken_ahead": speculation.n_taken,
                "void_windows": statistics.n_void,
                "tried_because": speculation.last_plan,
            }
        )
        return
    _print_summary(n_new, seconds, session.chain)
    slowest_passes = statistics.passes.where()
    if slowest_passes is not None:
        print(slowest_passes, file=sys.stderr)
    if speculation.n_sent:
        tried = f"{speculation.n_taken} of {speculation.n_sent} tokens tried ahead were right"
        print(f"{tried}, {statistics.n_void} windows were void. {speculation.last_plan}", file=sys.stderr)
    for token, hop, reason in doubts[:1]:
        answer_token = max(0, token + 1 - n_prompt)
        print(describe_doubt(answer_token, hop, reason), file=sys.stderr)
    for repair in statistics.repairs:
        print(f"repaired in {repair.stall_s:.2f} s: {repair.reason}", file=sys.stderr)


def end_options(
    author: int | list[int] | None, tokenizer: int | None, template: frozenset[int]
) -> dict[str, list[int]]:
    """Make the option of ``generate`` for ends: those of author, tokenizer and chat template, as in the gateway."""
    ends = set(template)
    for source in (author, tokenizer):
        ids = source if isinstance(source, list) else [source]
        ends |= {token for token in ids if token is not None}
    return {"eos_token_id": sorted(ends)} if ends else {}


def _encode_turn(
    swarm: Any,
    name: str,
    text: str,
) -> tuple[dict[str, Any], frozenset[int]]:
    """Encode a user's turn as the model's chat template writes it; also returns the tokens that end an answer.

    The template is run in a process with limits, as it is anybody's.
    """
    import torch

    from swarmd.client.text.prompts import one_turn

    async def encode() -> Any:
        model, n_blocks = await swarm.within.resolve(name)
        folder = await swarm.within.folder(model, n_blocks)
        return await one_turn(folder, text)

    prompt = swarm.call(encode)
    ids = torch.tensor([prompt.ids])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, prompt.ends


def demo(
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=8, help="How many tokens to generate.")] = 160,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 7,
    chat: Annotated[
        Path | None, typer.Option("--chat", metavar="MODEL", help="Chat with this GGUF file or checkpoint instead.")
    ] = None,
) -> None:
    """Run a private swarm of three volunteers here, kill one in mid-sentence, and show what happened.

    Example: swarmd demo
    """
    from swarmd_cli.verbs.demo import run_chat, run_demo

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)  # its processes end with it

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGHUP, end)
    raise typer.Exit(run_demo(max_tokens, seed) if chat is None else run_chat(chat))
