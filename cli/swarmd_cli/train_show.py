"""How runs and plans of training are shown in a terminal."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from swarmd.names import label_ids, label_member
from swarmd.values import count
from swarmd_cli.context import format_duration, format_number, format_rate, format_size
from swarmd_cli.terminal import print_table

if TYPE_CHECKING:
    from swarmd.run_status import PipelineRow, PlanAnswer, PlanSettingRow, RoundRow, RunRow, StageRow
    from swarmd.training_runs import RecipePlan

TOPOLOGIES = ("parts", "server", "sites", "grid", "ring")


def show_plan(plan: PlanAnswer, names: Mapping[str, str]) -> None:
    """Print the next round, and what each synchronisation, codec and topology would come to; or a run's stages."""
    if plan.pipeline is not None:
        _show_pipeline(plan.pipeline, names)
        return
    rows = []
    for member in plan.members:
        computes = "yes" if member.computes else "no"
        share = f"{100 * member.reduces:.0f} %"
        up = format_rate(member.up_bytes_per_s)
        down = format_rate(member.down_bytes_per_s)
        rows.append([label_member(member.peer, names), computes, share, up, down])
    print_table(f"The next round of {plan.run[:12]}", ["peer", "computes", "reduces", "up", "down"], rows)
    print(f"{format_size(plan.bytes)} to average in about {plan.expected_s:.2f} s ({plan.why})")
    print(f"with equal parts it would be {plan.equal_parts_s:.2f} s")
    rows = [_setting_row(setting, plan.setting) for setting in _choose_settings(plan)]
    if rows:
        columns = ["setting (* this run's)", "an update", "computes", "too large", "samples/s", "sent a sample"]
        print_table("Synchronisation, codec and topology, predicted", columns, rows)
        print(f"best: {plan.recommended}: {plan.recommended_why}")
    else:
        print(f"no other setting is predicted: {plan.recommended_why}")


def show_recipe_plan(plan: RecipePlan, names: Mapping[str, str]) -> None:
    """Print what a recipe in stages needs of machines, and what the swarm's have."""
    print(f"{count(plan.n_stages, 'stage')} of blocks, each {format_size(plan.stage_bytes)} of a holder's memory")
    print(f"the ends (embedding and head): {format_size(plan.ends_bytes)}")
    rows = []
    for peer, n_bytes in sorted(plan.room.items(), key=lambda item: -item[1]):
        n_held = min(n_bytes // plan.stage_bytes, plan.n_stages)
        can = count(n_held, "stage") if n_held else "the ends" if n_bytes >= plan.ends_bytes else "nothing of it"
        rows.append([label_member(peer, names), format_size(n_bytes), can])
    print_table("Machines", ["peer", "could give", "could hold"], rows)
    print(f"{'it fits' if plan.is_feasible else 'it does not fit'}: {plan.reason}")


def _setting_row(setting: PlanSettingRow, own_setting: str) -> list[str]:
    name = setting.setting
    mark = "* " if name == own_setting else ""
    return [
        mark + name,
        f"{setting.update_s:.1f} s",
        f"{100 * setting.utilisation:.0f} %",
        f"{setting.excess:.1f} x" if setting.excess > 1 else "",
        format_number(setting.samples_per_s),
        format_size(round(setting.bytes_per_sample)),
    ]


def _choose_settings(plan: PlanAnswer) -> list[PlanSettingRow]:
    """Choose the settings that are worth showing.

    They are: each synchronisation without a codec and with the best one, this run's setting by each topology, and the
    recommended one. A setting's name is "SYNCHRONISATION, CODEC", or "SYNCHRONISATION, TOPOLOGY".
    """
    best: dict[str, PlanSettingRow] = {}
    topologies = [row for row in plan.settings if row.setting.rpartition(", ")[2] in TOPOLOGIES]
    rows = [row for row in plan.settings if row not in topologies]
    for row in sorted(rows, key=lambda row: (-row.samples_per_s, row.excess)):
        best.setdefault(row.setting.rpartition(", ")[0], row)
    shown_names = {plan.setting, plan.recommended, *(f"{kind}, none" for kind in best)}
    return [row for row in rows if row.setting in shown_names or row in best.values()] + topologies


def show_run(row: RunRow, names: Mapping[str, str]) -> None:
    """Print how a run goes, here and elsewhere."""
    from swarmd_cli.curve import terminal_curve

    print(f"{row.name} ({row.run[:12]}): {row.state}; {row.role} here: {label_ids(row.why, names)}")
    if row.failure:
        print(f"  the last failure: {row.failure}")
    print(f"  update {row.update} of {row.updates}, {count(row.samples, 'sample')} counted")
    if row.finished:
        name = shlex.quote(row.name)
        print(f"  done: {row.finished}; swarmd train export {name} --out FOLDER writes the model")
    else:
        remaining = "unknown" if row.left_s is None else format_duration(row.left_s)
        print(f"  next round: {row.gathered} of {row.target} samples, {remaining} to go")
    if row.last_round is not None:
        _print_last_round(row.last_round, names)
    print(
        f"  here: {format_number(row.samples_per_s)} samples/s, {row.samples_counted} counted, "
        f"{row.samples_wasted} not counted, {row.catch_ups} times caught up"
    )
    if row.state_bytes:
        print(f"  who joins now fetches {format_size(row.state_bytes)}: parameters, and the moments that all share")
    if row.measured_samples_per_s and row.predicted_samples_per_s:
        _print_prediction(row.measured_samples_per_s, row.predicted_samples_per_s)
    rows = []
    for peer in row.peers:
        label = label_member(peer.peer, names)
        speed = format_number(peer.samples_per_s)
        rows.append([label, peer.role, str(peer.update), speed, label_ids(peer.status, names)])
    print_table("Others", ["peer", "role", "update", "samples/s", "doing"], rows)
    audits = row.audits
    if not audits.why_not:
        verdict = f"{audits.wrong} of them wrong" if audits.wrong else "all of them right"
        print(f"  computed again here: {count(audits.checked, 'contribution')} of others, {verdict}")
    if audits.trouble:
        print(f"  {label_ids(audits.trouble, names)}")
    if row.shunned:
        print(f"  done without, for faulty numbers: {', '.join(label_member(peer, names) for peer in row.shunned)}")
    if len(row.losses) > 1:
        print("\n".join(terminal_curve(row.losses)))


def show_stages(rows: Sequence[RunRow], names: Mapping[str, str]) -> None:
    """Print how a run in stages goes: all stages with their holders, and what those here do."""
    from swarmd_cli.curve import terminal_curve

    held = [row for row in rows if row.role != "anchor"]
    first = (held or list(rows))[0]
    role = f"holds {', '.join(f'stage {row.stage}' for row in held)}" if held else first.role
    print(f"{first.name} ({first.run[:12]}): {first.state}; {role} here")
    for row in rows:
        if row.failure:
            print(f"  the last failure, of stage {row.stage}: {row.failure}")
    print(f"  update {first.update} of {first.updates}, {count(first.samples, 'sample')} counted")
    if first.finished:
        print(f"  done: {first.finished}")
    table = []
    for stage in first.stages:
        gathered = f"{stage.samples} of {first.target}"
        holders = _name_holders(stage, names)
        speed = format_number(stage.samples_per_s)
        table.append([f"stage {stage.stage}", _name_blocks(stage), str(stage.update), gathered, speed, holders])
    print_table("Stages", ["stage", "holds", "update", "samples", "could do/s", "holders"], table)
    for row in held:
        busy = "" if row.busy is None else f"; it computed for {100 * row.busy:.0f} % of the last update"
        print(f"  stage {row.stage} here: {label_ids(row.why, names)}{busy}")
        print(f"    {row.samples_counted} samples counted, {row.samples_wasted} not, {row.catch_ups} times caught up")
        if row.state_bytes:
            print(f"    who holds it, too, fetches {format_size(row.state_bytes)} first")
    if len(first.losses) > 1:
        print("\n".join(terminal_curve(first.losses)))


def _show_pipeline(pipeline: PipelineRow, names: Mapping[str, str]) -> None:
    rows = []
    for stage in pipeline.stages:
        speed = format_number(stage.samples_per_s) if stage.samples_per_s else "not known yet"
        rows.append([f"stage {stage.stage}", _name_blocks(stage), speed, _name_holders(stage, names)])
    print_table("Stages", ["stage", "holds", "samples/s", "holders"], rows)
    if pipeline.lacking:
        stages = ", ".join(map(str, pipeline.lacking))
        print(f"it waits for holders of stage {stages}: swarmd train join on another machine")
    elif pipeline.slowest is None:
        print("how fast its holders compute is known after their first update: try again then")
    else:
        at_most = f"{format_number(pipeline.samples_per_s)} samples/s"
        more = f"{format_number(pipeline.with_one_more)} samples/s"
        print(f"at most {at_most}: stage {pipeline.slowest} is the slowest; one more machine there would bring {more}")
    if pipeline.sample_bytes:
        print(f"{format_size(round(pipeline.sample_bytes))} travel between holders for each sample, there and back")


def _name_holders(stage: StageRow, names: Mapping[str, str]) -> str:
    return ", ".join(label_member(peer, names) for peer in stage.holders) or "nobody: the run waits"


def _name_blocks(stage: StageRow) -> str:
    if stage.first_block is None:
        return "embedding and head"
    if stage.end_block is None:
        return f"blocks from {stage.first_block} on"
    return f"blocks {stage.first_block} to {stage.end_block - 1}"


def _print_last_round(last_round: RoundRow, names: Mapping[str, str]) -> None:
    left_out = label_ids(", ".join(last_round.left_out), names)
    print(
        f"  last round led here: {count(last_round.n_members, 'member')}, "
        f"gathered in {last_round.gather_s:.2f} s, "
        f"averaged in {last_round.average_s:.2f} s (expected {last_round.expected_s:.2f}), "
        f"committed in {last_round.commit_s:.2f} s" + (f"; left out: {left_out}" if left_out else "")
    )


def _print_prediction(measured: float, predicted: float) -> None:
    """Compare how fast all are together with what was predicted; both in samples per second."""
    error = predicted / measured - 1
    wrong = f"{100 * abs(error):.0f} % too {'many' if error > 0 else 'few'}"
    print(f"  all together: {format_number(measured)} samples/s; {format_number(predicted)} were predicted ({wrong})")


def write_plot(rows: Sequence[RunRow], path: Path) -> None:
    """Draw the loss curve of the one run that was named. Raises ConfigError."""
    from swarmd.errors import ConfigError
    from swarmd_cli.curve import save_png

    if len(rows) != 1 or not rows[0].losses:
        raise ConfigError("--plot draws one run that has come to an update: name it")
    save_png(rows[0].losses, path, f"{rows[0].name}, {rows[0].samples} samples")
