"""Every way in which a worker can lie, by a real process in a swarm of real processes: how soon it is found.

python -m tools.prove.trust [--only LIE] [--model bundled|smollm2] [--sessions 12] [--late TRIALS]

Of each block there are three holders from three invites. A client pins its sessions to the liar and an honest server,
and generates until the liar is banned: audits are those that every client makes (always, until ten in a row are
right). It tells tokens that were given meanwhile, of them how many differ from an honest generation's, and what
checking computed. With ``--late`` the liar was right a thousand times before: so many times, windows until it is found.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import StoppingCriteria

import swarmd
from swarmd.client.sessions import hop_audit
from swarmd.errors import SwarmError
from swarmd.plan.chains.routing import Hop
from swarmd.plan.trust.audits import AuditRecord
from swarmd.plan.trust.standing import Fault
from swarmd.values import Span
from tests.real.harness import LocalSwarm, Volunteer, local_swarm
from tests.real.liars import LIES, VARIABLE
from tests.real.smollm2 import smollm2

ROOT = Path(__file__).parent.parent.parent
N_TOKENS = 48  # of each answer
PROBED_WITHIN_S = 15.0  # after it is online
TOLD_WITHIN_S = 3.0  # for others to compute it too
PROMPTS = tuple(f"The function of number {n} returns a list of" for n in range(64))


@dataclass(frozen=True)
class Outcome:
    """What came of one lie: answers and tokens until it was found, tokens that were wrong, and what was said."""

    lie: str
    probes: str
    is_found: bool
    n_sessions: int
    n_tokens: int
    n_wrong: int
    n_accused: int
    n_believe: int
    share: float
    reason: str

    def row(self) -> str:
        found = f"{self.n_sessions} answers, {self.n_tokens} tokens" if self.is_found else "not found"
        cells = (
            self.lie,
            self.probes,
            found,
            self.n_wrong,
            self.n_accused,
            self.n_believe,
            f"{100 * self.share:.0f} %",
        )
        return f"| {' | '.join(map(str, cells))} | {self.reason} |"


HEAD = (
    "| the lie | probes say | found by audits after | wrong tokens given | honest ones accused | others who compute it "
    "and believe | checking computed | what was said |\n|---|---|---|---|---|---|---|---|"
)
LATE = "right for what looks like a check"
WINDOWS_OF_AN_ANSWER = 2  # after 32 ops, and at its end
MIGRATION = "a wrong cache migration"


@contextmanager
def honest_swarm(folder: Path, model: str) -> Iterator[tuple[LocalSwarm, list[Volunteer], int]]:
    """Three holders of each half, but for one of the first half: (swarm, holders, blocks)."""
    n_blocks = 30 if model == "smollm2" else 6
    with local_swarm(folder) as swarm:
        half = n_blocks // 2
        models = {"smollm2": smollm2()} if model == "smollm2" else None
        name = "smollm2" if models else "demo"
        spans = [(half, n_blocks), (0, half), (0, half), (half, n_blocks), (half, n_blocks)]
        holders = [swarm.add("--serve", name, "--blocks", f"{a}:{b}", models=models) for a, b in spans]
        swarm.wait_online()
        yield swarm, holders, n_blocks


def add_liar(swarm: LocalSwarm, lie: str, model: str, n_blocks: int, blocks: str = "", **settings: str) -> Volunteer:
    """A volunteer whose worker lies, with these blocks, or the first half."""
    models = {"smollm2": smollm2()} if model == "smollm2" else None
    name = "smollm2" if models else "demo"
    environment = {VARIABLE: lie, "PYTHONPATH": str(ROOT), **settings}
    blocks = blocks or f"0:{n_blocks // 2}"
    liar = swarm.prepare("--serve", name, "--blocks", blocks, models=models, **environment)
    liar.program = "tests.real.liars"
    liar.start()
    swarm.wait_online()
    return liar


class At(StoppingCriteria):  # type: ignore[misc]
    """Does something once so many tokens are there, and stops nothing."""

    def __init__(self, n_tokens: int, act: Callable[[], object]) -> None:
        self._left, self._act = n_tokens, act

    def __call__(self, ids: Any, scores: Any, **kwargs: Any) -> torch.Tensor:
        self._left -= 1
        if not self._left:
            self._act()
        return torch.zeros(ids.shape[0], dtype=torch.bool)


def generate(model: Any, tokenizer: Any, prompt: str, act: Callable[[], object] = lambda: None) -> torch.Tensor:
    """An answer; half-way ``act`` is done."""
    inputs = tokenizer(prompt, return_tensors="pt")
    criteria = [At(N_TOKENS // 2, act)]
    options = {"max_new_tokens": N_TOKENS, "min_new_tokens": N_TOKENS, "do_sample": False}
    ids = model.generate(**inputs, **options, stopping_criteria=criteria)
    return torch.as_tensor(ids[0, inputs["input_ids"].shape[1] :])


def probes_of(holders: list[Volunteer], liar: Volunteer) -> str:
    """What those say who probed it; each is probed by two."""

    def said() -> list[bool]:
        rows = [row for holder in holders for row in holder.ask("why")["probes"]]
        return [row["is_right"] for row in rows if row["peer"] == liar.peer]

    deadline = time.monotonic() + PROBED_WITHIN_S
    while len(said()) < 2 and time.monotonic() < deadline:
        time.sleep(0.2)
    found = said()
    return ", ".join("right" if is_right else "wrong" for is_right in found) or "nothing"


def prove(swarm: LocalSwarm, holders: list[Volunteer], liar: Volunteer, lie: str, name: str, n: int) -> Outcome:
    half = int(liar.arguments[liar.arguments.index("--blocks") + 1].split(":")[1])
    chains = [
        (Hop(first.peer, Span(0, half)), Hop(holders[0].peer, Span(half, 2 * half))) for first in (holders[1], liar)
    ]
    n_tokens = n_wrong = n_sessions = 0
    probes = probes_of(holders, liar)
    with swarmd.connect(swarm.invite()) as client:
        within, tokenizer = client.within, client.tokenizer(name)
        honest = client.model(name, chain=chains[0], lookup=False)
        lied = client.model(name, chain=chains[1], lookup=False)
        is_found = False
        while not is_found and n_sessions < n:
            prompt = PROMPTS[n_sessions % len(PROMPTS)]
            within.audits = False
            expected = generate(honest, tokenizer, prompt)
            within.audits = True
            n_sessions += 1
            act = (lambda: liar.ask("drain", "POST")) if lie == MIGRATION else (lambda: None)
            try:
                got = generate(lied, tokenizer, prompt, act)
            except SwarmError as error:
                print(f"  {error}", file=sys.stderr)
                break
            n_wrong += int((got != expected).sum())
            n_tokens += N_TOKENS
            lied.last_session.wait_closed()
            is_found = bool(lied.last_session.statistics.doubts)
        time.sleep(TOLD_WITHIN_S if is_found else 0)
        accused = sum(bool(within.rpc.standing.count(v.peer, Fault.WRONG_RESULTS)) for v in holders)
        believe = sum(
            any("wrong_results" in row["why"] for peer, row in v.ask("why")["standing"].items() if peer == liar.peer)
            for v in holders
        )
        others = [f.reason for f in within.checks.findings if f.outcome != "right"] or ["nothing"]
        share = within.checks.share()
        return Outcome(lie, probes, is_found, n_sessions, n_tokens, n_wrong, accused, believe, share, others[-1][:120])


class RightBefore(dict[str, AuditRecord]):
    """Records of servers that were right a thousand times before anything was noted here."""

    KNOWN = AuditRecord(1_000, 1_000, 0)

    def get(self, key: str, default: Any = None) -> AuditRecord:
        return super().get(key, self.KNOWN)

    def pop(self, key: str, default: Any = None) -> AuditRecord:
        return super().pop(key, self.KNOWN)


def windows_until_found(swarm: LocalSwarm, holders: list[Volunteer], liar: Volunteer, half: int, name: str) -> int:
    """How many windows of one who was right for long, and lies now, a client is given until one of them is drawn."""

    async def tell_nobody(*_: Any) -> None:
        return

    chain = (Hop(liar.peer, Span(0, half)), Hop(holders[0].peer, Span(half, 2 * half)))
    with swarmd.connect(swarm.invite()) as client:
        # else the others would do without it, and this would be the only trial
        hop_audit.accuse = tell_nobody  # type: ignore[attr-defined,assignment]
        client.within.checks._records = RightBefore()
        model, tokenizer = client.model(name, chain=chain, lookup=False), client.tokenizer(name)
        for n_answers in range(1, 1_000):
            generate(model, tokenizer, PROMPTS[n_answers % len(PROMPTS)])
            model.last_session.wait_closed()
            if model.last_session.statistics.doubts:
                return n_answers * WINDOWS_OF_AN_ANSWER
    raise AssertionError("not found in 2,000 windows")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="one lie")
    parser.add_argument("--model", default="bundled", choices=["bundled", "smollm2"])
    parser.add_argument("--sessions", type=int, default=12, help="answers until it counts as not found")
    parser.add_argument("--late", type=int, default=0, help="how often one who was right for long is tried")
    given = parser.parse_args()
    lies = [lie for lie in LIES if given.only in ("", lie)]
    missed = []
    print(HEAD, flush=True)
    with TemporaryDirectory() as folder, honest_swarm(Path(folder), given.model) as (swarm, holders, blocks):
        name = "smollm2" if given.model == "smollm2" else "demo"
        if given.late:
            liar = add_liar(swarm, given.only or LATE, given.model, blocks)
            found = [windows_until_found(swarm, holders, liar, blocks // 2, name) for _ in range(given.late)]
            mean = sum(found) / len(found)
            print(f"windows until one who was right 1,000 times is found: {found}; mean {mean:.0f}, expected 50")
            return
        for lie in lies:
            liar = add_liar(swarm, lie, given.model, blocks)
            outcome = prove(swarm, holders, liar, lie, name, given.sessions)
            print(outcome.row(), flush=True)
            missed += [] if outcome.is_found and not outcome.n_accused else [lie]
            liar.stop()
    raise SystemExit(f"not found, or others accused: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
