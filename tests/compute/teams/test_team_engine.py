"""A team of real processes behind the face of an engine: sessions' ops, and what is refused."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest
import safetensors.torch
import torch

from swarmd.compute.cache.pieces import SessionTokens
from swarmd.compute.passes.span import LoadedSpan
from swarmd.compute.serving import team_engine
from swarmd.compute.serving.block_passes import BlockPasses
from swarmd.compute.serving.client_parameters import read_tuned_untrusted
from swarmd.compute.serving.engine import LoadSignals
from swarmd.compute.serving.engines import load_engine
from swarmd.compute.serving.micro_batch import KeptBatch
from swarmd.compute.teams.led_span import LedSpan
from swarmd.compute.teams.local_followers import LocalFollowers
from swarmd.compute.teams.measuring import SliceTimes, read_times
from swarmd.compute.teams.sums import TeamBroken
from swarmd.config import TeamMode
from swarmd.errors import ConfigError
from swarmd.protocol.wire.teams import TeamSeat
from swarmd.protocol.wire.tickets import DialTicket
from swarmd.protocol.wire.worker import LoadSpan
from swarmd.resources import measure_memory
from swarmd.values import Span
from tests import checkpoints, families
from tests.compute.teams.far_team import HOST, FarFollower
from tests.families import operations_error

SIGNALS = LoadSignals(lambda: None, lambda stage, done, total: None)


def request(folder: Path, tmp_path: Path, **more: object) -> LoadSpan:
    settings = {"model": "m", "start": 0, "end": 2, "threads": 2, "team": (1.0, 2.0), "spill_folder": str(tmp_path)}
    return LoadSpan(path=str(folder), **(settings | more))  # type: ignore[arg-type]


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    """By how much tensors differ, beside how large they are."""
    return float((ours - theirs).norm() / theirs.norm())


def followers_here() -> set[int]:
    """Processes that follow this one."""
    return {child.pid for child in psutil.Process().children() if "swarmd.compute.teams.follower" in child.cmdline()}


def check_outputs(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    assert max(error(a, b) for a, b in zip(ours, theirs, strict=True)) < 1e-5


def fail_in_block(span: LoadedSpan, n_blocks: int) -> None:
    """Have a span run out of memory when it is done with so many blocks."""
    left = iter([False] * (n_blocks - 1) + [True])

    def on_block() -> None:
        if next(left, False):
            raise RuntimeError("no memory")

    span.on_block = on_block


def check_gradients(span: LoadedSpan, alone: LoadedSpan) -> None:
    """Gradients by what entered blocks are those of one process; graphs without a backward are given up."""
    hidden = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(1))
    wanted = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(2))
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1]])
    positions = torch.tensor([[0, *range(6)], [*range(7)]])
    gradients = []
    for loaded in (span, alone):
        loaded.forward_with_grad(hidden.clone().requires_grad_(), positions, mask)
        loaded.forward_with_grad(hidden, positions, mask)
        inputs = hidden.clone().requires_grad_()
        outputs = loaded.forward_with_grad(inputs, positions, mask)
        gradients.append(torch.autograd.grad(outputs, inputs, wanted)[0])
    assert error(*gradients) < 1e-5
    check_what_is_trained(span, alone, hidden, wanted)


def check_what_is_trained(span: LoadedSpan, alone: LoadedSpan, hidden: torch.Tensor, wanted: torch.Tensor) -> None:
    """Gradients by a client's LoRA matrices and prefix, block by block, are those of one process; sessions use them."""
    rng = torch.Generator().manual_seed(3)
    tensors = {}
    for block in (0, 1):
        for matrix, n_in, n_out in (("self_attn.v_proj", 64, 64), ("mlp.down_proj", 128, 64)):
            tensors[f"model.layers.{block}.{matrix}.lora_A"] = torch.randn(2, n_in, generator=rng) / 8
            tensors[f"model.layers.{block}.{matrix}.lora_B"] = torch.randn(n_out, 2, generator=rng) / 8
        tensors |= {f"{block}.{part}": torch.randn(1, 4, 3, 16, generator=rng) for part in ("keys", "values")}
    raw = safetensors.torch.save(tensors)
    positions = torch.arange(3, 10).expand(2, -1)
    of_all, texts = [], []
    for loaded in (span, alone):
        tuned, passes = read_tuned_untrusted(loaded, loaded.span, raw), BlockPasses(loaded)
        batch = KeptBatch(hidden, positions, None, tuned)
        first = passes.forward(batch, 0, hidden, True)
        second = passes.forward(batch, 1, first.outputs, True)
        gradient, gradients = passes.backward(second, dict(tuned.of_block(1)), wanted)
        gradient, others = passes.backward(first, dict(tuned.of_block(0)), gradient)
        of_all.append({"": gradient, **gradients, **others})
        cache = loaded.new_cache(loaded.span, 32)
        with torch.inference_mode():
            tuned.fill(cache, range(2), 1)
        pieces = [
            SessionTokens(hidden[:1], positions[:1], cache, 3, tuned.lora),
            SessionTokens(hidden[1:], positions[1:] - 3, loaded.new_cache(loaded.span, 32), 0),
        ]
        texts.append(loaded.run(pieces))
    assert of_all[0].keys() == of_all[1].keys() == {"", *tensors}
    for name, expected in of_all[1].items():
        assert error(of_all[0][name], expected) < 1e-5, name
    check_outputs(*texts)


@pytest.mark.parametrize("team", [(1.0, 2.0), (1.0, 2.0, 1.0)], ids=["here", "elsewhere"])
def test_a_teams_sessions_are_those_of_one_process(
    team: tuple[float, ...], far: Callable[[LoadSpan, int], list[FarFollower]], tmp_path: Path
) -> None:
    folder = checkpoints.make("llama", tmp_path / "llama", n_layers=2, num_key_value_heads=4)
    followers = far(request(folder, tmp_path, team=(), threads=1), len(team) - 1) if len(team) > 2 else []
    seats = tuple(follower.seat() for follower in followers)
    span = load_engine(request(folder, tmp_path, team=team, seats=seats), SIGNALS).engine
    assert isinstance(span, LedSpan)
    assert span.can_batch
    operations = operations_error(span)
    assert operations.error < 1e-5
    assert operations.can_crop
    assert not operations.can_hand_over
    alone = LoadedSpan(folder, Span(0, 2), torch.float32)
    alone.self_test()
    texts = [torch.randn(1, n, 64, generator=torch.Generator().manual_seed(n)) for n in (5, 9)]

    def run(engine: LoadedSpan) -> list[torch.Tensor]:
        caches = [engine.new_cache(engine.span, 32) for _ in texts]
        pieces = [
            SessionTokens(text, torch.arange(text.shape[1])[None], cache, 0)
            for text, cache in zip(texts, caches, strict=True)
        ]
        first = engine.run(pieces)
        borrowed = engine.new_cache(engine.span, 32)
        borrowed.borrow(caches[0], 3)
        again = SessionTokens(texts[0][:, 3:], torch.arange(3, 5)[None], borrowed, 3)
        return [*first, *engine.run([again])]

    check_outputs(run(span), run(alone))
    odd = SessionTokens(texts[0][..., :9], torch.arange(5)[None], span.new_cache(span.span, 32), 0)
    with pytest.raises(RuntimeError):
        span.run([odd])
    expected = run(alone)
    check_outputs(run(span), expected)
    for n_blocks in (1, 2):  # it fails at the leader only, when followers have come so far or further
        fail_in_block(span, n_blocks)
        with pytest.raises(RuntimeError, match="no memory"):
            run(span)
        span.on_block = lambda: None
        check_outputs(run(span), expected)
    check_gradients(span, alone)
    os.kill(followers[0].process.pid if followers else min(followers_here()), signal.SIGKILL)
    with pytest.raises(TeamBroken):
        run(span)


def test_who_cannot_be_reached_is_left_out(far: Callable[[LoadSpan, int], list[FarFollower]], tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path / "llama", n_layers=2)
    (follower,) = far(request(folder, tmp_path, team=(), threads=1), 1)
    seat = follower.seat()
    nobody = TeamSeat(HOST, DialTicket(1, seat.ticket.certificate, seat.ticket.token))
    asked = request(folder, tmp_path, team=(1.0, 2.0, 3.0), seats=(nobody, seat), threads=1, compiled=False)
    loaded = load_engine(asked, SIGNALS)
    assert loaded.description.seats == (1,)
    assert re.search(r"^1:3, .*; member 1 at 127\.0\.0\.1:1 cannot be reached", loaded.description.team)
    assert operations_error(loaded.engine).error < 1e-5  # type: ignore[arg-type]
    modes: tuple[TeamMode, ...] = ("weights", "auto", "whole")
    for mode in modes:
        alone = load_engine(msgspec.structs.replace(asked, team=(1.0, 2.0), seats=(nobody,), team_mode=mode), SIGNALS)
        assert alone.description.team.startswith("alone; member 1 at 127.0.0.1:1 cannot be reached")
        assert operations_error(alone.engine).error < 1e-5  # type: ignore[arg-type]


def test_auto_computes_alone_where_no_team_can_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = families.make_named("gpt2", tmp_path / "gpt2")
    loaded = load_engine(request(folder, tmp_path, team=(), team_mode="auto", compiled=False), SIGNALS)
    assert loaded.description.team.startswith("alone: it is not known how matrices of gpt2 may be cut")
    monkeypatch.setattr("swarmd.compute.serving.team_engine.pick_device", lambda device: "cuda:0")
    on_a_card = load_engine(request(folder, tmp_path, team=(), team_mode="auto", compiled=False), SIGNALS)
    assert on_a_card.description.team == ""


@pytest.mark.prove
def test_auto_leaves_out_a_slow_part_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoints.make("llama", tmp_path / "llama", n_layers=2)
    times = SliceTimes(fixed_s=0.0, block_s=0.5, free_bytes=None, sections=((2, 100), (16, 100)), width=64)
    before = followers_here()
    slow = msgspec.structs.replace(times, fixed_s=90.0)
    monkeypatch.setattr(team_engine, "count_numa_nodes", lambda: 3)
    monkeypatch.setattr(LocalFollowers, "measure", lambda followers: [(times, 0.0), (slow, 0.0), (times, 0.0)])
    token_s = iter([2.0, 1.0])
    monkeypatch.setattr(team_engine, "_token_s", lambda loaded: next(token_s))
    loaded = load_engine(request(folder, tmp_path, team=(), team_mode="auto", threads=3, compiled=False), SIGNALS)
    assert "0.5:0.5, of 2 units 1+1" in loaded.description.team
    assert "without 1 that would slow it down" in loaded.description.team
    assert len(followers_here() - before) == 1


def test_what_members_say_of_themselves_is_checked() -> None:
    with pytest.raises(TeamBroken, match="does not say how fast it is"):
        read_times(msgspec.msgpack.encode((0.0, 0.0, None, ((2, 100),), 64)))


def test_a_family_that_cannot_be_cut_is_refused(tmp_path: Path) -> None:
    folder = families.make_named("gpt2", tmp_path / "gpt2")
    with pytest.raises(ConfigError, match="it is not known how matrices of gpt2 may be cut"):
        load_engine(request(folder, tmp_path), SIGNALS)


def test_a_team_on_a_card_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarmd.compute.serving.team_engine.pick_device", lambda device: "cuda:0")
    with pytest.raises(ConfigError, match="a team computes on processors"):
        load_engine(request(tmp_path, tmp_path), SIGNALS)


@pytest.mark.parametrize(
    ("sum_s", "alone_s", "team_s", "said"),
    [
        pytest.param(
            *(9.0, 2.0, 1.0, r"a token takes 2000\.0 ms alone, and would take 3\d+\.\d in the best team$"),
            marks=pytest.mark.prove,
        ),
        (0.0, 2.0, 3.0, r"alone: a token takes 2000\.0 ms .* and took 3000\.0 when it was tried$"),
        (0.0, 2.0, 1.0, r"0\.5:0\.5, of 2 units 1\+1, .*a token takes 2000\.0 ms alone.*; there it takes 1000\.0$"),
    ],
    ids=["predicted to be slower", "found to be slower", "quicker"],
)
def test_auto_takes_what_is_quicker(
    sum_s: float, alone_s: float, team_s: float, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = checkpoints.make("llama", tmp_path / "llama", n_layers=2)
    before = followers_here()
    times = SliceTimes(fixed_s=0.0, block_s=0.5, free_bytes=None, sections=((2, 100), (16, 100)), width=64)
    monkeypatch.setattr(LocalFollowers, "measure", lambda followers: [(times, 0.0), (times, sum_s)])
    token_s = iter([alone_s, team_s])
    monkeypatch.setattr(team_engine, "_token_s", lambda loaded: next(token_s))
    loaded = load_engine(request(folder, tmp_path, team=(), team_mode="auto", compiled=False), SIGNALS)
    assert re.search(said, loaded.description.team)
    is_team = said.startswith("0")
    assert isinstance(loaded.engine, LedSpan) == is_team
    assert len(followers_here() - before) == is_team
    assert operations_error(loaded.engine).error < 1e-5  # type: ignore[arg-type]


@pytest.mark.prove
def test_auto_measures_the_members_that_are_there(tmp_path: Path) -> None:
    folder = checkpoints.make("llama", tmp_path / "llama", n_layers=2)
    loaded = load_engine(request(folder, tmp_path, team=(), team_mode="auto", compiled=False), SIGNALS)
    assert re.search(r"a token takes \d+\.\d ms alone, and (would take \d|every other member)", loaded.description.team)
    only_one = load_engine(request(folder, tmp_path, team=(), team_mode="auto", threads=1), SIGNALS)
    assert only_one.description.team == "alone: there is one processor, and no other member"


def test_auto_makes_a_team_of_members_that_have_room_only_together(
    far: Callable[[LoadSpan, int], list[FarFollower]], tmp_path: Path
) -> None:
    folder = checkpoints.make("llama", tmp_path / "llama", n_layers=2)
    (follower,) = far(request(folder, tmp_path, team=(), threads=1), 1)
    n_bytes = int(1.3 * measure_memory().free_bytes)  # the blocks are small: what they are said to take counts
    asked = request(
        folder, tmp_path, team=(1.0, 1.0), team_mode="auto", seats=(follower.seat(),), n_bytes=n_bytes, threads=1
    )
    loaded = load_engine(asked, SIGNALS)
    assert isinstance(loaded.engine, LedSpan)
    assert re.match(r"0\.\d+:0\.\d+, of 2 units 1\+1, .*; these blocks take \d+\.\d GiB", loaded.description.team)
    assert operations_error(loaded.engine).error < 1e-5
