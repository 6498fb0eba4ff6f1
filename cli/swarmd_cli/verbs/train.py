"""Training together: start a run from a recipe, take part, look, stop, go on, take the result home."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmd.importing import importing
from swarmd.values import count
from swarmd_cli.context import ask, ask_json, home, print_json, print_table, read_answer
from swarmd_cli.train_show import show_plan, show_run, write_plot
from swarmd_cli.verbs.look import Json

if TYPE_CHECKING:
    from swarmd.compute.runs.outline import Outline
    from swarmd.home.paths import Home
    from swarmd.protocol.runs.recipe import Recipe
    from swarmd.values import ModelId

app = typer.Typer(
    help="Train a model together: start a run, take part, look, stop, go on, take the result home.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
MADE_FROM = "made_from.txt"  # in a checkpoint that a run began with: the files that decided it
NO_ANCHORS = (
    "!! without this machine's signature no update of {name} counts: too few of its anchors are there.\n"
    "   swarmd train join {name} --role anchor   signs, and computes nothing\n"
    "   swarmd train anchors {name} PEER ...     has others sign; its owner can, while taking part\n"
    "   swarmd train stop {name} --all           stops it for everybody; its owner can, while taking part"
)
RunName = Annotated[str, typer.Argument(help="A run's name, or the beginning of its hash; left out: the only one.")]
Role = Annotated[
    str, typer.Option("--role", help="train (computes), reduce (averages only) or anchor (signs commits only).")
]


@app.command("start")
def start(
    recipe: Annotated[Path, typer.Argument(help="A recipe in TOML; docs/training.md explains it.")],
    role: Role = "train",
    again: Annotated[bool, typer.Option("--again", help="Start another run though one of this name is there.")] = False,
) -> None:
    """Check a recipe, pack its data, sign the run, and take part in it.

    Example: swarmd train start recipe.toml
    """
    import msgspec

    from swarmd.errors import ConfigError
    from swarmd.home.membership import MembershipFiles
    from swarmd.protocol.runs.recipe import read_toml, start_run
    from swarmd.train.runs import ROLES
    from swarmd.train.store.disk import RunFolder

    state = home()
    member = MembershipFiles(state)
    member.swarm()
    if role not in ROLES:
        raise ConfigError(f"--role is one of {', '.join(ROLES)}, not {role!r}")
    known = ask_json("train")
    if known["training"] == "off":
        raise ConfigError('this machine takes no part in training: its setting "training_runs" is "off"')
    draft = read_toml(recipe)
    taken = {row["name"] for row in [*known["runs"], *known["others"]]}
    if draft.name in taken:
        free_name = _next_name(draft.name, taken)
        if not again:
            raise ConfigError(
                f"a run called {draft.name!r} is there already: swarmd train join {draft.name} takes part in it, "
                f"--again starts another one, called {free_name!r}"
            )
        draft = msgspec.structs.replace(draft, name=free_name)
    # In the order of cost: what is wrong with the recipe is said before weights are made or texts packed.
    _require_data(draft.data, recipe.parent)
    model, folder = _find_source(state, draft, recipe.parent)
    outline = _load_outline(folder, draft)
    lora = msgspec.structs.replace(draft.lora, targets=outline.targets)
    draft = msgspec.structs.replace(draft, lora=lora)
    if not model:
        model, folder = _provide_model(state, draft, folder)
    data, n_rows = _provide_data(state, draft, recipe.parent, folder, outline.vocabulary)
    anchors = draft.anchors or (member.identity().peer_id,)
    if role == "anchor" and member.identity().peer_id not in anchors:
        raise ConfigError("anchors does not name this peer: add it, or take another role")
    resolved = msgspec.structs.replace(draft, model=model, data=data, anchors=anchors)
    run = start_run(resolved, member.identity(), int(time.time()))
    RunFolder(state.runs / run.id).keep_run(run, role)
    ask_json("reload", "POST")
    ask_json("train/join", "POST", name=run.id, role=role)
    print(f"{resolved.name}: run {run.id}")
    rows = f"{count(n_rows, 'row')} of {resolved.batch.tokens} tokens"
    print(f"model {model[:12]}, {rows}, {count(len(anchors), 'anchor')}")
    print(f"others take part with: swarmd train join {run.id[:12]}")


@app.command("join")
def join(run: RunName = "", role: Role = "train") -> None:
    """Take part in a run of the swarm.

    Example: swarmd train join demo-run
    """
    from swarmd.run_status import JoinRunAnswer

    part = ask(JoinRunAnswer, "train/join", "POST", timeout_s=60.0, name=run, role=role)
    print(f"takes part in {part.name} ({part.run[:12]}) as {role}: swarmd train status shows how it goes")


@app.command("stop")
def stop(
    run: RunName = "",
    everywhere: Annotated[bool, typer.Option("--all", help="As its owner: stop the run for everybody.")] = False,
) -> None:
    """Leave a run; what was gathered here and is not committed is lost. With --all its owner stops it for everybody.

    Example: swarmd train stop demo-run
    """
    from swarmd.run_status import LeaveRunAnswer, OrderAnswer

    if everywhere:
        stopped = ask(OrderAnswer, "train/order", "POST", name=run, state="stopped")
        print(f"{stopped.run[:12]} is stopped for everybody: swarmd train resume --all lets it go on")
        return
    answer = ask(LeaveRunAnswer, "train/leave", "POST", timeout_s=120.0, name=run)
    print(f"left {answer.run[:12]}; its state stays on this disk: swarmd train join takes part again")


@app.command("pause")
def pause(run: RunName = "") -> None:
    """Compute nothing for a run on this machine until swarmd train resume; its state stays and is given to others.

    Example: swarmd train pause demo-run
    """
    from swarmd.run_status import PauseRunAnswer

    answer = ask(PauseRunAnswer, "train/pause", "POST", name=run)
    print(f"{answer.run[:12]} is paused here")


@app.command("resume")
def resume(
    run: RunName = "",
    everywhere: Annotated[bool, typer.Option("--all", help="As its owner: let a stopped run go on.")] = False,
) -> None:
    """Go on with a run that was paused here. With --all its owner lets a stopped run go on for everybody.

    Example: swarmd train resume demo-run
    """
    from swarmd.run_status import OrderAnswer, PauseRunAnswer

    if everywhere:
        order = ask(OrderAnswer, "train/order", "POST", name=run, state="running")
        print(f"{order.run[:12]} goes on for everybody")
        return
    answer = ask(PauseRunAnswer, "train/unpause", "POST", name=run)
    print(f"{answer.run[:12]} goes on here")


@app.command("back")
def back(run: RunName) -> None:
    """As its owner: have a run go back to the newest state before its last update that somebody has.

    For a run whose newest state nobody gives. What was computed since that state is lost.

    Example: swarmd train back demo-run
    """
    from swarmd.run_status import OrderAnswer

    order = ask(OrderAnswer, "train/order", "POST", name=run, state="back")
    print(f"{order.run[:12]} goes back once a peer that has the state hears of it: swarmd train status shows it")


@app.command("anchors")
def anchors(
    run: RunName,
    peers: Annotated[list[str], typer.Argument(help="The peer ids that sign from now on, instead of those before.")],
) -> None:
    """As its owner: name other anchors, when a majority of the old ones is gone for good.

    Do it only then: old anchors that still sign would make a second, dead branch of the run.

    Example: swarmd train anchors demo-run 12D3KooW… 12D3KooW…
    """
    from swarmd.run_status import OrderAnswer

    order = ask(OrderAnswer, "train/order", "POST", name=run, state="running", anchors=",".join(peers))
    print(f"{order.run[:12]} has {count(len(order.anchors), 'anchor')} from now on")


@app.command("status")
def status(
    run: RunName = "",
    as_json: Json = False,
    plot: Annotated[Path | None, typer.Option("--plot", help="Also draw the loss curve to this PNG file.")] = None,
) -> None:
    """Show runs: who takes part and how fast, the time to the next round, what rounds took, the loss.

    Example: swarmd train status --plot loss.png
    """
    from swarmd.errors import ConfigError
    from swarmd.run_status import RunsAnswer

    body = ask_json("train")
    known_names = ", ".join(row["name"] for row in body["runs"]) or "none"
    body["runs"] = [row for row in body["runs"] if run == row["name"] or row["run"].startswith(run)]
    if run and not body["runs"]:
        raise ConfigError(f"this machine takes part in no run called {run!r}; it is in: {known_names}")
    if plot is not None:
        write_plot(read_answer(RunsAnswer, body).runs, plot)
    if as_json:
        print_json(body)
        return
    answer = read_answer(RunsAnswer, body)
    for row in answer.runs:
        show_run(row)
    other_runs = []
    for other in answer.others:
        other_runs.append([other.name, other.run[:12], str(other.peers), str(other.update)])
    if other_runs:
        print_table("Runs of the swarm that this peer is not in", ["name", "run", "peers", "updates"], other_runs)
    elif not answer.runs:
        print("no training run is known here: swarmd train start RECIPE starts one")


@app.command("plan")
def plan(run: RunName = "", as_json: Json = False) -> None:
    """Show the next round, who reduces which share of it, and which synchronisation and codec would be best.

    Of each synchronisation the table shows this run's codec, the best one and none; --json has all. Where peers compute
    on during a long round, an update comes to have more samples than the recipe asks for: too large.

    Example: swarmd train plan demo-run
    """
    from swarmd.run_status import PlanAnswer

    body = ask_json("train/plan", name=run)
    if as_json:
        print_json(body)
        return
    show_plan(read_answer(PlanAnswer, body))


@app.command("export")
def export(
    out: Annotated[Path, typer.Option("--out", help="The folder for the checkpoint or, of LoRA, the adapter.")],
    run: RunName = "",
) -> None:
    """Write what a run has come to, as transformers (or PEFT) saves it.

    Example: swarmd train export demo-run --out ./result
    """
    from swarmd.errors import ConfigError
    from swarmd.train.store.disk import RunFolder

    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already, and is not overwritten: choose another --out, or remove it first")
    body = ask_json("train/checkpoint", "POST", timeout_s=600.0, name=run)
    path = Path(body["path"])
    recipe = RunFolder(path.parent).run().recipe
    folder = ask_json("here", model=recipe.model)["folder"]
    _save_model(Path(folder), recipe, path, body["layout"], out)
    print(f"update {body['update']} of {recipe.name}: {out}")
    if recipe.train == "all":
        print(f"to have the swarm serve it: swarmd models add {out} --name NAME")


def _next_name(name: str, taken: set[str]) -> str:
    """The first of name-2, name-3, ... that no run has."""
    return next(f"{name}-{n}" for n in range(2, len(taken) + 3) if f"{name}-{n}" not in taken)


# --- what start does ---------------------------------------------------------------------------------------------


def _find_source(state: Home, recipe: Recipe, recipe_folder: Path) -> tuple[ModelId | None, Path]:
    """Find the model to begin with: one of the catalog, with its hash, or a folder beside the recipe.

    Such a folder holds a checkpoint, or only a configuration. Raises ConfigError.
    """
    from swarmd.errors import ConfigError
    from swarmd.home.membership import MembershipFiles

    folder = recipe_folder / recipe.model
    if folder.is_dir():
        return None, folder
    model = MembershipFiles(state).catalog().hash_of(recipe.model)
    presence = ask_json("here", model=model)
    if not presence["here"]:
        raise ConfigError(f"{recipe.model} is not whole on this machine: swarmd models pull {recipe.model}")
    return model, Path(presence["folder"])


def _load_outline(source: Path, recipe: Recipe) -> Outline:
    """Read the outline (compute.runs.outline). Raises ConfigError for what cannot be trained as the recipe says."""
    with importing():
        from swarmd.compute.runs.outline import read_outline
    return read_outline(source, recipe)


def _provide_model(state: Home, recipe: Recipe, source: Path) -> tuple[ModelId, Path]:
    """Provide a checkpoint to begin with, held for others; its first weights are made where it has none."""
    folder = source if any(source.glob("*.safetensors")) else _initialise(source, recipe, state)
    return _adopt_folder(state, folder), folder


def _initialise(folder: Path, recipe: Recipe, state: Home) -> Path:
    """Make a checkpoint of random weights for a configuration, the same for the same seed. Raises ConfigError.

    Where a run of this name had other files, this is another folder: members hold the earlier one by its hash.
    """
    import hashlib
    import shutil

    import torch
    from transformers import AutoModelForCausalLM

    from swarmd.compute.model.skeleton import building, read_config
    from swarmd.protocol.models.manifest import FILES

    sources = [name for name in ("config.json", *FILES) if (folder / name).is_file()]
    listed = ""
    for name in sources:
        digest = hashlib.sha256((folder / name).read_bytes())
        listed += f"{name} {digest.hexdigest()}\n"
    checkpoint = state.folder / "models" / f"{recipe.name}-{recipe.seed}"
    if checkpoint.exists() and _read_text(checkpoint / MADE_FROM) != listed:
        suffix = hashlib.sha256(listed.encode()).hexdigest()[:8]
        checkpoint = checkpoint.with_name(f"{checkpoint.name}-{suffix}")
    torch.manual_seed(recipe.seed)
    with building(f"{folder / 'config.json'}"):
        model = AutoModelForCausalLM.from_config(read_config(folder))
    model.save_pretrained(checkpoint)
    for name in sources[1:]:
        shutil.copy(folder / name, checkpoint / name)
    (checkpoint / MADE_FROM).write_text(listed)
    return checkpoint


def _read_text(path: Path) -> str:
    return path.read_text() if path.is_file() else ""


def _require_data(data: str, recipe_folder: Path) -> None:
    """Refuse what is neither a file nor a hash, before a model is made for it. Raises ConfigError."""
    from swarmd.errors import ConfigError
    from swarmd.names import is_model_hash

    if not (recipe_folder / data).is_file() and not is_model_hash(data):
        raise ConfigError(f"data: {recipe_folder / data} is no file, and no hash of data that is on this machine")


def _provide_data(state: Home, recipe: Recipe, recipe_folder: Path, model: Path, vocabulary: int) -> tuple[str, int]:
    """Provide the data, packed on this disk; returns its hash and its number of rows. Raises ConfigError.

    ``vocabulary``: how many tokens the model knows, which need not be how many its tokenizer does.
    """
    from swarmd.errors import ConfigError
    from swarmd.names import is_model_hash
    from swarmd.protocol.models import manifest
    from swarmd.train.store.data import highest_token, pack_texts, require_known_token, rows_of_shards

    # A file is tokenised by the model's own tokenizer, cut into rows, and shuffled by the recipe's seed. A hash means
    # rows that were packed before: they are only checked, for another model may know fewer tokens.
    tokens = recipe.batch.tokens
    source = recipe_folder / recipe.data
    if not source.is_file():
        presence = ask_json("here", model=recipe.data) if is_model_hash(recipe.data) else {"folder": None}
        if presence["folder"] is None:
            raise ConfigError(f"data: {source} is no file, and no hash of data that is on this machine")
        folder = Path(presence["folder"])
        data_manifest = manifest.read_folder(folder)
        n_rows = sum(rows_of_shards(data_manifest, tokens))
        require_known_token(highest_token(folder, data_manifest), vocabulary)
        return recipe.data, n_rows
    texts = _tokenise(source, model, vocabulary)
    folder = state.folder / "data" / f"{recipe.name}-{int(time.time())}"
    n_rows = pack_texts(texts, tokens, vocabulary, folder, recipe.seed)
    return _adopt_folder(state, folder), n_rows


def _adopt_folder(state: Home, folder: Path) -> ModelId:
    """Hash a folder, and have this machine's daemon hold it for others. Raises ConfigError."""
    from swarmd.home.models import ModelFolders
    from swarmd.protocol.models import manifest
    from swarmd.weights.library import Library

    read = manifest.read_folder(folder)
    Library(state.weights, {}).keep_manifest(read, folder)
    model = manifest.model_id(read)
    ModelFolders(state).add(model, folder)
    return model


def _tokenise(path: Path, model: Path, vocabulary: int) -> list[list[int]]:
    """Turn texts into tokens, each with its end. Raises ConfigError naming what cannot be used."""
    from swarmd.client.text.tokenizer import load_tokenizer
    from swarmd.client.tuning.dataset import Encoding, read_dataset
    from swarmd.errors import ConfigError

    tokenizer = load_tokenizer(model)
    end = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    if path.suffix != ".jsonl":
        try:
            return [[*encode(path.read_text()), *end]]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read as text: {error}") from None
    rows = read_dataset(path, Encoding(encode, (), end, vocabulary, sys.maxsize)).rows
    labelled = [number for number, row in enumerate(rows, 1) if row.labels != row.ids]
    if labelled:
        raise ConfigError(
            f"{path}: line {labelled[0]} says which of its tokens count (a completion, or labels), as {len(labelled)} "
            f"of {len(rows)} lines do: a run learns every token of its data, swarmd tune learns those that count. "
            'Write {"text": ...} or {"input_ids": ...} alone'
        )
    return [list(row.ids) for row in rows]


def _save_model(base: Path, recipe: Recipe, state: Path, layout: list[list[Any]], out: Path) -> None:
    """Put the parameters of a state into the model that they belong to, and save it."""
    import math

    import torch
    from safetensors import safe_open

    from swarmd.client.text.tokenizer import load_tokenizer
    from swarmd.compute.runs.gradients import build
    from swarmd.errors import ConfigError

    # A state holds all trained parameters in one vector, one after the other as the model names them. The layout of
    # the run says names and shapes: another version of transformers may order them otherwise.
    model = build(base, recipe)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if [[name, list(parameter.shape)] for name, parameter in trained] != layout:
        raise ConfigError("its parameters here differ from the run's: are the versions of transformers alike?")
    with safe_open(str(state), "pt") as file:
        vector = file.get_tensor("parameters")
    pieces = torch.split(vector, [math.prod(parameter.shape) for _, parameter in trained])
    with torch.no_grad():
        for (_, parameter), values in zip(trained, pieces, strict=True):
            parameter.copy_(values.view(parameter.shape))
    model.save_pretrained(out)  # type: ignore[operator]
    if recipe.train == "all" and (base / "tokenizer_config.json").is_file():
        load_tokenizer(base).save_pretrained(out)
