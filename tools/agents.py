"""Today's agents, from npm, in front of the gateway: does a tool call edit a file, and does a second turn go on?

python -m tools.agents [--only codex pi] [--folder FOLDER]

The model behind the gateway says what ``script`` tells it (tests/gateway/scripted.py). Agents run as they are
installed, without a log-in, in namespaces of their own, which takes root (``unshare``): there is nothing but loopback,
and what they leave running ends with it. Prints for each what docs/gateway.md, "Agents", says of it. They are installed
once, in FOLDER: 2 GB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trio

from tests.gateway.scripted import ScriptedGateway, call, last_text, scripted_gateway

CONTEXT = 131_072
LONG = "the small boat goes over the quiet water and comes back when the wind turns " * 1_600
PROMPT = "Write hello into the file made.txt"
MORE = LONG[:20_000]  # more tokens than an eighth of its letters
SECOND = "And now say goodbye"
DONE = "The file says hello now."
GOODBYE = "Goodbye then."
TITLE = "A file that says hello"
COMMAND = "echo hello > made.txt"
WITHIN_S = 120.0  # for one turn of an agent; the slowest takes 20 s
MODEL = "played"


@dataclass(frozen=True, slots=True)
class Agent:
    """How an agent is installed, told where the gateway is, asked, and asked again; and its tool for commands.

    {url} stands for the gateway's address, {id} for the name of its file of the conversation, which ``kept`` matches.
    ``files`` are written into its home; ``prepare`` is run once before. One that cannot go on with a conversation
    without a terminal has no ``again``.
    """

    package: str
    ask: tuple[str, ...]
    again: tuple[str, ...]
    tool: str
    arguments: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, Any] = field(default_factory=dict)
    prepare: tuple[str, ...] = ()
    kept: str = ""
    shortens: bool = True


_CODEX = (
    "--skip-git-repo-check",
    "--dangerously-bypass-approvals-and-sandbox",
    "-c",
    'model_providers.swarmd={name="swarmd",base_url="{url}/v1",wire_api="responses"}',
    "-c",
    "model_provider=swarmd",
    "-c",
    f"model={MODEL}",
)
AGENTS = {
    "codex": Agent(
        "@openai/codex@0.169.0",
        ("codex", "exec", *_CODEX, PROMPT),
        ("codex", "exec", "resume", "--last", *_CODEX, SECOND),
        "exec_command",
        {"cmd": COMMAND},
    ),
    "claude": Agent(
        "@anthropic-ai/claude-code@2.1.328",
        ("claude", "-p", PROMPT, "--allowedTools", "Bash"),
        ("claude", "-p", "-c", SECOND, "--allowedTools", "Bash"),
        "Bash",
        {"command": COMMAND, "description": "Writes the file"},
        {
            "ANTHROPIC_BASE_URL": "{url}",
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": MODEL,
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
    ),
    "pi": Agent(
        "@earendil-works/pi-coding-agent@0.74.2",
        ("pi", "-p", "--provider", "swarmd", "--model", MODEL, PROMPT),
        ("pi", "-p", "-c", "--provider", "swarmd", "--model", MODEL, SECOND),
        "bash",
        {"command": COMMAND},
        {"PI_OFFLINE": "1"},
        {
            ".pi/agent/models.json": {
                "providers": {
                    "swarmd": {
                        "baseUrl": "{url}/v1",
                        "api": "openai-completions",
                        "apiKey": "none",
                        "models": [{"id": MODEL, "contextWindow": CONTEXT, "maxTokens": 4_096}],
                    }
                }
            }
        },
    ),
    "qwen": Agent(
        "@qwen-code/qwen-code@0.24.4",
        ("qwen", "--auth-type", "openai", "-y", "-p", PROMPT),
        ("qwen", "--auth-type", "openai", "-y", "--continue", "-p", SECOND),
        "run_shell_command",
        {"command": COMMAND, "is_background": False},
        {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": "{url}/v1", "OPENAI_MODEL": MODEL},
        {".qwen/settings.json": {"privacy": {"usageStatisticsEnabled": False}}},
    ),
    "opencode": Agent(
        "opencode-ai@1.18.33",
        ("opencode", "run", PROMPT),
        ("opencode", "run", "-c", SECOND),
        "bash",
        {"command": COMMAND, "description": "Writes the file"},
        {},
        {
            "work/opencode.json": {
                "model": f"swarmd/{MODEL}",
                "share": "disabled",
                "autoupdate": False,
                "provider": {
                    "swarmd": {
                        "npm": "@ai-sdk/openai-compatible",
                        "options": {"baseURL": "{url}/v1", "apiKey": "none"},
                        "models": {MODEL: {}},
                    }
                },
            }
        },
    ),
    "copilot": Agent(
        "@github/copilot@1.0.102",
        ("copilot", "-p", PROMPT, "--allow-all-tools", "--no-auto-update"),
        ("copilot", "-p", SECOND, "--continue", "--allow-all-tools", "--no-auto-update"),
        "bash",
        {"command": COMMAND, "description": "Writes the file"},
        {"COPILOT_PROVIDER_BASE_URL": "{url}/v1", "COPILOT_MODEL": MODEL, "COPILOT_OFFLINE": "true"},
    ),
    "cn": Agent(
        "@continuedev/cli@1.5.47",
        ("cn", "-p", "--auto", "--config", "../config.yaml", PROMPT),
        ("cn", "-p", "--auto", "--resume", "--config", "../config.yaml", SECOND),
        "Bash",
        {"command": COMMAND},
        {"CONTINUE_TELEMETRY_ENABLED": "0"},
        {
            "config.yaml": {  # JSON is YAML
                "name": "swarmd",
                "version": "1.0.0",
                "schema": "v1",
                "models": [
                    {"name": MODEL, "provider": "openai", "model": MODEL, "apiBase": "{url}/v1", "apiKey": "none"}
                ],
            }
        },
    ),
    "cline": Agent(
        "cline@3.0.65",
        ("cline", "-P", "openai", "-m", MODEL, PROMPT),
        (),
        "run_commands",
        {"commands": [COMMAND]},
        {"CLINE_TELEMETRY_DISABLED": "1"},
        prepare=("cline", "auth", "-p", "openai", "-k", "none", "-m", MODEL, "-b", "{url}/v1"),
    ),
    "droid": Agent(
        "droid@0.215.0",
        ("droid", "exec", "--auto", "medium", "-m", f"custom:{MODEL}-0", PROMPT),
        ("droid", "exec", "--auto", "medium", "-m", f"custom:{MODEL}-0", "--fork", "{id}", SECOND),
        "Execute",
        {
            "command": COMMAND,
            "summary": "Write the file with hello",
            "riskLevelReason": "It writes a file.",
            "riskLevel": "low",
        },
        {"FACTORY_API_KEY": "none"},
        {
            ".factory/settings.json": {
                "customModels": [
                    {
                        "model": MODEL,
                        "displayName": MODEL,
                        "baseUrl": "{url}/v1",
                        "apiKey": "none",
                        "provider": "generic-chat-completion-api",
                        "maxOutputTokens": 4_096,
                    }
                ]
            }
        },
        kept=".factory/sessions/*/*.jsonl",
        shortens=False,
    ),
}


def script(agent: Agent, turns: list[dict[str, Any]], tools: list[dict[str, Any]]) -> str:
    """What the model says: the call, then that it is done; goodbye; and a title where there are no tools."""
    if agent.tool not in [tool["function"]["name"] for tool in tools]:
        return TITLE
    if turns[-1]["role"] == "tool":
        return DONE
    return GOODBYE if SECOND in last_text(turns, "user") else call(agent.tool, dict(agent.arguments))


@dataclass(slots=True)
class Outcome:
    """What was seen of one agent."""

    edited: bool = False
    said: bool = False
    went_on: bool | None = False
    kept: float = 0.0
    shortened: bool | None = None
    problem: str = ""


async def try_agent(agent: Agent, programs: Path) -> Outcome:
    """Have an agent edit a file by a tool, and then go on with the conversation."""
    outcome = Outcome()
    with tempfile.TemporaryDirectory(prefix="swarmd-agent-") as temporary:
        folder = Path(temporary)
        home = folder / "home"
        work = home / "work"
        work.mkdir(parents=True)
        async with scripted_gateway(folder, lambda turns, tools: script(agent, turns, tools), CONTEXT) as gateway:
            for name, content in agent.files.items():
                (home / name).parent.mkdir(parents=True, exist_ok=True)
                (home / name).write_text(json.dumps(content).replace("{url}", gateway.url))
            if agent.prepare:
                await run(agent, agent.prepare, gateway, home, programs)
            said = await run(agent, agent.ask, gateway, home, programs)
            outcome.edited = (work / "made.txt").is_file() and (work / "made.txt").read_text() == "hello\n"
            outcome.said = DONE in said
            n_before = max((report.n_prompt for report in gateway.reports), default=0)
            if not agent.again:
                outcome.went_on = None
                results = last_text(gateway.asked[-1], "tool")[:500] if gateway.asked else ""
                outcome.problem = "" if outcome.edited and outcome.said else f"{results}\n-----\n{said[-1500:]}"
                return outcome
            n_reports = len(gateway.reports)
            said_again = await run(agent, agent.again, gateway, home, programs)
            outcome.went_on = GOODBYE in said_again
            second = max(gateway.reports[n_reports:], key=lambda report: report.n_prompt, default=None)
            outcome.kept = second.n_cached / n_before if second and n_before else 0.0
            if agent.shortens:
                for _ in range(2):  # pi keeps the last 20,000 tokens, whatever the context is
                    await run(agent, _longer(agent.again, LONG), gateway, home, programs)
                n_reports = len(gateway.reports)
                gateway.ends.max_tokens = max(report.n_prompt for report in gateway.reports) + len(MORE) // 8
                said_last = await run(agent, _longer(agent.again, MORE), gateway, home, programs)
                outcome.shortened = len(gateway.reports) >= n_reports + 2  # a summary, and the question again
                said_again += f"\n-----\n{said_last}"
            if not (outcome.edited and outcome.said and outcome.went_on):
                outcome.problem = f"{len(gateway.asked)} requests; {said[-1500:]}\n-----\n{said_again[-1500:]}"
    return outcome


def _longer(command: tuple[str, ...], text: str) -> tuple[str, ...]:
    return tuple(argument.replace(SECOND, f"{SECOND}. Do not mind this: {text}") for argument in command)


async def run(agent: Agent, command: tuple[str, ...], gateway: ScriptedGateway, home: Path, programs: Path) -> str:
    """Run an agent for one turn; returns what it printed."""
    environment = {
        "HOME": str(home),
        "PATH": f"{programs / 'node_modules/.bin'}:{os.environ['PATH']}",
        "TERM": "dumb",
        **{name: value.replace("{url}", gateway.url) for name, value in agent.environment.items()},
    }
    conversation = next((path.stem for path in home.glob(agent.kept)), "") if agent.kept else ""
    arguments = [argument.replace("{url}", gateway.url).replace("{id}", conversation) for argument in command]
    with trio.move_on_after(WITHIN_S):
        ended = await trio.run_process(
            arguments,
            cwd=home / "work",
            env=environment,
            check=False,
            capture_stdout=True,
            capture_stderr=True,
            stdin=b"",
        )
        return ended.stdout.decode(errors="replace") + ended.stderr.decode(errors="replace")
    return f"it did not end within {WITHIN_S:.0f} s"


def main() -> None:
    """Install what is missing, go where only loopback is, and try one agent after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=AGENTS, default=list(AGENTS))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "swarmd-agents")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if not asked.inside:
        asked.folder.mkdir(parents=True, exist_ok=True)
        packages = [AGENTS[name].package for name in asked.only]
        install = ["npm", "install", "--no-audit", "--no-fund", "--silent", *packages]
        subprocess.run(install, cwd=asked.folder, check=True)
        again = [sys.executable, "-m", "tools.agents", "--inside", "--folder", str(asked.folder), "--only", *asked.only]
        alone = ["unshare", "-n", "-p", "-f", "--mount-proc", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
        sys.exit(subprocess.run([*alone, *again]).returncode)
    print("| agent | a file edited by a tool | what came of it said | a second turn | tokens kept for it | too long |")
    print("|---|---|---|---|---|---|")
    is_fine = True
    for name in asked.only:
        outcome = trio.run(try_agent, AGENTS[name], asked.folder)
        seen = (outcome.edited, outcome.said, outcome.went_on)
        marks = ["not by a command" if mark is None else "yes" if mark else "no" for mark in seen]
        kept = f"{min(1.0, outcome.kept):.1%}" if AGENTS[name].again else ""
        shortened = {None: "", True: "shortens, goes on", False: "says so, ends"}[outcome.shortened]
        print(f"| {AGENTS[name].package} | {' | '.join(marks)} | {kept} | {shortened} |", flush=True)
        if outcome.problem:
            is_fine = False
            print(outcome.problem, file=sys.stderr)
    sys.exit(not is_fine)


if __name__ == "__main__":
    main()
