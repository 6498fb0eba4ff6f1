"""``swarmd plan``: what a swarm would do with the machines, links and habits that its founder expects."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarmd.values import count
from swarmd_cli.context import print_json
from swarmd_cli.curve import EIGHTHS
from swarmd_cli.terminal import make_console, print_table, show_answer, show_waiting
from swarmd_cli.verbs.look import Json

if TYPE_CHECKING:
    from swarmd.whatif.answer import LoadAnswer, ModelAnswer, WhatIfAnswer
    from swarmd.whatif.training import TrainingAnswer

app = typer.Typer(help="What a swarm would do, before anybody is asked to come.", no_args_is_help=True)
EXAMPLE = Path(__file__).parent.parent / "what-if.toml"
MOST_SETTINGS = 6  # of a training run, in its table: the chosen one, and those that compute most


@app.command()
def example() -> None:
    """Print a scenario to begin with, which explains itself.

    Example: swarmd plan example > club.toml
    """
    show_answer(EXAMPLE.read_text(encoding="utf-8"))


@app.command("what-if")
def what_if(
    scenario: Annotated[Path, typer.Argument(help="A scenario as TOML: swarmd plan example prints one.")],
    runs: Annotated[int | None, typer.Option("--runs", min=1, max=1000, help="Runs of different chance.")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Of the chance: the same seed, the same answer.")] = None,
    no_one_more: Annotated[
        bool, typer.Option("--no-one-more", help="Leave out what one more machine of each kind would bring.")
    ] = False,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="PNG", help="Draw the hours as a picture; wants matplotlib.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say whether the expected machines can serve the expected load, how fast, and what limits them.

    The swarm's own decisions run in a model of time: nothing is started, and nobody is asked.

    Example: swarmd plan what-if club.toml
    """
    import msgspec

    from swarmd.errors import ConfigError
    from swarmd.train.synchronisation import codec_traffic
    from swarmd.whatif.answer import answer_scenario
    from swarmd.whatif.scenario import read_scenario, read_traces

    def read(path: object) -> str:
        try:
            return Path(str(path)).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path} cannot be read: {error}") from None

    if plot is not None:
        _check_plot(plot)
    wanted = read_scenario(read(scenario), str(scenario))
    if runs is not None:
        wanted = msgspec.structs.replace(wanted, runs=runs)
    if seed is not None:
        wanted = msgspec.structs.replace(wanted, seed=seed)
    traces = read_traces(wanted, read, scenario.parent)
    codecs = codec_traffic("float32") if wanted.training else ()
    begun = time.monotonic()
    with show_waiting(make_console(to_errors=True), "computing") as show:
        answer = answer_scenario(wanted, traces, codecs, not no_one_more, show)
    took_s = time.monotonic() - begun
    if plot is not None:
        _save_plot(answer, plot)
    if as_json:
        print_json(dataclasses.asdict(answer))
        return
    _show(answer, wanted.hours, wanted.start_hour_utc, took_s)


def _show(answer: WhatIfAnswer, hours: float, start_hour: float, took_s: float) -> None:
    print(f"{answer.name}: {count(answer.n_runs, 'run')} of {hours:g} hours, computed in {took_s:.0f} s")
    for model in answer.models:
        _show_model(model, start_hour)
    if answer.load is not None:
        _show_load(answer.load)
    rows = []
    for kind, (with_goodbye, without) in answer.leaves.items():
        rows.append([kind, f"{with_goodbye:.0f}", f"{without:.0f}"])
    print_table("Leaves in a run", ["machine", "with a goodbye", "without"], rows)
    print(f"{answer.n_moves_a_day:.0f} moves of servers and {answer.fetched_gb_a_day:.0f} GB of weights fetched a day")
    if answer.one_more:
        base = sum(model.mean_tokens_per_s for model in answer.models) / len(answer.models)
        served = sum(model.served_share for model in answer.models) / len(answer.models)
        rows = []
        for more in answer.one_more:
            gain = 100 * (more.mean_tokens_per_s / base - 1) if base else 0.0
            rows.append([more.kind, f"{100 * (more.served_share - served):+.2f} %", f"{gain:+.1f} %"])
        print_table("One machine more", ["machine", "time served", "tokens/s of all"], rows)
    for run in answer.training:
        _show_training(run)
    print("How far to trust this: docs/what-if.md")


def _show_model(model: ModelAnswer, start_hour: float) -> None:
    rows = []
    for number, served in enumerate(model.served_by_hour):
        hour = int(start_hour + number) % 24
        online = model.online_by_hour[number]
        rate = model.tokens_per_s_by_hour[number]
        bar = EIGHTHS[min(8, round(8 * served))]
        rows.append([f"{hour:02}:00", f"{bar} {100 * served:.1f} %", f"{online:.0f}", f"{rate:,.0f}"])
    title = f"{model.name}: can be served {100 * model.served_share:.2f} % of the time"
    print_table(title, ["UTC", "chance", "servers", "tokens/s of all streams, at most"], rows)
    if model.layout_share is not None:
        print(
            f"placement: all streams get {100 * model.layout_share:.0f} % of what the best layout found would give them"
        )
    for limit in model.limits:
        print(f"limit: {limit}")


def _show_load(load: LoadAnswer) -> None:
    def line(name: str, values: tuple[float, ...]) -> list[str]:
        return [name, *(f"{value:.2f}" if any(values) else "-" for value in values)]

    rows = [
        line("tokens/s of a stream", tuple(reversed(load.tokens_per_s))),
        line("s to the first token", load.first_token_s),
        line("s paused, where interrupted", load.paused_s),
    ]
    print_table(f"{load.sessions_a_day:.0f} conversations a day", ["", "best 5 %", "half", "worst 5 %"], rows)
    parts = ", ".join(f"{name} {100 * share:.0f} %" for name, share in load.parts.items())
    print(f"a token's time: {parts}")
    lost = f"{load.n_lost} of {load.n_begun} conversations lost, {load.n_lost_while_held} while all blocks had holders"
    under_way = load.n_begun - load.n_done - load.n_lost - load.n_refused
    if load.n_refused or under_way:
        print(f"{load.n_refused} found no room in caches; {under_way} had not ended ten minutes after the last hour")
    print(f"{lost}; {count(load.n_repairs, 'repair')}, {100 * load.replayed_share:.2f} % of the tokens computed again")


def _show_training(run: TrainingAnswer) -> None:
    if run.chosen is None:
        print(f"training {run.name}: none of its machines is there")
        return
    best = sorted(run.predictions, key=lambda p: -p.utilisation)[:MOST_SETTINGS]
    shown = [run.chosen.action, *(p for p in best if p is not run.chosen.action)][:MOST_SETTINGS]
    rows = []
    for prediction in shown:
        mark = " (chosen)" if prediction is run.chosen.action else ""
        rows.append(
            [
                f"{prediction.setting}{mark}",
                f"{100 * prediction.utilisation:.0f} %",
                f"{prediction.samples_per_s:.1f}",
                f"{prediction.update_s:.1f}",
            ]
        )
    title = f"Training {run.name} with {count(run.n_members, 'member')}"
    print_table(title, ["synchronisation, codec", "computing", "samples/s", "s an update"], rows)
    print(f"chosen: {run.chosen.reason}")
    if run.stages:
        print(run.stages)


def _check_plot(path: Path) -> None:
    """Raise ConfigError before anything is computed, where a picture could not be drawn or written."""
    from importlib.util import find_spec

    from swarmd.errors import ConfigError

    if find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib: pip install 'swarmd[tune]'")
    if path.suffix.lower() != ".png":
        raise ConfigError(f"--plot writes a PNG, so its file ends in .png, not {path.name!r}")
    if not path.parent.is_dir():
        raise ConfigError(f"--plot: there is no folder {path.parent}")


def _save_plot(answer: WhatIfAnswer, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 2.6 * len(answer.models) + 0.6), dpi=120, layout="constrained")
    for place, model in enumerate(answer.models):
        axes = figure.add_subplot(len(answer.models), 1, place + 1)
        hours = range(len(model.served_by_hour))
        axes.bar(hours, [100 * share for share in model.served_by_hour], color="#9bb7d4", label="can be served, %")
        axes.set_ylim(0, 105)
        axes.set_ylabel("%")
        axes.set_xlabel("hour")
        other = axes.twinx()
        other.plot(hours, model.tokens_per_s_by_hour, color="#c0504d", label="tokens/s of all streams")
        other.set_ylim(bottom=0)
        other.set_ylabel("tokens/s")
        axes.set_title(f"{answer.name}: {model.name}", parse_math=False)
        lines = axes.get_legend_handles_labels()
        more = other.get_legend_handles_labels()
        axes.legend(lines[0] + more[0], lines[1] + more[1], loc="lower left", fontsize=8)
    figure.savefig(path)
