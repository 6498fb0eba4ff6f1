"""A GGUF model at its own bits over real servers: the tokens are those of llama.cpp's library on the whole file."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import swarmd
from swarmd.errors import ConfigError
from tests.real.faults import Blow, check_identical, check_recovery, disturbed, generate
from tests.real.harness import LocalSwarm, local_swarm
from tests.real.smollm2 import gguf_file, pack_smollm2
from tests.real.test_drain import generate_while

pytestmark = pytest.mark.slow
N_TOKENS = 64
PROMPTS = (
    "The history of the Roman empire begins",
    "def quicksort(items):",
    "My favourite recipe for bread is simple.",
)


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalSwarm]:
    """Two servers in a row, and a third one that can take over from the second."""
    torch.set_num_threads(1)
    packed = pack_smollm2(tmp_path_factory.mktemp("packed"))
    with local_swarm(tmp_path_factory.mktemp("homes")) as made:
        made.serving((0, 2), (2, 4), (2, 4), model="smol", models={"smol": packed})
        yield made


@pytest.fixture
def client(swarm: LocalSwarm) -> Iterator[Any]:
    with swarmd.connect(swarm.invite()) as connected:
        yield connected


def ids_of(client: Any, *prompts: str) -> dict[str, torch.Tensor]:
    tokenizer = client.tokenizer("smol")
    tokenizer.padding_side = "left"
    return dict(tokenizer(list(prompts), return_tensors="pt", padding=True))


def new_tokens(model: Any, inputs: dict[str, torch.Tensor], n_tokens: int = N_TOKENS, **how: Any) -> list[list[int]]:
    out = model.generate(**inputs, max_new_tokens=n_tokens, do_sample=False, eos_token_id=-1, pad_token_id=2, **how)
    return out[:, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]


def whole_file_says(ids: list[int], n_tokens: int) -> list[int]:
    """Greedy tokens of the whole file, in a process of its own: this one is forked by others."""
    command = [sys.executable, "-m", "tests.real.whole_file", str(gguf_file()), str(n_tokens)]
    done = subprocess.run(command, input=json.dumps(ids), capture_output=True, text=True, check=True)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_tokens_are_the_librarys_own(client: Any, prompt: str) -> None:
    inputs = ids_of(client, prompt)
    (tokens,) = new_tokens(client.model("smol"), inputs)
    assert tokens == whole_file_says(inputs["input_ids"][0].tolist(), N_TOKENS)


def test_rows_of_different_lengths_are_each_answered_as_alone(client: Any) -> None:
    model = client.model("smol")
    alone = [new_tokens(model, ids_of(client, prompt), 24)[0] for prompt in PROMPTS]
    assert new_tokens(model, ids_of(client, *PROMPTS), 24) == alone


def test_a_server_that_drains_hands_its_caches_over(swarm: LocalSwarm, client: Any) -> None:
    """The one that takes them over has another session, too."""
    first, second, heir = swarm.volunteers
    other = client.model("smol", chain=swarm.hops((first, 0, 2), (heir, 2, 4)))
    cache = other.new_cache(256)
    with torch.no_grad():
        other(**ids_of(client, PROMPTS[2]), past_key_values=cache)
    model = client.model("smol", chain=swarm.hops((first, 0, 2), (second, 2, 4)))
    inputs = ids_of(client, *PROMPTS)
    expected = generate(model, "beams", inputs, 40, 1)
    out = generate_while(model, "beams", 10, lambda: second.ask("drain", "POST"), inputs)
    (repair,) = model.last_session.statistics.repairs
    cache.close()
    assert repair.handed_over == (f"[2,4) on {second.peer[-8:]}",), repair
    assert repair.replayed_tokens == 0
    assert torch.equal(out.sequences, expected.sequences)
    second.ask("resume", "POST")
    swarm.wait_online()


def test_a_server_that_is_killed_in_mid_answer_changes_no_token(swarm: LocalSwarm, client: Any) -> None:
    first, second, _ = swarm.volunteers
    model = client.model("smol", exact=True, chain=swarm.hops((first, 0, 2), (second, 2, 4)))
    inputs = ids_of(client, PROMPTS[0])
    expected = generate(model, "greedy", inputs, N_TOKENS, 1)
    blows = (Blow(12, (1,)),)
    outcome = disturbed(model, swarm.volunteers, "greedy", inputs, N_TOKENS, 1, blows)
    check_recovery(outcome, swarm.volunteers, blows)
    check_identical(outcome.out, expected)


def test_it_is_not_tuned_and_says_so(client: Any) -> None:
    model = client.model("smol")
    with pytest.raises(ConfigError, match="keeps its bits is not fine-tuned: add its file again with --dtype auto"):
        model(inputs_embeds=torch.zeros(1, 3, model.config.hidden_size, requires_grad=True))
