"""``swarmd demo``: three volunteers as separate processes, one killed in mid-sentence, and what came of it.

With a model of one's own it is a chat with three volunteers instead.
"""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

from swarmd.errors import DaemonNotRunning, SwarmUnavailable
from swarmd.home.founder import Founder
from swarmd.home.membership import MembershipFiles
from swarmd.home.paths import Home
from swarmd.importing import importing
from swarmd.member_status import PeersAnswer
from swarmd.net.local import ask_daemon
from swarmd.protocol.membership.identity import Identity
from swarmd.status import DaemonStatus
from swarmd_cli.context import Answer, read_answer
from swarmd_cli.gateway_client import open_gateway
from swarmd_cli.terminal import make_console, show_waiting, styled, text_column

if TYPE_CHECKING:
    from rich.console import Console

SPANS = ((0, 4), (1, 5), (2, 6))
CHAIN = ((0, 0, 2), (1, 2, 4), (2, 4, 6))
NAMES = ("Ada", "Barbara", "Claude")
VICTIM = 1  # who is killed: the middle of the chain
PROMPT = "The function returns"
QUIET_S = 300.0  # without any change in what they say they do: importing torch beside other work takes a minute or two
LOOK_INTERVAL_S = 0.2  # a line on a terminal need not be newer
CONVERTED = "converted"  # models that were files of another format, for the next chat


class Volunteers:
    """The demo's daemons; leaving the context ends them."""

    def __init__(
        self,
        folder: Path,
        model: str = "demo",
        spans: Sequence[tuple[int, int]] = SPANS,
    ) -> None:
        self.homes = [Home(folder / name.lower()) for name in NAMES]
        self.model = model
        self.spans = spans
        self.processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Volunteers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.wait()

    def start(self, index: int) -> None:
        """Start one volunteer's daemon."""
        home = self.homes[index]
        start, end = self.spans[index]
        command = [sys.executable, "-P", "-m", "swarmd_cli.main", "--home", str(home.folder), "up"]
        command += ["--listen", "/ip4/127.0.0.1/tcp/0", "--serve", self.model, "--blocks", f"{start}:{end}"]
        environment = {**os.environ, "SWARMD_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        with (home.folder / "daemon.log").open("wb") as log:
            process = subprocess.Popen(
                command,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=environment,
                process_group=0,  # Ctrl-C stops an answer of the chat, and no daemon
            )
        self.processes.append(process)

    def ask(self, index: int, answer: type[Answer], verb: str) -> Answer:
        """Call a volunteer's control API."""
        return read_answer(answer, ask_daemon(self.homes[index].socket, verb, timeout_s=10.0))

    def wait_for(
        self,
        condition: Any,
        missing: str,
        on_stage: Callable[[str], None],
    ) -> None:
        """Wait as long as anything changes in what the daemons say; ``on_stage`` gets it. Raises SwarmUnavailable."""
        # No fixed time is right for every machine: importing torch takes seconds on one, minutes on another. As long
        # as a daemon says something new it is at work, so the deadline is for silence alone.
        shown_stage = ""
        deadline = time.monotonic() + QUIET_S
        while not condition():
            stage = self._stage()
            if stage != shown_stage:
                shown_stage = stage
                deadline = time.monotonic() + QUIET_S
                on_stage(stage)
            for index, process in enumerate(self.processes):
                if process.poll() is not None:
                    log = (self.homes[index].folder / "daemon.log").read_text(encoding="utf-8")[-800:]
                    raise SwarmUnavailable(f"{NAMES[index]}'s daemon ended while waiting for {missing}:\n{log}")
            if time.monotonic() > deadline:
                raise SwarmUnavailable(f"no {missing}, and nothing has changed for {QUIET_S:.0f} s: {shown_stage}")
            time.sleep(LOOK_INTERVAL_S)

    def _stage(self) -> str:
        """Write what each daemon does now."""
        stages = []
        for index, name in enumerate(NAMES[: len(self.processes)]):
            try:
                has_socket = self.homes[index].socket.exists()
                hosting = self.ask(index, DaemonStatus, "status").hosting if has_socket else ()
            except DaemonNotRunning:  # a moment before it takes connections
                hosting = ()
            stage = "online" if hosting else "starting its daemon"
            if hosting and hosting[0].state != "online" and hosting[0].why:
                stage = hosting[0].why
            stages.append(f"{name}: {stage}")
        return "\n  ".join(stages)


def run_demo(max_tokens: int, seed: int) -> int:
    """Run the demo; returns 0 when the tokens equal an uninterrupted local run."""
    console = make_console(highlight=False)
    console.print(styled(("A private swarm of three volunteers on this machine", "bold")))
    with tempfile.TemporaryDirectory(prefix="swarmd-demo-") as folder, Volunteers(Path(folder)) as volunteers:
        with show_waiting(console, "starting three daemons and their workers ...") as change_text:
            Founder(volunteers.homes[0]).found("demo")
            _assemble(volunteers, lambda stage: change_text(f"getting ready\n  {stage}"))
        for name, (start, end), process in zip(NAMES, SPANS, volunteers.processes, strict=True):
            served = f"serves {_draw_span(start, end)}  blocks [{start},{end})"
            console.print(f"  {name:8} process {process.pid:<7} {served}")
        result = _generate(console, volunteers, max_tokens, seed)
    return _print_report(console, result)


def run_chat(source: Path) -> int:
    """Chat with a model that three volunteers serve: the first has it, the others fetch their parts from it."""
    from swarmd_cli.context import set_home
    from swarmd_cli.verbs import chat, models

    console = make_console(highlight=False)
    with tempfile.TemporaryDirectory(prefix="swarmd-chat-") as folder:
        home = Home(Path(folder) / NAMES[0].lower())
        Founder(home).found("chat")
        _keep_conversions(home)
        set_home(home.folder)
        console.print(models.add_source(str(source), "chat"))
        n = MembershipFiles(home).catalog().models["chat"][1]
        # Two thirds of the model for each. The first and the last together hold all of it: the middle one may die.
        first = (0, max(1, 2 * n // 3))
        middle = (n // 6, max(1, 5 * n // 6))
        last = (n // 3, n)
        spans = (first, middle, last)
        with Volunteers(Path(folder), "chat", spans) as volunteers:
            text = "starting three daemons, which fetch their parts from each other ..."
            with show_waiting(console, text) as change_text:
                _assemble(volunteers, lambda stage: change_text(f"getting ready\n  {stage}"))
            for name, (start, end), process in zip(NAMES, spans, volunteers.processes, strict=True):
                served = f"serves blocks [{start},{end})"
                console.print(f"  {name:8} process {process.pid:<7} {served}  (kill -9 one of them)")
            with open_gateway() as gateway:
                chat.Conversation(gateway, "chat", "", {}).run()
    return 0


def _keep_conversions(founder: Home) -> None:
    """Have what is converted outlive this chat: the next one begins where the first answer did."""
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    cache = caches / "swarmd" / CONVERTED
    cache.mkdir(parents=True, exist_ok=True)
    (founder.folder / CONVERTED).symlink_to(cache.resolve())


def _assemble(volunteers: Volunteers, on_stage: Callable[[str], None]) -> None:
    home = volunteers.homes[0]
    volunteers.start(0)
    volunteers.wait_for(home.socket.exists, "founder's control socket", on_stage)
    invite = Founder(home).invite(volunteers.ask(0, DaemonStatus, "status").addresses, 3_600)
    for index in (1, 2):
        guest = MembershipFiles(volunteers.homes[index])
        guest.enter(invite, Identity.generate(), MembershipFiles(home).catalog_raw())
        volunteers.start(index)

    def is_complete() -> bool:
        peers = volunteers.ask(0, PeersAnswer, "peers").peers
        online = [span for peer in peers for span in peer.spans if span.state == "online"]
        return len(online) == len(NAMES)

    volunteers.wait_for(is_complete, "complete set of blocks", on_stage)


def _generate(
    console: Console,
    volunteers: Volunteers,
    max_tokens: int,
    seed: int,
) -> dict[str, Any]:
    with importing():
        import torch
        from transformers import AutoModelForCausalLM
        from transformers.generation.streamers import BaseStreamer

        import swarmd.client.blocking
        from swarmd.compute.model.skeleton import quiet

    from swarmd.home.models import bundled_folder
    from swarmd.plan.chains.routing import Hop
    from swarmd.values import Span

    # The same seed draws the same tokens from the same logits. So the tokens of the swarm, with a server killed in
    # the middle, must be those of an uninterrupted local run, one by one.
    quiet()
    torch.set_num_threads(1)
    peers = [MembershipFiles(home).identity().peer_id for home in volunteers.homes]
    hops = [Hop(peers[index], Span(start, end)) for index, start, end in CHAIN]
    short_ids = [peer[-8:] for peer in peers]
    names = dict(zip(short_ids, NAMES, strict=True))
    local = AutoModelForCausalLM.from_pretrained(bundled_folder(), dtype=torch.float32)
    sampling = {"do_sample": True, "temperature": 0.7, "max_new_tokens": max_tokens, "min_new_tokens": max_tokens}
    with swarmd.connect(home=volunteers.homes[0].folder) as swarm:
        model = swarm.model("demo", chain=tuple(hops))
        tokenizer = swarm.tokenizer("demo")
        inputs = tokenizer(PROMPT, return_tensors="pt")
        description = text_column("{task.description}")
        with Progress(description, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console) as progress:
            task = progress.add_task("generating", total=max_tokens)
            times: list[float] = []

            class Watcher(BaseStreamer):  # type: ignore[misc]
                def put(self, value: Any) -> None:
                    times.append(time.perf_counter())
                    progress.update(task, completed=max(0, len(times) - 1))
                    if len(times) == max_tokens // 2:
                        os.kill(volunteers.processes[VICTIM].pid, signal.SIGKILL)
                        victim = f" {NAMES[VICTIM]}, at token {len(times) - 1}"
                        progress.console.print(styled("  ", ("kill -9", "red"), victim))

                def end(self) -> None: ...

            torch.manual_seed(seed)
            ids = model.generate(**inputs, streamer=Watcher(), **sampling)
        session = model.last_session
    torch.manual_seed(seed)
    expected = local.generate(**inputs, **sampling)
    gaps = sorted(later - earlier for earlier, later in itertools.pairwise(times))
    return {
        "text": tokenizer.decode(ids[0], skip_special_tokens=True),
        "is_equal": torch.equal(ids, expected),
        "n_tokens": max_tokens,
        "seconds": times[-1] - times[0],
        "longest_gap_s": gaps[-1],
        "median_gap_s": gaps[len(gaps) // 2],
        "repairs": session.statistics.repairs,
        "names": names,
        "chain_after": session.chain,
    }


def _print_report(console: Console, result: dict[str, Any]) -> int:
    repairs = result["repairs"]
    console.print(styled("\n", (result["text"], "italic"), "\n"))
    chain_before = repairs[0].chain_before if repairs else result["chain_after"]
    console.print(f"chain before  {_draw_chain(chain_before, result['names'])}")
    console.print(f"chain after   {_draw_chain(result['chain_after'], result['names'])}")
    tokens_per_s = result["n_tokens"] / result["seconds"]
    console.print(f"speed         {tokens_per_s:.1f} tokens/s; a token takes {1000 * result['median_gap_s']:.1f} ms")
    console.print(f"longest stall {1000 * result['longest_gap_s']:.0f} ms, while the chain was repaired")
    for repair in repairs:
        console.print(f"what happened {repair.reason}; {repair.replayed_tokens} tokens replayed by the hop before it")
    verdict = ("equal", "green") if result["is_equal"] else ("DIFFER from", "red")
    console.print(styled("the tokens    ", verdict, " those of an uninterrupted local run"))
    return 0 if result["is_equal"] and repairs else 1


def _draw_chain(hops: tuple[str, ...], names: dict[str, str]) -> str:
    """Draw a chain: you ─▶ Ada [0,2) ─▶ ... ─▶ you."""
    drawn = []
    for hop in hops:
        span, _, peer = hop.partition(" on ")
        drawn.append(f"{names.get(peer, peer)} {span}")
    return " ─▶ ".join(["you", *drawn, "you"])


def _draw_span(start: int, end: int) -> str:
    n = max(stop for _, stop in SPANS)
    return "".join("█" if start <= block < end else "░" for block in range(n))
