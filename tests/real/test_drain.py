"""A server that leaves on purpose hands its live caches over, and the generation goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import swarmd
from tests.real.faults import generate, inputs_for
from tests.real.harness import Volunteer, local_swarm

pytestmark = pytest.mark.slow
N_TOKENS = 40


def generate_while(
    model: Any, mode: str, at_token: int, act: Callable[[], None], inputs: dict[str, torch.Tensor] | None = None
) -> Any:
    """Generate; when ``at_token`` steps are out, act from another thread and let the generation go on meanwhile."""
    n_steps = 0
    threads: list[threading.Thread] = []
    new_cache = model.new_cache

    def watched(*args: Any) -> Any:
        cache = new_cache(*args)
        append = cache.append

        def appending(*a: Any) -> Any:
            nonlocal n_steps
            n_steps += 1
            if n_steps == at_token:
                threads.append(threading.Thread(target=act))
                threads[0].start()
            elif n_steps > at_token and n_steps < at_token + 20:
                time.sleep(0.05)  # a reader's pace: the session is idle between its steps, too
            return append(*a)

        cache.append = appending
        return cache

    model.new_cache = watched
    try:
        return generate(model, mode, inputs or inputs_for(mode, 1024, 3), N_TOKENS, 3)
    finally:
        model.new_cache = new_cache
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    ("how", "mode"), [("drain", "beams"), ("down", "greedy"), ("sigterm", "padded"), ("hangup", "greedy")]
)
def test_caches_are_handed_over_and_nothing_is_replayed(how: str, mode: str, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with local_swarm(tmp_path) as swarm:
        a, b, heir = swarm.serving((0, 3), (3, 6), (2, 6))

        def leave() -> None:
            if how == "sigterm":
                b.signal(signal.SIGTERM)
            elif how == "hangup":  # as a terminal that is closed does: to the whole group
                assert b.process is not None
                os.killpg(b.process.pid, signal.SIGHUP)
            else:
                b.ask(how, "POST")

        with swarmd.connect(home=a.home.folder) as client:
            model = client.model("demo", chain=swarm.hops((a, 0, 3), (b, 3, 6)))
            expected = generate(model, mode, inputs_for(mode, 1024, 3), N_TOKENS, 3)
            out = generate_while(model, mode, 10, leave)
            statistics = model.last_session.statistics
        assert torch.equal(out.sequences, expected.sequences)
        (repair,) = statistics.repairs
        assert repair.handed_over == (f"[3,6) on {b.peer[-8:]}",), repair
        assert repair.replayed_tokens == 0
        assert repair.replayed_ops <= 1, "no more than the answer that was on its way"
        assert not repair.lost
        assert not statistics.blamed
        assert model.last_session.chain[1].endswith(heir.peer[-8:])
        if how == "drain":
            swarm.wait(lambda: b.ask("status")["serving"] is None, "the server to be drained")
            b.ask("resume", "POST")
            swarm.wait_online()
            pid = b.worker_pid
            b.ask("resume", "POST")
            assert b.worker_pid == pid, "to resume what goes on changes nothing"
        else:
            assert b.process is not None
            b.process.wait(timeout=20)


def test_where_nobody_else_holds_the_blocks_together_the_client_replays(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with local_swarm(tmp_path) as swarm:
        a, b, _, _ = swarm.serving((0, 2), (2, 6), (2, 4), (4, 6))
        with swarmd.connect(home=a.home.folder) as client:
            model = client.model("demo", chain=swarm.hops((a, 0, 2), (b, 2, 6)))
            expected = generate(model, "greedy", inputs_for("greedy", 1024, 3), N_TOKENS, 3)
            out = generate_while(model, "greedy", 10, lambda: drain(b))
            (repair,) = model.last_session.statistics.repairs
        assert torch.equal(out.sequences, expected.sequences)
        assert not repair.handed_over
        assert repair.replayed_ops > 0
        assert not repair.from_client


def drain(volunteer: Volunteer) -> None:
    volunteer.ask("drain", "POST")


def test_an_idle_session_is_moved_too(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    with local_swarm(tmp_path) as swarm:
        a, b, heir = swarm.serving((0, 3), (3, 6), (3, 6))
        with swarmd.connect(home=a.home.folder) as client:
            model = client.model("demo", chain=swarm.hops((a, 0, 3), (b, 3, 6)))
            ids = inputs_for("greedy", 1024, 4)["input_ids"]
            with torch.no_grad():
                whole = model(ids).logits
                cache = model.new_cache()
                model(ids[:, :8], past_key_values=cache)
                drain(b)
                swarm.wait(lambda: len(heir.ask("sessions")["sessions"]) == 1, "the session at its new server")
                swarm.wait(lambda: b.ask("status")["serving"] is None, "the server to be drained")
                rest = model(ids[:, 8:], past_key_values=cache).logits
            torch.testing.assert_close(rest, whole[:, 8:], rtol=1e-3, atol=1e-3)
            (repair,) = cache.session.statistics.repairs
            assert repair.handed_over
            cache.close()


def test_a_server_moves_to_blocks_that_were_left(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        fixed = dict(zip(((0, 3), (3, 6)), swarm.serving((0, 3), (3, 6)), strict=True))
        free = swarm.add("--serve", "demo", SWARMD_MAX_BLOCKS="3", SWARMD_BALANCE_INTERVAL_S="2")
        swarm.wait_online()

        def blocks() -> tuple[int, ...]:
            serving = free.ask("status")["serving"]
            return tuple(serving["blocks"]) if serving else ()

        there = next(span for span in fixed if span != blocks())
        drain(fixed[there])
        swarm.wait(lambda: blocks() == there, "the move")
        swarm.wait(lambda: not free.ask("models")["models"][0]["missing"], "all blocks to be served again")
        status = free.ask("status")
        assert status["balance"]["last_move"].startswith(f"to blocks [{there[0]},{there[1]}): ")
        assert "moved:" in status["serving"]["why"]
