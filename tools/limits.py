"""docs/limits.md: the limits that a user, an operator or another member can meet, with their values from the source.

    python -m tools.limits      writes it anew; tests/test_limits.py holds the page to the source

Every named number of the program has its reason beside it (tests/test_architecture.py). This page has those whose
effect somebody sees from outside, by what is seen.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

from tools.reading import reading_minutes

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "limits.md"
UNITS = {"_PER_S": "", "_S": "s", "_BYTES": "B", "_TOKENS": "tokens"}
HEAD = """# Limits

{minutes} minutes to read. What somebody can meet of the program's bounds, by what is seen. Values and reasons are
the source's (`python -m tools.limits`). What can be set is in docs/operating.md. All other named numbers have their
reasons in the source.
"""
SEEN: dict[str, dict[str, str]] = {
    "By programs that ask the gateway": {
        "gateway.apis.body.MOST_BODY_BYTES": "a larger request is answered with 413",
        "gateway.apis.body.BODY_WITHIN_S": "a request that comes more slowly is answered with 408",
        "gateway.serving.REQUEST_WITHIN_S": "a connection without a whole request head is closed",
        "gateway.apis.schema.MAX_MESSAGES": "more messages are answered with 400",
        "gateway.apis.schema.MAX_TOOLS": "more tools are answered with 400",
        "gateway.apis.schema.MAX_STOPS": "more stop strings are answered with 400",
        "gateway.apis.schema.MAX_N": "more answers to one prompt are answered with 400",
        "gateway.apis.completions.MAX_PROMPTS": "more prompts of one request are answered with 400",
        "gateway.apis.streams.KEEP_ALIVE_S": "a stream that has nothing to say sends an event that says nothing",
        "gateway.generation.schema_trials.MOST_SCHEMA_BYTES": "a longer JSON schema is answered with 400",
        "gateway.generation.schema_trials.MOST_S": "a schema that takes longer to compile is answered with 400",
        "gateway.generation.schema_compiler.MOST_MEMORY_BYTES": "a schema that takes more memory is answered with 400",
        "gateway.generation.json_schema.MAX_DEPTH": "a schema nested deeper is answered with 400",
        "gateway.generation.kept_sessions.MOST_KEPT": "of more conversations the oldest are computed anew",
        "gateway.models.LOADED_WITHIN_S": "a model that takes longer to load is answered with 503",
        "client.text.prompts.MOST_S": "a template that takes longer is answered with 400",
        "client.text.prompts.MOST_MEMORY_BYTES": "a template that takes more memory is answered with 400",
    },
    "By users of models": {
        "client.sessions.repair_plan.PATIENCE_S": "blocks nobody serves for longer end the call with what is missing",
        "client.sessions.reservations.OPEN_TIMEOUT_S": "a server that does not answer for longer is passed over",
        "client.sessions.step_state.SLOWEST_TOKENS_PER_S": "a server whose prefill is slower is replaced",
        "client.sessions.step_state.MAX_WRONG": "after more chains with impossible answers in one step it ends",
        "client.sessions.repair.REPLAY_TIMEOUT_S": "a replacement that takes longer to catch up is replaced, too",
        "client.sessions.statements.MAX_AUDIT_BYTES": "a session with more inputs is checked up to here",
        "plan.chains.flight.MOST_AHEAD": "no more tokens are tried ahead of what is known",
        "plan.chains.flight.WINDOW_TOKENS": "no more tokens are tried in one pass",
        "protocol.accounts.taken_tokens.MOST_TRIED": "of a longer crop the tokens beyond it are paid for",
        "protocol.accounts.taken_tokens.LEAST_SHARE": "of so many computed tokens one is paid for at least",
        "plan.chains.void_ops.MOST_WINDOWS": "ops further beyond those that came cannot be said to be void",
        "protocol.fields.MOST_ABSENT": "a session with more void tokens that are not cropped is refused",
        "plan.chains.cache_admission.MAX_SHARE_PER_PEER": "one client's sessions beyond it are refused",
        "plan.chains.cache_admission.MAX_SESSIONS_PER_PEER": "one client's further sessions at a server are refused",
        "plan.chains.cache_admission.RETRY_AFTER_S": "a refusal for want of room says to come again after it",
        "plan.chains.watch.SUSPECT_AFTER_S": "a hop that is silent for longer, with work outstanding, is replaced",
        "plan.chains.cache_admission.SILENT_S": "a session without an op for longer ends when others need its room",
        "plan.chains.hop.LEASE_S": "a session without an op for longer is closed by its servers",
        "compute.cache.adapters.MAX_ADAPTERS": "of more adapters on a server the oldest makes room",
        "compute.cache.adapters.MAX_RANK": "an adapter of a higher rank is refused",
        "compute.serving.client_parameters.MAX_PREFIX_TOKENS": "a longer tuned prefix is refused",
        "compute.serving.fine_tuning.MAX_MICRO_BATCH_TOKENS": "a larger micro-batch is refused",
        "client.tuning.dataset.MAX_REPORTED": "of more faulty lines in a data file the first are told",
    },
    "By who publishes models": {
        "protocol.models.manifest.MAX_ENTRIES": "a checkpoint of more tensors and files is refused",
        "protocol.models.manifest.MAX_JSON_BYTES": "a larger configuration or tokenizer is refused",
        "protocol.models.manifest.MAX_FILE_BYTES": "a larger file beside the tensors is refused",
        "protocol.models.shards.MAX_HEADER_BYTES": "a safetensors file with a larger header is refused",
        "protocol.models.configuration.MAX_DEPTH": "a configuration nested deeper is refused",
        "compute.llama_cpp.gguf_header.MOST_ENTRIES": "a GGUF file with more settings or tensors is refused",
        "protocol.membership.catalog.MAX_CATALOG_BYTES": "a catalog that would be larger is not signed",
    },
    "By operators": {
        "node.worker.worker_link.STALL_S": "a worker that says nothing for longer is ended and started again",
        "node.worker.worker_link.STALL_LOADING_S": "the same while it loads",
        "node.serving.deployment.DRAIN_S": "`down` and `drain` wait no longer for sessions to move",
        "node.serving.deployment.GRACE_S": "`pause` waits no longer for caches to be handed over",
        "plan.owner.clock.CLOCK_S": "`doctor` says that the clock is wrong beyond it",
        "plan.owner.health.LEAST_DISK_BYTES": "`doctor` says that the disk is full below it",
        "plan.chains.placement.MAX_MOVES_PER_DAY": "a server that chooses its blocks moves no oftener",
        "plan.trust.standing.FIRST_BAN_S": "a member at fault is banned for this long, then twice as long each time",
        "plan.trust.standing.LONGEST_BAN_S": "no ban is longer",
    },
    "By members of a swarm": {
        "protocol.wire.frames.MAX_PAYLOAD_BYTES": "a larger frame ends its channel",
        "protocol.wire.frames.MAX_HEADER_BYTES": "a longer header ends its channel",
        "net.inbound.MAX_BYTES_OF_SPONSOR": "more frames of one invite's guests wait until some are handled",
        "net.inbound.MAX_BYTES": "the same for all peers together",
        "node.serving.outbox.SEND_TIMEOUT_S": "a peer that takes no byte for longer loses its frames",
        "node.serving.outbox.MAX_WAITING_BYTES": "frames beyond it, for all peers, are not kept",
        "net.libp2p.relay.MAX_RESERVATIONS": "a relay refuses further members",
        "net.libp2p.relay.MAX_CIRCUITS": "a relay refuses further circuits",
        "net.libp2p.relay.MAX_CIRCUITS_OF_PEER": "a relay refuses one member's further circuits",
        "plan.members.record_book.MAX_RECORDS": "records beyond it are not taken",
        "plan.members.record_book.MAX_RECORDS_OF_A_VOUCHER": "records of one invite's guests beyond it are not taken",
        "protocol.membership.records.RECORD_LIFETIME_S": "a member that vanished is still listed for so long",
        "protocol.membership.beats.MAX_SKEW_S": "records of clocks that differ by more are ignored",
        "protocol.membership.catalog.MAX_INVITES": "a founder makes no more invites that have not expired",
        "protocol.membership.catalog.MAX_ADMITTED": "no more members are admitted for good",
        "protocol.membership.catalog.MAX_REVOKED": "no more keys are revoked: revoke their invite",
        "protocol.membership.catalog.MAX_USES": "an invite is for no more machines, or for any number",
        "protocol.membership.charter.MAX_FOUNDERS": "a swarm has no more founders",
        "plan.trust.admission.MAX_WAITING": "no more machines wait for approval",
    },
    "By trainers": {
        "protocol.runs.recipe.MAX_RECIPE_BYTES": "a longer recipe is refused",
        "protocol.runs.recipe.MAX_TARGETS": "a recipe that names more LoRA targets is refused",
        "protocol.runs.recipe.MAX_ANCHORS": "a run has no more anchors",
        "protocol.runs.commit.MAX_CONTRIBUTORS": "an update counts no more contributors",
        "plan.members.record_book.MAX_RUNS": "a daemon takes part in no more runs at a time",
        "plan.runs.quorum.ALONE_AFTER_S": "a lone contributor's commit waits so long while others compute",
        "plan.runs.quorum.LOST_AFTER_S": "a run goes back to an older state no sooner",
    },
}


@dataclass(frozen=True, slots=True)
class Limit:
    """A named number of a module, as its source has it."""

    value: str
    reason: str


def limit_of(place: str) -> Limit:
    """Look up ``room.module.NAME``. Raises KeyError where there is no such number with a reason."""
    module, _, name = place.rpartition(".")
    path = ROOT / "swarmd" / f"{module.replace('.', '/')}.py"
    source = path.read_text()
    for node in ast.parse(source).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and target.id == name:
            written, _, reason = source.splitlines()[node.lineno - 1].partition("#")
            unit = next((unit for ending, unit in UNITS.items() if name.endswith(ending)), "")
            return Limit(f"{written.partition('=')[2].strip()} {unit}".strip(), reason.strip())
    raise KeyError(f"{path.relative_to(ROOT)} defines no {name}")


def page() -> str:
    """The whole of docs/limits.md."""
    lines = []
    for title, rows in SEEN.items():
        lines += [f"## {title}", "| what is seen | limit | why | where |", "|---|---|---|---|"]
        for place, seen in rows.items():
            limit = limit_of(place)
            lines.append(f"| {seen} | {limit.value} | {limit.reason} | {place} |")
        lines.append("")
    body = "\n".join(lines).rstrip() + "\n"
    return HEAD.format(minutes=reading_minutes(body)) + "\n" + body


if __name__ == "__main__":
    PAGE.write_text(page())
