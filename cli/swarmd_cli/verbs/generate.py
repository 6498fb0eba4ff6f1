"""Verbs that make text: run a hosted model, and the demo."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from swarmd.importing import importing
from swarmd.values import count
from swarmd_cli.beforehand import require_answers
from swarmd_cli.context import home, print_json
from swarmd_cli.gateway_client import (
    GatewayClient,
    describe_answer,
    describe_doubt,
    find_gateway,
    require_listed,
)

T = TypeVar("T")

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WAIT_S = 5.0  # between looks whether what a model lacks is served


def run(
    model: Annotated[str, typer.Argument(help="A name of the swarm's catalog.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue; read from standard input if left out.")] = "",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="How many tokens to add at most.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option(help="Seed of the sampling.")] = 0,
    adapter: Annotated[str, typer.Option("--adapter", help="A LoRA adapter of the catalog.")] = "",
    draft: Annotated[str, typer.Option("--draft", help="A small model of the catalog that guesses ahead, here.")] = "",
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
    home().swarm()  # not joined is said before anything is read
    text = prompt or _read_stdin()
    if not text.strip():
        raise typer.BadParameter("an empty prompt: give a text to continue")
    needs_own_client = as_json or adapter or draft or only or verify
    if not needs_own_client and (gateway := find_gateway()) is not None:
        sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
        if (path := _choose_path(gateway, model, raw)) is not None:
            _retry_until_whole(lambda: _ask_gateway(gateway, path, model, text, sampling), wait)
            return
    require_answers(model, draft, adapter=adapter)
    print(f"{model}: loading what is computed here ...", file=sys.stderr, flush=True)
    with importing():
        import swarmd.client.blocking

    with swarmd.connect(home=home().folder) as swarm:
        loaded = _retry_until_whole(
            lambda: swarm.model(model, adapter=adapter, draft=draft, only=only or (), verify=verify, wait_s=WAIT_S),
            wait,
        )
        _generate_here(swarm, loaded, model, text, max_tokens, temperature, seed, as_json, raw)


def _retry_until_whole(ask: Callable[[], T], waits: bool) -> T:
    """What ``ask`` gives; again and again while blocks are missing, if it is to wait. Raises SwarmError."""
    from swarmd.errors import NoRoute

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
    """Where a gateway answers for this model; None where only reading its files tells. Raises ConfigError."""
    listed = gateway.models()
    require_listed(name, listed)
    by_name = {entry["id"]: entry["swarmd"] for entry in listed}
    if name not in by_name:  # by its hash
        return None
    chats = by_name[name]["chats"]
    if raw or chats is False:
        return COMPLETIONS
    return None if chats is None else CHAT


def _ask_gateway(gateway: GatewayClient, path: str, name: str, text: str, sampling: dict[str, Any]) -> None:
    """Print what comes, and afterwards what it took. Raises NoRoute as long as nothing came, and SwarmError."""
    from swarmd.errors import NoRoute, SwarmError, SwarmUnavailable

    began_at, last_event, has_begun = time.monotonic(), dict[str, Any](), False
    prompt = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text, "echo": True}
    try:
        for event in gateway.stream(path, {"model": name, **prompt, **sampling}):
            last_event = event if event.get("usage") else last_event
            for choice in event["choices"]:
                delta = choice.get("delta") or {"content": choice.get("text")}
                part = delta.get("content") or delta.get("reasoning_content") or ""
                print(part, end="", flush=True)
                has_begun = has_begun or bool(part)
    except SwarmError as error:
        if has_begun:
            print()
        if has_begun and isinstance(error, NoRoute):  # to wait and ask again would say the beginning twice
            raise SwarmUnavailable(str(error)) from None
        raise
    print()
    details, n, seconds = last_event["swarmd"], last_event["usage"]["completion_tokens"], time.monotonic() - began_at
    _print_summary(n, seconds, details["chain"])
    for line in describe_answer(details):
        print(line, file=sys.stderr)


def _print_summary(n_tokens: int, seconds: float, chain: Iterable[str]) -> None:
    summary = f"{count(n_tokens, 'token')}, {n_tokens / seconds:.1f} tokens/s through {' -> '.join(chain)}"
    print(summary, file=sys.stderr)


def _read_stdin() -> str:
    """The prompt from standard input. Raises ConfigError for what is no UTF-8."""
    from swarmd.errors import ConfigError

    raw = sys.stdin.buffer.read()
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"the prompt on standard input is not UTF-8: byte {error.start + 1} is 0x{raw[error.start]:02x}; "
            "convert it first, for example with iconv -f latin1 -t utf-8"
        ) from None


def _generate_here(swarm, model, name, text, max_tokens, temperature, seed, as_json, raw) -> None:  # type: ignore[no-untyped-def]
    from dataclasses import asdict

    import torch
    from transformers import TextStreamer

    tokenizer = swarm.tokenizer(name)
    is_chat = bool(tokenizer.chat_template) and not raw
    inputs, ends = (
        _encode_turn(swarm, name, text) if is_chat else (tokenizer(text, return_tensors="pt"), frozenset[int]())
    )
    torch.manual_seed(seed)
    sampling = {"do_sample": True, "temperature": temperature} if temperature > 0 else {"do_sample": False}
    streamer = None if as_json else TextStreamer(tokenizer, skip_prompt=is_chat, skip_special_tokens=True)
    began_at = time.perf_counter()
    ends_option = end_options(model.generation_config.eos_token_id, tokenizer.eos_token_id, ends)
    ids = model.generate(**inputs, max_new_tokens=max_tokens, streamer=streamer, **ends_option, **sampling)
    seconds = time.perf_counter() - began_at
    n_new = ids.shape[1] - inputs["input_ids"].shape[1]
    session = model.last_session
    session.wait_closed()
    doubts = sorted({(doubt.first_token, doubt.hop, doubt.reason) for doubt in session.statistics.doubts})
    checks = swarm.within.checks
    if as_json:
        print_json(
            {
                "text": tokenizer.decode(ids[0, -n_new if is_chat else 0 :], skip_special_tokens=True),
                "new_tokens": n_new,
                "seconds": round(seconds, 3),
                "tokens_per_s": round(n_new / seconds, 2),
                "chain": list(session.chain),
                "repairs": len(session.statistics.repairs),
                "doubts": [{"token": first, "hop": hop, "reason": reason} for first, hop, reason in doubts],
                "checks": [asdict(finding) for finding in checks.findings],
                "tried_ahead": model.last_speculation.n_sent,
                "taken_ahead": model.last_speculation.n_taken,
            }
        )
        return
    _print_summary(n_new, seconds, session.chain)
    if (slowest_passes := session.statistics.passes.where()) is not None:
        print(slowest_passes, file=sys.stderr)
    if (speculation := model.last_speculation).n_sent:
        print(f"{speculation.n_taken} of {speculation.n_sent} tokens tried ahead were right", file=sys.stderr)
    for first, hop, reason in doubts[:1]:
        print(describe_doubt(max(0, first + 1 - inputs["input_ids"].shape[1]), hop, reason), file=sys.stderr)
    for repair in session.statistics.repairs:
        print(f"repaired in {repair.stall_s:.2f} s: {repair.reason}", file=sys.stderr)


def end_options(
    author: int | list[int] | None, tokenizer: int | None, template: frozenset[int]
) -> dict[str, list[int]]:
    """Where an answer ends, for ``generate``: wherever author, tokenizer or chat template say, as in the gateway."""
    ends = set(template)
    for source in (author, tokenizer):
        ids = source if isinstance(source, list) else [source]
        ends |= {token for token in ids if token is not None}
    return {"eos_token_id": sorted(ends)} if ends else {}


def _encode_turn(swarm: Any, name: str, text: str) -> tuple[dict[str, Any], frozenset[int]]:
    """What a user says, as the model's chat template writes it, and the tokens that end an answer.

    The template is run in a process with limits, as it is anybody's.
    """
    import torch

    from swarmd.client.text.prompts import one_turn

    async def ask() -> Any:
        return await one_turn(await swarm.within.folder(*await swarm.within.resolve(name)), text)

    prompt = swarm.call(ask)
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

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: sys.exit(128 + number))  # its processes end with it
    raise typer.Exit(run_demo(max_tokens, seed) if chat is None else run_chat(chat))
