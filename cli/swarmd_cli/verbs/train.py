"""Training together: start a run from a recipe, take part, look, stop, go on, take the result home."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from swarmd.values import count
from swarmd_cli.context import ask, ask_json, find_names, home, print_json, read_answer
from swarmd_cli.terminal import print_table
from swarmd_cli.train_show import show_plan, show_recipe_plan, show_run, show_stages, write_plot
from swarmd_cli.verbs.look import Json

app = typer.Typer(
    help="Train a model together: start a run, take part, look, stop, go on, take the result home.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
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

Stage = Annotated[
    int | None,
    typer.Option("--stage", help="In a run in stages: which to hold; 0 is embedding and head. Left out: the neediest."),
]


@app.command("start")
def start(
    recipe: Annotated[Path, typer.Argument(help="A recipe in TOML; docs/training.md explains it.")],
    role: Role = "train",
    stage: Stage = None,
    again: Annotated[bool, typer.Option("--again", help="Start another run though one of this name is there.")] = False,
) -> None:
    """Check a recipe, pack its data, sign the run, and take part in it.

    Example: swarmd train start recipe.toml
    """
    from swarmd import training_runs

    started = training_runs.start_run(recipe, role, stage=stage, again=again, home=home())
    run_id = started.run.id
    resolved = started.run.recipe
    print(f"{resolved.name}: run {run_id}")
    rows = f"{count(started.n_rows, 'row')} of {resolved.batch.tokens} tokens"
    print(f"model {resolved.model[:12]}, {rows}, {count(len(resolved.anchors), 'anchor')}")
    if resolved.first_blocks:
        why = f": {started.why_stages}" if started.why_stages else ""
        print(f"{count(len(resolved.first_blocks), 'stage')} of blocks, and one of embedding and head{why}")
    print(f"others take part with: swarmd train join {run_id[:12]}")
    if resolved.synchronisation == "delayed" and resolved.optimizer.price_of_delay:
        print(resolved.optimizer.price_of_delay)


@app.command("join")
def join(run: RunName = "", role: Role = "train", stage: Stage = None) -> None:
    """Take part in a run of the swarm; in one in stages, by holding the stage that lacks holders most, or --stage.

    Example: swarmd train join demo-run
    """
    from swarmd.run_status import JoinRunAnswer

    chosen = {} if stage is None else {"stage": str(stage)}
    part = ask(JoinRunAnswer, "train/join", "POST", timeout_s=60.0, name=run, role=role, **chosen)
    holds = "" if part.stage is None or role != "train" else f", holding stage {part.stage}"
    print(f"takes part in {part.name} ({part.run[:12]}) as {role}{holds}: swarmd train status shows how it goes")


@app.command("stop")
def stop(
    run: RunName = "",
    everywhere: Annotated[bool, typer.Option("--all", help="As its owner: stop the run for everybody.")] = False,
    stage: Annotated[int | None, typer.Option("--stage", help="Leave this stage only, at its next commit.")] = None,
) -> None:
    """Leave a run; what was gathered here and is not committed is lost. With --all its owner stops it for everybody.

    Example: swarmd train stop demo-run
    """
    from swarmd.run_status import LeaveRunAnswer, OrderAnswer

    if everywhere:
        stopped = ask(OrderAnswer, "train/order", "POST", name=run, state="stopped")
        print(f"{stopped.run[:12]} is stopped for everybody: swarmd train resume --all lets it go on")
        return
    chosen = {} if stage is None else {"stage": str(stage)}
    answer = ask(LeaveRunAnswer, "train/leave", "POST", timeout_s=120.0, name=run, **chosen)
    left = answer.run[:12] if stage is None else f"stage {stage} of {answer.run[:12]}"
    print(f"left {left}; its state stays on this disk: swarmd train join takes part again")


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
    from swarmd.run_status import RunRow, RunsAnswer

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
    names = find_names() if answer.runs else {}
    in_stages: dict[str, list[RunRow]] = {}
    for row in answer.runs:
        if row.stage is None:
            show_run(row, names)
        else:
            in_stages.setdefault(row.run, []).append(row)
    for rows in in_stages.values():
        show_stages(sorted(rows, key=lambda row: row.stage or 0), names)
    other_runs = []
    for other_run in answer.others:
        run_id = other_run.run[:12]
        other_runs.append([other_run.name, run_id, str(other_run.peers), str(other_run.update)])
    if other_runs:
        print_table("Runs of the swarm that this peer is not in", ["name", "run", "peers", "updates"], other_runs)
    elif not answer.runs:
        print("no training run is known here: swarmd train start RECIPE starts one")


@app.command("plan")
def plan(run: RunName = "", as_json: Json = False) -> None:
    """Show the next round, who reduces which share of it, and which synchronisation and codec would be best.

    Of a run in stages: its slowest stage, and what one more machine would bring. Of a recipe in stages, a file that
    ends with .toml: what each stage takes of a machine's memory, and whether the swarm's machines have it.

    Of each synchronisation the table shows this run's codec, the best one and none; --json has all. Where peers compute
    on during a long round, an update comes to have more samples than the recipe asks for: too large.

    Example: swarmd train plan demo-run
    """
    from swarmd.run_status import PlanAnswer

    if run.endswith(".toml"):
        from swarmd import training_runs

        needed = training_runs.plan_recipe(Path(run), home=home())
        if as_json:
            print_json(asdict(needed))
        else:
            show_recipe_plan(needed, find_names())
        return
    body = ask_json("train/plan", name=run)
    if as_json:
        print_json(body)
        return
    show_plan(read_answer(PlanAnswer, body), find_names())


@app.command("export")
def export(
    out: Annotated[Path, typer.Option("--out", help="The folder for the checkpoint or, of LoRA, the adapter.")],
    run: RunName = "",
) -> None:
    """Write what a run has come to, as transformers (or PEFT) saves it.

    Example: swarmd train export demo-run --out ./result
    """
    from swarmd import training_runs

    exported = training_runs.export_run(run, out, home=home())
    print(f"update {exported.update} of {exported.recipe.name}: {out}")
    if exported.recipe.train == "all":
        print(f"to have the swarm serve it: swarmd models add {out} --name NAME")
