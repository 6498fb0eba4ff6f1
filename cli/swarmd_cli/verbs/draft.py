"""Verbs on drafts: small blocks that learn, here, to guess what a hosted model says next."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmd.importing import importing
from swarmd_cli.context import home, membership, print_json
from swarmd_cli.preflight import require_answers
from swarmd_cli.terminal import rewrite_line
from swarmd_cli.verbs.look import Json

if TYPE_CHECKING:
    from swarmd.client.drafting.writing import TurnTokens

app = typer.Typer(
    help="Drafts that guess ahead of a hosted model, on this machine.", no_args_is_help=True, rich_markup_mode=None
)


@app.callback()
def drafts() -> None:
    """Keep ``train`` a verb of its own."""


@app.command("train")
def train(
    model: Annotated[str, typer.Argument(help="A name of the swarm's catalog.")],
    data: Annotated[Path | None, typer.Option("--data", help="JSONL to learn from, as swarmd tune reads it.")] = None,
    minutes: Annotated[float, typer.Option("--minutes", min=0.2, help="How long it may take.")] = 30.0,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of the draft; the usual one is found unasked.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Have a draft for a hosted model learn here; run uses it from then on where that is faster.

    Without --data the model writes what is learned from. Interrupted, the same command goes on with what is there.

    Example: swarmd draft train llama --minutes 30
    """
    membership().swarm()
    from swarmd.errors import ConfigError

    if data is not None and not data.is_file():
        raise ConfigError(f"{data} is no file: give rows of text as JSONL with --data")
    require_answers(model)
    print("starting ...", file=sys.stderr, flush=True)
    with importing():
        import swarmd.client.blocking
        from swarmd.client.draft_training import DraftTask, train_draft

    progress = _Progress()
    with swarmd.connect(home=home().folder) as swarm:
        remote = swarm.model(model, lookup=False, draft="")
        base, _ = swarm.call(swarm.within.resolve, model)
        folder = out or home().drafts / base
        rows = _read_rows(swarm, model, remote, data)
        turns = None if rows else _find_turns(swarm, model)
        task = DraftTask(base, folder, minutes * 60, rows, turns)
        try:
            made = train_draft(remote, task, progress.show)
        except KeyboardInterrupt:
            print(f"\nstopped; the same command goes on with what is in {folder}", file=sys.stderr)
            raise SystemExit(130) from None
        finally:
            progress.end()
    if as_json:
        print_json({"folder": str(folder), "acceptance": made.draft.acceptance, "second": made.draft.second})
        return
    shares = " ".join(f"{share:.2f}" for share in made.draft.acceptance)
    print(f"right by place, where those before were: {shares}")
    print(f"a second choice is right behind a wrong first one: {made.draft.second:.2f}")
    print(f"the draft: {folder}")
    if out is not None:
        print(f"to have others use it: swarmd models add {out} --name NAME --draft-for {model}")


def _read_rows(swarm: Any, name: str, remote: Any, data: Path | None) -> list[list[int]]:
    if data is None:
        return []
    from swarmd.client.drafting.writing import cut_rows
    from swarmd.client.tuning.dataset import read_dataset
    from swarmd.errors import ConfigError
    from swarmd_cli.verbs.tune import make_encoding

    encoding = make_encoding(swarm.tokenizer(name), remote, remote.max_session_tokens)
    rows = cut_rows([row.ids for row in read_dataset(data, encoding).rows])
    if len(rows) < 2:
        raise ConfigError(f"{data} is too short: a draft learns from rows of 512 tokens, and needs some")
    return rows


def _find_turns(swarm: Any, name: str) -> TurnTokens:
    """How the model's conversations are written; of a model for texts, how one begins."""
    from swarmd.client.drafting.writing import TURN_EXAMPLES, TurnTokens, read_turns
    from swarmd.client.text.prompts import Prompts

    async def render() -> list[tuple[int, ...]] | None:
        model, n_blocks = await swarm.within.resolve(name)
        async with Prompts(await swarm.within.folder(model, n_blocks)) as prompts:
            if not prompts.has_template:
                return None
            options = {"add_generation_prompt": True}
            return [(await prompts.chat([*turns], None, options)).ids for turns in TURN_EXAMPLES]

    rendered = swarm.call(render)
    if rendered is not None:
        return read_turns(rendered)
    tokenizer = swarm.tokenizer(name)
    begin = tokenizer("").input_ids or [tokenizer.bos_token_id or tokenizer.eos_token_id or 0]
    return TurnTokens(tuple(begin))


class _Progress:
    """One line that is written again and again on a terminal; a line now and then elsewhere."""

    INTERVAL_S = 30.0

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._said_at = -self.INTERVAL_S

    def show(self, line: str) -> None:
        """Say how far it is."""
        if self._is_terminal:
            rewrite_line(line)
        elif time.monotonic() - self._said_at >= self.INTERVAL_S:
            self._said_at = time.monotonic()
            print(line, file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._is_terminal:
            print(file=sys.stderr)
