"""``swarmd.train.Collaboration``: a loop of one's own beside real daemons."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import swarmd
from swarmd.errors import ConfigError
from swarmd.train import Collaboration
from tests.real.harness import local_swarm
from tests.real.training import check_ledgers, join, run_of, start_run, wait_update

pytestmark = pytest.mark.slow


def test_loop_of_ones_own_takes_part(tmp_path: Path) -> None:
    with local_swarm(tmp_path) as swarm:
        a, b = (swarm.add("--no-serve") for _ in range(2))
        start_run(a, "run", target=24)
        join(swarm, [b])
        wait_update(swarm, [a, b], 2)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_pretrained(a.home.folder / "models" / "run-0", dtype=torch.float32)
        with swarmd.connect(swarm.invite()) as client:
            with pytest.raises(ConfigError, match="sgd"):
                Collaboration(client, "run", model, torch.optim.AdamW(model.parameters()))
            with pytest.raises(ConfigError, match="0 runs"):
                Collaboration(client, "no such run", model)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
            with Collaboration(client, "run", model, optimizer) as collaboration:
                updates = set()
                for _ in range(400):
                    rows = torch.randint(0, 1024, (2, 33))
                    logits = model(rows[:, :-1]).logits
                    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
                    loss.backward()
                    stepped = collaboration.step(len(rows), loss)
                    updates.add(stepped.update)
                    status = collaboration.status()
                    if len(updates) >= 4 and status.samples_counted > 0:
                        break
                assert status.samples_counted > 0, status
                assert all(p.grad is None or not p.grad.any() for p in model.parameters())
        update = run_of(a)["update"]
        wait_update(swarm, [a, b], update + 2)  # the others go on without it
        swarm.wait(lambda: all(run_of(v)["samples_counted"] for v in (a, b)), "samples of both are counted")
        ledger = check_ledgers([a, b])
        assert len({c.peer for s in ledger.sealed for c in s.commit.contributors}) == 3
