"""Reading verbs: what this daemon and its swarm are doing, as tables for people or --json for scripts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from msgspec import structs

from swarmd.names import label_ids, label_member
from swarmd.values import count
from swarmd_cli.context import (
    ask,
    ask_json,
    find_names,
    format_duration,
    format_number,
    format_percent,
    format_rate,
    format_size,
    home,
    is_running,
    membership,
    print_json,
    read_answer,
)
from swarmd_cli.terminal import print_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from swarmd.member_status import PeerRow, SpanRow
    from swarmd.status import (
        Blocks,
        ChainRow,
        DaemonStatus,
        DownloadRow,
        HealthRow,
        HostingStatus,
        ModelRow,
        PolicyStatus,
        ReachStatus,
        SessionRow,
        StandingRow,
        WhyAnswer,
    )

Json = Annotated[bool, typer.Option("--json", help='Print JSON with "schema": 1.')]


def status(as_json: Json = False) -> None:
    """Say what this daemon is doing, and why.

    Example: swarmd status --json
    """
    from swarmd.status import DaemonStatus

    body = ask_json("status")
    if as_json:
        print_json(body)
        return
    daemon_status = read_answer(DaemonStatus, body)
    rows = [
        ["swarm", f"{daemon_status.swarm}, {count(daemon_status.members, 'member')} known"],
        ["this peer", _full_label(daemon_status.peer, daemon_status.name)],
        ["addresses", "\n".join(daemon_status.addresses) or "none: not listening"],
        *([["reachable", reach_text(daemon_status.reach)]] if daemon_status.reach else []),
        ["up for", f"{daemon_status.uptime_s:.0f} s, {daemon_status.memory_mib:.0f} MiB"],
        ["directory", daemon_status.directory.reason],
    ]
    if (policy := daemon_status.policy) is not None:
        rows += [["policy", policy.why], ["network", network_text(policy)]]
    for row in daemon_status.health:
        if row.is_fine is False:
            rows.append([f"!! {row.kind}", health_text(row)])
    for hosting in daemon_status.hosting:
        rows += _hosting_rows(hosting)
    for team in daemon_status.following:
        rows.append(["following", f"{team.leader}: {team.state}"])
    if not daemon_status.hosting:
        rows.append(["serving", "nothing: started with --no-serve"])
    if (gateway := daemon_status.gateway) is not None:
        rows.append(["gateway", f"{gateway.state}, {gateway.listen}: {gateway.why}"])
    for download in daemon_status.downloads:
        rows.append(["fetching", download_line(download)])
    for model in merge_names(daemon_status.models):
        rows.append([f"model {model.name}", model.help or _missing_text(model) or _safety_text(model)])
    names = find_names()
    print_table("Status", ["", ""], [[title, label_ids(text, names)] for title, text in rows])


def _full_label(peer: str, name: str) -> str:
    return f"{peer} ({name})" if name else peer


def merge_names(listed: Iterable[ModelRow]) -> list[ModelRow]:
    """Merge the rows of each model into one, under all of its names."""
    # A catalog may call the same bytes by several names; what is missing of them is missing for all of these.
    merged: dict[str, ModelRow] = {}
    for row in listed:
        earlier = merged.get(row.model)
        merged[row.model] = structs.replace(row, name=f"{earlier.name}, {row.name}") if earlier else row
    return list(merged.values())


def reach_text(reach: ReachStatus) -> str:
    """Write whether others can connect to this machine, and what it does for them, in a line."""
    relaying = f"; it relays {count(reach.relaying, 'circuit')} for others" if reach.relaying else ""
    mapped = f"; the router forwards {reach.mapped} to it" if reach.mapped else ""
    return f"{reach.state}: {reach.why}{mapped}{relaying}"


def health_text(row: HealthRow) -> str:
    """Write what was found, and what to do."""
    return ": ".join(filter(None, (row.text, row.remedy)))


def network_text(policy: PolicyStatus) -> str:
    """Write what has passed beyond the home this month, and the owner's limits."""
    limit = " GiB"
    if policy.month_limit_bytes:
        limit = f" of {policy.month_limit_bytes / 2**30:g} GiB"
    texts = [f"{policy.month_bytes / 2**30:.2f}{limit} beyond the home this month"]
    for direction, bytes_per_s in (("up", policy.up_bytes_per_s), ("down", policy.down_bytes_per_s)):
        if bytes_per_s:
            texts.append(f"{direction} at most {8e-6 * bytes_per_s:g} Mbit/s")
    return ", ".join(texts)


def _hosting_rows(hosting: HostingStatus) -> list[list[str]]:
    """Write what one worker serves, in which state, and why."""
    serving = hosting.serving
    worker = hosting.worker
    server = hosting.server
    tuning = hosting.tuning
    if serving is None or worker is None or server is None or tuning is None:
        return [["serving", f"nothing now ({hosting.wanted} is wanted); {hosting.state}: {hosting.why}"]]
    last_end = f"; the last because {worker.last_end}" if worker.last_end else ""
    rows = [
        ["serving", f"{serving.name} blocks {span_text(serving.blocks)}: {serving.why}"],
        ["state", f"{hosting.state}: {hosting.why}"],
        ["worker", f"{worker.state}: {worker.why} (restarts: {worker.restarts}{last_end})"],
    ]
    if worker.batching:
        rows += [["batching", worker.batching], ["kernels", worker.kernels or ""]]
    if worker.team:
        rows.append(["team", worker.team])
    free = f"{server.free_cache_tokens} of {server.total_cache_tokens} cache tokens free"
    served = f"{server.tokens_served} tokens served, {server.tokens_reused} of them copied"
    rows.append(["sessions", f"{server.sessions} open, {served}, {free}"])
    lanes = f"{count(tuning.lanes, 'lane')} of {count(tuning.clients, 'client')}"
    rows.append(["fine-tuning", f"{lanes}, {count(tuning.tokens_trained, 'token')} trained"])
    balance = hosting.balance
    rows.append(["balance", balance.last_move or f"never moved; {balance.last_look}"])
    return rows


def _missing_text(model: ModelRow) -> str:
    missing = ", ".join(span_text(s) for s in model.missing)
    return f"blocks missing: {missing}" if missing else ""


def download_line(download: DownloadRow) -> str:
    """Write how far one download is, in a line."""
    done = download.done_bytes
    total = download.total_bytes
    left_s = download.left_s
    share = f"{100 * done / total:.0f} %" if total else "all"
    time_left = "" if left_s is None else f", {format_duration(left_s)} left"
    waiting = f"; {download.waiting_for}" if download.waiting_for else ""
    source = f"{format_rate(download.bytes_per_s)} from {count(len(download.donors), 'peer')}"
    return f"{format_size(done)} of {format_size(total)} ({share}), {source}{time_left}{waiting}"


def _safety_text(model: ModelRow) -> str:
    """Write how many servers hold the rarest block, and how likely a gap is."""
    holders = f"complete: every block on {model.lowest} or more servers (target {model.target})"
    chance = model.gap_chance_within_hour
    shown_chance = "unknown" if chance is None else format_percent(chance)
    return f"{holders}; chance of a gap within the hour {shown_chance}"


def peers(as_json: Json = False) -> None:
    """List the members that are known, what they have and what they serve.

    Example: swarmd peers
    """
    from swarmd.member_status import PeersAnswer

    body = ask_json("peers")
    if as_json:
        print_json(body)
        return
    for peer in read_answer(PeersAnswer, body).peers:
        print(_peer_lines(peer))


def _peer_lines(peer: PeerRow) -> str:
    """Write two or more lines for one peer: what it serves, and what it has."""
    distance = "this one"
    if not peer.is_self:
        distance = f"{format_number(peer.round_trip_ms, ' ms')} away{_way_text(peer)}"
    lines = [f"{_full_label(peer.peer, peer.name)}  ({distance})"]
    lines += [f"  serves {_served_text(span)}" for span in peer.spans]
    if not peer.spans:
        lines.append("  serves nothing")
    device = f"device {peer.device or 'unknown'}"
    if peer.device_memory_bytes:
        device += f", {format_size(peer.device_memory_bytes)} of its own"
    memory = f"memory {format_size(peer.memory_bytes)}"
    disk = f"{format_size(peer.free_disk_bytes)} disk free"
    lines.append(f"  {device}, {memory}, {peer.cores or 'unknown'} cores, {disk}")
    if peer.gave or peer.took:
        lines.append(f"  with its invite's guests it gave you {peer.gave:,}, took {peer.took:,} tokens x blocks")
    if peer.standing:
        lines.append(f"  standing: {standing_text(peer.standing)}")
    rates = f"up {format_rate(peer.up_bytes_per_s)}, down {format_rate(peer.down_bytes_per_s)}"
    lines.append(f"  {rates}, version {peer.version}")
    return "\n".join(lines)


def _served_text(span: SpanRow) -> str:
    blocks = f"{span.model} {span_text(span.blocks)}{' and the head' if span.head else ''}"
    speed = f"{format_number(span.decode_tokens_per_s)} tokens/s"
    free = f"{span.free_cache_tokens} cache tokens free"
    tuning = f"fine-tuning in {format_size(span.training_bytes)}" if span.training_bytes else "no fine-tuning"
    return f"{blocks}: {span.state}, {speed}, {free}, {tuning}"


def _way_text(peer: PeerRow) -> str:
    """Write how a member is connected with this daemon; for one that is not, whether it could be dialled."""
    if peer.way is None:
        return ", not connected; nobody can dial it" if peer.reach == "closed" else ", not connected"
    return f", {peer.way}"


def standing_text(standing: StandingRow) -> str:
    """Write what is held against a peer, in a line."""
    faults = ", ".join(f"{fault.count} x {fault.kind}" for fault in standing.faults)
    banned = f"banned for {format_duration(standing.banned_s)} more; " if standing.banned_s else ""
    return f"{banned}{faults} (weighs {standing.score:.2g}); the last: {standing.why}"


def ps(as_json: Json = False) -> None:
    """List the sessions that this daemon serves.

    Example: swarmd ps
    """
    from swarmd.status import SessionsAnswer

    body = ask_json("sessions")
    if as_json:
        print_json(body)
        return
    names = find_names()
    rows = [
        [
            session.session,
            label_member(session.client, names),
            span_text(session.blocks),
            f"{session.finished}/{session.received}",
            str(session.epoch),
            label_ids(session.why, names),
        ]
        for session in read_answer(SessionsAnswer, body).sessions
    ]
    print_table("Sessions", ["session", "client", "blocks", "ops done", "epoch", "outputs"], rows)


def ping(
    peer: Annotated[str, typer.Argument(help="A peer id, or the end of one.")],
    as_json: Json = False,
) -> None:
    """Measure the round trip to a peer, and say whether it is connected directly or through a relay.

    Example: swarmd ping 7xQm4kHc
    """
    from swarmd.errors import SwarmUnavailable
    from swarmd.status import PingAnswer

    body = ask_json("ping", "POST", peer=peer)
    answer = read_answer(PingAnswer, body)
    if as_json:
        print_json(body)
    elif answer.error is None:
        way = f", {answer.way}" if answer.way else ""
        print(f"{answer.peer}: {answer.round_trip_ms} ms{way}")
    if answer.error is not None:
        raise SwarmUnavailable(f"{answer.peer}: {answer.error}")


def why(
    what: Annotated[
        str, typer.Argument(metavar="[MODEL|SESSION]", help="A model, or a session as swarmd ps shows it; else all.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Explain the blocks served here, where the time of a token goes, and the chain that would be chosen.

    Example: swarmd why demo
    """
    from swarmd.status import WhyAnswer

    body = ask_json("why", model=what)
    if as_json:
        print_json(body)
        return
    reasons = read_answer(WhyAnswer, body)
    names = find_names()
    for line in _explain(reasons, what):
        print(label_ids(line, names))


def _explain(reasons: WhyAnswer, what: str) -> Iterator[str]:
    """Write what ``why`` says, line by line; members by the ends of their ids."""
    if what and not reasons.chains:
        yield from _describe_sessions(reasons.sessions)
        return
    for hosting in reasons.hosting:
        serving = hosting.serving
        named = f"{serving.name} {span_text(serving.blocks)}" if serving else hosting.wanted
        yield f"{named}: {hosting.state}: {hosting.why}"
        if serving:
            yield f"  placement: {serving.why}"
        if hosting.worker:
            yield f"  worker:    {hosting.worker.why}"
            if hosting.worker.team:
                yield f"  team:      {hosting.worker.team}"
        yield f"  balance:   {hosting.balance.last_look}"
    if not reasons.hosting:
        yield f"placement: {reasons.placement}"
    for peer, standing in reasons.standing.items():
        yield f"{peer[-8:]} is left out: {standing_text(standing)}"
    for probe in reasons.probes:
        yield f"{probe.peer[-8:]} was probed: {'right' if probe.is_right else 'WRONG'}: {probe.why}"
    yield from _describe_sessions(reasons.sessions)
    for name, chain in reasons.chains.items():
        yield from _describe_chain(name, chain)


def _describe_chain(name: str, chain: ChainRow) -> Iterator[str]:
    if chain.layout:
        yield f"blocks of {name}: {chain.layout}"
    if chain.cost_ms is None:
        yield f"chain for {name}: none: {chain.error}"
        return
    yield f"chain for {name}: about {chain.cost_ms} ms a token"
    for hop in chain.hops:
        yield f"  {hop}"
    readers = ", ".join(peer[-8:] for peer in chain.readers)
    yield f"  can read the text: {readers}, and whoever is asked to check them (only some: swarmd run --only)"
    if chain.rejected:
        yield f"best rejected chain: about {chain.rejected.cost_ms} ms a token"
        for hop in chain.rejected.hops:
            yield f"  {hop}"


def _describe_sessions(sessions: Iterable[SessionRow]) -> Iterator[str]:
    for session in sessions:
        yield f"session {session.session} {span_text(session.blocks)}: {session.why}"
        for hop in session.times:
            place = " (here)" if hop.start == session.blocks[0] else ""
            times = f"{hop.computing_ms:.1f} ms are computing, {hop.waiting_ms:.1f} waiting"
            yield f"  of a pass at the hop from block {hop.start}{place}, {times}"


def update_check() -> None:
    """Say whether other members run a newer version.

    Example: swarmd update-check
    """
    from swarmd.status import DaemonStatus

    health = ask(DaemonStatus, "status").health
    rows = [row for row in health if row.kind == "version"]
    print(health_text(rows[0]) if rows else "the daemon has not looked yet, or is of another version: swarmd status")


def doctor(as_json: Json = False) -> None:
    """Check this machine's state, daemon and swarm, and say what to do.

    Example: swarmd doctor
    """
    checks = _run_checks()
    if as_json:
        listed = [{"check": check, "ok": is_fine, "detail": detail} for check, is_fine, detail in checks]
        print_json({"checks": listed})
    else:
        marks = {True: "ok", False: "!!", None: "?"}
        names = find_names()
        rows = [[marks[is_fine], check, label_ids(detail, names)] for check, is_fine, detail in checks]
        print_table("Doctor", ["", "check", "detail"], rows)
    if any(is_fine is False for _, is_fine, _ in checks):
        raise typer.Exit(1)


def _run_checks() -> list[tuple[str, bool | None, str]]:
    """Check all there is; returns what was looked at, whether it is well (None: unknown), and more."""
    from swarmd.status import DaemonStatus

    state = home()
    joined_text = "swarmd init --name NAME founds a swarm, swarmd join INVITE joins one"
    if state.has_joined:
        joined_text = membership().swarm().keys.name
    checks: list[tuple[str, bool | None, str]] = [
        _check_folder(state.folder),
        ("member of a swarm", state.has_joined, joined_text),
    ]
    if not state.has_joined:
        return checks
    running = is_running()
    if not running:
        free = shutil.disk_usage(_existing_parent(state.folder)).free
        checks.append(("disk", free > 1 << 30, f"{format_size(free)} free"))
    checks.append(("daemon", running, "answers" if running else "swarmd up"))
    return checks + _check_daemon(ask(DaemonStatus, "status")) if running else checks


def _existing_parent(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())


def _check_folder(folder: Path) -> tuple[str, bool | None, str]:
    parent = _existing_parent(folder)
    may_write = os.access(parent, os.W_OK)
    if not folder.is_dir():
        trouble = "" if may_write else f", and {parent} cannot be written"
        return "state folder", False, f"{folder} is not there yet{trouble}"
    if not may_write:
        return "state folder", False, f"{folder} cannot be written: choose another --home"
    return "state folder", True, str(folder)


def _check_addresses(addresses: tuple[str, ...]) -> list[tuple[str, bool | None, str]]:
    from swarmd.net.interfaces import is_loopback

    only_here = "; no other machine can dial that" if is_loopback(addresses) else ""
    return [("announced as", None if only_here else True, address + only_here) for address in addresses[:1]]


def _check_daemon(daemon_status: DaemonStatus) -> list[tuple[str, bool | None, str]]:
    checks: list[tuple[str, bool | None, str]] = []
    checks.append(("this peer", True, _full_label(daemon_status.peer, daemon_status.name)))
    reach = daemon_status.reach
    if reach is not None:
        is_reached = reach.state == "open" or bool(reach.relays)
        remedy = ""
        if reach.state == "closed":
            remedy = "; faster: have the router forward its TCP port (docs/operating.md)"
            if reach.is_behind_another:
                remedy = "; a port forwarded at this router does not help: one at the router behind it may"
        checks.append(("reached by others", is_reached, reach.why + remedy))
        checks += _check_addresses(daemon_status.addresses)
    for row in daemon_status.health:
        checks.append((row.kind, row.is_fine, health_text(row)))
    policy = daemon_status.policy
    if policy is not None:
        checks.append(("policy", policy.may_work or None, policy.why))
    for hosting in daemon_status.hosting:
        name = hosting.serving.name if hosting.serving else hosting.wanted
        comes_back = hosting.worker is not None and hosting.worker.last_end != ""
        is_fine = hosting.state == "online" or (hosting.state in ("loading", "fetching") and not comes_back)
        checks.append((f"serving {name}", is_fine, f"{hosting.state}: {hosting.why}"))
    for model in merge_names(daemon_status.models):
        lacking = model.help or _missing_text(model)
        checks.append((f"model {model.name}", not model.missing, lacking or "complete"))
    return checks


def span_text(pair: Blocks) -> str:
    """Write blocks as [start,end)."""
    return f"[{pair[0]},{pair[1]})"
