"""Training runs from Python: start one from a recipe, and take the result home. ``swarmd train`` does it by these.

>>> from swarmd import training_runs
>>> started = training_runs.start_run(Path("recipe.toml"))                                 # doctest: +SKIP
>>> training_runs.export_run(started.run.id, Path("result"))                               # doctest: +SKIP

Torch and transformers are imported once a recipe is sound: what is wrong is said at once.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from swarmd.errors import ConfigError
from swarmd.home.membership import MembershipFiles
from swarmd.home.models import ModelFolders
from swarmd.home.paths import Home
from swarmd.importing import importing
from swarmd.names import is_model_hash
from swarmd.net import local
from swarmd.plan.runs.stages import USABLE_SHARE, ModelSize, choose_stages, divide_blocks, fit_stages
from swarmd.protocol.models import manifest
from swarmd.protocol.runs import recipe as recipes
from swarmd.protocol.runs.recipe import Recipe, Run
from swarmd.text_files import find_other_format, read_bytes, read_text
from swarmd.train.runs import ROLES
from swarmd.train.store.disk import RunFolder
from swarmd.values import ModelId

if TYPE_CHECKING:
    from swarmd.compute.runs.outline import Outline

MADE_FROM = "made_from.txt"  # in a checkpoint that a run began with: the files that decided it
ROWS = (".jsonl", ".ndjson", ".json")  # names of files with a row on each line
TABLES = (".csv", ".tsv")  # whose commas and headings nobody wants a model to learn
HEAD_BYTES = 65_536  # of data, which tell what it is before a model is made for it
EXPORT_TIMEOUT_S = 600.0  # the daemon writes the whole state to the disk


@dataclass(frozen=True, slots=True)
class StartedRun:
    """A run that this machine has started, of how many rows its data is, and why it has so many stages, if it chose."""

    run: Run
    n_rows: int
    why_stages: str = ""


@dataclass(frozen=True, slots=True)
class RecipePlan:
    """What a recipe in stages needs: how many stages of blocks, why, and the bytes that a holder of each takes.

    ``room``: what each machine of the swarm has to give, by peer; ``is_feasible``: can these machines hold it?
    """

    n_stages: int
    reason: str
    is_feasible: bool
    stage_bytes: int
    ends_bytes: int
    room: dict[str, int]


@dataclass(frozen=True, slots=True)
class ExportedRun:
    """What a run has come to, as it was saved: after which update, of which recipe."""

    update: int
    recipe: Recipe


# From a recipe to a run, in the order of cost: what is wrong with it is said before weights are made or texts packed.
#
#     recipe.toml --> name, role free? --> data there? --> model found --> outline: can it be trained so?
#                                                                            |
#     signed run <-- data packed, its hash <-- first weights, their hash <---+
#         |
#     on this disk --> the daemon takes part, and gives model and data to others
#
# The run names model and data by their hashes, so that no member has to believe the starter.


def start_run(
    recipe_path: Path,
    role: str = "train",
    *,
    stage: int | None = None,
    again: bool = False,
    home: Home | None = None,
) -> StartedRun:
    """Check a recipe, pack its data, sign the run, and have this machine's daemon take part in it.

    ``stage``: which of its stages this machine holds, where it has any; None: the one that lacks holders most.
    ``again``: start another run though one of this name is there; ``home``: None is the default one. Raises SwarmError.
    """
    home = home or Home.default()
    member = MembershipFiles(home)
    member.swarm()
    if role not in ROLES:
        raise ConfigError(f"--role is one of {', '.join(ROLES)}, not {role!r}")
    known = _ask(home, "train")
    if known["training"] == "off":
        raise ConfigError('this machine takes no part in training: its setting "training_runs" is "off"')
    taken = {row["name"] for row in [*known["runs"], *known["others"]]}
    draft = _name_run(recipes.read_toml(recipe_path), taken, again)
    beside = recipe_path.parent
    require_data(draft.data, beside)
    model, source = _find_source(home, draft, beside)
    outline = _load_outline(source, draft)
    lora = msgspec.structs.replace(draft.lora, targets=outline.targets)
    draft = msgspec.structs.replace(draft, lora=lora)
    if not model:
        model, source = _provide_model(home, draft, source)
    data, n_rows = _provide_data(home, draft, beside, source, outline.vocabulary)
    anchors = draft.anchors or (member.identity().peer_id,)
    if role == "anchor" and member.identity().peer_id not in anchors:
        raise ConfigError("anchors does not name this peer: add it, or take another role")
    stages, why_stages = _divide_blocks(home, draft, outline.size)
    resolved = msgspec.structs.replace(draft, model=model, data=data, anchors=anchors, stages=stages)
    run = recipes.start_run(resolved, member.identity(), int(time.time()))
    RunFolder(home.runs / run.id).keep_run(run, "" if stages else role)  # stages have folders of their own
    _ask(home, "reload", "POST")
    _ask(home, "train/join", "POST", name=run.id, role=role, stage="" if stage is None else str(stage))
    return StartedRun(run, n_rows, why_stages)


def plan_recipe(recipe_path: Path, *, home: Home | None = None) -> RecipePlan:
    """Say what a recipe in stages needs, and whether the machines of the swarm have it. Raises SwarmError."""
    home = home or Home.default()
    draft = recipes.read_toml(recipe_path)
    if not draft.is_in_stages:
        raise ConfigError(f"{recipe_path} is not in stages: every member holds the whole model; start it, then plan")
    _, source = _find_source(home, draft, recipe_path.parent)
    size = _load_outline(source, draft).size
    room = _find_room(home)
    if draft.stages == "auto":
        choice = choose_stages(size, list(room.values()))
        n_stages = choice.action or size.n_blocks
    else:
        n_stages = len(_divide_blocks(home, draft, size)[0])
        choice = fit_stages(size, n_stages, list(room.values()))
    return RecipePlan(n_stages, choice.reason, bool(choice.action), size.stage_bytes(n_stages), size.ends_bytes, room)


def export_run(name: str, out: Path, *, home: Home | None = None) -> ExportedRun:
    """Write what a run has come to into a folder, as transformers (or PEFT) saves it. Raises SwarmError."""
    home = home or Home.default()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already, and is not overwritten: choose another --out, or remove it first")
    MembershipFiles(home).swarm()
    body = _ask(home, "train/checkpoint", "POST", EXPORT_TIMEOUT_S, name=name)
    state = Path(body["path"])
    recipe = RunFolder(state.parent).run().recipe
    if body["stages"]:
        updates = {stage["update"] for stage in body["stages"]}
        if max(updates) - min(updates) > 1:  # one apart is what a round leaves for a moment, and no harm
            raise ConfigError(
                f"the stages of {recipe.name!r} are at updates {min(updates)} to {max(updates)}, which are no one "
                "model: try again when they have come together"
            )
    base = Path(_ask(home, "here", model=recipe.model)["folder"] or home.folder)
    if body["stages"] and not any(base.glob("*.safetensors")):
        raise ConfigError(
            f"the model that the run began with is not whole on this machine: swarmd models pull {recipe.model}"
        )
    _save_model(base, recipe, state, body, out)
    return ExportedRun(body["update"], recipe)


def _ask(
    home: Home,
    verb: str,
    method: str = "GET",
    timeout_s: float = 15.0,
    **query: str,
) -> dict[str, Any]:
    return local.ask_daemon(home.socket, verb, query, method, timeout_s)


# --- names -------------------------------------------------------------------------------------------------------


def _name_run(draft: Recipe, taken: set[str], again: bool) -> Recipe:
    """Give a run a name that no other has: its own, or with ``again`` the next one. Raises ConfigError."""
    if draft.name not in taken:
        return draft
    free_name = next(f"{draft.name}-{n}" for n in range(2, len(taken) + 3) if f"{draft.name}-{n}" not in taken)
    if not again:
        raise ConfigError(
            f"a run called {draft.name!r} is there already: swarmd train join {draft.name} takes part in it, "
            f"--again starts another one, called {free_name!r}"
        )
    return msgspec.structs.replace(draft, name=free_name)


# --- the model ---------------------------------------------------------------------------------------------------


def _find_source(home: Home, recipe: Recipe, recipe_folder: Path) -> tuple[ModelId | None, Path]:
    """Find the model to begin with: one of the catalog, with its hash, or a folder beside the recipe.

    Such a folder holds a checkpoint, or only a configuration. Raises ConfigError.
    """
    folder = recipe_folder / recipe.model
    if folder.is_dir():
        return None, folder
    model = MembershipFiles(home).catalog().hash_of(recipe.model)
    presence = _ask(home, "here", model=model)
    if not presence["here"]:
        raise ConfigError(f"{recipe.model} is not whole on this machine: swarmd models pull {recipe.model}")
    return model, Path(presence["folder"])


def _load_outline(source: Path, recipe: Recipe) -> Outline:
    """Read the outline (compute.runs.outline). Raises ConfigError for what cannot be trained as the recipe says."""
    with importing():
        from swarmd.compute.runs.outline import read_outline
    return read_outline(source, recipe)


def _find_room(home: Home) -> dict[str, int]:
    """Find how many bytes each machine of the swarm has to give to stages, by peer, as far as that is known."""
    memories = {peer["peer"]: peer["memory_bytes"] for peer in _ask(home, "peers")["peers"]}
    return {peer: int(n_bytes * USABLE_SHARE) for peer, n_bytes in memories.items() if n_bytes}


def _divide_blocks(home: Home, recipe: Recipe, size: ModelSize) -> tuple[tuple[int, ...], str]:
    """Return the first block of each stage that a recipe asks for, and why; () for none. Raises ConfigError."""
    stages = recipe.stages
    why = ""
    if stages == "auto":
        choice = choose_stages(size, list(_find_room(home).values()))
        if not choice.action:
            raise ConfigError(f'stages = "auto": {choice.reason}: have more machines join, or say how many stages')
        stages, why = choice.action, choice.reason
    if isinstance(stages, tuple):
        return stages, why
    try:
        return divide_blocks(size.n_blocks, stages), why
    except ValueError as error:
        raise ConfigError(f"stages: {error}") from None


def _provide_model(home: Home, recipe: Recipe, source: Path) -> tuple[ModelId, Path]:
    """Provide a checkpoint to begin with, held for others; its first weights are made where it has none."""
    folder = source if any(source.glob("*.safetensors")) else initialise_model(source, recipe, home.folder / "models")
    return _adopt_folder(home, folder), folder


def initialise_model(folder: Path, recipe: Recipe, models: Path) -> Path:
    """Make a checkpoint of random weights for a configuration, the same for the same seed. Raises ConfigError.

    ``models``: where its folder is made. Where a run of this name had other files, this is another folder: members
    hold the earlier one by its hash.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from swarmd.compute.model.plain_config import building, read_config
    from swarmd.protocol.models.manifest import FILES

    sources = [name for name in ("config.json", *FILES) if (folder / name).is_file()]
    listed = ""
    for name in sources:
        digest = hashlib.sha256((folder / name).read_bytes())
        listed += f"{name} {digest.hexdigest()}\n"
    checkpoint = models / f"{name_folder(recipe.name)}-{recipe.seed}"
    if checkpoint.exists() and _read_listed(checkpoint / MADE_FROM) != listed:
        suffix = hashlib.sha256(listed.encode()).hexdigest()[:8]
        checkpoint = checkpoint.with_name(f"{checkpoint.name}-{suffix}")
    torch.manual_seed(recipe.seed)
    with building(f"{folder / 'config.json'}"):
        model = AutoModelForCausalLM.from_config(read_config(folder))
    model.save_pretrained(checkpoint)
    for name in sources[1:]:
        shutil.copy(folder / name, checkpoint / name)
    (checkpoint / MADE_FROM).write_text(listed, encoding="utf-8")
    return checkpoint


def name_folder(run: str) -> str:
    """Name a folder after a run, whose name may be a path or hidden: it stays in the folder that it is made in."""
    return re.sub(r"[^\w.-]", "_", run).lstrip(".") or "run"


def _read_listed(path: Path) -> str:
    return read_text(path) if path.is_file() else ""


def _adopt_folder(home: Home, folder: Path) -> ModelId:
    """Hash a folder, and have this machine's daemon hold it for others. Raises ConfigError."""
    from swarmd.weights.library import Library

    read = manifest.read_folder(folder)
    Library(home.weights, {}).keep_manifest(read, folder)
    model = manifest.model_id(read)
    ModelFolders(home).add(model, folder)
    return model


# --- the data ----------------------------------------------------------------------------------------------------


def require_data(data: str, recipe_folder: Path) -> None:
    """Refuse what is no hash, and no file of rows or text, before a model is made for it. Raises ConfigError."""
    path = recipe_folder / data
    if not path.is_file():
        if not is_model_hash(data):
            raise ConfigError(f"data: {path} is no file, and no hash of data that is on this machine")
        return
    head = read_bytes(path, HEAD_BYTES)
    other = find_other_format(head) or ("" if _has_rows(path) else _find_table(path, head))
    if other:
        raise ConfigError(f"data: {path}: {other}")


def _has_rows(path: Path) -> bool:
    """Does a file hold a row on each line, by its name? Else it is one text."""
    return path.suffix.lower() in ROWS


def _find_table(path: Path, head: bytes) -> str:
    """Say why a file is no plain text, but rows under another name; "" where it may be text."""
    if path.suffix.lower() in TABLES:
        return 'it is a table, expected lines of JSON ({"text": ...}) in a .jsonl file, or plain text'
    line = head.removeprefix(codecs.BOM_UTF8).lstrip().partition(b"\n")[0]
    try:
        is_row = isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return ""
    if is_row:
        return "its first line is an object of JSON: name it .jsonl to have each line taken for a row"
    return ""


def _provide_data(
    home: Home,
    recipe: Recipe,
    recipe_folder: Path,
    model: Path,
    vocabulary: int,
) -> tuple[str, int]:
    """Provide the data, packed on this disk; returns its hash and its number of rows. Raises ConfigError.

    ``vocabulary``: how many tokens the model knows, which need not be how many its tokenizer does.
    """
    from swarmd.train.store.data import highest_token, pack_texts, require_known_token, rows_of_shards

    # A file is tokenised by the model's own tokenizer, cut into rows, and shuffled by the recipe's seed. A hash means
    # rows that were packed before: they are only checked, for another model may know fewer tokens.
    tokens = recipe.batch.tokens
    source = recipe_folder / recipe.data
    if not source.is_file():
        presence = _ask(home, "here", model=recipe.data) if is_model_hash(recipe.data) else {"folder": None}
        if presence["folder"] is None:
            raise ConfigError(f"data: {source} is no file, and no hash of data that is on this machine")
        folder = Path(presence["folder"])
        data_manifest = manifest.read_folder(folder)
        n_rows = sum(rows_of_shards(data_manifest, tokens))
        require_known_token(highest_token(folder, data_manifest), vocabulary)
        return recipe.data, n_rows
    texts = tokenise_texts(source, model, vocabulary)
    folder = home.folder / "data" / f"{name_folder(recipe.name)}-{int(time.time())}"
    n_rows = pack_texts(texts, tokens, vocabulary, folder, recipe.seed)
    return _adopt_folder(home, folder), n_rows


def tokenise_texts(path: Path, model: Path, vocabulary: int) -> list[list[int]]:
    """Turn texts into tokens, each with its end. Raises ConfigError naming what cannot be used."""
    from swarmd.client.text.tokenizer import load_tokenizer
    from swarmd.client.tuning.dataset import Encoding, read_dataset

    tokenizer = load_tokenizer(model)
    end = () if tokenizer.eos_token_id is None else (int(tokenizer.eos_token_id),)

    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False).input_ids)

    if not _has_rows(path):
        text = read_text(path).replace("\r\n", "\n")
        return [[*encode(text), *end]]
    dataset = read_dataset(path, Encoding(encode, (), end, vocabulary, sys.maxsize))
    rows = dataset.rows
    numbered = zip(dataset.line_numbers, rows, strict=True)
    labelled = [number for number, row in numbered if row.labels != row.ids]
    if labelled:
        raise ConfigError(
            f"{path}: line {labelled[0]} says which of its tokens count (a completion, or labels), as {len(labelled)} "
            f"of {len(rows)} lines do: a run learns every token of its data, swarmd tune learns those that count. "
            'Write {"text": ...} or {"input_ids": ...} alone'
        )
    return [list(row.ids) for row in rows]


# --- the result --------------------------------------------------------------------------------------------------


def _save_model(
    base: Path,
    recipe: Recipe,
    state: Path,
    body: dict[str, Any],
    out: Path,
) -> None:
    """Put the parameters of a state, or of those of all stages, into the model that they belong to, and save it."""
    import torch
    from safetensors import safe_open

    from swarmd.client.text.tokenizer import load_tokenizer
    from swarmd.compute.runs.gradients import build
    from swarmd.compute.runs.stages import parameters_of_stages

    # A state holds all trained parameters in one vector, one after the other as the model names them. The layout of
    # the run says names and shapes: another version of transformers may order them otherwise.
    model = build(base, recipe)
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    by_state = {str(state): [parameter for _, parameter in trained]}
    if body["stages"]:
        parameters = parameters_of_stages(model, base, recipe)
        by_state = {stage["path"]: parameters[stage["stage"]] for stage in body["stages"]}
    elif [[name, list(parameter.shape)] for name, parameter in trained] != body["layout"]:
        raise ConfigError("its parameters here differ from the run's: are the versions of transformers alike?")
    for path, parameters_of_state in by_state.items():
        with safe_open(path, "pt") as file:
            vector = file.get_tensor("parameters")
        pieces = torch.split(vector, [parameter.numel() for parameter in parameters_of_state])
        with torch.no_grad():
            for parameter, values in zip(parameters_of_state, pieces, strict=True):
                parameter.copy_(values.view(parameter.shape))
    model.save_pretrained(out)  # type: ignore[operator]
    if recipe.train == "all" and (base / "tokenizer_config.json").is_file():
        load_tokenizer(base).save_pretrained(out)
