"""Hit a hop of a running generation at a moment that is known, and compare with an undisturbed run.

The victim's worker is stopped first, so that the next op is accepted and not answered; only then comes the blow.
Used by test_faults.py (a few cases) and by ``make prove`` (all of them, with many seeds).
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import LogitsProcessor

import swarmd
from swarmd.client.drafting.speculation import Costs, PassCost
from swarmd.client.links.link import Statistics
from tests.real.harness import LocalSwarm, Volunteer, local_swarm

VOCABULARY = 1024  # of the swarm's model
N_TOKENS = 30  # of each generation

MOVE_BOUNDS = {"float32": (1e-3, 1e-3), "bfloat16": (0.5, 1.0)}
"""docs/protocol.md, "What exact means": how far two logits behind the same tokens may move against each other, if they
are among the two best of either run, and any two of the vocabulary."""

MAX_RESTARTS = 3  # of a worker, before its daemon is started anew: a worker that ends again and again is left to itself


@dataclass(frozen=True)
class Blow:
    """One thing done to one volunteer: a signal to its daemon, worker or both, when that many tokens are out."""

    at_token: int
    victims: tuple[int, ...]
    number: int = signal.SIGKILL
    what: str = "daemon"

    def __str__(self) -> str:
        return f"{signal.Signals(self.number).name}-{self.what}-{'+'.join(map(str, self.victims))}"


MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8},
    "beams": {"do_sample": False, "num_beams": 3},
    "lookup": {"do_sample": False, "prompt_lookup_num_tokens": 4},
    "padded": {"do_sample": False},
}


class Heard(LogitsProcessor):  # type: ignore[misc]
    """Keeps the logits behind each row of tokens, whatever the way of decoding makes of them."""

    def __init__(self) -> None:
        self.logits: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for ids, row in zip(input_ids.tolist(), scores, strict=True):
            finite = row[row.isfinite()]
            if finite.min() < finite.max():  # else it is prompt lookup, which asks what is forbidden
                self.logits[tuple(ids)] = row.clone()
        return scores


@dataclass
class Generated:
    """Tokens (rows, n), logits of each step, and logits by the row of tokens that they came behind."""

    sequences: torch.Tensor
    logits: tuple[torch.Tensor, ...]
    heard: dict[tuple[int, ...], torch.Tensor]


@dataclass
class Outcome:
    """What a disturbed generation gave."""

    out: Generated
    statistics: Statistics
    chain: tuple[str, ...]
    unanswered: list[tuple[int, int]] = field(default_factory=list)
    seconds: float = 0.0
    difference: str = ""  # from an undisturbed generation, in words


def inputs_for(mode: str, vocabulary: int, seed: int) -> dict[str, torch.Tensor]:
    """A prompt of random tokens; in a padded batch, two prompts of which the first is shorter."""
    rng = torch.Generator().manual_seed(seed)
    n_rows = 2 if mode == "padded" else 1
    ids = torch.randint(3, vocabulary, (n_rows, 12), generator=rng)
    if mode == "lookup":
        ids = torch.cat([ids[:, :6], ids[:, :6], ids[:, :4]], 1)
    mask = torch.ones_like(ids)
    if mode == "padded":
        ids[0, :5], mask[0, :5] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def fly_far_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second a trip, so that many windows are under way whatever this machine's speed."""
    measure = Costs.measured

    def measured(costs: Costs, cost: PassCost) -> None:
        measure(costs, PassCost(cost.n_tokens, 1.0 + 0.01 * (cost.n_tokens - 1), hops_s=(0.001,)))

    monkeypatch.setattr(Costs, "measured", measured)


def generate(
    model: Any, mode: str, inputs: dict[str, torch.Tensor], n_tokens: int, seed: int, **more: Any
) -> Generated:
    torch.manual_seed(seed)
    heard = Heard()
    length = {"max_new_tokens": n_tokens, "min_new_tokens": n_tokens}
    wanted = {"return_dict_in_generate": True, "output_logits": True, "logits_processor": [heard]}
    out = model.generate(**inputs, **length, **MODES[mode], **wanted, **more)
    return Generated(out.sequences, out.logits, heard.logits)


class Attacker:
    """Counts steps of a session and strikes at the right one, from the thread that generates."""

    def __init__(self, model: Any, volunteers: list[Volunteer], blows: tuple[Blow, ...]) -> None:
        self.session: Any = None
        self.unanswered: list[tuple[int, int]] = []
        self.failure: BaseException | None = None
        self._volunteers = volunteers
        self._blows = list(blows)
        self._threads: list[threading.Thread] = []
        self._n_steps = 0
        new_cache = model.new_cache

        def watched_cache(*args: Any) -> Any:
            cache = new_cache(*args)
            open_session, append = cache._open_session, cache.append

            def opening(*a: Any) -> Any:
                self.session = open_session(*a)
                return self.session

            def appending(*a: Any) -> Any:
                self._before_step()
                return append(*a)

            cache._open_session, cache.append = opening, appending
            return cache

        model.new_cache = watched_cache
        self._restore = lambda: setattr(model, "new_cache", new_cache)

    def finish(self) -> None:
        self._restore()
        for thread in self._threads:
            thread.join()
        if self.failure is not None:
            raise self.failure

    def _before_step(self) -> None:
        self._n_steps += 1
        while self._blows and self._blows[0].at_token <= self._n_steps:
            blow = self._blows.pop(0)
            victims = [self._find(v) for v in blow.victims]
            for victim in victims:
                victim.signal(signal.SIGSTOP, "worker")  # the next op is accepted and stays unanswered
            thread = threading.Thread(target=self._strike, args=(blow, victims), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _find(self, victim: int) -> Volunteer:
        """A volunteer by number; -1 - i is whoever serves hop i now."""
        if victim >= 0:
            return self._volunteers[victim]
        peer = self.session.chain_session.chain.links[-1 - victim].hop.peer
        return next(v for v in self._volunteers if v.process is not None and v.peer == peer)

    def _strike(self, blow: Blow, victims: list[Volunteer]) -> None:
        try:
            first = victims[0]  # with several victims only the first of the chain is reached by the op
            deadline = time.monotonic() + 3.5
            while not self._holds_unanswered(first):
                assert time.monotonic() < deadline, "the victim was never given an op"
                time.sleep(0.02)
            for victim in victims:
                if (blow.number, blow.what) != (signal.SIGSTOP, "worker"):
                    victim.signal(blow.number, blow.what)
        except BaseException as error:  # noqa: BLE001 - handed to the test's thread by finish()
            self.failure = error

    def _holds_unanswered(self, victim: Volunteer) -> bool:
        for session in victim.ask("sessions")["sessions"]:
            if session["received"] > session["finished"]:
                self.unanswered.append((session["received"], session["finished"]))
                return True
        return False


def disturbed(
    model: Any,
    volunteers: list[Volunteer],
    mode: str,
    inputs: dict[str, torch.Tensor],
    n_tokens: int,
    seed: int,
    blows: tuple[Blow, ...],
) -> Outcome:
    attacker = Attacker(model, volunteers, blows)
    begun = time.monotonic()
    try:
        out = generate(model, mode, inputs, n_tokens, seed)
    finally:
        attacker.finish()
    session = model.last_session
    seconds = time.monotonic() - begun
    return Outcome(out, session.statistics, session.chain, attacker.unanswered, seconds)


def check_recovery(outcome: Outcome, volunteers: list[Volunteer], blows: tuple[Blow, ...], first_hop: int = 0) -> None:
    """What every recovery must show, whatever was hit."""
    assert outcome.unanswered, "the victim had accepted an op and not answered it"
    repairs = outcome.statistics.repairs
    assert repairs, "the chain was repaired"
    assert sum(r.replayed_ops for r in repairs) > 0, "ops were replayed"
    hit = {volunteers[v].peer for blow in blows for v in blow.victims if v >= 0}
    chosen = any(v < 0 for blow in blows for v in blow.victims)
    blamed = {peer for peer, _ in outcome.statistics.blamed}
    assert chosen or blamed <= hit, f"healthy peers were blamed: {outcome.statistics.blamed}"
    restarted = [r for r in repairs if r.from_client]
    allowed = any(first_hop in blow.victims or min(blow.victims) < 0 for blow in blows)
    assert allowed or not restarted, "history came from the client although a predecessor was alive"


def check_replayed(ours: Generated, theirs: Generated, dtype: str) -> str:
    """Check the rule for the *replayed* grade; returns how far logits moved.

    Tokens can differ for this reason only: behind the same tokens the logits were not quite the same.
    """
    best, any_two = 0.0, 0.0
    for ids in ours.heard.keys() & theirs.heard.keys():
        a, b = ours.heard[ids], theirs.heard[ids]
        moved = torch.where(a == b, 0, a - b)  # what is forbidden is minus infinity in both
        among = moved[torch.cat([a.topk(2).indices, b.topk(2).indices])]
        best, any_two = max(best, _extent(among)), max(any_two, _extent(moved))
    bounds = MOVE_BOUNDS[dtype]
    assert best <= bounds[0], f"of the two best logits behind the same tokens one moved by {best:.3g}"
    assert any_two <= bounds[1], f"logits behind the same tokens moved by {any_two:.3g}"
    return f"{best:.2g} of the two best, {any_two:.2g} of all"


def _extent(moved: torch.Tensor) -> float:
    return float(moved.max() - moved.min())


def check_identical(ours: Generated, theirs: Generated) -> None:
    """Check the rule for the *exact* grade: the same tokens and, bit for bit, the same logits."""
    assert torch.equal(ours.sequences, theirs.sequences)
    for step, (a, b) in enumerate(zip(ours.logits, theirs.logits, strict=True)):
        assert torch.equal(a, b), f"logits of step {step} differ by {(a - b).abs().max():.3g}"


class Stage:
    """A chain of three hops on three volunteers of one dtype, and two more volunteers that hold everything."""

    def __init__(self, swarm: LocalSwarm, volunteers: list[Volunteer], client: Any, dtype: str) -> None:
        self.swarm = swarm
        self.volunteers = volunteers
        self._dtype = dtype
        a, b, c = volunteers[:3]
        chain = swarm.hops((a, 0, 2), (b, 2, 4), (c, 4, 6))
        self.models = {
            grade: client.model("demo", exact=grade == "exact", dtype=dtype, chain=chain)
            for grade in ("replayed", "exact")
        }

    def play(self, mode: str, blows: tuple[Blow, ...], grade: str = "replayed", seed: int = 1) -> Outcome:
        """Generate undisturbed, then under ``blows``; check what every recovery must show, and the grade's rule."""
        model = self.models[grade]
        inputs = inputs_for(mode, VOCABULARY, seed)
        expected = generate(model, mode, inputs, N_TOKENS, seed)
        outcome = disturbed(model, self.volunteers, mode, inputs, N_TOKENS, seed, blows)
        check_recovery(outcome, self.volunteers, blows)
        if grade == "exact":
            check_identical(outcome.out, expected)
            outcome.difference = "identical"
        else:
            moved = check_replayed(outcome.out, expected, self._dtype)
            is_equal = torch.equal(outcome.out.sequences, expected.sequences)
            outcome.difference = f"{'the same' if is_equal else 'other'} tokens, logits moved by {moved}"
        return outcome

    def revive(self) -> None:
        """Have everybody online again, whatever was done to them."""
        revive(self.swarm, self.volunteers)


@contextmanager
def open_stage(folder: Path, dtype: str = "float32") -> Iterator[Stage]:
    """Start the volunteers of a stage, and a client."""
    with local_swarm(folder) as swarm:
        volunteers = swarm.serving((0, 2), (2, 4), (4, 6), (0, 6), (0, 6), SWARMD_DTYPE=dtype)
        with swarmd.connect(swarm.invite()) as client:
            yield Stage(swarm, volunteers, client, dtype)


def revive(swarm: LocalSwarm, volunteers: list[Volunteer]) -> None:
    """Let stopped daemons go on, start ended ones again, and wait until everybody is online with a worker that runs."""
    stopped = []
    for volunteer in volunteers:
        if volunteer.process is not None and volunteer.process.poll() is None:
            volunteer.signal(signal.SIGCONT, "daemon")
            worker = volunteer.ask("status")["worker"]
            if worker["restarts"] < MAX_RESTARTS:
                if worker["pid"] and _is_stopped(worker["pid"]):
                    os.kill(worker["pid"], signal.SIGKILL)  # else it counts as online until a session finds it silent
                    stopped.append((volunteer, worker["pid"]))
                continue
        volunteer.stop()
        volunteer.start()
    for volunteer, pid in stopped:
        swarm.wait(lambda v=volunteer, p=pid: v.ask("status")["worker"]["pid"] != p, "the end of a worker")  # type: ignore[misc]
    swarm.wait_online()


def _is_stopped(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False
