"""How runs and plans of training are shown in a terminal."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from swarmd.values import count
from swarmd_cli.context import format_duration, format_number, format_rate, format_size, print_table

TOPOLOGIES = ("parts", "server", "sites", "grid", "ring")


def show_plan(body: dict[str, Any]) -> None:
    """The next round, and what each synchronisation, codec and topology would come to."""
    rows = [
        [
            member["peer"][-8:],
            "yes" if member["computes"] else "no",
            f"{100 * member['reduces']:.0f} %",
            format_rate(member["up_bytes_per_s"]),
            format_rate(member["down_bytes_per_s"]),
        ]
        for member in body["members"]
    ]
    print_table(f"The next round of {body['run'][:12]}", ["peer", "computes", "reduces", "up", "down"], rows)
    print(f"{format_size(body['bytes'])} to average in about {body['expected_s']:.2f} s ({body['why']})")
    print(f"with equal parts it would be {body['equal_parts_s']:.2f} s")
    settings = [
        [
            ("* " if setting["setting"] == body["setting"] else "") + setting["setting"],
            f"{setting['update_s']:.1f} s",
            f"{100 * setting['utilisation']:.0f} %",
            f"{setting['excess']:.1f} x" if setting["excess"] > 1 else "",
            format_number(setting["samples_per_s"]),
            format_size(round(setting["bytes_per_sample"])),
        ]
        for setting in _choose_settings(body)
    ]
    if settings:
        columns = ["setting (* this run's)", "an update", "computes", "too large", "samples/s", "sent a sample"]
        print_table("Synchronisation, codec and topology, predicted", columns, settings)
        print(f"best: {body['recommended']}: {body['recommended_why']}")
    else:
        print(f"no other setting is predicted: {body['recommended_why']}")


def _choose_settings(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Of each synchronisation without a codec, with the best one, and this run's by each topology; the recommended."""
    best: dict[str, dict[str, Any]] = {}
    topologies = [row for row in body["settings"] if row["setting"].rpartition(", ")[2] in TOPOLOGIES]
    rows = [row for row in body["settings"] if row not in topologies]
    for row in sorted(rows, key=lambda row: (-row["samples_per_s"], row["excess"])):
        best.setdefault(row["setting"].rpartition(", ")[0], row)
    named = {body["setting"], body["recommended"], *(f"{kind}, none" for kind in best)}
    return [row for row in rows if row["setting"] in named or row in best.values()] + topologies


def show_run(row: dict[str, Any]) -> None:
    from swarmd_cli.curve import terminal_curve

    remaining = "unknown" if row["left_s"] is None else format_duration(row["left_s"])
    print(f"{row['name']} ({row['run'][:12]}): {row['state']}; {row['role']} here: {row['why']}")
    if row["failure"]:
        print(f"  the last failure: {row['failure']}")
    print(f"  update {row['update']} of {row['updates']}, {count(row['samples'], 'sample')} counted")
    if row["finished"]:
        name = shlex.quote(row["name"])
        print(f"  done: {row['finished']}; swarmd train export {name} --out FOLDER writes the model")
    else:
        print(f"  next round: {row['gathered']} of {row['target']} samples, {remaining} to go")
    if (last := row["last_round"]) is not None:
        print(
            f"  last round led here: {count(last['n_members'], 'member')}, gathered in {last['gather_s']:.2f} s, "
            f"averaged in {last['average_s']:.2f} s (expected {last['expected_s']:.2f}), "
            f"committed in {last['commit_s']:.2f} s"
            + (f"; left out: {', '.join(last['left_out'])}" if last["left_out"] else "")
        )
    print(
        f"  here: {format_number(row['samples_per_s'])} samples/s, {row['samples_counted']} counted, "
        f"{row['samples_wasted']} not counted, {row['catch_ups']} times caught up"
    )
    if row["state_bytes"]:
        print(f"  who joins now fetches {format_size(row['state_bytes'])}: parameters, and the moments that all share")
    if (measured := row["measured_samples_per_s"]) and (predicted := row["predicted_samples_per_s"]):
        error = predicted / measured - 1
        wrong = f"{100 * abs(error):.0f} % too {'many' if error > 0 else 'few'}"
        print(
            f"  all together: {format_number(measured)} samples/s; {format_number(predicted)} were predicted ({wrong})"
        )
    rows = [
        [p["peer"][-8:], p["role"], str(p["update"]), format_number(p["samples_per_s"]), p["status"]]
        for p in row["peers"]
    ]
    print_table("Others", ["peer", "role", "update", "samples/s", "doing"], rows)
    audits = row["audits"]
    if not audits["why_not"]:
        verdict = f"{audits['wrong']} of them wrong" if audits["wrong"] else "all of them right"
        print(f"  computed again here: {count(audits['checked'], 'contribution')} of others, {verdict}")
    if audits["trouble"]:
        print(f"  {audits['trouble']}")
    if row["shunned"]:
        print(f"  done without, for faulty numbers: {', '.join(p[-8:] for p in row['shunned'])}")
    if len(row["losses"]) > 1:
        print("\n".join(terminal_curve(row["losses"])))


def write_plot(rows: list[dict[str, Any]], path: Path) -> None:
    from swarmd.errors import ConfigError
    from swarmd_cli.curve import save_png

    if len(rows) != 1 or not rows[0]["losses"]:
        raise ConfigError("--plot draws one run that has come to an update: name it")
    save_png(rows[0]["losses"], path, f"{rows[0]['name']}, {rows[0]['samples']} samples")
