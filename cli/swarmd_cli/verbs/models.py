"""Verbs on models: what the swarm has, what of it is here, adding, fetching, deleting, checking."""

from __future__ import annotations

import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from swarmd.names import require_name
from swarmd.values import count, some_of
from swarmd_cli.context import (
    JsonObject,
    ask,
    ask_json,
    format_size,
    founder,
    home,
    is_running,
    membership,
    model_folders,
    print_json,
    read_answer,
    reload_daemon,
)
from swarmd_cli.convert import OWN, delete_converted, link_laid_out
from swarmd_cli.hub_reading import read_on_hub
from swarmd_cli.source import HUB_ID, check_tokenizer, find_folder
from swarmd_cli.terminal import make_console, print_table, text_column
from swarmd_cli.verbs.look import Json, download_line, merge_names, span_text

if TYPE_CHECKING:
    from swarmd.protocol.membership.catalog import Catalog
    from swarmd.protocol.models.manifest import Manifest
    from swarmd.protocol.models.model_layout import ModelLayout
    from swarmd.status import DownloadRow, ModelRow

LOOK_INTERVAL_S = 0.5  # between two questions to the daemon how far it is

app = typer.Typer(
    help="Models of the swarm: list, add, fetch, delete and check them.", no_args_is_help=True, rich_markup_mode=None
)
Model = Annotated[str, typer.Argument(help="A name of the swarm's catalog, or a model's hash.")]


@app.command("ls")
def ls(as_json: Json = False) -> None:
    """List the models, adapters and drafts of the swarm's catalog.

    Example: swarmd models ls
    """
    from swarmd.status import ModelsAnswer

    body = ask_json("models") if is_running() else None
    catalog = membership().catalog()
    names = {model: name for name, (model, _) in catalog.models.items()}
    made_for = {
        kind: [
            {"name": name, kind[:-1]: hash_, "model": base, "for": names.get(base)}
            for name, (hash_, base) in sorted(getattr(catalog, kind).items())
        ]
        for kind in ("adapters", "drafts")
    }
    if as_json:
        models = _offline_rows() if body is None else body["models"]
        print_json({"models": models, **made_for})
        return
    listed = merge_names(_offline_models() if body is None else read_answer(ModelsAnswer, body).models)
    columns = ["name", "hash", "blocks", "blocks here", "blocks missing in the swarm"]
    print_table("Models", columns, [_model_row(row) for row in listed])
    for row in listed:
        if row.help:
            print(f"{row.name}: {row.help}")
    for kind, entries in made_for.items():
        if entries:
            rows = [[str(e["name"]), str(e[kind[:-1]])[:12], str(e["for"] or e["model"])] for e in entries]
            print_table(kind.capitalize(), ["name", "hash", "for"], rows)


def _model_row(row: ModelRow) -> list[str]:
    blocks_here = ", ".join(map(span_text, row.blocks_here)) or "no"
    if row.here:
        blocks_here = "all"
    missing = ", ".join(map(span_text, row.missing)) or "none"
    return [row.name, row.model[:12], str(row.blocks), blocks_here, missing]


@app.command("add")
def add(
    source: Annotated[
        str,
        typer.Argument(help="A checkpoint folder, a GGUF file, or ORG/NAME of the hub (GGUF: ORG/NAME:BITS)."),
    ],
    name: Annotated[str, typer.Option("--name", help="What to call the model.")],
    base: Annotated[str, typer.Option("--base", help="For a LoRA adapter: the model that it adapts.")] = "",
    draft_for: Annotated[
        str, typer.Option("--draft-for", help="For a draft: the model that it guesses ahead of.")
    ] = "",
    replace: Annotated[bool, typer.Option("--replace", help="Let the name mean another model than before.")] = False,
    dtype: Annotated[
        str,
        typer.Option("--dtype", help="Unpack a GGUF file to float32, bfloat16, float16; auto is the best of 16 bits."),
    ] = OWN,
    no_copy: Annotated[
        bool, typer.Option("--no-copy", help="Of ORG/NAME: hash what the hub sends, and keep none of its weights here.")
    ] = False,
) -> None:
    """Hash and check a checkpoint, an adapter or a draft; the founder, or a delegate, also publishes the name.

    Example: swarmd models add ./llama --name llama
    """
    print(add_source(source, name, base, replace, dtype, draft_for, no_copy))
    print(_next_step(name, base, draft_for), file=sys.stderr)


def add_source(
    source: str,
    name: str,
    base: str = "",
    replace: bool = False,
    dtype: str = OWN,
    draft_for: str = "",
    no_copy: bool = False,
) -> str:
    """Do what ``add`` does; returns what came of it, in a line. Raises SwarmError."""
    import msgspec

    from swarmd.config import DTYPES
    from swarmd.errors import ConfigError
    from swarmd.protocol.models import manifest
    from swarmd.weights.digests import KeptDigests
    from swarmd.weights.library import Library

    # In the order of cost: names and rights are checked before gigabytes are hashed, and the catalog changes last,
    # once the weights are held here. A name that this machine may not publish is let through as long as it may turn
    # out to mean these very bytes: then adding them publishes nothing.
    state = home()
    member = membership()
    member.swarm()
    require_name("a model", name)
    if dtype not in (OWN, "auto", *DTYPES):
        raise ConfigError(f"--dtype is one of {OWN}, auto, {', '.join(DTYPES)}, not {dtype!r}")
    if base and draft_for:
        raise ConfigError("--base is for adapters and --draft-for for drafts: give one of them")
    kept = KeptDigests(state.digests)
    made_for = member.catalog().hash_of(base or draft_for) if base or draft_for else ""
    if replace or name not in member.catalog().names:  # else it may be what the name means, which the hash says
        require_publisher()
    if no_copy:
        if base or draft_for:
            raise ConfigError("--no-copy is for models: adapters and drafts are small")
        judge = partial(_check_model, holds_weights=False)
        folder, read = read_on_hub(source, lambda line: print(line, file=sys.stderr), kept, judge)
        kind, layout, commit = "models", judge(folder, read), folder.name
    else:
        folder = find_folder(source, dtype)
        is_hub_id = HUB_ID.fullmatch(source) and not Path(source).exists()
        commit = folder.name if is_hub_id and folder.parent.name == "snapshots" else ""
        read, kind, layout = _read_manifest(folder, base, draft_for)
    source_manifest = manifest.lay_out(read, layout)
    model = manifest.model_id(source_manifest)
    entry = (model, made_for or source_manifest.n_blocks)
    catalog: JsonObject = getattr(member.catalog(), kind)
    known = catalog.get(name)
    is_new = known is None or known[0] != model
    if is_new:
        _require_name_is_free(name, model, known[0] if known else "", replace)
    if no_copy:
        Library(state.weights, {}).fill(source_manifest)
    else:
        if source_manifest != read:
            folder = link_laid_out(folder, source_manifest)
        Library(state.weights, {}).keep_manifest(source_manifest, folder)
        model_folders().add(model, folder)
    if is_new:
        on_hub: dict[str, str] = {model: f"{source}@{commit}"} if commit else {}

        def publish(draft: Catalog) -> Catalog:
            sources = {**draft.sources, **on_hub}
            entries = {**getattr(draft, kind), name: entry}
            return msgspec.structs.replace(draft, sources=sources, **{kind: entries})

        founder().change_catalog(publish)
    kept.forget()
    reload_daemon()
    names = {alias for alias, (model_hash, _) in catalog.items() if model_hash == model}
    aliases = sorted(names - {name})
    also = f" (the same bytes as {', '.join(aliases)})" if aliases else ""
    unusual = f" ({layout.describe()})" if layout.describe() else ""
    blocks = f"{count(source_manifest.n_blocks, 'block')}{unusual}, " if source_manifest.n_blocks else ""
    tensors = count(len(source_manifest.tensors), "tensor")
    return f"{name}: {model}  {blocks}{tensors}{_describe_quantised(source_manifest)}{also}"


def _describe_quantised(read: Manifest) -> str:
    """Say what weights that are quantised as published take, on the disk and once they are loaded."""
    import json

    from swarmd.plan.chains.memory import group_bytes
    from swarmd.protocol.models.scheme import read_scheme

    scheme = read_scheme(json.loads(read.config))
    if scheme is None:
        return ""
    n_stored = sum(tensor.n_bytes for tensor in read.tensors)
    n_loaded = {bits: sum(group_bytes(read, "bfloat16", bits)[0]) for bits in ("none", "int8", "int4")}
    loaded = [f"{format_size(n)} {'in 16 bits' if bits == 'none' else 'in ' + bits}" for bits, n in n_loaded.items()]
    return f", {scheme.method} of {format_size(n_stored)}; its blocks take {', '.join(loaded)} of memory"


def _next_step(name: str, base: str, draft_for: str) -> str:
    """Tell what to type to use what was added."""
    if draft_for:
        return f"who runs {draft_for} uses it where that is faster: swarmd run {shlex.quote(draft_for)} PROMPT"
    if base:
        return f"now: swarmd run {shlex.quote(base)} PROMPT --adapter {shlex.quote(name)}"
    serve = f"swarmd up --serve {shlex.quote(name)}"
    if not is_running():
        return f"now: {serve}"
    return (
        "the running daemon was told: it gives the weights to others, and serves them itself once it is free to choose "
        f"and the swarm lacks them most; to serve them at once: swarmd down, then {serve}"
    )


def _require_name_is_free(name: str, model: str, known: str, replace: bool) -> None:
    """Raise ConfigError if this machine may not let ``name`` mean ``model``, which it does not yet."""
    from swarmd.errors import ConfigError

    if not founder().may_publish:
        catalog_entry = f"says {name!r} is {known[:12]}" if known else "has no model of that name"
        raise ConfigError(f"this folder is {model[:12]}, and the swarm's catalog {catalog_entry}: {_how_to_publish()}")
    if known and not replace:
        raise ConfigError(
            f"{name!r} is {known[:12]} in the catalog, and this folder is {model[:12]}: "
            "choose another name, or say --replace"
        )


def _read_manifest(folder: Path, base: str, draft_for: str) -> tuple[Manifest, str, ModelLayout]:
    """Read the manifest of a checkpoint, an adapter or a draft, and name its list in the catalog. Raises ConfigError.

    Also returns how the layers of a model become blocks.
    """
    from swarmd.errors import ConfigError
    from swarmd.protocol.models import adapter, draft, manifest
    from swarmd.protocol.models.model_layout import EACH_LAYER

    if draft.is_draft(folder):
        if not draft_for:
            raise ConfigError(f"{folder} is a draft: say --draft-for MODEL, the name of the model that it learned from")
        return draft.read_folder(folder, membership().catalog().hash_of(draft_for)), "drafts", EACH_LAYER
    if adapter.is_adapter(folder):
        if not base:
            raise ConfigError(f"{folder} is an adapter: say --base MODEL, the name of the model that it adapts")
        read = adapter.read_folder(folder, membership().catalog().hash_of(base))
        _check_adapter(folder, read, base)
        return read, "adapters", EACH_LAYER
    if base:
        raise ConfigError(f"{folder} is no adapter ({adapter.CONFIG_FILE} is missing): --base is for adapters")
    read = manifest.read_folder(folder)
    return read, "drafts" if draft_for else "models", _check_model(folder, read)


def _check_model(folder: Path, read: Manifest, holds_weights: bool = True) -> ModelLayout:
    """Say how the layers of a model become blocks. Raises ConfigError for one that cannot be served."""
    from swarmd.compute.checkpoints.check import check_folder  # after what costs no import of torch

    layout = check_folder(folder, read, holds_weights)
    check_tokenizer(folder)
    return layout


def _check_adapter(folder: Path, read: Manifest, base: str) -> None:
    """Compare an adapter with the model that it adapts, if that is on this machine. Raises ConfigError."""
    from swarmd.errors import ConfigError
    from swarmd.weights.library import Library

    state = home()
    catalog = membership().catalog()
    if base in catalog.adapters:
        raise ConfigError(f"--base {base} is an adapter itself: say the model that {folder} was made for")
    base_hash = catalog.hash_of(base)
    of_base = Library(state.weights, model_folders().read()).folders.get(base_hash)
    if of_base is None:
        print(f"nothing of {base} is on this machine: whether the adapter fits it was not looked at", file=sys.stderr)
        return
    from swarmd.compute.checkpoints.check import check_adapter  # after what costs no import of torch

    check_adapter(folder, read, of_base.folder)


@app.command("pull")
def pull(
    model: Model,
    blocks: Annotated[str, typer.Option("--blocks", metavar="A:B", help="Only these blocks, and the head.")] = "",
    as_json: Json = False,
) -> None:
    """Fetch a model from the members that have it; interrupted downloads go on where they were.

    Example: swarmd models pull llama --blocks 0:16
    """
    from swarmd.status import HereAnswer, PullAnswer

    model_id = ask(PullAnswer, "pull", "POST", model=model, blocks=blocks).model
    body = _follow_download(model_id, quiet=as_json)
    if as_json:
        print_json(body)
    else:
        print(f"{model}: here, in {read_answer(HereAnswer, body).folder}")


@app.command("rm")
def rm(model: Model) -> None:
    """Delete what was fetched of a model; a folder that was added is forgotten, and stays as it is.

    Example: swarmd models rm llama
    """
    from swarmd.errors import ConfigError
    from swarmd.home.models import bundled_model
    from swarmd.status import RemoveAnswer
    from swarmd.weights.library import Library

    state = home()
    catalog = membership().catalog()
    model_id = catalog.hash_of(model)
    if model_id == bundled_model()[0]:
        raise ConfigError("the bundled model is a part of swarmd: it cannot be removed")
    other_names = [name for name in catalog.names_of(model_id) if name != model]
    if other_names and model != model_id:
        raise ConfigError(
            f"{', '.join(map(repr, other_names))} needs the same weights as {model!r}: swarmd models unpublish "
            f"{shlex.quote(model)} takes back the name alone, swarmd models rm {model_id} deletes the weights of all "
            "names"
        )
    folder = model_folders().read().get(model_id)
    if folder is not None:
        model_folders().forget(model_id)
        reload_daemon()
        fate = "what was made of its file is deleted" if delete_converted(folder) else "its folder is untouched"
        print(f"{model}: this machine no longer offers it; {fate}")
        return
    if is_running():
        n_bytes = ask(RemoveAnswer, "rm", "POST", model=model_id).freed_bytes
    else:
        n_bytes = Library(state.weights, model_folders().read()).remove(model_id)
    print(f"{model}: deleted, {format_size(n_bytes)} freed")


@app.command("unpublish")
def unpublish(name: Annotated[str, typer.Argument(help="A name of the swarm's catalog.")]) -> None:
    """Take a name out of the swarm's catalog, as its founder or a delegate; weights stay where they are.

    Example: swarmd models unpublish llama
    """
    import msgspec

    from swarmd.errors import ConfigError

    membership().swarm()
    require_publisher()
    catalog = membership().catalog()
    kind = next((kind for kind in ("models", "adapters", "drafts") if name in getattr(catalog, kind)), "models")
    if name not in getattr(catalog, kind):
        known = ", ".join(sorted(catalog.names)) or "none yet"
        raise ConfigError(f"the catalog has no name {name!r}; it has: {known}")
    model = catalog.hash_of(name)

    def take_back(draft: Catalog) -> Catalog:
        # Where the weights came from is said by hash: as long as another name means them, it stays.
        entries = dict(getattr(draft, kind))
        entries.pop(name, None)
        sources = dict(draft.sources)
        if all(model_hash != model for model_hash, _ in entries.values()):
            sources.pop(model, None)
        return msgspec.structs.replace(draft, sources=sources, **{kind: entries})

    changed = founder().change_catalog(take_back)
    reload_daemon()
    other_names = changed.names_of(model)
    next_step = f"to delete them: swarmd models rm {model}"
    if other_names:
        next_step = f"its weights are still called {', '.join(other_names)}"
    print(f"{name}: no longer in the catalog; {next_step}")


def require_publisher() -> None:
    """Raise ConfigError if this machine may not change the catalog's names."""
    from swarmd.errors import ConfigError

    if not founder().may_publish:
        raise ConfigError(f"only a founder of the swarm, or a delegate, publishes names: {_how_to_publish()}")


def _how_to_publish() -> str:
    return f"a founder adds it, or says swarmd models delegate {membership().identity().peer_id}"


@app.command("verify")
def verify(model: Model, as_json: Json = False) -> None:
    """Hash all that is here of a model and compare it with the manifest.

    Example: swarmd models verify llama
    """
    from swarmd.errors import ConfigError, IntegrityError
    from swarmd.weights.library import Library

    state = home()
    model_id = membership().catalog().hash_of(model)
    folder = Library(state.weights, model_folders().read()).folders.get(model_id)
    if folder is None:
        raise ConfigError(f"nothing of {model} is on this machine")
    damaged = folder.damaged()
    n_bytes = folder.n_bytes(folder.held)
    if as_json:
        print_json({"model": model_id, "bytes": n_bytes, "damaged": damaged})
    elif not damaged:
        print(f"{model}: {format_size(n_bytes)} in {folder.folder} are what the manifest says")
    if damaged:
        raise IntegrityError(
            f"{model}: {some_of(damaged)} differ from the manifest: swarmd models rm {model}, then pull it"
        )


@app.command("delegate")
def delegate(
    peer: Annotated[str, typer.Argument(help="The member's peer id: swarmd status shows it.")],
    revoke: Annotated[bool, typer.Option("--revoke", help="Take it back.")] = False,
) -> None:
    """Let another member publish models, or no longer. Only the founder can.

    Example: swarmd models delegate 12D3KooW...
    """
    import msgspec

    from swarmd.errors import ConfigError, IntegrityError
    from swarmd.protocol.membership.identity import public_key_of_untrusted

    founder().key()
    try:
        key = public_key_of_untrusted(peer)
    except IntegrityError as error:
        raise ConfigError(f"{peer!r} is no peer id: {error}") from None
    delegates = tuple(delegate for delegate in membership().catalog().delegates if delegate != key)
    if not revoke:
        delegates = (*delegates, key)
    founder().change_catalog(lambda catalog: msgspec.structs.replace(catalog, delegates=delegates))
    reload_daemon()
    print(f"{peer} {'may no longer' if revoke else 'may now'} publish models")


def _follow_download(model: str, quiet: bool) -> JsonObject:
    """Show a download until it ends: a bar on a terminal, else a line now and then. Raises what it ended with.

    Returns what the daemon says of the model then.
    """
    from swarmd.errors import SwarmError
    from swarmd.status import DownloadsAnswer, HereAnswer

    progress: type[_NoProgress] = _NoProgress
    if not quiet:
        progress = _ProgressBar if sys.stderr.isatty() else _ProgressLines
    with progress() as update:
        while True:
            body = ask_json("here", model=model)
            presence = read_answer(HereAnswer, body)
            if not presence.pulling:
                break
            for download in ask(DownloadsAnswer, "downloads").downloads:
                if download.model == model:
                    update(download)
            time.sleep(LOOK_INTERVAL_S)
    if presence.failure:
        error = SwarmError(presence.failure)
        error.exit_code = presence.exit_code
        raise error
    return body


class _NoProgress:
    """Shows nothing; entered, each of these gives the function that takes a download's row."""

    def __enter__(self) -> Any:
        return lambda download: None

    def __exit__(self, *error: object) -> None: ...


class _ProgressLines(_NoProgress):
    """A line whenever a tenth more is there."""

    def __enter__(self) -> Any:
        shown_tenths = -1

        def update(download: DownloadRow) -> None:
            nonlocal shown_tenths
            tenths = 10 * download.done_bytes // max(1, download.total_bytes)
            if tenths != shown_tenths:
                shown_tenths = tenths
                print(download_line(download), file=sys.stderr, flush=True)

        return update


class _ProgressBar(_NoProgress):
    """A bar on a terminal."""

    def __enter__(self) -> Any:
        from rich import progress

        self._progress = progress.Progress(
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            text_column("{task.fields[note]}"),
            console=make_console(to_errors=True),
        )
        self._progress.start()
        task = self._progress.add_task("", total=None, note="")

        def update(download: DownloadRow) -> None:
            note = download_line(download).split(", ", 1)[1]
            total = download.total_bytes
            self._progress.update(task, total=total, completed=download.done_bytes, note=note)

        return update

    def __exit__(self, *error: object) -> None:
        self._progress.stop()


def _offline_rows() -> list[JsonObject]:
    """What is known without a daemon, for programs."""
    keys = ("name", "model", "blocks", "coverage", "missing", "help", "here", "blocks_here")
    return [{key: getattr(row, key) for key in keys} for row in _offline_models()]


def _offline_models() -> list[ModelRow]:
    """List what the catalog and this machine's folders say; of the swarm nothing is known."""
    from swarmd.status import ModelRow
    from swarmd.weights.library import Library

    state = home()
    member = membership()
    member.swarm()
    folders = Library(state.weights, model_folders().read()).folders
    rows = []
    for name, (model, n_blocks) in sorted(member.catalog().models.items()):
        folder = folders.get(model)  # type: ignore[call-overload]
        rows.append(
            ModelRow(
                name=name,
                model=model,
                blocks=n_blocks,
                coverage=(0,) * n_blocks,
                missing=((0, n_blocks),),
                help="",
                target=0,
                lowest=0,
                gap_chance_within_hour=None,
                here=folder is not None and folder.is_whole,
                blocks_here=tuple((span.start, span.end) for span in folder.blocks_held) if folder else (),
                folder=None,
                pulling=False,
                failure=None,
                exit_code=0,
            )
        )
    return rows
